"""A bus in this process: the engine and its clients joined without a socket.

Rule 1: nothing is decided here. The engine is the server's, the client is that of `connect`; a link
hands the bytes of one to the other, as many at once as there are.
Rule 2: time is the event loop's clock. Whoever waits for bytes watches it for the whole bus, so
under trio's MockClock an hour takes no time.
Rule 3: what a client wrote has happened when `send` returns. What the bus has for a client is taken
by the client's reader, in its turn: a program cannot overrun itself.

    Bus ─ Wire ─► MemoryLink.send ─────────► Broker ─► rings
            ▲                                  │
            └──── MemoryLink.receive_into ◄── Outbox
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.lowlevel

from simplebus.client.aio.bus import Bus
from simplebus.client.aio.connect import open_bus
from simplebus.client.aio.transport import Endpoint
from simplebus.client.context_guard import guarded_async_context, not_entered_error
from simplebus.client.handler_errors import HandlerErrors
from simplebus.client.message_types import DEFAULT_REGISTRY, Registry
from simplebus.core.broker.broker import Broker
from simplebus.core.commit_log import CommitLog, Durability
from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.core.limits import READ_BYTES, RING_IDLE_TICKS
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.session.session import Session
from simplebus.core.settings import Settings
from simplebus.core.statistics import BrokerStatistics

if TYPE_CHECKING:
    from simplebus.memory.journal import MemoryJournal

# After so many beats nothing changes any more where nothing is in flight.
_IDLE_BEATS = 2 * RING_IDLE_TICKS


class MemoryBus:
    """The bus without a server, for tests and for programs that are one process.

    `async with MemoryBus() as bus` takes the place of `async with simplebus.connect(…) as bus`: all
    that can be done with the one can be done with the other, and keeps the same promises, because
    the same engine does it.

        async with MemoryBus() as bus:
            bus.handle(ShopCreated, send_welcome)
            await bus.publish(ShopCreated("Ada's Books"))

    Args: how the engine behaves; this client's name; which types are bound to which classes;
    whether leaving raises what handlers raised; a directory in which what the bus holds is kept,
    and what a confirm promises then: "disk", "os" or "memory".
    Leaving drains: handlers are called with everything that the bus could deliver, what they
    publish meanwhile included, and are waited for. What a handler has failed on, and what its
    publisher has delayed, would come only after a pause: that is not waited for. This alone is
    otherwise with `connect`, which ends its handlers: there, `await bus.drain()` comes last.
    Error handling: leaving raises an ExceptionGroup of what handlers raised or the bus refused,
    unless the block itself raises.
    With a directory, entering raises JournalError where it cannot be used, by another bus for
    example; leaving waits for what is to be written.
    `connect` gives further clients; the bus lasts as long as the object, whoever is connected. With
    a directory it is closed when the last client leaves, and opened again by the next one.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        name: str | None = None,
        registry: Registry = DEFAULT_REGISTRY,
        raise_errors: bool = True,
        data_dir: str | PathLike[str] | None = None,
        durability: Durability | Literal["disk", "os", "memory"] = Durability.DISK,
    ) -> None:
        if not isinstance(settings, Settings | None):
            raise TypeError(f"settings must be Settings, got {settings!r}")
        path = None if data_dir is None else Path(data_dir)
        self._exchange = Exchange(settings or Settings(), path, _level(durability))
        self._name = name
        self._registry = registry
        self._raise_errors = raise_errors
        self._client: AbstractAsyncContextManager[Bus] | None = None

    if not TYPE_CHECKING:  # A type checker tells by itself.

        def __getattr__(self, name: str) -> object:
            raise not_entered_error(name, "async with simplebus.MemoryBus() as bus")

    @guarded_async_context("async with memory.connect(…) as bus")
    async def connect(
        self, *, name: str | None = None, registry: Registry | None = None
    ) -> AsyncIterator[Bus]:
        """One more client: `async with memory.connect(name="billing") as billing`.

        It is what another program would be to a bus with a server. Leaving it drains its handlers.
        """
        exchange = self._exchange
        exchange.enter()
        try:
            async with open_bus(
                [exchange],
                name=name,
                registry=registry or self._registry,
                heartbeat=0.0,
                frame_bytes=exchange.broker.settings.limits.frame_bytes,
            ) as bus:
                yield bus
                await exchange.drain(bus)
                if not self._raise_errors:
                    bus.failures = HandlerErrors()
        finally:
            exchange.leave()

    async def __aenter__(self) -> Bus:
        if self._client is not None:
            raise RuntimeError("this MemoryBus is entered; `connect` gives further clients of it")
        self._client = client = self.connect(name=self._name)
        try:
            return await client.__aenter__()
        except BaseException:
            self._client = None
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        client, self._client = self._client, None
        assert client is not None, "left without being entered"
        return await client.__aexit__(kind, error, traceback)

    @property
    def place(self) -> Endpoint:
        """Where its clients find it: for a bridge that copies from it."""
        return self._exchange

    def tick(self, times: int = 1) -> None:
        """Let so many beats of the ack timer pass now; otherwise they come by the loop's clock."""
        self._exchange.tick(times)

    def hang_up(self) -> None:
        """Break every client's connection, as a network that fails does. They connect again."""
        self._exchange.hang_up()

    def statistics(self) -> BrokerStatistics:
        """A snapshot of the engine."""
        return self._exchange.broker.statistics()


