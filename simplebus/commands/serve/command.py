"""The command that runs the bus: its options, and the call that they amount to.

Rule 1: nothing heavy is imported before the command runs, so that help is instant.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from simplebus.commands.serve import http_options as http
from simplebus.commands.serve import jetstream_options as flags
from simplebus.commands.serve import log_options
from simplebus.commands.serve import nats_options as nats
from simplebus.commands.serve import tls_options as tls
from simplebus.config.file import config_option
from simplebus.config.mistakes import ConfigError
from simplebus.config.parse import (
    ACKNOWLEDGEMENT,
    DEFAULT,
    DRAIN_SECONDS,
    DURABILITY,
    MEMORY,
    PATIENCE,
    DurabilityChoice,
    FullPolicyChoice,
    LogFormat,
    LogLevel,
    option,
    parse_host,
    parse_last_values,
    parse_port,
    seconds_option,
    show_size,
    size_option,
)
from simplebus.console.errors import (
    BUSY_STATUS,
    CONFIG_STATUS,
    JOURNAL_STATUS,
    MEMORY_STATUS,
    UNAVAILABLE_STATUS,
    USAGE_STATUS,
    describe_error,
    fail,
    flatten_errors,
)
from simplebus.core.errors import BusError, RemoteProtocolError
from simplebus.core.limits import DEFAULT_DELIVERIES_MAX, HEARTBEAT_SECONDS

if TYPE_CHECKING:
    from simplebus.core.settings import Settings
    from simplebus.server.run import ServeOptions

FROM_ENVIRONMENT = (
    "Each option can be set by an environment variable too: --port by SIMPLEBUS_PORT, and so on."
)

HELP = (
    "Run the bus.\n\n"
    "It prints one line when it is ready, [bold]simplebus ready tcp=HOST:PORT nats=HOST:PORT "
    "http=HOST:PORT[/bold], and serves until it is told to stop. Messages live in memory and end "
    "with the server, unless --data-dir keeps them.\n\n\b\n"
    "  simplebus serve\n"
    "  simplebus serve --host 0.0.0.0 --max-memory 4GiB --verbose\n"
    "  simplebus serve --config /etc/simplebus.toml\n\n" + FROM_ENVIRONMENT
)


def serve(
    context: typer.Context,
    host: Annotated[
        list[str] | None,
        option(
            "--host",
            "An address or name to listen on; give it again for more than one. By default only "
            "programs on this machine can connect. 0.0.0.0 opens the bus to the network, where "
            "it asks nobody for a password.",
            parser=parse_host,
            metavar="ADDRESS",
            show_default="127.0.0.1 and ::1",
        ),
    ] = None,
    port: Annotated[
        int,
        option(
            "--port",
            "The TCP port. 0 picks a free one; the ready line tells which.",
            parser=parse_port,
            metavar="PORT",
        ),
    ] = 8888,
    ack_timeout: Annotated[
        int,
        option(
            "--ack-timeout",
            "Ticks after which a message that its subscriber has not acknowledged is sent again; "
            "each further pause is twice as long. Some clients acknowledge 1.5 seconds late, so "
            "stay above 2 seconds.",
            panel=ACKNOWLEDGEMENT,
            metavar="TICKS",
        ),
    ] = 6,
    tick: Annotated[
        float,
        seconds_option(
            "--tick", "How long a tick is, the beat of the ack timer.", 1.0, panel=ACKNOWLEDGEMENT
        ),
    ] = 1.0,
    max_deliveries: Annotated[
        int,
        option(
            "--max-deliveries",
            "How often a message is sent to a subscription that does not acknowledge it, before it "
            "is given up and becomes a dead letter. 0 sends it without end.",
            panel=ACKNOWLEDGEMENT,
            metavar="COUNT",
        ),
    ] = DEFAULT_DELIVERIES_MAX,
    full: Annotated[
        FullPolicyChoice,
        option(
            "--full",
            "What happens to a message for a class that is at one of its limits. block: its "
            "publisher waits, nothing is lost. drop_oldest: the oldest message makes room. "
            "drop_newest: it is dropped itself. What is dropped is counted. spill: the oldest in "
            "memory make room, and are read back from --data-dir when somebody needs them.",
            panel=MEMORY,
            metavar="POLICY",
        ),
    ] = FullPolicyChoice.BLOCK,
    max_memory: Annotated[
        int,
        size_option(
            "--max-memory",
            "Memory that the messages of all classes together may take. At this limit no class "
            "grows any more, and --full decides.",
            show_size(DEFAULT.total_bytes),
        ),
    ] = DEFAULT.total_bytes,
    max_class_memory: Annotated[
        int | None,
        size_option(
            "--max-class-memory",
            "Memory that the messages of one class may take. At this limit --full decides.",
            f"{show_size(DEFAULT.class_bytes)}, at most --max-memory",
        ),
    ] = None,
    max_dead_letters: Annotated[
        int,
        size_option(
            "--max-dead-letters",
            "Memory that the dead letters of one class may take, those that were given up. At this "
            "limit the oldest make room. All together take at most a quarter of --max-memory.",
            show_size(DEFAULT.dead_letter_bytes),
        ),
    ] = DEFAULT.dead_letter_bytes,
    max_class_messages: Annotated[
        int,
        option(
            "--max-class-messages",
            "Messages that one class may hold. At this limit --full decides.",
            panel=MEMORY,
            metavar="COUNT",
        ),
    ] = DEFAULT.class_messages,
    max_frame: Annotated[
        int | None,
        size_option(
            "--max-frame",
            "The longest message accepted, with its 13 bytes of framing. Who sends a longer one is "
            "disconnected.",
            f"{show_size(DEFAULT.frame_bytes)}, at most half of --max-class-memory",
        ),
    ] = None,
    max_pending: Annotated[
        int | None,
        size_option(
            "--max-pending",
            "Memory kept for one connection beside the classes: messages that wait for room, "
            "answers that its peer has not taken. Who needs more is disconnected.",
            f"{show_size(DEFAULT.pending_bytes)}, at least --max-frame and 512KiB",
        ),
    ] = None,
    max_total_pending: Annotated[
        int | None,
        size_option(
            "--max-total-pending",
            "The same for all connections together. Above it, those for which the most is kept are "
            "disconnected.",
            f"{show_size(DEFAULT.total_pending_bytes)}, at least --max-pending",
        ),
    ] = None,
    max_connections: Annotated[
        int,
        option(
            "--max-connections",
            "Connections open at once. One more is closed as soon as it comes.",
            metavar="COUNT",
        ),
    ] = DEFAULT.connections,
    max_credit: Annotated[
        int,
        size_option(
            "--max-credit",
            "What a version 2 publisher may have sent without having been told that it is stored.",
            show_size(DEFAULT.credit_bytes),
        ),
    ] = DEFAULT.credit_bytes,
    max_subscriptions: Annotated[
        int,
        option(
            "--max-subscriptions",
            "Subscriptions of one version 2 connection. One more is refused.",
            metavar="COUNT",
        ),
    ] = DEFAULT.subscriptions,
    max_durables: Annotated[
        int,
        option(
            "--max-durables",
            "Durable subscriptions and groups of one class. One more is refused.",
            metavar="COUNT",
        ),
    ] = DEFAULT.durables,
    max_classes: Annotated[
        int,
        option(
            "--max-classes",
            "Classes in use. Who asks for one more is disconnected.",
            metavar="COUNT",
        ),
    ] = DEFAULT.classes,
    hello_timeout: Annotated[
        float,
        seconds_option(
            "--hello-timeout",
            "How long a fresh connection may say nothing before it is closed.",
            DEFAULT.hello_seconds,
            panel=PATIENCE,
        ),
    ] = DEFAULT.hello_seconds,
    frame_timeout: Annotated[
        float,
        seconds_option(
            "--frame-timeout",
            "How long a message may be under way, from its first byte to its last, before its "
            "sender is disconnected.",
            DEFAULT.frame_seconds,
            panel=PATIENCE,
        ),
    ] = DEFAULT.frame_seconds,
    stall_timeout: Annotated[
        float,
        seconds_option(
            "--stall-timeout",
            "How long a subscriber that holds back a full class may take nothing before it is "
            "disconnected.",
            DEFAULT.stall_seconds,
            panel=PATIENCE,
        ),
    ] = DEFAULT.stall_seconds,
    data_dir: Annotated[
        Path | None,
        option(
            "--data-dir",
            "A directory in which messages, durables and dead letters are kept, so that they are "
            "there again when the server is. It is made if it is not there, and used by one server "
            "at a time.",
            panel=DURABILITY,
            parser=Path,
            metavar="DIRECTORY",
            show_default="nothing is kept",
        ),
    ] = None,
    durability: Annotated[
        DurabilityChoice,
        option(
            "--durability",
            "With --data-dir, where a message is when its publisher is told that it is stored. "
            "disk: on disk, it outlives a power cut. os: with the operating system, it outlives "
            "the server. memory: with the server, which writes it soon.",
            panel=DURABILITY,
            metavar="LEVEL",
        ),
    ] = DurabilityChoice.DISK,
    drain_timeout: Annotated[
        float,
        seconds_option(
            "--drain-timeout",
            "How long a server that was told to stop, by SIGTERM or Ctrl-C, waits for subscribers "
            "to take and acknowledge what is stored for them. What is left then is lost, and the "
            "log says so, unless --data-dir keeps it. A second signal stops at once.",
            DRAIN_SECONDS,
            panel=PATIENCE,
        ),
    ] = DRAIN_SECONDS,
    heartbeat: Annotated[
        float,
        seconds_option(
            "--heartbeat",
            "How long a version 2 connection may be silent before either side says that it is "
            "still there; after three times as long it is closed. 0 lets it be silent for ever.",
            HEARTBEAT_SECONDS,
            panel=PATIENCE,
        ),
    ] = HEARTBEAT_SECONDS,
    keep_messages: Annotated[
        int,
        option(
            "--keep-messages",
            "Keep so many of a class's last messages after everybody has acknowledged them, for "
            "subscriptions that start at an earlier place. 0 keeps none.",
            panel=MEMORY,
            min=0,
            metavar="COUNT",
        ),
    ] = 0,
    keep_memory: Annotated[
        int,
        size_option(
            "--keep-memory",
            "Keep a class's last messages up to so many bytes after everybody has acknowledged "
            "them. With --keep-messages or --keep-seconds too, whichever is reached first counts.",
            "0",
        ),
    ] = 0,
    keep_seconds: Annotated[
        float,
        seconds_option(
            "--keep-seconds",
            "Keep a class's messages for so long after everybody has acknowledged them.",
            0,
            panel=MEMORY,
        ),
    ] = 0.0,
    last_values: Annotated[
        list[Any] | None,
        option(
            "--last-values",
            "Keep the last message of each channel in this class, after everybody has acknowledged "
            "it, for subscriptions that start with those. Give it again for more.",
            panel=MEMORY,
            metavar="CLASS",
            parser=parse_last_values,
            show_default=False,
        ),
    ] = None,
    engine: flags.Engine = None,
    engine_prefix: flags.Prefix = "simplebus",
    engine_replicas: flags.Replicas = 1,
    engine_storage: flags.Storage = "file",
    engine_ack_wait: flags.AckWait = 30.0,
    engine_duplicates: flags.Duplicates = 120.0,
    engine_max_bytes: flags.MaxBytes = 0,
    engine_ca: flags.Ca = None,
    bind: nats.Bind = None,
    nats_port: nats.NatsPort = None,
    no_nats: nats.NoNats = False,
    nats_max_payload: nats.MaxPayload = nats.DEFAULT_NATS.max_payload,
    nats_max_control_line: nats.MaxControlLine = nats.DEFAULT_NATS.max_control_line,
    nats_max_subs: nats.MaxSubs = nats.DEFAULT_NATS.max_subs,
    nats_max_pending: nats.MaxPending = None,
    nats_max_connections: nats.MaxConnections = nats.DEFAULT_NATS.connections,
    nats_ping_interval: nats.PingInterval = nats.DEFAULT_NATS.ping_seconds,
    nats_max_pings_out: nats.MaxPingsOut = nats.DEFAULT_NATS.pings_max,
    nats_auth_timeout: nats.AuthTimeout = nats.DEFAULT_NATS.auth_seconds,
    nats_write_timeout: nats.WriteTimeout = nats.DEFAULT_NATS.write_seconds,
    nats_lame_duck_grace: nats.LameDuckGrace = nats.DEFAULT_NATS.lame_duck_grace_seconds,
    nats_lame_duck_time: nats.LameDuckTime = nats.DEFAULT_NATS.lame_duck_seconds,
    nats_tls_cert: nats.TlsCert = None,
    nats_tls_key: nats.TlsKey = None,
    nats_tls_ca: nats.TlsCa = None,
    nats_tls_verify: nats.TlsVerify = False,
    nats_tls_verify_and_map: nats.TlsVerifyAndMap = False,
    nats_tls_handshake_first: nats.TlsHandshakeFirst = False,
    nats_tls_optional: nats.TlsOptional = False,
    nats_tls_timeout: nats.TlsTimeout = nats.DEFAULT_NATS.tls_seconds,
    http_port: http.Port = None,
    http_host: http.Hosts = None,
    http_name: http.Names = None,
    no_http: http.Closed = False,
    tls_cert: tls.Cert = None,
    tls_key: tls.Key = None,
    tls_ca: tls.Ca = None,
    tls_verify: tls.Verify = False,
    tls_timeout: tls.Timeout = tls.SECONDS,
    users: tls.UsersFile = None,
    max_connections_per_address: tls.PerAddress = 0,
    max_connection_rate: tls.Rate = 0.0,
    max_message_rate: tls.MessageRate = 0.0,
    max_byte_rate: tls.ByteRate = 0,
    config: Annotated[Any, config_option()] = None,
    verbose: Annotated[
        bool,
        option("--verbose", "Print a line of rates every second, on standard error."),
    ] = False,
    log_level: log_options.Level = LogLevel.INFO,
    log_format: log_options.Format = LogFormat.TEXT,
) -> None:
    import logging
    from dataclasses import replace
    from functools import partial

    import trio

    from simplebus.commands.serve.settings import (
        SECRET_VARIABLES,
        again,
        changes,
        planned,
        set_free,
        taken_over,
    )
    from simplebus.config.environment import unread_variables
    from simplebus.config.stable_read import read_at_rest
    from simplebus.server import systemd
    from simplebus.server.observability.logs import UNLIMITED, configure_logging
    from simplebus.server.run import serve as serve_until_stopped

    try:
        plan = planned(context)
    except ValueError as error:
        fail_for(error)
    configure_logging(plan.log_level, plan.log_format)
    log = logging.getLogger("simplebus")
    root = context.find_root().command
    unread = unread_variables(os.environ, context.command, root, SECRET_VARIABLES)
    for warning in (*plan.warnings, *unread):
        log.warning("configuration: %s", warning)

    files = [*([config.path] if config else []), *([users] if users else [])]

    def reload() -> tuple[Settings, ServeOptions, Callable[[], None]]:
        """See `ServeOptions.reload`."""
        fresh = read_at_rest(partial(again, context), files)

        def write_line() -> None:
            nonlocal plan
            found, freed = changes(plan, fresh), set_free(plan, fresh)
            plan = taken_over(plan, fresh)
            configure_logging(fresh.log_level, fresh.log_format)
            for change in found:
                level = logging.INFO if change.is_reloaded else logging.WARNING
                log.log(level, "configuration: %s", change, extra=UNLIMITED)
            for warning in (*fresh.warnings, *freed):
                log.warning("configuration: %s", warning, extra=UNLIMITED)
            log.info("the configuration is read again: %d changes", len(found))

        return fresh.settings, fresh.options, write_line

    options = plan.options
    ports = {"tcp": options.port, "nats": options.nats_port, "http": options.http_port}
    sockets = systemd.assign_sockets(systemd.take_inherited_sockets(os.environ), ports)
    changes_later = reload if config or users else None
    options = replace(options, inherited=sockets, reload=changes_later, owns_process=True)
    try:
        run = partial(serve_until_stopped, plan.settings, options, announce=_announce)
        if plan.bridges:
            from simplebus.bridge.runner import serve_with_bridges

            run = partial(serve_with_bridges, run, plan.bridges)
        trio.run(run)
    except (BaseExceptionGroup, BusError, OSError, MemoryError) as error:
        _end_for(error, options.hosts)


def _end_for(error: BaseException, hosts: tuple[str, ...]) -> NoReturn:
    """Say in a sentence why the server cannot go on, or has not begun."""
    import logging
    import socket

    from simplebus.jetstream.cluster.cluster_id import UnusableClusterError
    from simplebus.server.tls.certificates import CertificateError
    from simplebus.storage.errors import JournalError, JournalInUseError

    for handler in logging.getLogger().handlers:
        handler.flush()  # What was said before comes first.
    causes = flatten_errors(error)
    if not all(isinstance(cause, (BusError, OSError, MemoryError)) for cause in causes):
        raise error  # A bug of ours: its traceback is wanted.
    cause, status = causes[0], 1
    said = describe_error(cause)
    match cause:
        case RemoteProtocolError():
            said, status = cause.sentence, USAGE_STATUS
        case UnusableClusterError() | CertificateError():
            status = CONFIG_STATUS
        case JournalInUseError():
            status = BUSY_STATUS
        case JournalError():
            status = JOURNAL_STATUS
        case socket.gaierror():
            said, status = f"cannot listen on {' or '.join(hosts)}: {said}", UNAVAILABLE_STATUS
        case OSError() if said.startswith("cannot listen on"):
            status = UNAVAILABLE_STATUS
        case MemoryError():
            status = MEMORY_STATUS
    fail(said, status=status)


def fail_for(error: ValueError) -> NoReturn:
    """End the command for options that make no sense, wherever they stand."""
    fail(str(error), status=CONFIG_STATUS if isinstance(error, ConfigError) else USAGE_STATUS)


def _announce(line: str) -> None:
    """The ready line is all that a script has to read; the rest is for people. Whether anybody
    still reads is not the server's concern."""
    from simplebus.server.observability.logs import write_line

    with contextlib.suppress(OSError):
        if line.startswith("simplebus ready "):
            print(line, flush=True)
        else:
            write_line(line)
