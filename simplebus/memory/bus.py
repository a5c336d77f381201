"""`MemoryBus`: a broker and its clients in one process, joined without a socket.

Time is the clock of the event loop, so under trio's MockClock an hour takes no time. A client
that waits for bytes also runs the timers of the bus. The broker has processed the bytes of a client
when `send` returns. The reader task of a client reads the bytes for this client.

    Bus ─ ClientConnection ─► MemoryTransport.send ─────────► Broker ─► rings
            ▲                                                   │
            └──────────────── MemoryTransport.receive_into ◄── Outbox
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
from simplebus.client.tracing.interface import Tracing
from simplebus.core.broker.broker import NO_ACTIONS, Broker
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.core.limits import CONNECTION_SCAN_MESSAGES_MAX, READ_BYTES, RING_IDLE_TICKS
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.session.session import Session
from simplebus.core.settings import Settings
from simplebus.core.statistics import BrokerStatistics

if TYPE_CHECKING:
    from simplebus.memory.journal import MemoryJournal

# Without messages in flight, nothing changes after this number of ticks.
_IDLE_TICKS = 2 * RING_IDLE_TICKS


class MemoryBus:
    """Bus without a server, for tests and for programs of one process.

        async with simplebus.MemoryBus() as bus:
            bus.handle(ShopCreated, send_welcome)
            await bus.publish(ShopCreated("Ada's Books"))

    Entering it gives a `Bus`, as `simplebus.connect` does, with the same methods and guarantees:
    acknowledgement, redelivery and all options are those of `Bus.subscribe`. `connect` makes more
    clients. The messages exist as long as the object, even when no client is connected.

    Leaving the block calls handlers until they have processed all messages that the bus can deliver
    now, including messages that handlers publish. It does not wait for messages in a backoff or
    delay. In contrast, leaving `simplebus.connect` ends the handlers, so that a program calls
    `await bus.drain()` before.

    With `data_dir` the messages are kept in a directory. The directory is opened when the first
    client enters and closed when the last one has left.

    Args:
        settings: Settings of the broker.
        name: Publisher name of the client that entering gives.
        registry: Bindings of types to classes.
        raise_errors: Raise the errors of handlers when the block is left.
        data_dir: Directory that keeps messages and durables. None keeps them in memory only.
        durability: Guarantee of a confirm with `data_dir`: "disk" (synced), "os" (written) or
            "memory".
        tracing: `simplebus.otel.OpenTelemetryTracing`, for spans and metrics of all clients. None
            disables both.

    Raises:
        ValueError: `durability` is not one of the three.
        TypeError: `settings` is not a `Settings`.
        JournalError: When entered: the directory cannot be used, for example because another bus
            uses it.
        ExceptionGroup: When left without an exception: errors that handlers raised, and refusals
            that no call has raised.
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
        tracing: Tracing | None = None,
    ) -> None:
        if not isinstance(settings, Settings | None):
            raise TypeError(f"settings must be Settings, got {settings!r}")
        path = None if data_dir is None else Path(data_dir)
        self._server = InProcessServer(settings or Settings(), path, _parse_durability(durability))
        self._name = name
        self._registry = registry
        self._raise_errors = raise_errors
        self._tracing = tracing
        self._client: AbstractAsyncContextManager[Bus] | None = None

    if not TYPE_CHECKING:  # A type checker reports the mistake itself.

        def __getattr__(self, name: str) -> object:
            raise not_entered_error(name, "async with simplebus.MemoryBus() as bus")

    @guarded_async_context("async with memory.connect(…) as bus")
    async def connect(
        self, *, name: str | None = None, registry: Registry | None = None
    ) -> AsyncIterator[Bus]:
        """Connect one more client: `async with memory.connect(name="billing") as billing`.

        It corresponds to another program at a server. Leaving its block drains its handlers.

        Args:
            name: Publisher name of the client. None makes a random name.
            registry: Bindings of types to classes. None is the registry of the `MemoryBus`.

        Yields:
            The connected `Bus`.

        Raises:
            JournalError: The data directory cannot be used.
            ExceptionGroup: When left without an exception: errors that handlers raised, and
                refusals that no call has raised.
        """
        server = self._server
        server.add_client()
        try:
            async with open_bus(
                [server],
                name=name,
                registry=registry or self._registry,
                heartbeat=0.0,
                frame_bytes=server.broker.settings.limits.frame_bytes,
                tracing=self._tracing,
            ) as bus:
                yield bus
                await server.drain(bus)
                if not self._raise_errors:
                    bus.failures = HandlerErrors()
        finally:
            server.remove_client()

    async def __aenter__(self) -> Bus:
        if self._client is not None:
            raise RuntimeError(
                "this MemoryBus is already entered; call `connect` for another client"
            )
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
        """Endpoint of this bus, for example for a bridge that copies from it."""
        return self._server

    def tick(self, times: int = 1) -> None:
        """Run this number of ticks of the ack timer now. Otherwise the event loop's clock runs
        them.
        """
        self._server.tick(times)

    def hang_up(self) -> None:
        """Break every client's connection, as a network failure does. The clients connect again."""
        self._server.drop_connections()

    def statistics(self) -> BrokerStatistics:
        """Return a snapshot of the broker's counters."""
        return self._server.broker.statistics()


