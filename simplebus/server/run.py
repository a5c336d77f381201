"""The whole server: listeners, signals, the ready line and the shutdown.

The ready line and READY=1 are sent when every listener accepts connections.
"""

from __future__ import annotations

import contextlib
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
from simplebus.core.broker.wait_reasons import format_count, format_message_count
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import BusError
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.users.rate_limit import UNLIMITED, RateLimit
from simplebus.core.users.users import Users
from simplebus.jetstream.backend import JetStreamBackend
from simplebus.jetstream.cluster.limits_check import check_cluster
from simplebus.jetstream.settings import JetStreamOptions, check_settings
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.settings import NatsSettings
from simplebus.server import listeners, process
from simplebus.server.journal.pump import JournalPump, load
from simplebus.server.nats_listener import NatsListener
from simplebus.server.observability.loop_watchdog import LoopWatchdog
from simplebus.server.observability.message_rates import MessageRates, print_rates
from simplebus.server.observability.message_spans import MessageSpans, SpanRecorder
from simplebus.server.preauth.address_limits import AddressLimits, is_loopback
from simplebus.server.reload import CannotReloadError, apply_settings, read_in_thread
from simplebus.server.runtime import garbage_collection, heap
from simplebus.server.server import LifecycleCommands, Server, new_bus_id
from simplebus.server.shutdown import drain
from simplebus.server.signals import STOP_SIGNALS, log_ignored_signal, open_signal_receiver
from simplebus.server.systemd import notify, send_notifications, watchdog_seconds
from simplebus.server.tls.certificates import ReloadableCertificate, TlsOptions
from simplebus.storage.directory import lock_directory

if TYPE_CHECKING:
    from simplebus.server.http.server_monitor import ServerMonitor

log = EventLogger("simplebus.server")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Addresses, users, storage and limits of a server."""

    hosts: tuple[str, ...] = ("127.0.0.1", "::1")
    """Addresses to listen on. An IPv6 address that this machine lacks is skipped."""
    port: int = 8888
    """Port for binary clients; 0 selects a free one."""
    nats_port: int | None = None
    """Port for NATS clients; None disables the listener."""
    nats: NatsSettings = field(default_factory=NatsSettings)
    nats_tls: TlsOptions | None = None
    """TLS for NATS clients; None for plain TCP."""
    http_port: int | None = None
    """Port for monitoring over HTTP; None disables the listener."""
    http_hosts: tuple[str, ...] = ("127.0.0.1", "::1")
    """Addresses of the HTTP listener."""
    http_names: tuple[str, ...] = ()
    """Further host names that HTTP requests may use, such as the name of a proxy."""
    span_recorder: SpanRecorder | None = field(default=None, compare=False)
    """Recorder of spans of sampled messages, if HTTP is enabled; None records no spans."""
    tls: TlsOptions | None = None
    """TLS for binary clients; None for plain TCP."""
    users: Users | None = None
    """Users that may connect; None admits every client."""
    per_address: int = 0
    """Maximum of open connections per address; 0 for no limit."""
    connection_rate: float = 0.0
    """New connections per second and address; 0 for no limit."""
    publish_rate: RateLimit = UNLIMITED
    """Publish rate limit of all connections of one address together."""
    classes: tuple[NamedClass, ...] = ()
    """Classes that exist from the start, with their bound NATS subjects."""
    data_dir: Path | None = None
    """Directory of the journal; None stores messages in memory only."""
    cluster: JetStreamOptions | None = None
    """JetStream cluster that stores all classes; None if this process stores them."""
    durability: Durability = Durability.DISK
    """Durability that a confirm promises if there is a journal."""
    drain_seconds: float = 10.0
    """Time limit of a graceful shutdown."""
    owns_process: bool = False
    """True if the process runs only this server and ends with it.

    Enables the event loop watchdog, ignores signals after the server ended, and excludes objects
    that exist at the start from garbage collection.
    """
    verbose: bool = False
    """Write message rates to standard error once per second."""
    inherited: Mapping[str, list[socket.socket]] = field(default_factory=dict)
    """Listening sockets from systemd, by listener name, used instead of new ones."""
    reload: Callable[[], tuple[Settings, ServeOptions, Callable[[], None]]] | None = None
    """Called on SIGHUP: returns the current settings, and a function to log what changed.

    Raises ValueError with one line per problem; then nothing is changed. None if there is no
    configuration to reload.
    """


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server whose listeners accept connections."""

    server: Server
    addresses: tuple[str, ...]
    """HOST:PORT of each binary listener."""
    nats_addresses: tuple[str, ...] = ()
    """HOST:PORT of each NATS listener."""
    nats_listener: NatsListener | None = None
    http_addresses: tuple[str, ...] = ()
    """HOST:PORT of each HTTP listener."""
    monitor: ServerMonitor | None = None
    """Source of the monitoring data; None without an HTTP listener."""
    certificates: tuple[ReloadableCertificate, ...] = ()
    """Certificates of all listeners with TLS."""

    async def reload_certificates(self, *, log_warnings: bool) -> None:
        """Read the certificates again for new connections.

        A certificate that cannot be used is logged, and the listener keeps the previous one.

        Args:
            log_warnings: Also log problems of usable certificates, such as an expired one.
        """
        for certificate in self.certificates:
            try:
                warnings = await read_in_thread(certificate.reload)
            except (OSError, CannotReloadError) as error:
                problem = getattr(error, "strerror", None) or error
                log.error(
                    "certificate.reload_failed",
                    "certificate not reloaded, the previous one stays in use: {error}",
                    error=problem,
                )
            else:
                log.info(
                    "certificate.reloaded",
                    "reloaded the certificate {path}",
                    path=certificate.options.cert,
                )
                for warning in warnings if log_warnings else ():
                    log.warning("certificate.suspect", "{problem}", problem=warning)


