"""Delivery of messages to the sinks of their subjects, in turns of the event loop.

A turn has a limited cost. A publication that costs more is delivered in several turns, because it
may have thousands of receivers. The messages for one client stay in publication order across its
subscriptions: a batch is delivered to all subscriptions of a client in the same turn.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator

import numpy as np

from simplebus.core.steps import drain_list
from simplebus.nats.limits import (
    DELIVERY_COST_BYTES,
    ENCODED_BATCHES_KEPT_MAX,
    EVENT_COST_BYTES,
    GROUPING_COST_BYTES,
    OUTPUT_PER_READ_BYTES,
    SINGLE_DELIVERY_COST_BYTES,
)
from simplebus.nats.protocol.events import (
    Indexes,
    MixedBatch,
    Pub,
    UniformBatch,
    iter_messages,
)
from simplebus.nats.server.queue_group import QUEUE_GROUPS
from simplebus.nats.server.routes import SinkRows, SubjectRoutes, SubjectSink, SubjectSinks
from simplebus.nats.server.session import EncodedBatches, NatsSession


class MessageDelivery:
    """Delivers messages of clients and of the bus, and counts the cost of the current turn."""

    def __init__(self, routes: SubjectRoutes) -> None:
        self.cost_bytes = 0
        """Cost of the current turn, as bytes of output that take equally long."""
        self.fan_out_bytes = 0
        """Part of the cost that batches caused for all clients but one."""
        self._routes = routes
        self._gathering_sessions: list[NatsSession] = []
        """Sessions that receive messages of the current batch."""

    def begin_turn(self) -> None:
        """Begin a turn without cost."""
        self.cost_bytes = self.fan_out_bytes = 0

    @property
    def is_turn_over(self) -> bool:
        """True if the turn has reached its cost: other clients are served before the next one."""
        return self.cost_bytes > OUTPUT_PER_READ_BYTES

    @property
    def is_turn_long(self) -> bool:
        """True if the turn has reached half of its cost."""
        return 2 * self.cost_bytes > OUTPUT_PER_READ_BYTES

    def fits_into_turn(self, cost_bytes: int) -> bool:
        """Return True if work of this cost does not exceed the cost of the turn."""
        return self.cost_bytes + cost_bytes <= OUTPUT_PER_READ_BYTES

    # Messages of clients -------------------------------------------------------------------------

    def deliver_message(self, message: Pub, sinks: SubjectSinks, origin: NatsSession) -> bool:
        """Deliver a message at once. Returns True if a receiver accepted it."""
        self.cost_bytes += estimate_message_cost(message, sinks)
        is_accepted = False
        for sink in sinks:
            is_accepted |= sink.deliver(message, origin)
        return is_accepted

    def deliver_message_in_steps(
        self, message: Pub, sinks: SubjectSinks, origin: NatsSession
    ) -> Generator[None, None, bool]:
        """Do the same in turns, with a step at the end of each turn but the last."""
        self.cost_bytes += EVENT_COST_BYTES
        cost_bytes = SINGLE_DELIVERY_COST_BYTES + len(message.body)
        remaining, is_accepted = list(sinks), False
        del sinks  # It would keep subscriptions that end meanwhile.
        for sink in drain_list(remaining):
            if self.is_turn_over:
                yield
            self.cost_bytes += cost_bytes
            is_accepted |= sink.deliver(message, origin)
        return is_accepted

    def deliver_batch(
        self, batch: UniformBatch | MixedBatch, targets: list[SinkRows], origin: NatsSession
    ) -> None:
        """Deliver a batch at once."""
        largest_bytes = self._deliver(batch, targets, origin, {})
        self.fan_out_bytes -= largest_bytes

    def deliver_batch_in_steps(
        self, batch: UniformBatch | MixedBatch, targets: list[SinkRows], origin: NatsSession
    ) -> Iterator[None]:
        """Do the same in turns, with a step at the end of each turn but the last."""
        remaining = _ReceiverGroups()
        for sinks, rows in targets:
            for sink in sinks:
                if self.is_turn_over:
                    yield
                self.cost_bytes += GROUPING_COST_BYTES
                self.fan_out_bytes += GROUPING_COST_BYTES
                remaining.add(sink, rows)
        targets.clear()  # It would keep subscriptions that end meanwhile.
        encoded: EncodedBatches = {}
        # Queue groups first: which clients receive their messages is known only then.
        group_targets = remaining.pop(QUEUE_GROUPS)
        largest_bytes = self._deliver(batch, group_targets, origin, encoded, remaining)
        for key in drain_list(remaining.keys()):
            if self.is_turn_over:
                if len(encoded) > ENCODED_BATCHES_KEPT_MAX:
                    encoded.clear()
                yield
            size_bytes = self._deliver(batch, remaining.pop(key), origin, encoded)
            largest_bytes = max(largest_bytes, size_bytes)
        self.fan_out_bytes -= largest_bytes

    # Messages of the bus -------------------------------------------------------------------------

    def deliver_from_bus(self, messages: Pub | UniformBatch | MixedBatch) -> None:
        """Deliver messages of the bus at once. A mixed batch must have `subject_names`."""
        if isinstance(messages, Pub):
            for sink in self._routes.match(messages.subject):
                sink.deliver(messages, None)
        elif self._gathering_sessions:  # Another batch is being gathered.
            for message in iter_messages(messages):
                self.deliver_from_bus(message)
        else:
            for sink, rows in self._routes.iter_sinks(messages):
                sink.deliver_batch(messages, rows, None)
            self._write_gathered(messages, {})

    # Gathering -----------------------------------------------------------------------------------

    def mark_gathering(self, session: NatsSession) -> None:
        """Record that a session has gathered the first messages of the current batch."""
        self._gathering_sessions.append(session)

    def discard_gathered(self) -> None:
        """Discard the gathered messages of the current batch."""
        for session in self._gathering_sessions:
            session.discard_gathered()
        self._gathering_sessions.clear()

    def _deliver(
        self,
        batch: UniformBatch | MixedBatch,
        targets: list[SinkRows],
        origin: NatsSession,
        encoded: EncodedBatches,
        remaining: _ReceiverGroups | None = None,
    ) -> int:
        """Deliver a batch to some sinks, and to the `remaining` ones of clients that gather it.

        `encoded` are complete batches encoded for other clients; reused and extended. Returns the
        largest output for one client.
        """
        try:
            self._gather(batch, targets, origin)
            if remaining is not None:
                for session in self._gathering_sessions:
                    self._gather(batch, remaining.pop(session), origin)
            return self._write_gathered(batch, encoded)
        except BaseException:
            self.discard_gathered()
            raise

    def _gather(
        self, batch: UniformBatch | MixedBatch, targets: list[SinkRows], origin: NatsSession
    ) -> None:
        """Pass a batch to sinks; the sessions of their clients gather it."""
        ordered_rows: dict[SubjectSink, list[Indexes]] = {}
        for sinks, rows in targets:
            self.cost_bytes += len(sinks) * DELIVERY_COST_BYTES
            self.fan_out_bytes += len(sinks) * DELIVERY_COST_BYTES
            for sink in sinks:
                if rows is not None and sink.is_ordered:
                    ordered_rows.setdefault(sink, []).append(rows)
                else:
                    sink.deliver_batch(batch, rows, origin)
        for sink, parts in ordered_rows.items():
            sink.deliver_batch(batch, np.sort(np.concatenate(parts)), origin)

    def _write_gathered(self, batch: UniformBatch | MixedBatch, encoded: EncodedBatches) -> int:
        """Encode the gathered messages of a batch for each receiving session. Returns the largest
        output for one of them.
        """
        largest_bytes = 0
        for session in self._gathering_sessions:
            size_bytes = session.write_gathered(batch, encoded)
            self.cost_bytes += size_bytes
            self.fan_out_bytes += size_bytes
            largest_bytes = max(largest_bytes, size_bytes)
        self._gathering_sessions.clear()
        return largest_bytes


class _ReceiverGroups:
    """Sinks of a batch, grouped by `order_key`.

    A group of one sink, the usual case, needs no object of its own: there may be thousands.
    """

    def __init__(self) -> None:
        self._first_sinks: dict[Hashable, SubjectSink] = {}
        self._other_sinks: dict[Hashable, list[SubjectSink]] = {}
        self._rows: dict[SubjectSink, list[Indexes]] = {}
        """Rows of the sinks that receive only some of the messages."""

    def add(self, sink: SubjectSink, rows: Indexes | None) -> None:
        """Add a sink, or more rows of a sink that has some of the rows."""
        if rows is not None:
            parts = self._rows.setdefault(sink, [])
            parts.append(rows)
            if len(parts) > 1:
                return
        key = sink.order_key
        if self._first_sinks.setdefault(key, sink) is not sink:
            self._other_sinks.setdefault(key, []).append(sink)

    def keys(self) -> list[Hashable]:
        """Return the keys of the remaining groups."""
        return list(self._first_sinks)

    def pop(self, key: Hashable) -> list[SinkRows]:
        """Remove and return the sinks with this key and their rows. Empty if there are none."""
        if (first := self._first_sinks.pop(key, None)) is None:
            return []
        return [
            ((sink,), rows)
            for sink in (first, *self._other_sinks.pop(key, ()))
            for rows in self._rows.pop(sink, (None,))
        ]


def estimate_message_cost(message: Pub, sinks: SubjectSinks) -> int:
    """Return the cost of delivering a message."""
    return EVENT_COST_BYTES + len(sinks) * (SINGLE_DELIVERY_COST_BYTES + len(message.body))


def estimate_batch_cost(batch: UniformBatch | MixedBatch, targets: list[SinkRows]) -> int:
    """Return the cost of delivering a batch, if all receivers accept all messages."""
    mean_bytes, count = batch.mean_message_bytes, batch.count
    return sum(
        len(sinks) * (DELIVERY_COST_BYTES + mean_bytes * (count if rows is None else len(rows)))
        for sinks, rows in targets
    )
