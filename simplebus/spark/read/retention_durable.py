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
from simplebus.spark.connections import Buses
from simplebus.spark.read.bus_reader import SourceBus
from simplebus.spark.read.offsets import BusExtents, Offsets
from simplebus.spark.read.planner import firsts

# A query that was killed a moment ago may still hold its name, until the bus has noticed.
_IN_USE_SECONDS = 10.0
_PAUSE_SECONDS = 0.2


class PinError(RuntimeError):
    """Another query keeps its place under this name."""


@dataclass(slots=True)
class _Hold:
    """A position that is held."""

    inbox: Inbox
    at: int
    session_id: int | None
    """The connection on which it was taken."""


class Pin:
    """A query's, at one bus. Its connection is the caller's. Under a name, what nobody comes for
    within `idle` seconds is let go of; None: never, or when the one before would have been."""

    def __init__(self, bus: SourceBus, name: str, *, idle: float | None = None) -> None:
        self._bus = bus
        self._core, self._wire = bus.blocking.wire.core, bus.blocking.wire
        self._name, self._idle = name, idle
        self._held: dict[str, _Hold] = {}

    @property
    def is_held(self) -> bool:
        """Whether it keeps anything."""
        return bool(self._held)

    def move(self, class_: str, to: int | str) -> int:
        """Keep what a class holds from a sequence on, or from where `earliest` or `new` say, and
        nothing before. Returns where that is: the bus may hold less.

        Raises PinError, BusConnectionError.
        """
        while True:
            hold = self._held.get(class_)
            if hold and hold.at == to and hold.session_id == self._core.session_id:
                return hold.at
            try:
                return self._take(class_, to, hold)
            except BusConnectionError:
                self._held.pop(class_, None)
                self._wire.check()  # Raises unless there may be another connection.
                self._wire.wait_until(lambda: self._core.is_ready)

    def _take(self, class_: str, to: int | str, former: _Hold | None) -> int:
        """Take the new position before the former one is let go of; under a name they are one."""
        if former is not None and self._name:
            self._let_go(former)
        deadline = monotonic() + _IN_USE_SECONDS
        while True:
            inbox = self._core.subscribe(self._bus.class_id(class_), self._request(to))
            try:
                self._wire.answered(inbox.subscribe_request)
                break
            except RefusedError as error:
                if error.code != Reason.DURABLE_IN_USE:
                    raise
                if monotonic() >= deadline:
                    raise PinError(
                        f"another query keeps its place in class {class_} at {self._bus.server} "
                        f"under the name {self._name!r}: each query has a checkpoint and a name of "
                        "its own, and runs once; the option durable gives it one, and without it "
                        "it gives one to itself"
                    ) from error
                sleep(_PAUSE_SECONDS)
        reply = inbox.subscribe_request.reply
        assert isinstance(reply, SubscribeReply)
        begins = self._begins(class_, to, reply)
        at = to if isinstance(to, int) else begins
        self._held[class_] = _Hold(inbox, at, self._core.session_id)
        if former is not None and not self._name:
            self._let_go(former)
        return begins

    def _begins(self, class_: str, to: int | str, reply: SubscribeReply) -> int:
        """Where a position is that was taken just now. Before a cluster a subscription has numbers
        of its own, and what is kept lies before what is there when it is had."""
        if not self._core.bus_id.startswith(CLUSTER_ID_PREFIX):
            return reply.cursor
        held = self._bus.memory([class_]).classes[class_]
        if isinstance(to, int):
            return max(to, held.floor)
        return held.floor if to == "earliest" else held.head

    def _request(self, to: int | str) -> SubscribeRequest:
        return SubscribeRequest(
            durable=self._name or None,
            idle_seconds=self._idle if self._name else None,
            start=Start(sequence=to) if isinstance(to, int) else to,
            seek=bool(self._name),
            max_in_flight=1,  # One is sent, and never looked at.
        )

    def take_waiting(self, class_: str) -> None:
        """Take what waits at the bus for a first subscription: this is one, and it holds a position
        before all of that. Else it would wait there for ever, and fill its class.

        Raises BusConnectionError.
        """
        asked = SubscribeRequest(start="waiting", max_in_flight=1)
        inbox = self._core.subscribe(self._bus.class_id(class_), asked)
        self._wire.answered(inbox.subscribe_request)
        self._core.unsubscribe(inbox, is_processed=False)
        self._wire.push()

    def _let_go(self, hold: _Hold) -> None:
        self._core.unsubscribe(hold.inbox, is_processed=False)
        self._wire.push()

    def forget(self, class_: str) -> None:
        """Keep nothing of a class any more, under this name, whoever was to keep it.

        Raises PinError, BusConnectionError.
        """
        self.move(class_, "new")
        hold = self._held.pop(class_)
        self._wire.answered(self._core.unsubscribe(hold.inbox, is_processed=False, forget=True))

    def release(self) -> None:
        """Keep nothing any more but what the name stands for."""
        for hold in self._held.values():
            self._let_go(hold)
        self._held.clear()


