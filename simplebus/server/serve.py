"""The whole server: listeners in front of an engine, signals, the ready line, the farewell.

Rule 1: nothing is announced before it is true: the ready line and READY=1 come when every listener
is up. Rule 2: what is lost by stopping is said.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import trio

from simplebus.core.broker import Settings
from simplebus.core.statistics import BrokerStatistics
from simplebus.nats.settings import NatsSettings
from simplebus.server import listeners
from simplebus.server.engine import Engine
from simplebus.server.nats_door import NatsDoor
from simplebus.server.notify import notify
from simplebus.server.tls import TlsOptions

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

log = logging.getLogger("simplebus.server")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where and how to serve."""

    hosts: tuple[str, ...] = ("127.0.0.1", "::1")
    """Addresses to listen on. An IPv6 address that this machine lacks is left out."""
    port: int = 8888
    """0 picks a free one."""
    nats_port: int | None = None
    """The same for the NATS door; None keeps it closed."""
    nats: NatsSettings = field(default_factory=NatsSettings)
    nats_tls: TlsOptions | None = None
    """None for NATS clients in clear."""
    drain_seconds: float = 10.0
    """How long SIGTERM waits for what is under way."""
    verbose: bool = False
    """Print rates once a second."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that is up."""

    engine: Engine
    addresses: tuple[str, ...]
    """HOST:PORT of each listener."""
    nats_addresses: tuple[str, ...] = ()
    """The same of the NATS door."""
    nats_door: NatsDoor | None = None


async def serve(
    settings: Settings,
    options: ServeOptions,
    *,
    announce: Callable[[str], None] = print,
    task_status: trio.TaskStatus[Serving] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until SIGTERM or SIGINT (main thread only) or until cancelled.

    Task status: a `Serving` once every listener is up. Resources: all sockets are closed on return.
    Raises OSError when no listener can be had.
    """
    sockets = await _bind_all(options.hosts, options.port)
    try:
        nats_sockets = await _bind_nats(options)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    _keep_temporary_arrays_mapped()
    engine = Engine(settings)
    # Signals are caught before anything is announced: who reads that we are ready may stop us.
    with _stop_signals() as signals:
        async with trio.open_nursery() as engines:
            await engines.start(engine.run)
            await _keep_open(engine, sockets, nats_sockets, options, signals, announce, task_status)
            notify("STOPPING=1", "STATUS=draining")
            await _drain(engine, options.drain_seconds, signals)
            _say_farewell(engine)
            engines.cancel_scope.cancel()


async def _keep_open(
    engine: Engine,
    sockets: list[socket.socket],
    nats_sockets: list[socket.socket],
    options: ServeOptions,
    signals: AsyncIterator[int],
    announce: Callable[[str], None],
    task_status: trio.TaskStatus[Serving],
) -> None:
    """Accept connections until the first signal."""
    async with trio.open_nursery() as doors:
        for sock in sockets:
            doors.start_soon(listeners.accept, sock, engine.serve)
        addresses = _names(sockets)
        nats_addresses = _names(nats_sockets)
        nats_door = None
        if nats_sockets:
            nats_door = NatsDoor(engine, options.nats)
            doors.start_soon(nats_door.run)
            for sock in nats_sockets:
                doors.start_soon(listeners.accept, sock, nats_door.serve)
        gc.collect()
        gc.freeze()  # What exists now lives for ever: no collection needs to look at it.
        ready = f"simplebus ready tcp={addresses[0]}"
        announce(f"{ready} nats={nats_addresses[0]}" if nats_addresses else ready)
        notify("READY=1", f"STATUS=listening on {', '.join(addresses + nats_addresses)}")
        task_status.started(Serving(engine, addresses, nats_addresses, nats_door))
        if options.verbose:
            doors.start_soon(_print_rates, engine, announce)
        number = await anext(signals)
        log.info("%s: draining", signal.Signals(number).name)
        doors.cancel_scope.cancel()


def _keep_temporary_arrays_mapped() -> None:
    """Have the allocator keep what batches free, instead of returning and faulting it in again.

    Measured with two classes interleaved: 110,000 page faults a second without this, none with it.
    Rings have mappings of their own and are returned all the same.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # Not glibc.
        return
    mallopt(_M_MMAP_THRESHOLD, 4 << 20)
    mallopt(_M_TRIM_THRESHOLD, 32 << 20)


def _names(sockets: list[socket.socket]) -> tuple[str, ...]:
    return tuple(listeners.name(sock.getsockname()) for sock in sockets)


async def _bind_nats(options: ServeOptions) -> list[socket.socket]:
    if options.nats_port is None:
        return []
    return await _bind_all(options.hosts, options.nats_port)


async def _bind_all(hosts: tuple[str, ...], port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    for host in hosts:
        try:
            sockets += await listeners.bind(host, port)
            port = port or sockets[0].getsockname()[1]
        except OSError as error:
            if not (":" in host and sockets):
                for sock in sockets:
                    sock.close()
                raise
            problem = error
    if problem is not None:
        log.info("IPv6 left out: %s", problem)
    return sockets


@contextlib.contextmanager
def _stop_signals() -> Iterator[AsyncIterator[int]]:
    """The signals that stop the server. Behind the block they mean again what they did before."""
    if threading.current_thread() is threading.main_thread():
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            yield signals
    else:  # Only the main thread hears signals.
        yield _no_signals()


async def _no_signals() -> AsyncIterator[int]:
    await trio.sleep_forever()
    yield 0


async def _drain(engine: Engine, seconds: float, signals: AsyncIterator[int]) -> None:
    """Wait until every subscriber has acknowledged what is stored for it, up to the deadline or a
    second signal."""
    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:

            async def stop_at_once() -> None:
                number = await anext(signals)
                log.info("%s: stopping at once", signal.Signals(number).name)
                nursery.cancel_scope.cancel()

            nursery.start_soon(stop_at_once)
            await engine.drained()
            nursery.cancel_scope.cancel()


async def _print_rates(engine: Engine, announce: Callable[[str], None]) -> None:
    """One line a second, as the original prints."""
    before = engine.broker.statistics()
    while True:
        await trio.sleep(1)
        now = engine.broker.statistics()
        announce(rates_line(before, now))
        before = now


def rates_line(before: BrokerStatistics, now: BrokerStatistics) -> str:
    """What happened between two snapshots a second apart."""
    sent = now.delivered + now.redelivered - before.delivered - before.redelivered
    return (
        f"Received: {now.published - before.published:,}. Send: {sent:,}. "
        f"Acknowledged: {now.acknowledged - before.acknowledged:,}. "
        f"Redelivered: {now.redelivered - before.redelivered:,}. In flight: {now.in_flight:,}. "
        f"Dropped: {now.dropped - before.dropped:,}. "
        f"Sessions: {now.sessions}. Memory: {now.memory_bytes >> 20} MiB."
    )


def _say_farewell(engine: Engine) -> None:
    for cls in engine.broker.statistics().classes:
        lost = cls.ring.messages + cls.parked
        if lost:
            log.warning(
                "class %d: %d stored messages are lost: nothing keeps them past the process",
                cls.class_id,
                lost,
            )
    notify("STATUS=stopped")


def configure_logging(level: str) -> None:
    """Log to standard error, one line an event."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        force=True,
    )
