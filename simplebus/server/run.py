"""The whole server: listeners in front of an engine, signals, the ready line, the farewell.

Rule 1: nothing is announced before it is true: the ready line and READY=1 come when every listener
is up. Rule 2: what is lost by stopping is said.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from simplebus.core.broker.broker import Settings
from simplebus.core.commit_log import CommitLog, Durability
from simplebus.core.errors import BusError
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.users.rate_limit import UNLIMITED, Rate
from simplebus.core.users.users import Users
from simplebus.jetstream.backend import Cluster
from simplebus.jetstream.limits_check import fitted
from simplebus.jetstream.settings import EngineOptions, check_settings
from simplebus.nats.settings import NatsSettings
from simplebus.server import listeners, process
from simplebus.server.journal.pump import Keeping, load
from simplebus.server.loop_watchdog import Stalls
from simplebus.server.nats_listener import NatsDoor
from simplebus.server.preauth.address_limits import AddressLimits, is_loopback
from simplebus.server.rate_log import Rates, print_rates
from simplebus.server.reload import CannotReloadError, adopt, read_aside
from simplebus.server.server import Engine, new_identity
from simplebus.server.shutdown import drain
from simplebus.server.signals import STOPPING, listen, say_ignored
from simplebus.server.systemd import notify, tell, watchdog_seconds
from simplebus.server.tls.certificates import ReloadableCertificate, TlsOptions
from simplebus.storage.directory import take

if TYPE_CHECKING:
    from simplebus.server.http.metrics import Watch

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
    http_port: int | None = None
    """The same for the HTTP door."""
    http_hosts: tuple[str, ...] = ("127.0.0.1", "::1")
    """Addresses that it listens on."""
    http_names: tuple[str, ...] = ()
    """What else it is called, as by a proxy: see `http_names`."""
    tls: TlsOptions | None = None
    """None for binary clients in clear."""
    users: Users | None = None
    """Who may come in; None for everybody."""
    per_address: int = 0
    """Connections of one address at once; 0 for any number."""
    connection_rate: float = 0.0
    """Connections a second of one address; 0 for any number."""
    publish_rate: Rate = UNLIMITED
    """How fast all connections of one address together may publish."""
    classes: tuple[NamedClass, ...] = ()
    """Classes that are there from the start, and the subjects of the NATS door bound to them."""
    data_dir: Path | None = None
    """Where what the bus holds is kept past its process; None for nowhere."""
    cluster: EngineOptions | None = None
    """The JetStream cluster that keeps what the bus holds; None for this process."""
    durability: Durability = Durability.DISK
    """What a Confirm promises then."""
    drain_seconds: float = 10.0
    """How long SIGTERM waits for what is under way."""
    owns_process: bool = False
    """Its process is there for it alone, and ends with it: it is logged where the event loop is
    when it stands still for long, a signal that comes behind its end changes nothing, and what
    exists when it is up is never looked through for garbage."""
    verbose: bool = False
    """Print rates once a second."""
    inherited: Mapping[str, list[socket.socket]] = field(default_factory=dict)
    """Listening sockets of doors by their names, instead of fresh ones: see `activation`."""
    reload: Callable[[], tuple[Settings, ServeOptions, Callable[[], None]]] | None = None
    """Called on SIGHUP: what the settings are now, and what is called when they are in force, to
    say what is different. Raises ValueError with a line for each reason why there are none, and
    nothing is changed then. None where there is nothing to read again."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that is up."""

    engine: Engine
    addresses: tuple[str, ...]
    """HOST:PORT of each listener."""
    nats_addresses: tuple[str, ...] = ()
    """The same of the NATS door."""
    nats_door: NatsDoor | None = None
    http_addresses: tuple[str, ...] = ()
    """The same of the HTTP door."""
    watch: Watch | None = None
    """What the HTTP door tells; None for a closed one."""
    certificates: tuple[ReloadableCertificate, ...] = ()
    """Those of all doors that use TLS."""

    async def reload_certificates(self, *, says_doubts: bool) -> None:
        """Read them again, for connections to come. One that is no good is said, and the door goes
        on with what it had; what clients may have against one that is, where nobody else says that.
        """
        for each in self.certificates:
            try:
                warnings = await read_aside(each.reload)
            except (OSError, CannotReloadError) as error:
                said = getattr(error, "strerror", None) or error
                log.error("the certificate is as it was: %s", said)
            else:
                log.info("the certificate %s is read again", each.options.cert)
                for warning in warnings if says_doubts else ():
                    log.warning(warning)