async def serve(
    settings: Settings,
    options: ServeOptions,
    *,
    announce: Callable[[str], None] = print,
    task_status: trio.TaskStatus[RunningServer] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until SIGTERM or SIGINT (main thread only) or until cancelled.

    All sockets are closed on return.

    Args:
        settings: Settings of the broker.
        options: Addresses, users, storage and limits.
        announce: Called with the ready line.
        task_status: Receives a `RunningServer` once every listener accepts connections.

    Raises:
        OSError: A listening socket is not available.
        RemoteProtocolError: The declared classes are invalid.
        JournalError: The data directory cannot be used.
        EngineError: The JetStream cluster cannot be used.
    """
    bus_id = ""
    if options.cluster is not None:
        found = await check_cluster(settings, options.cluster)
        settings, bus_id = found.settings, found.cluster_id
    with _open_server(settings, options, bus_id) as server:
        await _run_server(server, options, announce, task_status)


@contextlib.contextmanager
def _open_server(settings: Settings, options: ServeOptions, bus_id: str) -> Iterator[Server]:
    """Create the server and recover its data; close its journal on exit."""
    if options.cluster is not None:
        check_settings(settings)
        commit_log = CommitLog(options.cluster.durability, is_remote=True)
        server = Server(settings, bus_id=bus_id, commit_log=commit_log)
        server.jetstream = JetStreamBackend(server.broker, options.cluster)
        server.jetstream.drive(server.flush_ready, server.update_clock)
        yield server
        return
    if options.data_dir is None:
        yield Server(settings)
        return
    with contextlib.closing(lock_directory(options.data_dir, new_bus=new_bus_id())) as directory:
        server = Server(settings, bus_id=directory.bus_id, commit_log=CommitLog(options.durability))
        server.broker.clock.now = time.time()
        load(server.broker, directory)
        server.journal_pump = JournalPump(server.broker, directory, server.flush_ready)
        with contextlib.closing(server.journal_pump) as pump:
            pump.start()
            yield server


async def _run_server(
    server: Server,
    options: ServeOptions,
    announce: Callable[[str], None],
    task_status: trio.TaskStatus[RunningServer],
) -> None:
    server.broker.store.class_registry.declare_operator_classes(options.classes)
    certificates = {
        tls: ReloadableCertificate(tls) for tls in (options.tls, options.nats_tls) if tls
    }
    if options.tls is not None:
        server.certificate = certificates[options.tls]
    if options.users is not None:
        server.replace_users(options.users)
    server.address_limits = AddressLimits(options.per_address, options.connection_rate)
    server.apply_rate_limits(options.publish_rate)
    nats_listener = None
    if options.nats_port is not None:
        certificate = certificates[options.nats_tls] if options.nats_tls is not None else None
        nats_listener = NatsListener(server, options.nats, certificate)
    async with contextlib.AsyncExitStack() as close_on_error:
        inherited_sockets = options.inherited
        sockets = inherited_sockets.get("tcp") or await _bind_clients(options)
        close_on_error.callback(_close_sockets, sockets)
        nats_sockets = await _bind_nats(options)
        close_on_error.callback(_close_sockets, nats_sockets)
        http_sockets = await _bind_http(options)
        close_on_error.pop_all()
    listening = {"tcp": sockets, "nats": nats_sockets, "http": http_sockets}
    server.wrong_port_check.ports = {
        name: each[0].getsockname()[1] for name, each in listening.items() if each
    }
    _warn_about_unprotected_listeners(
        options,
        client_hosts=_public_hosts(sockets + nats_sockets),
        http_hosts=_public_hosts(http_sockets),
    )
    heap.keep_freed_memory_mapped()
    process.raise_descriptor_limit()
    if options.owns_process:
        connections_max = server.broker.settings.limits.connections
        if nats_listener is not None:
            connections_max += nats_listener.nats_server.settings.limits.connections
        process.grow_descriptor_table(connections_max)
    # Signals are handled before the ready line: its reader may stop the server at once.
    watchdog = LoopWatchdog()
    signal_receiver = open_signal_receiver(ignore_afterwards=options.owns_process)
    async with signal_receiver as signals, trio.open_nursery() as nursery:
        nursery.start_soon(watchdog.run)
        await nursery.start(server.run)
        if server.jetstream is not None:
            async with trio.open_nursery() as waiting:
                waiting.start_soon(_cancel_on_stop_signal, signals, nursery.cancel_scope)
                await nursery.start(server.jetstream.run)
                waiting.cancel_scope.cancel()
        if nats_listener is not None:
            nursery.start_soon(nats_listener.run)
        monitor = None
        if options.http_port is not None:
            (client_socket, *_) = nats_sockets or sockets
            http_names = (*options.http_hosts, *options.http_names)
            monitor = await _start_http_server(
                server,
                nats_listener,
                client_socket,
                http_sockets,
                http_names,
                options.span_recorder,
                nursery,
            )
            monitor.collector.watchdog = watchdog
        running = RunningServer(
            server,
            _format_addresses(sockets),
            _format_addresses(nats_sockets),
            nats_listener,
            _format_addresses(http_sockets),
            monitor,
            tuple(certificates.values()),
        )
        nats_server = nats_listener.nats_server if nats_listener is not None else None
        rates = MessageRates(server.broker, nats_server)
        watchdog_interval = watchdog_seconds(os.environ)
        nursery.start_soon(
            partial(send_notifications, rates.status_line, watchdog_interval=watchdog_interval)
        )
        # Not started earlier, because importing the HTTP server stalls the event loop, which does
        # no harm before there are clients.
        with watchdog.watch_in_thread() if options.owns_process else contextlib.nullcontext():
            options, is_signaled = await _accept_until_stopped(
                running, sockets, nats_sockets, options, signals, announce, task_status
            )
            if monitor is not None:
                monitor.collector.is_draining = True
            notify("STOPPING=1", "STATUS=draining")
            await drain(
                server, nats_listener, options.drain_seconds, signals, is_signaled=is_signaled
            )
            _log_lost_messages(server)
        nursery.cancel_scope.cancel()


async def _cancel_on_stop_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    """Cancel `scope` if a stop signal arrives before the server has started."""
    async for number in signals:
        if number in STOP_SIGNALS:
            log.info(
                "startup.interrupted",
                "{signal}: stopping during the start",
                signal=signal.Signals(number).name,
            )
            scope.cancel()
        else:
            log_ignored_signal(number)


async def _accept_until_stopped(
    running: RunningServer,
    sockets: list[socket.socket],
    nats_sockets: list[socket.socket],
    options: ServeOptions,
    signals: AsyncIterator[int],
    announce: Callable[[str], None],
    task_status: trio.TaskStatus[RunningServer],
) -> tuple[ServeOptions, bool]:
    """Accept connections until a stop signal, or until the last NATS client has left after SIGUSR2.

    Returns:
        The current options, and True if a signal stopped the server.
    """
    is_signaled = False
    server, nats_listener, addresses = running.server, running.nats_listener, running.addresses
    async with trio.open_nursery() as listener_nursery:
        if options.owns_process:
            await listener_nursery.start(garbage_collection.run)
            listener_nursery.start_soon(
                heap.maintain, server.had_large_read, server.slow_request_turns
            )
        for sock in sockets:
            accept = partial(listeners.accept, free_descriptor=server.free_descriptor)
            listener_nursery.start_soon(accept, sock, server.serve, server.preauth_queue)
        nats_accept_scopes = [trio.CancelScope() for _ in nats_sockets]
        for scope, sock in zip(nats_accept_scopes, nats_sockets, strict=True):
            assert nats_listener is not None
            listener_nursery.start_soon(_accept_in_scope, scope, sock, nats_listener)
        reload_lock = trio.Lock()

        async def reload_once() -> None:
            nonlocal options
            async with reload_lock:
                options = await reload(running, options)

        def start_reload() -> bool:
            can_reload = options.reload is not None or bool(running.certificates)
            # A waiting reload will read the latest files.
            if can_reload and not reload_lock.statistics().tasks_waiting:
                listener_nursery.start_soon(reload_once)
            return can_reload

        def start_drain() -> None:
            server.lifecycle = None
            listener_nursery.cancel_scope.cancel()

        server.lifecycle = LifecycleCommands(start_reload, start_drain)
        if running.monitor is not None:
            running.monitor.collector.is_ready = True
        announce(ready_line(running))
        all_addresses = addresses + running.nats_addresses + running.http_addresses
        notify("READY=1", f"STATUS=listening on {', '.join(all_addresses)}")
        task_status.started(running)
        if options.verbose:
            nats_server = nats_listener.nats_server if nats_listener is not None else None
            listener_nursery.start_soon(print_rates, server.broker, nats_server)

        async def run_lame_duck() -> None:
            log.info(
                "lame_duck.started",
                "SIGUSR2: refusing new NATS clients and asking connected ones to disconnect",
            )
            for scope in nats_accept_scopes:
                scope.cancel()
            assert nats_listener is not None
            await nats_listener.run_lame_duck()
            log.info("lame_duck.ended", "the last NATS client has disconnected: draining")
            listener_nursery.cancel_scope.cancel()

        async for number in signals:
            if number in STOP_SIGNALS:
                log.info("drain.started", "{signal}: draining", signal=signal.Signals(number).name)
                is_signaled = True
                start_drain()
            elif number == signal.SIGHUP and start_reload():
                pass
            elif number == signal.SIGUSR2 and nats_listener is not None and nats_sockets:
                nats_sockets = []
                listener_nursery.start_soon(run_lame_duck)
            else:
                log_ignored_signal(number)
    server.lifecycle = None
    return options, is_signaled


async def reload(running: RunningServer, options: ServeOptions) -> ServeOptions:
    """Read settings and certificates again. Returns the options that apply from now on."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        if options.reload is not None:
            settings, new_options, log_changes = await read_in_thread(options.reload)
            _check_authentication_stays(running, new_options)
            for _ in apply_settings(
                running.server.broker,
                running.nats_listener,
                settings,
                new_options.nats,
                new_options.classes,
                options.classes,
            ):
                await trio.lowlevel.checkpoint()
            for _ in running.server.replace_users_in_parts(new_options.users):
                await trio.lowlevel.checkpoint()
            running.server.address_limits.set_limits(
                new_options.per_address, new_options.connection_rate
            )
            await trio.lowlevel.checkpoint()
            for _ in running.server.apply_rate_limits_in_parts(new_options.publish_rate):
                await trio.lowlevel.checkpoint()
            if running.nats_listener is not None:
                for _ in running.nats_listener.apply_rate_limits_in_parts():
                    await trio.lowlevel.checkpoint()
            running.server.flush_ready()
            options = replace(
                options, classes=new_options.classes, drain_seconds=new_options.drain_seconds
            )
            log_changes()
    except (ValueError, BusError) as error:
        for line in str(error).splitlines():
            log.error(
                "reload.rejected", "settings not reloaded: {error}", error=line, is_unlimited=True
            )
    except Exception:  # No error of a reload may end the server.
        log.exception("reload.failed", "applying the reloaded settings failed")
    await running.reload_certificates(log_warnings=options.reload is None)
    notify("READY=1")
    return options


def _check_authentication_stays(running: RunningServer, new_options: ServeOptions) -> None:
    """Raise ValueError if a listener that requires authentication would admit every client."""
    reason = "so every client could connect; restart the server to disable authentication"
    if new_options.users is None and running.server.broker.users is not None:
        raise ValueError(f"the new settings have no users, {reason}")
    listener = running.nats_listener
    users = None if listener is None else listener.nats_server.settings.users
    if users is not None and new_options.nats.users is None:
        raise ValueError(f"the new settings have no users of NATS clients, {reason}")


def ready_line(running: RunningServer) -> str:
    """Return the line that reports the addresses of all listeners once they accept connections."""
    listeners = (
        ("tcp", running.addresses),
        ("nats", running.nats_addresses),
        ("http", running.http_addresses),
    )
    ready = (f"{name}={addresses[0]}" for name, addresses in listeners if addresses)
    return " ".join(["simplebus ready", *ready])


async def _start_http_server(
    server: Server,
    nats_listener: NatsListener | None,
    client_socket: socket.socket,
    sockets: list[socket.socket],
    allowed_hosts: tuple[str, ...],
    span_recorder: SpanRecorder | None,
    nursery: trio.Nursery,
) -> ServerMonitor:
    """Serve HTTP until the nursery ends, so that monitoring also works during shutdown."""
    from simplebus.server.http.api import AdminApi
    from simplebus.server.http.auth import HttpAuth
    from simplebus.server.http.facts import FactsCollector
    from simplebus.server.http.server import HttpServer
    from simplebus.server.http.server_monitor import ServerMonitor
    from simplebus.server.http.varz import VarzEndpoints

    spans = None if span_recorder is None else MessageSpans(span_recorder)
    monitor = ServerMonitor(FactsCollector(server, nats_listener, spans))
    certificate = server.certificate
    varz_endpoints = VarzEndpoints(
        monitor.collector,
        client_address=client_socket.getsockname()[:2],
        http_address=sockets[0].getsockname()[:2],
        version=monitor.version,
    )
    auth = HttpAuth(server)
    listener = HttpServer(
        monitor.dashboard,
        varz_endpoints.build_handlers(),
        auth=auth,
        api=AdminApi(server, auth, monitor.version),
        tls=None if certificate is None else lambda: certificate.context,
        allowed_hosts=allowed_hosts,
        preauth_queue=server.preauth_queue,
        wrong_port_check=server.wrong_port_check,
    )
    monitor.collector.http_connections = lambda: (listener.connections, listener.accepted_count)
    monitor.collector.http_seconds = lambda: listener.cpu_seconds
    await nursery.start(listener.run)
    nursery.start_soon(monitor.collector.latency.measure_loop_delay)
    for sock in sockets:
        nursery.start_soon(listener.accept, sock)
    return monitor


def _close_sockets(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


async def _accept_in_scope(
    scope: trio.CancelScope, sock: socket.socket, listener: NatsListener
) -> None:
    """Accept connections until `scope` is cancelled."""
    with scope:
        await listeners.accept(
            sock,
            listener.serve,
            listener.preauth_queue,
            free_descriptor=listener.server.free_descriptor,
        )


def _public_hosts(sockets: list[socket.socket]) -> str:
    """Return the hosts that other machines can reach, joined by "and"; empty if all are local."""
    hosts = dict.fromkeys(str(sock.getsockname()[0]) for sock in sockets)
    return " and ".join(host for host in hosts if not is_loopback(host))


def _warn_about_unprotected_listeners(
    options: ServeOptions, *, client_hosts: str, http_hosts: str
) -> None:
    """Warn about listeners that other machines can reach without authentication or TLS.

    `client_hosts` and `http_hosts` are their hosts, as `_public_hosts` returns them.
    """
    if http_hosts and options.users is None:
        log.warning(
            "http.unprotected",
            "every client that reaches {address} can read metrics and client names: "
            "authentication is off (enable it with simplebus user add and --users)",
            address=http_hosts,
        )
    if client_hosts and options.users is None:
        log.warning(
            "listener.unprotected",
            "every client that reaches {address} can publish, subscribe and purge: "
            "authentication is off (enable it with simplebus user add and --users)",
            address=client_hosts,
        )
    elif client_hosts and options.tls is None:
        log.warning(
            "listener.unencrypted",
            "passwords and messages on {address} are not encrypted: TLS is off (--tls-cert)",
            address=client_hosts,
        )


def _format_addresses(sockets: list[socket.socket]) -> tuple[str, ...]:
    return tuple(listeners.format_address(sock.getsockname()) for sock in sockets)


async def _bind_clients(options: ServeOptions) -> list[socket.socket]:
    with listeners.explain_port_in_use("is for clients: select another one with --port"):
        return await listeners.bind_all(options.hosts, options.port)


async def _bind_nats(options: ServeOptions) -> list[socket.socket]:
    if options.nats_port is None:
        return []
    if sockets := options.inherited.get("nats"):
        return sockets
    with listeners.explain_port_in_use(
        "is for NATS clients: select another one with --nats-port, or disable NATS with --no-nats"
    ):
        return await listeners.bind_all(options.hosts, options.nats_port)


async def _bind_http(options: ServeOptions) -> list[socket.socket]:
    if options.http_port is None:
        return []
    if sockets := options.inherited.get("http"):
        return sockets
    with listeners.explain_port_in_use(
        "is for HTTP: select another one with --http-port, or disable HTTP with --no-http"
    ):
        return await listeners.bind_all(options.http_hosts, options.http_port)


def _log_lost_messages(server: Server) -> None:
    """Warn about messages that are lost because the server stops."""
    for cls in server.broker.statistics().classes:
        name = cls.name or str(cls.class_id)
        count = cls.ring.message_count + cls.parked
        if server.journal_pump is None and count:
            log.warning(
                "class.messages_lost",
                "class {class_name}: lost {messages}, because the server has no --data-dir",
                class_name=name,
                messages=format_count(count, "stored message"),
                count=count,
            )
        elif cls.parked:
            log.warning(
                "class.waiting_messages_lost",
                "class {class_name}: lost {messages} that waited for space in the class",
                class_name=name,
                messages=format_message_count(cls.parked),
                count=cls.parked,
            )
    notify("STATUS=stopped")
