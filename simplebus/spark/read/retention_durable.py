"""What keeps messages at the bus until a query has processed them.

Rule 1: a pin holds one position per class, and what is stored from there on stays. It never
processes anything: moving on is all the acknowledging there is, and in between nothing is let go.
Rule 2: under a name it is a durable: it stays when the query is gone, and another query that uses
the name is told so. Without a name it goes with the connection.

    committed │ kept for the query               │
              pin ── start ── end ── … ── head
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import monotonic, sleep

from simplebus.client.core.inbox import Inbox
from simplebus.core.errors import BusConnectionError, Reason, RefusedError
from simplebus.core.protocol.requests import Start, SubscribeReply, SubscribeRequest
from simplebus.jetstream.names import CLUSTER_ID_PREFIX
from simplebus.spark.connections import SourceConnections
from simplebus.spark.read.bus_reader import BusReader
from simplebus.spark.read.offsets import BusExtents, Offsets
from simplebus.spark.read.planner import first_available

# A query that was killed a moment ago may still hold its name, until the bus has noticed.
_NAME_IN_USE_TIMEOUT_SECONDS = 10.0
_NAME_RETRY_SECONDS = 0.2


class RetentionError(RuntimeError):
    """Another query keeps its place under this name."""


@dataclass(slots=True)
class _HeldPosition:
    """A position that is held."""

    inbox: Inbox
    sequence: int
    session_id: int | None
    """The connection on which it was taken."""


class RetentionDurable:
    """A query's, at one bus. Its connection is the caller's. Under a name, what nobody comes for
    within `idle` seconds is let go of; None: never, or when the one before would have been."""

    def __init__(self, bus: BusReader, name: str, *, idle: float | None = None) -> None:
        self._bus = bus
        self._core, self._wire = bus.blocking_bus.connection.core, bus.blocking_bus.connection
        self._name, self._idle = name, idle
        self._held: dict[str, _HeldPosition] = {}

    @property
    def is_active(self) -> bool:
        """Whether it keeps anything."""
        return bool(self._held)

    def retain_from(self, class_: str, to: int | str) -> int:
        """Keep what a class holds from a sequence on, or from where `earliest` or `new` say, and
        nothing before. Returns where that is: the bus may hold less.

        Raises PinError, BusConnectionError.
        """
        while True:
            position = self._held.get(class_)
            if (
                position
                and position.sequence == to
                and position.session_id == self._core.session_id
            ):
                return position.sequence
            try:
                return self._subscribe_at(class_, to, position)
            except BusConnectionError:
                self._held.pop(class_, None)
                self._wire.check_open()  # Raises unless there may be another connection.
                self._wire.wait_until(lambda: self._core.is_ready)

    def _subscribe_at(self, class_: str, to: int | str, previous: _HeldPosition | None) -> int:
        """Take the new position before the former one is let go of; under a name they are one."""
        if previous is not None and self._name:
            self._unsubscribe(previous)
        deadline = monotonic() + _NAME_IN_USE_TIMEOUT_SECONDS
        while True:
            inbox = self._core.subscribe(self._bus.class_id(class_), self._subscribe_request(to))
            try:
                self._wire.wait_answered(inbox.subscribe_request)
                break
            except RefusedError as error:
                if error.code != Reason.DURABLE_IN_USE:
                    raise
                if monotonic() >= deadline:
                    raise RetentionError(
                        f"another query keeps its place in class {class_} at {self._bus.server} "
                        f"under the name {self._name!r}: each query has a checkpoint and a name of "
                        "its own, and runs once; the option durable gives it one, and without it "
                        "it gives one to itself"
                    ) from error
                sleep(_NAME_RETRY_SECONDS)
        reply = inbox.subscribe_request.reply
        assert isinstance(reply, SubscribeReply)
        begins = self._start_sequence(class_, to, reply)
        sequence = to if isinstance(to, int) else begins
        self._held[class_] = _HeldPosition(inbox, sequence, self._core.session_id)
        if previous is not None and not self._name:
            self._unsubscribe(previous)
        return begins

    def _start_sequence(self, class_: str, to: int | str, reply: SubscribeReply) -> int:
        """Where a position is that was taken just now. Before a cluster a subscription has numbers
        of its own, and what is kept lies before what is there when it is had."""
        if not self._core.bus_id.startswith(CLUSTER_ID_PREFIX):
            return reply.cursor
        held = self._bus.get_extent([class_]).classes[class_]
        if isinstance(to, int):
            return max(to, held.floor)
        return held.floor if to == "earliest" else held.head

    def _subscribe_request(self, to: int | str) -> SubscribeRequest:
        return SubscribeRequest(
            durable=self._name or None,
            idle_seconds=self._idle if self._name else None,
            start=Start(sequence=to) if isinstance(to, int) else to,
            seek=bool(self._name),
            max_in_flight=1,  # One is sent, and never looked at.
        )

    def claim_waiting(self, class_: str) -> None:
        """Take what waits at the bus for a first subscription: this is one, and it holds a position
        before all of that. Else it would wait there for ever, and fill its class.

        Raises BusConnectionError.
        """
        asked = SubscribeRequest(start="waiting", max_in_flight=1)
        inbox = self._core.subscribe(self._bus.class_id(class_), asked)
        self._wire.wait_answered(inbox.subscribe_request)
        self._core.unsubscribe(inbox, is_processed=False)
        self._wire.write_now()

    def _unsubscribe(self, position: _HeldPosition) -> None:
        self._core.unsubscribe(position.inbox, is_processed=False)
        self._wire.write_now()

    def forget(self, class_: str) -> None:
        """Keep nothing of a class any more, under this name, whoever was to keep it.

        Raises PinError, BusConnectionError.
        """
        self.retain_from(class_, "new")
        position = self._held.pop(class_)
        self._wire.wait_answered(
            self._core.unsubscribe(position.inbox, is_processed=False, forget=True)
        )

    def release(self) -> None:
        """Keep nothing any more but what the name stands for."""
        for position in self._held.values():
            self._unsubscribe(position)
        self._held.clear()


log = logging.getLogger("simplebus.spark")


class NoRetention:
    """Of a query that reads journals: nobody keeps anything for it."""

    is_active = True

    def retain_start(
        self, server: str, classes: Mapping[str, int], *, with_waiting: bool
    ) -> dict[str, int]:
        """What it may begin with is where it is."""
        return dict(classes)

    def retain_from(self, offsets: Offsets, extents: BusExtents, durable: str) -> None:
        """Nobody is told."""

    def drop_server(self, server: str) -> None:
        """Nothing was held."""


class QueryRetention:
    """Of one query, as long as it runs. The connections are those of `buses`."""

    def __init__(self, connections: SourceConnections) -> None:
        self._connections = connections
        self._durable_name = ""
        """The name of the pins."""
        self._durables: dict[str, RetentionDurable] = {}
        self._start_durables: dict[str, RetentionDurable] = {}
        """Keep what the query begins with until it has begun."""

    @property
    def is_active(self) -> bool:
        """Whether anything is kept."""
        return any(pin.is_active for pin in self._durables.values())

    def retain_start(
        self, server: str, classes: Mapping[str, int | str], *, with_waiting: bool
    ) -> dict[str, int]:
        """Keep what the query may begin with, as long as this connection lasts; `with_waiting`, as
        the first who comes for it. Returns where that is."""
        pin = self._start_durables[server] = RetentionDurable(
            self._connections.bus_reader(server), ""
        )
        found = {name: pin.retain_from(name, sequence) for name, sequence in classes.items()}
        if with_waiting:
            for name in classes:
                pin.claim_waiting(name)
        return found

    def retain_from(self, offsets: Offsets, extents: BusExtents, durable: str) -> None:
        """Keep what lies behind these offsets, under this name, and nothing before them.

        Raises PinError, BusConnectionError.
        """
        previous: dict[str, RetentionDurable] = {}
        if durable != self._durable_name:
            previous, self._durables, self._durable_name = self._durables, {}, durable
        for (server, name), first in first_available(offsets, extents).items():
            if server not in self._durables:
                idle = self._connections.options.durable_idle_seconds
                self._durables[server] = RetentionDurable(
                    self._connections.bus_reader(server), durable, idle=idle
                )
            self._durables[server].retain_from(name, first)
        for pin in previous.values():
            pin.release()
        for server in [server for server in self._start_durables if server in extents]:
            self._start_durables.pop(server).release()

    def drop_server(self, server: str) -> None:
        """The connection is gone, and what it held."""
        self._durables.pop(server, None)
        self._start_durables.pop(server, None)

    def forget(self, server: str, classes: Iterable[str], durable: str) -> None:
        """Keep nothing of these classes under this name any more, if the bus can be asked."""
        try:
            pin = RetentionDurable(self._connections.bus_reader(server), durable)
            for name in classes:
                pin.forget(name)
        except (BusConnectionError, RefusedError, RetentionError) as error:
            log.warning(
                "%s may still keep what is not read any more, under the name %r: %s",
                server,
                durable,
                error,
            )