async def serve(
    settings: Settings,
    options: ServeOptions,
    *,
    announce: Callable[[str], None] = print,
    task_status: trio.TaskStatus[Serving] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until SIGTERM or SIGINT (main thread only) or until cancelled.

    Task status: a `Serving` once every listener is up. Resources: all sockets are closed on return.
    Raises OSError when no listener can be had, RemoteProtocolError for classes that cannot be,
    JournalError for a data directory that cannot be used, EngineError for a cluster that cannot.
    """
    identity = ""
    if options.cluster is not None:
        found = await fitted(settings, options.cluster)
        settings, identity = found.settings, found.identity
    with _engine(settings, options, identity) as engine:
        await _serve(engine, options, announce, task_status)


@contextlib.contextmanager
def _engine(settings: Settings, options: ServeOptions, identity: str) -> Iterator[Engine]:
    """An engine that holds what was kept, and keeps it; of a door, this bus's."""
    if options.cluster is not None:
        check_settings(settings)
        ledger = CommitLog(options.cluster.level, elsewhere=True)
        engine = Engine(settings, identity=identity, ledger=ledger)
        engine.cluster = Cluster(engine.broker, options.cluster)
        engine.cluster.drive(engine.settle, engine.read_clock)
        yield engine
        return
    if options.data_dir is None:
        yield Engine(settings)
        return
    with contextlib.closing(take(options.data_dir, new_bus=new_identity())) as directory:
        engine = Engine(settings, identity=directory.bus, ledger=CommitLog(options.durability))
        engine.broker.clock.now = time.time()
        load(engine.broker, directory)
        engine.keeping = Keeping(engine.broker, directory, engine.settle)
        with contextlib.closing(engine.keeping) as keeping:
            keeping.start()
            yield engine


async def _serve(
    engine: Engine,
    options: ServeOptions,
    announce: Callable[[str], None],
    task_status: trio.TaskStatus[Serving],
) -> None:
    engine.broker.store.class_registry.declare_classes(options.classes)
    given = {each: ReloadableCertificate(each) for each in (options.tls, options.nats_tls) if each}
    if options.tls is not None:
        engine.certificates = given[options.tls]
    if options.users is not None:
        engine.adopt_users(options.users)
    engine.addresses = AddressLimits(options.per_address, options.connection_rate)
    engine.adopt_rates(options.publish_rate)
    nats_door = None
    if options.nats_port is not None:
        shown = given[options.nats_tls] if options.nats_tls is not None else None
        nats_door = NatsDoor(engine, options.nats, shown)
    async with contextlib.AsyncExitStack() as unless_all_are_up:
        given_sockets = options.inherited
        sockets = given_sockets.get("tcp") or await listeners.bind_all(options.hosts, options.port)
        unless_all_are_up.callback(_close, sockets)
        nats_sockets = await _bind_nats(options)
        unless_all_are_up.callback(_close, nats_sockets)
        http_sockets = await _bind_http(options)
        unless_all_are_up.pop_all()
    _warn_of_open_doors(options, _open_at(sockets + nats_sockets), _open_at(http_sockets))
    process.keep_temporary_arrays_mapped()
    process.allow_many_sockets()
    # Signals are caught before anything is announced: who reads that we are ready may stop us.
    stalls = Stalls()
    with stalls.watched() if options.owns_process else contextlib.nullcontext():
        heard = listen(for_good=options.owns_process)
        async with heard as signals, trio.open_nursery() as engines:
            engines.start_soon(stalls.run)
            await engines.start(engine.run)
            if engine.cluster is not None:
                async with trio.open_nursery() as waiting:
                    waiting.start_soon(_end_when_told, signals, engines.cancel_scope)
                    await engines.start(engine.cluster.run)
                    waiting.cancel_scope.cancel()
            if nats_door is not None:
                engines.start_soon(nats_door.run)
            watch = None
            if options.http_port is not None:
                (first, *_) = nats_sockets or sockets
                called = (*options.http_hosts, *options.http_names)
                watch = await _open_http(engine, nats_door, first, http_sockets, called, engines)
                watch.stalls = stalls
            up = Serving(
                engine,
                _names(sockets),
                _names(nats_sockets),
                nats_door,
                _names(http_sockets),
                watch,
                tuple(given.values()),
            )
            status = Rates(engine.broker, nats_door).line
            engines.start_soon(partial(tell, status, watchdog=watchdog_seconds(os.environ)))
            options, is_told_to_end = await _keep_open(
                up, sockets, nats_sockets, options, signals, announce, task_status
            )
            if watch is not None:
                watch.is_draining = True
            notify("STOPPING=1", "STATUS=draining")
            await drain(
                engine, nats_door, options.drain_seconds, signals, is_told_to_end=is_told_to_end
            )
            _say_farewell(engine)
            engines.cancel_scope.cancel()


async def _end_when_told(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    """Before there is anything to drain."""
    async for number in signals:
        if number in STOPPING:
            log.info("%s: ends before it has begun", signal.Signals(number).name)
            scope.cancel()
        else:
            say_ignored(number)


async def _keep_open(
    up: Serving,
    sockets: list[socket.socket],
    nats_sockets: list[socket.socket],
    options: ServeOptions,
    signals: AsyncIterator[int],
    announce: Callable[[str], None],
    task_status: trio.TaskStatus[Serving],
) -> tuple[ServeOptions, bool]:
    """Accept connections until a signal stops the server, or its last NATS client has left a lame
    duck. Returns the options as they are then, and whether it was a signal."""
    is_told_to_end = False
    engine, nats_door, addresses = up.engine, up.nats_door, up.addresses
    async with trio.open_nursery() as doors:
        for sock in sockets:
            accept = partial(listeners.accept, make_room=engine.make_room)
            doors.start_soon(accept, sock, engine.serve, engine.anteroom)
        nats_listening = [trio.CancelScope() for _ in nats_sockets]
        for scope, sock in zip(nats_listening, nats_sockets, strict=True):
            assert nats_door is not None
            doors.start_soon(_accept_in, scope, sock, nats_door)
        if options.owns_process:
            gc.collect()
            gc.freeze()  # What exists now lives for ever: no collection needs to look at it.
        if up.watch is not None:
            up.watch.is_ready = True
        announce(ready_line(up))
        everywhere = addresses + up.nats_addresses + up.http_addresses
        notify("READY=1", f"STATUS=listening on {', '.join(everywhere)}")
        task_status.started(up)
        if options.verbose:
            doors.start_soon(print_rates, engine.broker, nats_door, announce)

        async def be_lame_duck() -> None:
            log.info("SIGUSR2: no NATS client is let in any more, and those inside are to leave")
            for scope in nats_listening:
                scope.cancel()
            assert nats_door is not None
            await nats_door.be_lame_duck()
            log.info("the last NATS client has left: draining")
            doors.cancel_scope.cancel()

        reading = trio.Lock()

        async def read_again() -> None:
            nonlocal options
            async with reading:
                options = await reload(up, options)

        async for number in signals:
            if number in STOPPING:
                log.info("%s: draining", signal.Signals(number).name)
                is_told_to_end = True
                doors.cancel_scope.cancel()
            elif number == signal.SIGHUP and (options.reload or up.certificates):
                if not reading.statistics().tasks_waiting:  # That one will read all there is.
                    doors.start_soon(read_again)
            elif number == signal.SIGUSR2 and nats_door is not None and nats_sockets:
                nats_sockets = []
                doors.start_soon(be_lame_duck)
            else:
                say_ignored(number)
    return options, is_told_to_end


async def reload(up: Serving, options: ServeOptions) -> ServeOptions:
    """Read settings and certificates again. Returns the options as they are now."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        if options.reload is not None:
            settings, fresh, say = await read_aside(options.reload)
            if fresh.users is None and up.engine.broker.users is not None:
                raise ValueError(
                    "there are no users any more, so everybody could connect: that needs a restart"
                )
            adopt(
                up.engine.broker,
                up.nats_door,
                settings,
                fresh.nats,
                fresh.classes,
                options.classes,
            )
            up.engine.adopt_users(fresh.users)
            up.engine.addresses.set_limits(fresh.per_address, fresh.connection_rate)
            up.engine.adopt_rates(fresh.publish_rate)
            if up.nats_door is not None:
                up.nats_door.adopt_rates()
            up.engine.settle()
            options = replace(options, classes=fresh.classes, drain_seconds=fresh.drain_seconds)
            say()
    except (ValueError, BusError) as error:
        for line in str(error).splitlines():
            log.error("nothing is changed: %s", line)
    except Exception:  # Whatever it is, it is no reason to end.
        log.exception("what was read again could not be taken over")
    await up.reload_certificates(says_doubts=options.reload is None)
    notify("READY=1")
    return options


def ready_line(up: Serving) -> str:
    """What says that all doors are open, and where."""
    doors = (("tcp", up.addresses), ("nats", up.nats_addresses), ("http", up.http_addresses))
    return " ".join(["simplebus ready", *(f"{door}={at[0]}" for door, at in doors if at)])


async def _open_http(
    engine: Engine,
    nats_door: NatsDoor | None,
    client_socket: socket.socket,
    sockets: list[socket.socket],
    names: tuple[str, ...],
    nursery: trio.Nursery,
) -> Watch:
    """Open the HTTP door, which stays open until the nursery ends: also while others drain."""
    from simplebus.server.http.auth import HttpGate
    from simplebus.server.http.metrics import Watch
    from simplebus.server.http.server import HttpDoor  # Loaded when it is wanted.
    from simplebus.server.http.varz import Zpages

    watch = Watch(engine, nats_door)
    shown = engine.certificates
    zpages = Zpages(
        engine,
        nats_door,
        at=client_socket.getsockname()[:2],
        http=sockets[0].getsockname()[:2],
        version=watch.version,
    )
    door = HttpDoor(
        watch.board,
        zpages.answers(),
        gate=HttpGate(engine),
        tls=None if shown is None else lambda: shown.context,
        names=names,
        anteroom=engine.anteroom,
    )
    watch.http_connections = lambda: (door.connections, door.accepted)
    watch.http_seconds = lambda: door.spent_seconds
    await nursery.start(door.run)
    nursery.start_soon(watch.timing.beat)
    for sock in sockets:
        nursery.start_soon(door.accept, sock)
    return watch


def _close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


async def _accept_in(scope: trio.CancelScope, sock: socket.socket, door: NatsDoor) -> None:
    """Accept until the scope is cancelled."""
    with scope:
        await listeners.accept(sock, door.serve, door.anteroom, make_room=door.engine.make_room)


def _open_at(sockets: list[socket.socket]) -> str:
    """Where others than this machine come in, handed over or opened; empty where none do."""
    hosts = dict.fromkeys(str(sock.getsockname()[0]) for sock in sockets)
    return " and ".join(host for host in hosts if not is_loopback(host))


def _warn_of_open_doors(options: ServeOptions, bus: str, http: str) -> None:
    """Say it where the network comes in without being asked who it is."""
    if http and options.users is None:
        log.warning(
            "whoever reaches %s may see the figures of the bus and the names of who is there: "
            "there are no users (simplebus user add, --users)",
            http,
        )
    if bus and options.users is None:
        log.warning(
            "whoever reaches %s may publish, subscribe and purge: there are no users (simplebus "
            "user add, --users)",
            bus,
        )
    elif bus and options.tls is None:
        log.warning("passwords and messages on %s can be read on the way: there is no TLS", bus)


def _names(sockets: list[socket.socket]) -> tuple[str, ...]:
    return tuple(listeners.name(sock.getsockname()) for sock in sockets)


async def _bind_nats(options: ServeOptions) -> list[socket.socket]:
    if options.nats_port is None:
        return []
    if sockets := options.inherited.get("nats"):
        return sockets
    with _hint("is for NATS clients: --nats-port picks another one, --no-nats goes without"):
        return await listeners.bind_all(options.hosts, options.nats_port)


async def _bind_http(options: ServeOptions) -> list[socket.socket]:
    if options.http_port is None:
        return []
    if sockets := options.inherited.get("http"):
        return sockets
    with _hint(
        "is for operators, over HTTP: --http-port picks another one, --no-http goes without"
    ):
        return await listeners.bind_all(options.http_hosts, options.http_port)


@contextlib.contextmanager
def _hint(what: str) -> Iterator[None]:
    """Have it said of a port that is taken what it is for, and what may be done."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise OSError(error.errno, f"{error.strerror}. That port {what}") from None


def _say_farewell(engine: Engine) -> None:
    for cls in engine.broker.statistics().classes:
        if engine.keeping is None and cls.ring.messages + cls.parked:
            log.warning(
                "class %d: %d stored messages are lost: nothing keeps them past the process",
                cls.class_id,
                cls.ring.messages + cls.parked,
            )
        elif cls.parked:
            log.warning(
                "class %d: %d messages that waited for room are lost", cls.class_id, cls.parked
            )
    notify("STATUS=stopped")