class InProcessServer:
    """Broker of one `MemoryBus`, its clock, and the transports of its clients. Implements
    `Endpoint`.
    """

    def __init__(
        self, settings: Settings, path: Path | None = None, level: Durability = Durability.DISK
    ) -> None:
        # A transport cannot fail silently, so heartbeats are not needed.
        self._settings = replace(settings, heartbeat_seconds=0.0)
        self._path, self._durability = path, level
        self._journal: MemoryJournal | None = None
        """Journal of the data directory, while a client is connected."""
        self._client_count = 0
        """Clients that have entered and not left."""
        self.broker = Broker(
            self._settings,
            identity=secrets.token_hex(8),
            commit_log=None if path is None else CommitLog(level),
        )
        self.buffer = ReceiveBuffer(READ_BYTES)
        self._transports: dict[int, MemoryTransport] = {}
        """Open transports, by session id."""
        self._loop: object = None
        """Event loop whose clock is used."""
        self._clock_offset = 0.0
        """Seconds to add to the loop's clock to get seconds since 1970."""
        self._next_tick_at = 0.0
        """Time of the next tick of the ack timer, by the loop's clock."""
        self._next_wakeup_at = math.inf
        """Time of the next timed action. Readers wait no longer than this."""
        self._draining_buses: dict[Bus, None] = {}
        """Clients that wait in `drain`."""

    async def open(self) -> MemoryTransport:
        await anyio.lowlevel.checkpoint()
        self._start_clock()
        session = self.broker.open_session("a client in this process")
        transport = self._transports[session.session_id] = MemoryTransport(self, session)
        return transport

    def __str__(self) -> str:
        return "memory"

    def add_client(self) -> None:
        """Register a client. The first one opens the data directory. Raises JournalError."""
        if self._path is not None and not self._client_count:
            from simplebus.memory.journal import MemoryJournal

            now = max(time.time(), self.broker.clock.now)
            journal = MemoryJournal(self._path, self._durability, self._settings, now=now)
            self.broker, self._journal = journal.broker, journal
            self._loop = None
            journal.start(self.wake_clients)
        self._client_count += 1

    def remove_client(self) -> None:
        """Unregister a client. The last one closes the data directory."""
        self._client_count -= 1
        if self._journal is not None and not self._client_count:
            journal, self._journal = self._journal, None
            journal.close()

    # Bytes ---------------------------------------------------------------------------------------

    def receive(self, transport: MemoryTransport, data: memoryview) -> int:
        """Process bytes that a client has written. Returns how many were accepted."""
        count = min(len(data), len(self.buffer.writable))
        self.buffer.writable[:count] = data[:count]
        self.advance_time()
        try:
            self.broker.receive(transport.session, self.buffer, count)
        except RemoteProtocolError as error:
            self.broker.send_fatal_error(transport.session, error)
            self.close(transport)
        self.wake_clients()
        return count

    def wake_clients(self) -> None:
        """Wake the readers that have bytes to read, and close the sessions that ended."""
        broker, transports = self.broker, self._transports
        # All clients are always read, because their credit bounds them: none is resumed.
        while (actions := broker.end_turn()) is not NO_ACTIONS:
            for session_id in actions.flush:
                if session_id in transports:
                    transports[session_id].wake()
            for session, _ in actions.close:
                self.close(transports[session.session_id])
        if self._journal is not None:
            self._journal.submit_pending()
        self._schedule_wakeup()

    def close(self, transport: MemoryTransport) -> None:
        """Close the session of a transport. Either side may call this."""
        if not transport.is_closed:
            transport.is_closed = True
            del self._transports[transport.session.session_id]
            self.broker.close_session(transport.session)
            transport.wake()
            self.wake_clients()

    def drop_connections(self) -> None:
        for transport in list(self._transports.values()):
            transport.is_dropped = True
            self.close(transport)

    # Time ----------------------------------------------------------------------------------------

    def _start_clock(self) -> None:
        """Read the clock of the current event loop, which may differ from the loop of earlier
        clients.
        """
        loop = anyio.lowlevel.current_token()
        if loop != self._loop:
            if self._transports:
                raise RuntimeError("a MemoryBus is used in one event loop at a time")
            self._loop = loop
            now = anyio.current_time()
            self._clock_offset = max(time.time(), self.broker.clock.now) - now
            self._next_tick_at = now + self.broker.settings.tick_seconds
        self.advance_time()

    def advance_time(self) -> None:
        """Run the actions that are due by the loop's clock. Called before every other action."""
        broker, now = self.broker, anyio.current_time()
        broker.clock.now = now + self._clock_offset
        if now < self._next_tick_at and now < self._next_wakeup_at:
            return
        if broker.next_wakeup - self._clock_offset <= now:
            # The sum may be rounded down to before the wakeup.
            broker.clock.now = max(broker.clock.now, broker.next_wakeup)
            broker.run_due_wakeups()
        if self._journal is not None and self._journal.next_scan_at - self._clock_offset <= now:
            broker.clock.now = max(broker.clock.now, self._journal.next_scan_at)
        if now >= self._next_tick_at:
            self._run_due_ticks(now)
        self._next_wakeup_at = math.inf
        self.wake_clients()

    def _run_due_ticks(self, now: float) -> None:
        """Run the ticks that are due, except ticks that would change nothing."""
        tick_seconds = self.broker.settings.tick_seconds
        count = int((now - self._next_tick_at) / tick_seconds) + 1
        self._next_tick_at += count * tick_seconds
        for _ in range(count if self._needs_ticks() else min(count, _IDLE_TICKS)):
            self._run_tick()

    def _needs_ticks(self) -> bool:
        """Return True if a message is in flight or a publisher is blocked."""
        return any(
            cls.blocked_sessions
            or any(position.window.floor < position.window.cursor for position in cls.positions)
            for cls in self.broker.classes.values()
        )

    def tick(self, times: int) -> None:
        for _ in range(times):
            self._run_tick()
            self.wake_clients()

    def _run_tick(self) -> None:
        if self._journal is not None:
            self._journal.tick()
        for session, error in self.broker.tick():
            self.broker.send_fatal_error(session, error)
            self.close(self._transports[session.session_id])

    def _schedule_wakeup(self) -> None:
        wakeup_at = min(self.broker.next_wakeup - self._clock_offset, self._next_wakeup_at)
        if self._journal is not None:
            wakeup_at = min(wakeup_at, self._journal.next_scan_at - self._clock_offset)
        if self._next_tick_at < wakeup_at and self._needs_ticks():
            wakeup_at = self._next_tick_at
        if wakeup_at < self._next_wakeup_at:
            self._next_wakeup_at = wakeup_at
            for transport in self._transports.values():
                transport.wake()

    async def wait(self, arrived: anyio.Event) -> None:
        """Return when data has arrived for a client, or when a timed action was done."""
        for bus in self._draining_buses:
            bus.connection.changed.set()
        with anyio.CancelScope(deadline=self._next_wakeup_at):
            await arrived.wait()
        self.advance_time()

    # The end -------------------------------------------------------------------------------------

    async def drain(self, bus: Bus) -> None:
        """Wait until a client's handlers have processed everything that the bus can deliver now."""
        self._draining_buses[bus] = None
        connection = bus.connection
        try:
            while True:
                connection.check_open()
                connection.writer.write_now()
                if _is_idle(bus):
                    return
                await connection.changed.wait()
        except BusConnectionError:  # Leaving the block raises the error.
            return
        finally:
            del self._draining_buses[bus]