class Exchange:
    """The engine of one bus, its time, and the links of its clients. A `Place`."""

    def __init__(
        self, settings: Settings, path: Path | None = None, level: Durability = Durability.DISK
    ) -> None:
        # Nobody is away without the other side knowing: silence says nothing.
        self._settings = replace(settings, heartbeat_seconds=0.0)
        self._path, self._level = path, level
        self._journal: MemoryJournal | None = None
        """Where what the bus holds is kept, while somebody is inside."""
        self._inside = 0
        """How many clients have entered and not left."""
        self.broker = Broker(
            self._settings,
            identity=secrets.token_hex(8),
            commit_log=None if path is None else CommitLog(level),
        )
        self.buffer = ReceiveBuffer(READ_BYTES)
        self._links: dict[int, MemoryLink] = {}
        """Those that are open, by session id."""
        self._loop: object = None
        """The event loop whose clock is read."""
        self._epoch = 0.0
        """What is added to that clock to have seconds since 1970."""
        self._next_beat = 0.0
        """When the ack timer beats next, by the loop's clock."""
        self._alarm = math.inf
        """When something is to be done without being asked. Nobody waits any longer."""
        self._drained: dict[Bus, None] = {}
        """Clients that wait until nothing moves."""

    async def open(self) -> MemoryLink:
        """A link to the engine, for one client."""
        await anyio.lowlevel.checkpoint()
        self._follow_clock()
        session = self.broker.open_session("a client in this process")
        link = self._links[session.session_id] = MemoryLink(self, session)
        return link

    def __str__(self) -> str:
        return "memory"

    def enter(self) -> None:
        """A client is to come: the first one finds what was kept. Raises JournalError."""
        if self._path is not None and not self._inside:
            from simplebus.memory.journal import MemoryJournal

            now = max(time.time(), self.broker.clock.now)
            journal = MemoryJournal(self._path, self._level, self._settings, now=now)
            self.broker, self._journal = journal.broker, journal
            self._loop = None
            journal.start(self.settle)
        self._inside += 1

    def leave(self) -> None:
        """A client has gone: what is there when the last one has is kept."""
        self._inside -= 1
        if self._journal is not None and not self._inside:
            journal, self._journal = self._journal, None
            journal.close()

    # Bytes ---------------------------------------------------------------------------------------

    def receive(self, link: MemoryLink, data: memoryview) -> int:
        """A client has written. Returns how much of it was taken."""
        count = min(len(data), len(self.buffer.space))
        self.buffer.space[:count] = data[:count]
        self.pass_time()
        try:
            self.broker.receive(link.session, self.buffer, count)
        except RemoteProtocolError as error:
            self.broker.send_fatal_error(link.session, error)
            self.close(link)
        self.settle()
        return count

    def settle(self) -> None:
        """Wake those for whom there is something."""
        broker, links = self.broker, self._links
        while ready := broker.drain_writable():
            for session_id in ready:
                if session_id in links:
                    links[session_id].wake()
        for session, _ in broker.drain_closing():
            self.close(self._links[session.session_id])
        broker.drain_resumed()  # All are read, always: their credit is what bounds them.
        if self._journal is not None:
            self._journal.hand_over()
        self._set_alarm()

    def close(self, link: MemoryLink) -> None:
        """One side or the other has ended a connection."""
        if not link.is_over:
            link.is_over = True
            del self._links[link.session.session_id]
            self.broker.close_session(link.session)
            link.wake()
            self.settle()

    def hang_up(self) -> None:
        for link in list(self._links.values()):
            link.is_lost = True
            self.close(link)

    # Time ----------------------------------------------------------------------------------------

    def _follow_clock(self) -> None:
        """A client comes, perhaps in another event loop than those before."""
        loop = anyio.lowlevel.current_token()
        if loop != self._loop:
            if self._links:
                raise RuntimeError("a MemoryBus is used in one event loop at a time")
            self._loop = loop
            now = anyio.current_time()
            self._epoch = max(time.time(), self.broker.clock.now) - now
            self._next_beat = now + self.broker.settings.tick_seconds
        self.pass_time()

    def pass_time(self) -> None:
        """Do what is due by the loop's clock. To be called before anything else is done."""
        broker, now = self.broker, anyio.current_time()
        broker.clock.now = now + self._epoch
        if now < self._next_beat and now < self._alarm:
            return
        if broker.next_wakeup - self._epoch <= now:
            broker.clock.now = max(broker.clock.now, broker.next_wakeup)  # Sums are rounded.
            broker.run_due_wakeups()
        if self._journal is not None and self._journal.due - self._epoch <= now:
            broker.clock.now = max(broker.clock.now, self._journal.due)
        if now >= self._next_beat:
            self._catch_up(now)
        self._alarm = math.inf
        self.settle()

    def _catch_up(self, now: float) -> None:
        """Have the beats that were due up to now. None are had while they would change nothing."""
        tick_seconds = self.broker.settings.tick_seconds
        count = int((now - self._next_beat) / tick_seconds) + 1
        self._next_beat += count * tick_seconds
        for _ in range(count if self._awaits_beats() else min(count, _IDLE_BEATS)):
            self._beat()

    def _awaits_beats(self) -> bool:
        """Whether time makes a difference to some message."""
        return any(
            cls.blocked_sessions
            or any(held.window.floor < held.window.cursor for held in cls.subscriptions)
            for cls in self.broker.classes.values()
        )

    def tick(self, times: int) -> None:
        for _ in range(times):
            self._beat()
            self.settle()

    def _beat(self) -> None:
        if self._journal is not None:
            self._journal.tick()
        for session, error in self.broker.tick():
            self.broker.send_fatal_error(session, error)
            self.close(self._links[session.session_id])

    def _set_alarm(self) -> None:
        at = min(self.broker.next_wakeup - self._epoch, self._alarm)
        if self._journal is not None:
            at = min(at, self._journal.due - self._epoch)
        if self._next_beat < at and self._awaits_beats():
            at = self._next_beat
        if at < self._alarm:
            self._alarm = at
            for link in self._links.values():
                link.wake()

    async def wait(self, arrived: anyio.Event) -> None:
        """Return when something has arrived, or when time has made a difference."""
        for bus in self._drained:
            bus.connection.changed.set()
        with anyio.CancelScope(deadline=self._alarm):
            await arrived.wait()
        self.pass_time()

    # The end -------------------------------------------------------------------------------------

    async def drain(self, bus: Bus) -> None:
        """Wait until a client's handlers are through with all that the bus could deliver now, and
        with what comes of it."""
        self._drained[bus] = None
        wire = bus.connection
        try:
            while True:
                wire.check_open()
                wire.writer.write_now()
                if _is_through(bus):
                    return
                await wire.changed.wait()
        except BusConnectionError:  # Leaving says what became of it.
            return
        finally:
            del self._drained[bus]