log = logging.getLogger("simplebus.spark")


class NotKeeping:
    """Of a query that reads journals: nobody keeps anything for it."""

    is_begun = True

    def begin(
        self, server: str, classes: Mapping[str, int], *, with_waiting: bool
    ) -> dict[str, int]:
        """What it may begin with is where it is."""
        return dict(classes)

    def keep(self, offsets: Offsets, memories: BusExtents, durable: str) -> None:
        """Nobody is told."""

    def lost(self, server: str) -> None:
        """Nothing was held."""


class Keeping:
    """Of one query, as long as it runs. The connections are those of `buses`."""

    def __init__(self, buses: Buses) -> None:
        self._buses = buses
        self._durable = ""
        """The name of the pins."""
        self._pins: dict[str, Pin] = {}
        self._first_pins: dict[str, Pin] = {}
        """Keep what the query begins with until it has begun."""

    @property
    def is_begun(self) -> bool:
        """Whether anything is kept."""
        return any(pin.is_held for pin in self._pins.values())

    def begin(
        self, server: str, classes: Mapping[str, int | str], *, with_waiting: bool
    ) -> dict[str, int]:
        """Keep what the query may begin with, as long as this connection lasts; `with_waiting`, as
        the first who comes for it. Returns where that is."""
        pin = self._first_pins[server] = Pin(self._buses.bus(server), "")
        found = {name: pin.move(name, at) for name, at in classes.items()}
        if with_waiting:
            for name in classes:
                pin.take_waiting(name)
        return found

    def keep(self, offsets: Offsets, memories: BusExtents, durable: str) -> None:
        """Keep what lies behind these offsets, under this name, and nothing before them.

        Raises PinError, BusConnectionError.
        """
        former: dict[str, Pin] = {}
        if durable != self._durable:
            former, self._pins, self._durable = self._pins, {}, durable
        for (server, name), first in firsts(offsets, memories).items():
            if server not in self._pins:
                idle = self._buses.options.durable_idle
                self._pins[server] = Pin(self._buses.bus(server), durable, idle=idle)
            self._pins[server].move(name, first)
        for pin in former.values():
            pin.release()
        for server in [server for server in self._first_pins if server in memories]:
            self._first_pins.pop(server).release()

    def lost(self, server: str) -> None:
        """The connection is gone, and what it held."""
        self._pins.pop(server, None)
        self._first_pins.pop(server, None)

    def forget(self, server: str, classes: Iterable[str], durable: str) -> None:
        """Keep nothing of these classes under this name any more, if the bus can be asked."""
        try:
            pin = Pin(self._buses.bus(server), durable)
            for name in classes:
                pin.forget(name)
        except (BusConnectionError, RefusedError, PinError) as error:
            log.warning(
                "%s may still keep what is not read any more, under the name %r: %s",
                server,
                durable,
                error,
            )
