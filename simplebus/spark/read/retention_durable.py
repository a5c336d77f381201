"""Durables that make a bus retain messages until a query has processed them.

A RetentionDurable has one position per class. It never acks single messages: moving the position
forward is its only ack. A named one survives the query, and another query with the same name is
rejected; an unnamed one ends with its connection.

    committed │ retained for the query               │
       position ── start ── end ── … ── head
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import monotonic, sleep

from simplebus.client.core.inbox import Inbox
from simplebus.core.errors import BusConnectionError, Reason, RefusedError
from simplebus.core.protocol.requests import Start, SubscribeReply, SubscribeRequest
from simplebus.jetstream.names import CLUSTER_ID_PREFIX
from simplebus.logs.event_logger import EventLogger
from simplebus.spark.connections import SourceConnections
from simplebus.spark.read.bus_reader import BusReader
from simplebus.spark.read.offsets import BusExtents, Offsets
from simplebus.spark.read.planner import first_available

# The connection of a killed query may hold the name until the bus notices its end.
_NAME_IN_USE_TIMEOUT_SECONDS = 10.0
_NAME_RETRY_SECONDS = 0.2


class RetentionError(RuntimeError):
    """Another query uses this durable name."""


@dataclass(slots=True)
class _HeldPosition:
    """Position of one class at the bus."""

    inbox: Inbox
    sequence: int
    session_id: int | None
    """Session in which the position was opened."""


class RetentionDurable:
    """Durable of one query at one bus, over the caller's connection.

    Args:
        bus: The connection.
        name: Name of the durable; empty for a position that ends with the connection.
        idle: Seconds after which the bus deletes the unused durable. None keeps the durable's
            current setting, or means never for a new one.
    """

    def __init__(self, bus: BusReader, name: str, *, idle: float | None = None) -> None:
        self._bus = bus
        self._core, self._wire = bus.blocking_bus.connection.core, bus.blocking_bus.connection
        self._name, self._idle = name, idle
        self._positions: dict[str, _HeldPosition] = {}

    @property
    def is_active(self) -> bool:
        """True if a position is open."""
        return bool(self._positions)

    def retain_from(self, class_: str, to: int | str) -> int:
        """Retain a class's messages from a sequence on, or from `earliest` or `new`, and release
        earlier ones.

        Returns the resulting start, which may be later if the bus stores less. Raises
        RetentionError and BusConnectionError.
        """
        while True:
            position = self._positions.get(class_)
            if (
                position
                and position.sequence == to
                and position.session_id == self._core.session_id
            ):
                return position.sequence
            try:
                return self._subscribe_at(class_, to, position)
            except BusConnectionError:
                self._positions.pop(class_, None)
                self._wire.check_open()  # Raises if the connection is not retried any more.
                self._wire.wait_until(lambda: self._core.is_ready)

    def _subscribe_at(self, class_: str, to: int | str, previous: _HeldPosition | None) -> int:
        """Open the new position and close the previous one. An unnamed previous position is closed
        after the new one is open, so that no messages are released.
        """
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
                        f"another query uses the durable {self._name!r} of class {class_} at "
                        f"{self._bus.server}: give each query its own checkpoint and its own name "
                        "(option durable; by default a name is generated), and start it only once"
                    ) from error
                sleep(_NAME_RETRY_SECONDS)
        reply = inbox.subscribe_request.reply
        assert isinstance(reply, SubscribeReply)
        begins = self._start_sequence(class_, to, reply)
        sequence = to if isinstance(to, int) else begins
        self._positions[class_] = _HeldPosition(inbox, sequence, self._core.session_id)
        if previous is not None and not self._name:
            self._unsubscribe(previous)
        return begins

    def _start_sequence(self, class_: str, to: int | str, reply: SubscribeReply) -> int:
        """Return the sequence of a new position.

        At a stateless server a subscription has its own numbering, so the class's extent is
        used: messages that arrive between the two requests are retained too.
        """
        if not self._core.bus_id.startswith(CLUSTER_ID_PREFIX):
            return reply.cursor
        extent = self._bus.get_extent([class_]).classes[class_]
        if isinstance(to, int):
            return max(to, extent.floor)
        return extent.floor if to == "earliest" else extent.head

    def _subscribe_request(self, to: int | str) -> SubscribeRequest:
        return SubscribeRequest(
            durable=self._name or None,
            idle_seconds=self._idle if self._name else None,
            start=Start(sequence=to) if isinstance(to, int) else to,
            seek=bool(self._name),
            max_in_flight=1,  # The bus sends one message, which is ignored.
        )

    def claim_waiting(self, class_: str) -> None:
        """Claim the messages that wait at the bus for a class's first subscription, and release
        them.

        This query's position already retains them. Unclaimed messages would stay in the class
        forever. Raises BusConnectionError.
        """
        request = SubscribeRequest(start="waiting", max_in_flight=1)
        inbox = self._core.subscribe(self._bus.class_id(class_), request)
        self._wire.wait_answered(inbox.subscribe_request)
        self._core.unsubscribe(inbox, is_processed=False)
        self._wire.write_now()

    def _unsubscribe(self, position: _HeldPosition) -> None:
        self._core.unsubscribe(position.inbox, is_processed=False)
        self._wire.write_now()

    def forget(self, class_: str) -> None:
        """Delete the durable of a class, whichever query created it.

        Raises RetentionError, BusConnectionError.
        """
        self.retain_from(class_, "new")
        position = self._positions.pop(class_)
        self._wire.wait_answered(
            self._core.unsubscribe(position.inbox, is_processed=False, forget=True)
        )

    def release(self) -> None:
        """Close all positions. Named durables remain at the bus."""
        for position in self._positions.values():
            self._unsubscribe(position)
        self._positions.clear()


log = EventLogger("simplebus.spark")


class NoRetention:
    """Retention of a query that reads journals: nothing is retained."""

    is_active = True

    def retain_start(
        self, server: str, classes: Mapping[str, int], *, with_waiting: bool
    ) -> dict[str, int]:
        """Return `classes` unchanged."""
        return dict(classes)

    def retain_from(self, offsets: Offsets, extents: BusExtents, durable: str) -> None:
        """Do nothing."""

    def drop_server(self, server: str) -> None:
        """Do nothing."""


class QueryRetention:
    """Retention of one running query at all its buses, over shared connections."""

    def __init__(self, connections: SourceConnections) -> None:
        self._connections = connections
        self._durable_name = ""
        """Name of the durables."""
        self._durables: dict[str, RetentionDurable] = {}
        self._start_durables: dict[str, RetentionDurable] = {}
        """Unnamed durables that retain the possible start of the query until its first batch is
        planned.
        """

    @property
    def is_active(self) -> bool:
        """True if a named or regular durable is open."""
        return any(pin.is_active for pin in self._durables.values())

    def retain_start(
        self, server: str, classes: Mapping[str, int | str], *, with_waiting: bool
    ) -> dict[str, int]:
        """Retain the query's possible start as long as this connection lasts.

        Args:
            server: The bus.
            classes: Start by class: a sequence, or `earliest`.
            with_waiting: True to claim messages that wait for a first subscription.

        Returns:
            The first retained sequence, by class.
        """
        pin = self._start_durables[server] = RetentionDurable(
            self._connections.bus_reader(server), ""
        )
        found = {name: pin.retain_from(name, sequence) for name, sequence in classes.items()}
        if with_waiting:
            for name in classes:
                pin.claim_waiting(name)
        return found

    def retain_from(self, offsets: Offsets, extents: BusExtents, durable: str) -> None:
        """Retain messages from these offsets on, under the name `durable`, and release earlier
        ones.

        Raises RetentionError, BusConnectionError.
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
        """Discard the durables of a lost connection."""
        self._durables.pop(server, None)
        self._start_durables.pop(server, None)

    def forget(self, server: str, classes: Iterable[str], durable: str) -> None:
        """Delete the durable of these classes; log a warning if the bus cannot be reached."""
        try:
            pin = RetentionDurable(self._connections.bus_reader(server), durable)
            for name in classes:
                pin.forget(name)
        except (BusConnectionError, RefusedError, RetentionError) as error:
            log.warning(
                "durable.deletion_failed",
                "cannot delete durable {durable!r} at {server}, which may still retain "
                "unread messages: {error}",
                durable=durable,
                server=server,
                error=error,
            )