def _parse_durability(durability: Durability | str) -> Durability:
    names = [level.name.lower() for level in reversed(Durability)]
    if isinstance(durability, Durability):
        return durability
    if durability not in names:
        raise ValueError(f"durability must be one of {', '.join(names)}, got {durability!r}")
    return Durability[durability.upper()]


def _is_idle(bus: Bus) -> bool:
    """Return True if no bytes are on the way and no handler runs."""
    transport = bus.connection.writer.transport
    return (
        isinstance(transport, MemoryTransport)
        and transport.is_quiet
        and not bus.connection.core.send_queue.peek()
        and bus.is_idle
    )


class MemoryTransport:
    """Transport between a client and the broker. Implements `Transport`."""

    def __init__(self, server: InProcessServer, session: Session) -> None:
        self.session = session
        self.is_closed = False
        """True if the connection has ended. Bytes that were queued before are still read."""
        self.is_dropped = False
        """True if the queued bytes are discarded as well."""
        self._server = server
        self._data_arrived: anyio.Event | None = None
        """Set to wake the waiting reader; None while it does not wait."""

    @property
    def is_quiet(self) -> bool:
        """True if the client's reader waits and there is nothing to read."""
        broker = self._server.broker
        has_more = broker.next_wakeup <= broker.clock.now
        return self._data_arrived is not None and self.session.outbox.is_idle and not has_more

    def wake(self) -> None:
        """Wake the reader, because there may be bytes to read."""
        if self._data_arrived is not None:
            self._data_arrived.set()

    def send(self, data: memoryview) -> int:
        if self.is_closed:
            return len(data)  # As for a socket, the reader detects that the peer is gone.
        return self._server.receive(self, data)

    def flush(self) -> bool:
        return True

    async def wait_sendable(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def receive_into(self, space: memoryview) -> int:
        await anyio.lowlevel.checkpoint()
        while True:
            if count := self._read_outbox(space):
                return count
            if self.is_closed:
                return 0
            if not self.session.outbox.is_idle:  # It may return more bytes in another turn.
                self._server.wake_clients()
                await anyio.lowlevel.checkpoint()
                continue
            self._data_arrived = anyio.Event()
            try:
                await self._server.wait(self._data_arrived)
            finally:
                self._data_arrived = None

    def _read_outbox(self, space: memoryview) -> int:
        """Copy queued bytes into `space`. Returns their number."""
        if self.is_dropped:
            return 0
        server, outbox = self._server, self.session.outbox
        server.advance_time()
        tick, count_read, size = server.broker.tick_number, 0, len(space)
        scanned_count = 0
        while (
            count_read < size
            and scanned_count <= CONNECTION_SCAN_MESSAGES_MAX
            and (piece := outbox.peek(tick))
        ):
            scanned_count += outbox.scanned_count
            count = min(len(piece), size - count_read)
            space[count_read : count_read + count] = piece[:count]
            outbox.mark_sent(count, tick)
            count_read += count
        if count_read or server.broker.has_position_changes:
            server.wake_clients()  # Skipped messages may have freed space for publishers.
        return count_read

    def send_eof(self) -> None:
        self._server.close(self)

    def close(self) -> None:
        self._server.close(self)