def _level(durability: Durability | str) -> Durability:
    names = [level.name.lower() for level in reversed(Durability)]
    if isinstance(durability, Durability):
        return durability
    if durability not in names:
        raise ValueError(f"durability must be one of {', '.join(names)}, got {durability!r}")
    return Durability[durability.upper()]


def _is_through(bus: Bus) -> bool:
    """Whether nothing moves: neither bytes nor handlers."""
    link = bus.connection.writer.transport
    return (
        isinstance(link, MemoryLink)
        and link.is_quiet
        and not bus.connection.core.send_queue.peek()
        and bus.is_idle
    )


class MemoryLink:
    """A client's link to the engine. A `Link`."""

    def __init__(self, exchange: Exchange, session: Session) -> None:
        self.session = session
        self.is_over = False
        """Whether the connection has ended: what was answered before is still read."""
        self.is_lost = False
        """Whether not even that is."""
        self._exchange = exchange
        self._arrived: anyio.Event | None = None
        """Set when the waiting reader is to look again; None while it does not wait."""

    @property
    def is_quiet(self) -> bool:
        """Whether the client's reader waits, and there is nothing for it."""
        broker = self._exchange.broker
        goes_on = broker.next_wakeup <= broker.clock.now
        return self._arrived is not None and self.session.outbox.is_idle and not goes_on

    def wake(self) -> None:
        """There may be something to read."""
        if self._arrived is not None:
            self._arrived.set()

    def send(self, data: memoryview) -> int:
        if self.is_over:
            return len(data)  # As a socket's: who reads learns that nobody listens.
        return self._exchange.receive(self, data)

    def flush(self) -> bool:
        return True

    async def wait_sendable(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def receive_into(self, space: memoryview) -> int:
        await anyio.lowlevel.checkpoint()
        while True:
            if count := self._take(space):
                return count
            if self.is_over:
                return 0
            if not self.session.outbox.is_idle:  # It has more to look at, in another turn.
                self._exchange.settle()
                await anyio.lowlevel.checkpoint()
                continue
            self._arrived = anyio.Event()
            try:
                await self._exchange.wait(self._arrived)
            finally:
                self._arrived = None

    def _take(self, space: memoryview) -> int:
        """Fill the space with what is there for the client. Returns how much it was."""
        if self.is_lost:
            return 0
        exchange, outbox = self._exchange, self.session.outbox
        exchange.pass_time()
        tick, taken, most = exchange.broker.tick_number, 0, len(space)
        while taken < most and (piece := outbox.peek(tick)):
            count = min(len(piece), most - taken)
            space[taken : taken + count] = piece[:count]
            outbox.mark_sent(count, tick)
            taken += count
        if taken:
            exchange.settle()  # What was passed over may have made room.
        return taken

    def end(self) -> None:
        self._exchange.close(self)

    def close(self) -> None:
        self._exchange.close(self)
