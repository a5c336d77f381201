"""Delivery of messages to the sinks of their subjects, in turns of the event loop.

A turn has a limited cost. A publication that costs more is delivered in several turns, because it
may have thousands of receivers. The messages of one class, or of one publisher, for a client stay
in order across its subscriptions: a batch is delivered to all subscriptions of a client in the same
turn, or message by message if that turn would take too long.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Collection, Generator, Hashable, Iterable, Iterator, Sequence, Set
from itertools import chain
from typing import TypeAlias

import numpy as np

from simplebus.core.channel.matches import pages_of
from simplebus.core.channel.paged_set import PAGE_SIZE
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.steps import drain_list, run_to_end
from simplebus.nats.limits import (
    BATCH_COST_PER_CLIENT_MAX,
    BATCHED_STORE_COST_BYTES,
    DECISION_COST_BYTES,
    DECISION_STEP_COST_BYTES,
    DELIVERY_COST_BYTES,
    ENCODED_BATCHES_KEPT_MAX,
    EVENT_COST_BYTES,
    FILTERS_PER_BATCH_MAX,
    FOUND_SINK_COST_BYTES,
    GROUPING_COST_BYTES,
    HEADER_COST_FACTOR,
    OUTPUT_PER_READ_BYTES,
    SEARCHED_SINKS_PER_TURN_MAX,
    SHARED_BODY_BYTES_MIN,
    SINGLE_CONVERSION_COST_BYTES,
    SINGLE_DELIVERY_COST_BYTES,
    SINK_COMPARISON_COST_BYTES,
    WAITING_DELIVERIES_BYTES_MAX,
    WAITING_DELIVERY_BYTES,
    WAITING_SINK_BYTES,
)
from simplebus.nats.protocol.events import (
    Indexes,
    LazyMessages,
    MixedBatch,
    Pub,
    UniformBatch,
    iter_messages,
    row_indexes,
)
from simplebus.nats.server.class_permissions import SubjectClasses
from simplebus.nats.server.permissions import PermissionCache
from simplebus.nats.server.queue_group import QUEUE_GROUPS
from simplebus.nats.server.routes import SinkRows, SubjectRoutes, SubjectSink, SubjectSinks
from simplebus.nats.server.session import EncodedBatches, NatsSession, NatsSubscription

ReceiverRows: TypeAlias = tuple[Collection[SubjectSink], Indexes | None]
"""Some sinks, and the rows of the messages that they receive; None for all rows. Unlike those of
SinkRows, the sinks are merged.
"""


class MessageDelivery:
    """Delivers messages of clients and of the bus, and counts the cost of the current turn.

    Messages of a class that do not fit into a turn wait in a queue, and so do all later ones of the
    class: each client receives them in the order in which they were stored. Classes take turns, so
    that the messages of one class do not wait for those of another one.

    All queues together may keep `WAITING_DELIVERIES_BYTES_MAX`, each of them an equal part. The
    driver reads from no client whose last input added to a queue above its part. So the queue of a
    class exceeds it by one read of each client, at most `RECEIVE_BYTES`, and by messages that no
    client has just sent: delayed ones that are due, and dead letters of the ack timer. Queues that
    were filled before their part shrank, because other classes began to wait, only shrink.

    An error of a receiver is recorded, and delivery goes on with the other receivers. In the
    publication of a client, which a class may not have stored then, it is raised.
    """

    def __init__(self, routes: SubjectRoutes, subject_classes: SubjectClasses) -> None:
        """`subject_classes` has the class of the messages being delivered."""
        self.cost_bytes = 0
        """Cost of the current turn, as bytes of output that take equally long."""
        self.fan_out_bytes = 0
        """Part of the cost that batches caused for all clients but one."""
        self._routes = routes
        self._subject_classes = subject_classes
        self._can_wait = False
        self._is_continuing = False
        """True while a waiting delivery is continued."""
        self._queues: OrderedDict[MessageClass | None, _DeliveryQueue] = OrderedDict()
        """Waiting deliveries by class, the next class to be served first; None for replies of the
        bus. No queue is empty.
        """
        self._latest_started: dict[MessageClass | None, WaitingDelivery] = {}
        """The last delivery of each class that began to wait since `pop_started`."""
        self._errors: list[Exception] = []
        self._gathering_sessions: list[NatsSession] = []
        """Sessions that receive messages of the current batch."""

    def begin_turn(self) -> None:
        """Begin a turn without cost."""
        self.cost_bytes = self.fan_out_bytes = 0

    def add_cost(self, cost_bytes: int) -> None:
        """Add to the cost of the turn, in bytes of output."""
        self.cost_bytes += cost_bytes

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

    def fits_message(self, message: Pub, sinks: SubjectSinks) -> bool:
        """Return True if delivering a message does not exceed the cost of the turn.

        A message to a single sink fits, unless the sink is a queue group whose delivery filters
        decide in several steps.
        """
        if len(sinks) <= 1:
            return not self._routes.filtered_count or all(map(_decides_in_one_step, sinks))
        cost_bytes = _estimate_message_cost(message, sinks)
        # Finding the filters of thousands of sinks takes long, so only if the rest fits.
        return self.fits_into_turn(cost_bytes) and self.fits_into_turn(
            cost_bytes + _estimate_decision_cost(message, self._find_filters(sinks))
        )

    def fits_batch(self, batch: UniformBatch | MixedBatch, targets: list[SinkRows]) -> bool:
        """Return True if delivering a batch does not exceed the cost of the turn."""
        cost_bytes = _estimate_batch_cost(batch, targets)
        if not self.fits_into_turn(cost_bytes):
            return False
        filters = self._find_filters(chain.from_iterable([sinks for sinks, _ in targets]))
        return self.fits_into_turn(cost_bytes + _estimate_decision_cost(batch, filters))

    def _find_filters(self, sinks: Iterable[SubjectSink]) -> set[PermissionCache]:
        """Return the delivery filters of some sinks."""
        if not self._routes.filtered_count:
            return set()
        return {each for sink in sinks for each in sink.delivery_filters}

    # Messages of clients -------------------------------------------------------------------------

    def deliver_message(self, message: Pub, sinks: SubjectSinks, origin: NatsSession) -> bool:
        """Deliver a message at once. Returns True if a receiver accepted it."""
        self.cost_bytes += _estimate_message_cost(message, sinks)
        message = share_body(message, len(sinks))
        is_accepted = False
        for sink in self._merge_at_once(sinks):
            is_accepted |= sink.deliver(message, origin)
        return is_accepted

    def deliver_message_in_steps(
        self, message: Pub, sinks: SubjectSinks, origin: NatsSession | None
    ) -> Generator[None, None, bool]:
        """Do the same in turns, with a step at the end of each turn but the last."""
        self.cost_bytes += EVENT_COST_BYTES + len(sinks) * FOUND_SINK_COST_BYTES
        message = share_body(message, len(sinks))
        remaining = yield from self._merge_in_steps(sinks)
        del sinks  # It would keep subscriptions that end meanwhile.
        return (yield from self._deliver_to_each(message, remaining, origin))

    def _merge_in_steps(self, sinks: SubjectSinks) -> Generator[None, None, Iterator[SubjectSink]]:
        """Return the sinks of a subject, in turns: paged ones are not merged yet."""
        if isinstance(sinks, tuple):
            return drain_list(list(sinks))
        merger = self._routes.create_merger()
        for page in sinks.pages:
            if self.is_turn_over:
                yield
            self.cost_bytes += len(page) * FOUND_SINK_COST_BYTES
            self.cost_bytes += merger.add(page) * GROUPING_COST_BYTES
        yield  # The first delivery to thousands of merged groups takes long.
        return merger.drain()

    def _merge_at_once(self, sinks: SubjectSinks) -> tuple[SubjectSink, ...]:
        """Return the sinks of a subject, merged if they are paged."""
        if isinstance(sinks, tuple):
            return sinks
        return tuple(run_to_end(self._merge_in_steps(sinks)))

    def _deliver_to_each(
        self, message: Pub, sinks: Iterable[SubjectSink], origin: NatsSession | None
    ) -> Generator[None, None, bool]:
        """Deliver a message to some sinks in turns. Returns True if a receiver accepted it."""
        cost_bytes, is_accepted = SINGLE_DELIVERY_COST_BYTES + len(message.body), False
        for sink in sinks:
            if self.is_turn_over:
                yield
            self.cost_bytes += cost_bytes
            try:
                is_accepted |= yield from sink.deliver_in_steps(message, origin)
            except Exception as error:
                self._handle_error(error, origin)
        return is_accepted

    def deliver_batch(
        self, batch: UniformBatch | MixedBatch, targets: list[SinkRows], origin: NatsSession | None
    ) -> None:
        """Deliver a batch at once."""
        merged = [(self._merge_at_once(sinks), rows) for sinks, rows in targets]
        largest_bytes = self._deliver(batch, merged, origin, {})
        self.fan_out_bytes -= largest_bytes

    def deliver_batch_in_steps(
        self, batch: UniformBatch | MixedBatch, targets: list[SinkRows], origin: NatsSession | None
    ) -> Iterator[None]:
        """Do the same in turns, with a step at the end of each turn but the last."""
        remaining = _ReceiverGroups()
        search_cost_bytes = sum([len(sinks) for sinks, _ in targets]) * FOUND_SINK_COST_BYTES
        self.cost_bytes += search_cost_bytes
        self.fan_out_bytes += search_cost_bytes
        for sinks, rows in targets:
            for sink in (yield from self._merge_in_steps(sinks)):
                if self.is_turn_over:
                    yield
                self.cost_bytes += GROUPING_COST_BYTES
                self.fan_out_bytes += GROUPING_COST_BYTES
                remaining.add(sink, rows)
        sinks = ()
        targets.clear()  # They would keep subscriptions that end meanwhile.
        encoded: EncodedBatches = {}
        # Queue groups first: which clients receive their messages is known only then.
        group_targets, largest_bytes = remaining.pop(QUEUE_GROUPS), 0
        cost_bytes = yield from self._prepare_groups(batch, group_targets, remaining)
        if cost_bytes > BATCH_COST_PER_CLIENT_MAX:
            group_targets += yield from self._pop_members(group_targets, remaining)
            yield from self._deliver_singly(batch, group_targets, origin)
        else:
            largest_bytes = self._deliver(batch, group_targets, origin, encoded, remaining)
        for key in drain_list(remaining.keys()):
            if self.is_turn_over:
                if len(encoded) > ENCODED_BATCHES_KEPT_MAX:
                    encoded.clear()
                yield
            client_targets = remaining.pop(key)
            cost_bytes = yield from self._prepare(batch, client_targets)
            if isinstance(key, NatsSession) and cost_bytes > BATCH_COST_PER_CLIENT_MAX:
                yield from self._deliver_singly(batch, client_targets, origin)
                continue
            size_bytes = self._deliver(batch, client_targets, origin, encoded)
            largest_bytes = max(largest_bytes, size_bytes)
        self.fan_out_bytes -= largest_bytes

    def _prepare_groups(
        self,
        batch: UniformBatch | MixedBatch,
        group_targets: list[ReceiverRows],
        remaining: _ReceiverGroups,
    ) -> Generator[None, None, int]:
        """Do the same as `_prepare` for queue groups, with the other targets of their members."""
        if not (group_targets and remaining):
            return (yield from self._prepare(batch, group_targets))
        if (cost_bytes := _estimate_batch_cost(batch, group_targets)) > BATCH_COST_PER_CLIENT_MAX:
            return cost_bytes
        member_targets = yield from self._find_member_targets(batch, group_targets, remaining)
        return (yield from self._prepare(batch, group_targets + member_targets))

    def _prepare(
        self, batch: UniformBatch | MixedBatch, targets: list[ReceiverRows]
    ) -> Generator[None, None, int]:
        """Return the cost of delivering a batch at once. Unless it is too high, decide about denied
        subjects in turns before.

        The caller must deliver the batch before the turn ends, while the decisions are cached.
        """
        cost_bytes = _estimate_batch_cost(batch, targets)
        if cost_bytes > BATCH_COST_PER_CLIENT_MAX:
            return cost_bytes
        return cost_bytes + (yield from self._decide_in_steps(batch, targets))

    def _decide_in_steps(
        self, batch: UniformBatch | MixedBatch, targets: list[ReceiverRows]
    ) -> Generator[None, None, int]:
        """Let the delivery filter of these targets decide about the subjects of a batch, in turns.

        If there are several filters, end the turn unless it has time for their decisions.

        Returns:
            The cost of the decisions that are left.
        """
        filters = self._find_filters(chain.from_iterable([sinks for sinks, _ in targets]))
        if len(filters) == 1 and isinstance(batch, MixedBatch):
            for _ in next(iter(filters)).decide_in_steps(batch):
                if self.is_turn_over:
                    yield
        cost_bytes = _estimate_decision_cost(batch, filters)
        is_delivered_as_batch = cost_bytes <= BATCH_COST_PER_CLIENT_MAX
        if len(filters) > 1 and is_delivered_as_batch and not self.fits_into_turn(cost_bytes):
            yield
        return cost_bytes

    def _find_member_targets(
        self,
        batch: UniformBatch | MixedBatch,
        group_targets: list[ReceiverRows],
        remaining: _ReceiverGroups,
    ) -> Generator[None, None, list[ReceiverRows]]:
        """Return the remaining targets of clients that are members of queue groups, in turns, to
        estimate the cost.

        Includes one client for each message and group, because a message reaches one member. The
        member is chosen when the message is delivered, so these are the clients with most sinks.
        """
        yield  # Finding the members of thousands of merged groups takes long, as does the delivery.
        sessions: set[NatsSession] = set()
        group_count = 0
        for sinks, _ in group_targets:
            group_count += len(sinks)
            for sink in sinks:
                if self.is_turn_over:
                    yield
                receiving_sessions = sink.receiving_sessions()
                sessions.update(receiving_sessions)
                self.cost_bytes += GROUPING_COST_BYTES
                self.cost_bytes += len(receiving_sessions) * SINK_COMPARISON_COST_BYTES
        receivers = remaining.find_sessions(sessions)
        self.cost_bytes += len(receivers) * GROUPING_COST_BYTES
        if self.is_turn_over:
            yield
        # With more sinks, the cost is too high in any case.
        max_count = BATCH_COST_PER_CLIENT_MAX // DELIVERY_COST_BYTES + 1
        if not self._routes.filtered_count:  # Else the filters of all clients count.
            max_count = min(max_count, batch.count * group_count)
        largest = heapq.nlargest(max_count, receivers, remaining.count_sinks)
        yield
        return [part for session in largest for part in remaining.get(session)]

    def _pop_members(
        self, group_targets: list[ReceiverRows], remaining: _ReceiverGroups
    ) -> Generator[None, None, list[ReceiverRows]]:
        """Remove and return the sinks of all clients that are members of queue groups, in turns."""
        found: list[ReceiverRows] = []
        for sinks, _ in group_targets:
            for sink in sinks:
                self.cost_bytes += GROUPING_COST_BYTES
                for session in list(sink.receiving_sessions()):  # They may change between turns.
                    if self.is_turn_over:
                        yield
                    self.cost_bytes += GROUPING_COST_BYTES
                    found += remaining.pop(session)
        return found

    def _deliver_singly(
        self,
        batch: UniformBatch | MixedBatch,
        targets: list[ReceiverRows],
        origin: NatsSession | None,
    ) -> Iterator[None]:
        """Deliver a batch message by message, in turns: a client may have thousands of
        subscriptions, and a queue group thousands of members. Empties `targets`.
        """
        parts_by_rows: dict[int, list[Collection[SubjectSink]]] = {}
        rows_by_id: dict[int, Indexes | None] = {}  # Many sinks have the same array of rows.
        for sinks, rows in targets:
            if self.is_turn_over:
                yield
            self.cost_bytes += GROUPING_COST_BYTES
            rows_by_id[id(rows)] = rows
            parts_by_rows.setdefault(id(rows), []).append(sinks)
        sinks = ()
        targets.clear()
        parts_by_row: dict[int, list[list[Collection[SubjectSink]]]] = {}
        for rows_id, rows in rows_by_id.items():
            for row in row_indexes(batch, rows).tolist():
                if self.is_turn_over:
                    yield
                self.cost_bytes += SINK_COMPARISON_COST_BYTES
                parts_by_row.setdefault(row, []).append(parts_by_rows[rows_id])
        for row, message in enumerate(iter_messages(batch)):
            parts = list(chain(*parts_by_row.pop(row, [])))
            self.cost_bytes += EVENT_COST_BYTES + len(parts) * FOUND_SINK_COST_BYTES
            message = share_body(message, sum(map(len, parts)))
            yield from self._deliver_to_each(message, chain.from_iterable(parts), origin)
        parts = []
        for delivered_parts in parts_by_rows.values():
            for part in drain_list(delivered_parts):  # Freeing merged queue groups takes long.
                if self.is_turn_over:
                    yield
                self.cost_bytes += len(part) * GROUPING_COST_BYTES

    # Messages of the bus -------------------------------------------------------------------------

    def allow_waiting(self) -> None:
        """Let messages of the bus wait. The caller continues them with `deliver_waiting`."""
        self._can_wait = True

    @property
    def has_waiting(self) -> bool:
        """True if `deliver_waiting` has work to do."""
        return bool(self._queues)

    @property
    def waiting_bytes(self) -> int:
        """Estimated memory of the deliveries that wait."""
        return sum(queue.kept_bytes for queue in self._queues.values())

    def pop_started(self) -> list[WaitingDelivery]:
        """Return the last delivery of each class that began to wait since the last call.

        It ends after all earlier ones of its class.
        """
        if not self._latest_started:
            return []
        started, self._latest_started = self._latest_started, {}
        return list(started.values())

    def is_queue_full(self, delivery: WaitingDelivery) -> bool:
        """Return True if the queue of a delivery keeps more than its part of the limit."""
        return delivery.queue.kept_bytes * len(self._queues) > WAITING_DELIVERIES_BYTES_MAX

    def drain_errors(self) -> list[Exception]:
        """Return the errors of receivers, and those that ended deliveries which had to wait."""
        errors, self._errors = self._errors, []
        return errors

    def deliver_from_bus(self, messages: Pub | UniformBatch | MixedBatch | LazyMessages) -> bool:
        """Deliver stored messages. A mixed batch must have `subject_names`.

        The messages must stay valid and unchanged. Returns True if deliveries wait, or if there are
        errors.
        """
        if isinstance(messages, LazyMessages):
            if self._can_wait:
                # Storing the messages has taken much of this turn.
                steps = self._deliver_lazily(messages)
                self._append_waiting(steps, messages.size_bytes, can_start=False)
                return True
            are_pending = [self.deliver_from_bus(message) for message in messages.messages]
            return any(are_pending)
        must_wait = bool(self._queues) and self._subject_classes.source_class in self._queues
        if isinstance(messages, Pub):
            sinks = self._routes.match(messages.subject)
            if sinks and (must_wait or (self._can_wait and not self.fits_message(messages, sinks))):
                self._append_message(messages, sinks)
                return True
            if self._can_wait and len(sinks) > 1:  # A single delivery costs little.
                self.cost_bytes += _estimate_message_cost(messages, sinks)
            return self._deliver_message_from_bus(messages, sinks)
        names = _subject_names(messages)
        max_sinks = SEARCHED_SINKS_PER_TURN_MAX if self._can_wait else math.inf
        matches, found_count = self._routes.match_some(names, max_sinks)
        if len(names) > 1:  # Delivery to the sinks of one subject adds the cost.
            self.cost_bytes += found_count * FOUND_SINK_COST_BYTES
        count = sum(map(len, matches))
        if (
            self._can_wait
            and count
            and (
                must_wait
                or len(matches) < len(names)
                or not self._fits_batch_from_bus(messages, matches, count)
            )
        ):
            steps = self._deliver_batch_from_bus_in_steps(messages, matches)
            self._append_waiting(steps, messages.size_bytes + count * WAITING_SINK_BYTES)
            return True
        if self._gathering_sessions:  # Another batch is being gathered.
            are_pending = [self.deliver_from_bus(message) for message in iter_messages(messages)]
            return any(are_pending)
        targets: list[SinkRows] = [(matches[0], None)]
        if len(set(matches)) > 1:
            targets = run_to_end(self._find_targets_in_steps(messages, matches))
        self.deliver_batch(messages, targets, None)
        return bool(self._errors)

    def deliver_reply(self, message: Pub, receiver: NatsSession | None) -> bool:
        """Deliver a reply of the bus, before messages that wait unless it has many sinks.

        Args:
            message: The reply.
            receiver: The only client that may receive the reply; None for all clients.

        Returns:
            True if deliveries wait, or if there are errors.
        """
        sinks = self._routes.match(message.subject)
        if receiver is not None:
            steps = self._deliver_to_client_in_steps(message, sinks, receiver)
            if self._can_wait and len(sinks) > SEARCHED_SINKS_PER_TURN_MAX:
                self._append_waiting(steps, len(message.body) + len(sinks) * WAITING_SINK_BYTES)
                return True
            run_to_end(steps)
            return False
        if self._can_wait and self._estimate_reply_cost(message, sinks) > OUTPUT_PER_READ_BYTES:
            self._append_message(message, sinks)
            return True
        return self._deliver_message_from_bus(message, sinks)

    def _estimate_reply_cost(self, message: Pub, sinks: SubjectSinks) -> int:
        """Return the cost of delivering a reply to all clients; without permission decisions if
        the rest alone exceeds a turn.
        """
        cost_bytes = _estimate_message_cost(message, sinks)
        if cost_bytes > OUTPUT_PER_READ_BYTES:
            return cost_bytes
        return cost_bytes + _estimate_decision_cost(message, self._find_filters(sinks))

    def _deliver_to_client_in_steps(
        self, message: Pub, sinks: SubjectSinks, receiver: NatsSession
    ) -> Generator[None, None, None]:
        """Deliver a message to the subscriptions of one client, in turns."""
        for page in pages_of(sinks):
            if self.is_turn_over:
                yield
            self.cost_bytes += len(page) * FOUND_SINK_COST_BYTES
            for sink in page:
                if isinstance(sink, NatsSubscription) and sink.session is receiver:
                    self.cost_bytes += SINGLE_DELIVERY_COST_BYTES
                    sink.deliver(message, None)

    def _deliver_message_from_bus(self, message: Pub, sinks: SubjectSinks) -> bool:
        """Deliver a message of the bus at once. Returns True if there are errors."""
        message = share_body(message, len(sinks))
        for sink in self._merge_at_once(sinks):
            try:
                sink.deliver(message, None)
            except Exception as error:
                self._errors.append(error)
        return bool(self._errors)

    def deliver_waiting(self) -> None:
        """Continue the deliveries that wait until the turn is over: of each class in turn, the
        oldest one for one step.
        """
        while self._queues and not self.is_turn_over:
            source_class = next(iter(self._queues))
            self._queues.move_to_end(source_class)
            self._continue_oldest(source_class)

    def _append_message(self, message: Pub, sinks: SubjectSinks) -> None:
        steps = self.deliver_message_in_steps(message, sinks, None)
        self._append_waiting(steps, len(message.body) + len(sinks) * WAITING_SINK_BYTES)

    def _append_waiting(
        self, steps: Iterator[None], size_bytes: int, *, can_start: bool = True
    ) -> None:
        """Append a delivery to the queue of its class. If it is the only one and can start, its
        first part is delivered at once.
        """
        source_class = self._subject_classes.source_class
        queue = self._queues.get(source_class)
        if queue is None:
            queue = self._queues[source_class] = _DeliveryQueue()
        delivery = WaitingDelivery(queue, steps, WAITING_DELIVERY_BYTES + size_bytes)
        queue.append(delivery)
        self._latest_started[source_class] = delivery
        # Sinks may cause further deliveries.
        if not can_start or self._is_continuing or self._gathering_sessions:
            return
        if len(queue.deliveries) == 1 and not self.is_turn_over:
            self._continue_oldest(source_class)

    def _continue_oldest(self, source_class: MessageClass | None) -> None:
        """Continue the oldest delivery of a class for one step, and remove it at its end."""
        queue, classes = self._queues[source_class], self._subject_classes
        outer_class, classes.source_class = classes.source_class, source_class
        self._is_continuing = True
        try:
            for _ in queue.deliveries[0].steps:
                return
        except Exception as error:
            self._errors.append(error)
        finally:
            classes.source_class = outer_class
            self._is_continuing = False
        queue.remove_oldest()
        if not queue.deliveries:
            del self._queues[source_class]

    def _fits_batch_from_bus(
        self, batch: UniformBatch | MixedBatch, matches: list[SubjectSinks], count: int
    ) -> bool:
        """Return True if delivering a batch to `count` sinks, some of them equal, fits into the
        turn. A batch for one sink always fits, unless permissions must be decided.
        """
        output_bytes = batch.size_bytes * count // len(matches)
        cost_bytes = output_bytes + count * DELIVERY_COST_BYTES
        if count > 1 and not self.fits_into_turn(cost_bytes):
            if len(matches) == 1 or not self.fits_into_turn(count * GROUPING_COST_BYTES):
                return False
            sink_count = len(set[SubjectSink]().union(*set(matches)))
            cost_bytes = output_bytes + sink_count * DELIVERY_COST_BYTES
            if not self.fits_into_turn(cost_bytes):
                return False
        filters = self._find_filters(chain(*set(matches)))
        decisions_cost_bytes = _estimate_decision_cost(batch, filters)
        return not decisions_cost_bytes or self.fits_into_turn(cost_bytes + decisions_cost_bytes)

    def _deliver_lazily(self, messages: LazyMessages) -> Iterator[None]:
        """Convert and deliver messages in turns."""
        for message in messages.messages:
            if isinstance(message, Pub):
                self.cost_bytes += SINGLE_CONVERSION_COST_BYTES
                self.cost_bytes += HEADER_COST_FACTOR * message.header_bytes
                sinks = self._routes.match(message.subject)
                yield from self.deliver_message_in_steps(message, sinks, None)
            else:
                self.cost_bytes += BATCHED_STORE_COST_BYTES * message.count
                yield from self._deliver_batch_from_bus_in_steps(message, [])
            if self.is_turn_over:
                yield

    def _deliver_batch_from_bus_in_steps(
        self, batch: UniformBatch | MixedBatch, matches: list[SubjectSinks]
    ) -> Iterator[None]:
        """Deliver a batch in turns. `matches` are the sinks of the first subjects."""
        names = _subject_names(batch)
        while len(matches) < len(names):
            if self.is_turn_over:
                yield
            found, found_count = self._routes.match_some(
                names[len(matches) :], SEARCHED_SINKS_PER_TURN_MAX
            )
            self.cost_bytes += found_count * FOUND_SINK_COST_BYTES
            matches += found
        targets = yield from self._find_targets_in_steps(batch, matches)
        matches.clear()  # They would keep subscriptions that end meanwhile.
        yield from self.deliver_batch_in_steps(batch, targets, None)

    def _find_targets_in_steps(
        self, batch: UniformBatch | MixedBatch, matches: list[SubjectSinks]
    ) -> Generator[None, None, list[SinkRows]]:
        """Return the sinks of a batch, each once. `matches` are the sinks of each subject.

        Has a step at the end of each turn but the last. Often all subjects have the same sinks, and
        comparing these is fast, unless they are paged.
        """
        if isinstance(batch, UniformBatch):
            return [(matches[0], None)]
        numbers_by_sinks: dict[SubjectSinks, list[int]] = {}
        for number, sinks in enumerate(matches):
            if self.is_turn_over:
                yield
            self.cost_bytes += len(sinks) * SINK_COMPARISON_COST_BYTES
            numbers_by_sinks.setdefault(sinks, []).append(number)
        if len(numbers_by_sinks) == 1:
            return [(matches[0], None)]
        numbers_by_sink: dict[SubjectSink, list[int]] = {}
        for sinks, numbers in numbers_by_sinks.items():
            for sink in (yield from self._merge_in_steps(sinks)):
                if self.is_turn_over:
                    yield
                self.cost_bytes += GROUPING_COST_BYTES
                numbers_by_sink.setdefault(sink, []).extend(numbers)
        targets: list[SinkRows] = []
        rows_by_numbers: dict[tuple[int, ...], Indexes | None] = {}
        for sink, numbers in numbers_by_sink.items():
            if self.is_turn_over:
                yield
            self.cost_bytes += GROUPING_COST_BYTES
            key = tuple(numbers)
            if key not in rows_by_numbers:
                has_all_rows = len(numbers) == len(matches)
                rows_by_numbers[key] = (
                    None
                    if has_all_rows
                    else np.flatnonzero(np.isin(batch.subject_numbers, numbers))
                )
            targets.append(((sink,), rows_by_numbers[key]))
        return targets

    def _handle_error(self, error: Exception, origin: NatsSession | None) -> None:
        """Record the error of a receiver of a message of the bus; raise that of a publication."""
        if origin is not None:
            raise error
        self._errors.append(error)

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
        targets: Sequence[ReceiverRows],
        origin: NatsSession | None,
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
            return self._write_gathered(batch, encoded, origin)
        except BaseException:
            self.discard_gathered()
            raise

    def _gather(
        self,
        batch: UniformBatch | MixedBatch,
        targets: Sequence[ReceiverRows],
        origin: NatsSession | None,
    ) -> None:
        """Pass a batch to sinks; the sessions of their clients gather it."""
        ordered_rows: dict[SubjectSink, list[Indexes]] = {}
        for sinks, rows in targets:
            count = batch.count if rows is None else len(rows)
            for sink in sinks:
                cost_bytes = DELIVERY_COST_BYTES + sink.further_cost_bytes(count)
                self.cost_bytes += cost_bytes
                self.fan_out_bytes += cost_bytes
                if rows is not None and sink.is_ordered:
                    ordered_rows.setdefault(sink, []).append(rows)
                    continue
                try:
                    sink.deliver_batch(batch, rows, origin)
                except Exception as error:
                    self._handle_error(error, origin)
        for sink, parts in ordered_rows.items():
            try:
                sink.deliver_batch(batch, np.sort(np.concatenate(parts)), origin)
            except Exception as error:
                self._handle_error(error, origin)

    def _write_gathered(
        self,
        batch: UniformBatch | MixedBatch,
        encoded: EncodedBatches,
        origin: NatsSession | None,
    ) -> int:
        """Encode the gathered messages of a batch for each receiving session. Returns the largest
        output for one of them.
        """
        largest_bytes = 0
        for session in self._gathering_sessions:
            try:
                size_bytes = session.write_gathered(batch, encoded)
            except Exception as error:
                self._handle_error(error, origin)
                session.discard_gathered()
                continue
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
        self._first_rows: dict[Hashable, Indexes] = {}
        """Rows of the first sinks that receive only some of the messages."""
        self._other_parts: dict[Hashable, list[tuple[list[SubjectSink], Indexes | None]]] = {}
        """The other sinks in parts with the same rows, of at most PAGE_SIZE sinks."""

    def add(self, sink: SubjectSink, rows: Indexes | None) -> None:
        """Add a sink, or more rows of a sink that has some of the rows."""
        key = sink.order_key
        if key not in self._first_sinks:
            self._first_sinks[key] = sink
            if rows is not None:
                self._first_rows[key] = rows
            return
        parts = self._other_parts.setdefault(key, [])
        if not parts or parts[-1][1] is not rows or len(parts[-1][0]) == PAGE_SIZE:
            parts.append(([], rows))
        parts[-1][0].append(sink)

    def __len__(self) -> int:
        return len(self._first_sinks)

    def keys(self) -> list[Hashable]:
        """Return the keys of the remaining groups."""
        return list(self._first_sinks)

    def find_sessions(self, sessions: set[NatsSession]) -> set[Hashable]:
        """Return the given sessions whose sinks remain."""
        return self._first_sinks.keys() & sessions

    def count_sinks(self, key: Hashable) -> int:
        """Return the number of sinks with this key, of which there must be one."""
        return 1 + sum([len(sinks) for sinks, _ in self._other_parts.get(key, ())])

    def get(self, key: Hashable) -> list[ReceiverRows]:
        """Return the sinks with this key and their rows. Empty if there are none."""
        if (first := self._first_sinks.get(key)) is None:
            return []
        return [((first,), self._first_rows.get(key)), *self._other_parts.get(key, ())]

    def pop(self, key: Hashable) -> list[ReceiverRows]:
        """Remove and return the sinks with this key and their rows. Empty if there are none."""
        parts = self.get(key)
        for parts_by_key in (self._first_sinks, self._first_rows, self._other_parts):
            parts_by_key.pop(key, None)
        return parts


class WaitingDelivery:
    """Delivery of messages of the bus that continues in later turns."""

    __slots__ = ("has_ended", "kept_bytes", "queue", "steps")

    def __init__(self, queue: _DeliveryQueue, steps: Iterator[None], kept_bytes: int) -> None:
        self.queue = queue
        """Queue that contains the delivery until it ends."""
        self.steps = steps
        """Delivers the messages, with a step at the end of each turn but the last."""
        self.kept_bytes = kept_bytes
        """Estimated memory of the delivery."""
        self.has_ended = False


class _DeliveryQueue:
    """Waiting deliveries of one class, the oldest first."""

    __slots__ = ("deliveries", "kept_bytes")

    def __init__(self) -> None:
        self.deliveries: deque[WaitingDelivery] = deque()
        self.kept_bytes = 0
        """Estimated memory of the deliveries."""

    def append(self, delivery: WaitingDelivery) -> None:
        self.deliveries.append(delivery)
        self.kept_bytes += delivery.kept_bytes

    def remove_oldest(self) -> None:
        delivery = self.deliveries.popleft()
        delivery.has_ended = True
        self.kept_bytes -= delivery.kept_bytes


def _subject_names(batch: UniformBatch | MixedBatch) -> Sequence[bytes]:
    """Return the subjects of a batch of the bus, by their numbers in the batch."""
    if isinstance(batch, UniformBatch):
        return [batch.first_message.subject]
    return batch.subject_names or ()


def share_body(message: Pub, sink_count: int) -> Pub:
    """Return the message, with a body that its receivers share if they are several."""
    if sink_count > 1 and len(message.body) >= SHARED_BODY_BYTES_MIN and not message.shared_end:
        return message.with_shared_end()
    return message


def _estimate_message_cost(message: Pub, sinks: SubjectSinks) -> int:
    """Return the cost of delivering a message."""
    return EVENT_COST_BYTES + len(sinks) * (SINGLE_DELIVERY_COST_BYTES + len(message.body))


def _estimate_batch_cost(
    batch: UniformBatch | MixedBatch, targets: Sequence[SinkRows] | Sequence[ReceiverRows]
) -> int:
    """Return the cost of delivering a batch, if all receivers accept all messages; part of the cost
    if it does not fit into a turn.
    """
    mean_bytes, cost_bytes = batch.mean_message_bytes, 0
    for sinks, rows in targets:
        count = batch.count if rows is None else len(rows)
        cost_bytes += len(sinks) * (DELIVERY_COST_BYTES + mean_bytes * count)
        if cost_bytes > BATCH_COST_PER_CLIENT_MAX:
            return cost_bytes
        cost_bytes += sum([sink.further_cost_bytes(count) for sink in sinks])
    return cost_bytes


def _decides_in_one_step(sink: SubjectSink) -> bool:
    """Return True if the delivery filters of a sink decide about a message in one step."""
    filters = sink.delivery_filters
    if len(filters) <= FILTERS_PER_BATCH_MAX:
        return True
    if len(filters) * DECISION_COST_BYTES > DECISION_STEP_COST_BYTES:
        return False  # Without adding the costs of thousands of filters.
    return sum([each.decision_cost_bytes for each in filters]) <= DECISION_STEP_COST_BYTES


def _estimate_decision_cost(
    messages: Pub | UniformBatch | MixedBatch, filters: Set[PermissionCache]
) -> int:
    """Return an estimate of the cost of the decisions of delivery filters that are not cached.

    The result exceeds BATCH_COST_PER_CLIENT_MAX for a batch that is to be delivered message by
    message: a mixed one with more than FILTERS_PER_BATCH_MAX filters, or any one for which several
    filters need more than half a turn.
    """
    if len(filters) > FILTERS_PER_BATCH_MAX and isinstance(messages, MixedBatch):
        return BATCH_COST_PER_CLIENT_MAX + 1
    cost_bytes = sum([each.estimate_cost(messages) for each in filters])
    if isinstance(messages, Pub) or len(filters) == 1:
        return cost_bytes
    has_time = 2 * cost_bytes <= BATCH_COST_PER_CLIENT_MAX
    return cost_bytes if has_time else cost_bytes + BATCH_COST_PER_CLIENT_MAX
