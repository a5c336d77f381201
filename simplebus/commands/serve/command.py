"""The `serve` command: option declarations, and the call that runs the server.

Heavy modules are imported when the command runs, so that `--help` is fast.
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
from simplebus.config.errors import ConfigError
from simplebus.config.file import config_option
from simplebus.config.parse import (
    ACKNOWLEDGEMENT,
    DEFAULT,
    DRAIN_SECONDS,
    DURABILITY,
    MEMORY,
    TIMEOUTS,
    DurabilityChoice,
    FullPolicyChoice,
    LogFormat,
    LogLevel,
    format_size,
    option,
    parse_host,
    parse_last_values,
    parse_port,
    seconds_option,
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

_LOGGED_CHANGES_MAX = 1000
"""Changed settings that one reload logs."""

HELP = (
    "Run the server.\n\n"
    "The server prints one line when it is ready, [bold]simplebus ready tcp=HOST:PORT "
    "nats=HOST:PORT http=HOST:PORT[/bold], and runs until it is stopped. Messages are kept in "
    "memory and are lost when the server ends, unless --data-dir stores them.\n\n\b\n"
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
            "Address or host name to listen on. Repeat the option for more addresses. By default "
            "only programs on this machine can connect. 0.0.0.0 opens the server to the network, "
            "without a password unless users are configured.",
            parser=parse_host,
            metavar="ADDRESS",
            show_default="127.0.0.1 and ::1",
        ),
    ] = None,
    port: Annotated[
        int,
        option(
            "--port",
            "TCP port of the binary protocol. 0 picks a free port, which the ready line shows.",
            parser=parse_port,
            metavar="PORT",
        ),
    ] = 8888,
    ack_timeout: Annotated[
        int,
        option(
            "--ack-timeout",
            "Ticks after which an unacknowledged message is redelivered; each further delay is "
            "twice as long. Some clients acknowledge 1.5 seconds late, so set more than 2 seconds.",
            panel=ACKNOWLEDGEMENT,
            metavar="TICKS",
        ),
    ] = 6,
    tick: Annotated[
        float,
        seconds_option("--tick", "Length of a tick of the ack timer.", 1.0, panel=ACKNOWLEDGEMENT),
    ] = 1.0,
    max_deliveries: Annotated[
        int,
        option(
            "--max-deliveries",
            "Number of deliveries after which an unacknowledged message becomes a dead letter. 0 "
            "sets no limit.",
            panel=ACKNOWLEDGEMENT,
            metavar="COUNT",
        ),
    ] = DEFAULT_DELIVERIES_MAX,
    full: Annotated[
        FullPolicyChoice,
        option(
            "--full",
            "Policy for a new message when its class is full. block: the publisher waits and no "
            "message is lost. drop_oldest: the oldest message is dropped. drop_newest: the new "
            "message is dropped. Dropped messages are counted. spill: the oldest messages are "
            "moved from memory to --data-dir and read back when a subscription needs them.",
            panel=MEMORY,
            metavar="POLICY",
        ),
    ] = FullPolicyChoice.BLOCK,
    max_memory: Annotated[
        int,
        size_option(
            "--max-memory",
            "Maximum memory for the messages of all classes together. At this limit no class "
            "grows, and --full applies.",
            format_size(DEFAULT.total_bytes),
        ),
    ] = DEFAULT.total_bytes,
    max_class_memory: Annotated[
        int | None,
        size_option(
            "--max-class-memory",
            "Maximum memory for the messages of one class. At this limit --full applies.",
            f"{format_size(DEFAULT.class_bytes)}, at most --max-memory",
        ),
    ] = None,
    max_dead_letters: Annotated[
        int,
        size_option(
            "--max-dead-letters",
            "Maximum memory for the dead letters of one class. At this limit the oldest are "
            "dropped. All dead letters together take at most a quarter of --max-memory.",
            format_size(DEFAULT.dead_letter_bytes),
        ),
    ] = DEFAULT.dead_letter_bytes,
    max_class_messages: Annotated[
        int,
        option(
            "--max-class-messages",
            "Maximum number of messages in one class. At this limit --full applies.",
            panel=MEMORY,
            metavar="COUNT",
        ),
    ] = DEFAULT.class_messages,
    max_frame: Annotated[
        int | None,
        size_option(
            "--max-frame",
            "Maximum size of a message, including its 13 bytes of framing. The server disconnects "
            "a client that sends a longer message.",
            f"{format_size(DEFAULT.frame_bytes)}, at most half of --max-class-memory",
        ),
    ] = None,
    max_pending: Annotated[
        int | None,
        size_option(
            "--max-pending",
            "Maximum memory for one connection outside the classes: messages that wait for space, "
            "and replies that its peer has not read. Above it, the connection is closed.",
            f"{format_size(DEFAULT.pending_bytes)}, at least --max-frame and 512KiB",
        ),
    ] = None,
    max_total_pending: Annotated[
        int | None,
        size_option(
            "--max-total-pending",
            "The same limit for all connections together. Above it, the connections that use the "
            "most memory are closed.",
            f"{format_size(DEFAULT.total_pending_bytes)}, at least --max-pending",
        ),
    ] = None,
    max_connections: Annotated[
        int,
        option(
            "--max-connections",
            "Maximum number of open connections. Further connections are closed at once.",
            metavar="COUNT",
        ),
    ] = DEFAULT.connections,
    max_credit: Annotated[
        int,
        size_option(
            "--max-credit",
            "Maximum size of the messages that a version 2 publisher may send before they are "
            "confirmed.",
            format_size(DEFAULT.credit_bytes),
        ),
    ] = DEFAULT.credit_bytes,
    max_subscriptions: Annotated[
        int,
        option(
            "--max-subscriptions",
            "Maximum number of subscriptions of one version 2 connection. Further subscriptions "
            "are refused.",
            metavar="COUNT",
        ),
    ] = DEFAULT.subscriptions,
    max_durables: Annotated[
        int,
        option(
            "--max-durables",
            "Maximum number of durables and groups of one class. Further ones are refused.",
            metavar="COUNT",
        ),
    ] = DEFAULT.durables,
    max_classes: Annotated[
        int,
        option(
            "--max-classes",
            "Maximum number of classes in use. A client that needs a further class is "
            "disconnected.",
            metavar="COUNT",
        ),
    ] = DEFAULT.classes,
    hello_timeout: Annotated[
        float,
        seconds_option(
            "--hello-timeout",
            "Time until a new connection that has sent nothing is closed.",
            DEFAULT.hello_seconds,
            panel=TIMEOUTS,
        ),
    ] = DEFAULT.hello_seconds,
    frame_timeout: Annotated[
        float,
        seconds_option(
            "--frame-timeout",
            "Maximum time between the first and the last byte of a message. The server disconnects "
            "a sender that takes longer.",
            DEFAULT.frame_seconds,
            panel=TIMEOUTS,
        ),
    ] = DEFAULT.frame_seconds,
    stall_timeout: Annotated[
        float,
        seconds_option(
            "--stall-timeout",
            "Time until a subscriber that reads nothing is disconnected, if a full class waits for "
            "it.",
            DEFAULT.stall_seconds,
            panel=TIMEOUTS,
        ),
    ] = DEFAULT.stall_seconds,
    data_dir: Annotated[
        Path | None,
        option(
            "--data-dir",
            "Directory of the journal, which keeps messages, durables and dead letters across "
            "restarts. It is created if missing. Only one server can use it at a time.",
            panel=DURABILITY,
            parser=Path,
            metavar="DIRECTORY",
            show_default="no journal",
        ),
    ] = None,
    durability: Annotated[
        DurabilityChoice,
        option(
            "--durability",
            "With --data-dir, how safely a message is stored before it is confirmed. disk: synced "
            "to disk, so that it survives a power failure. os: written to the operating system, so "
            "that it survives a server crash. memory: in the memory of the server, which writes it "
            "soon.",
            panel=DURABILITY,
            metavar="LEVEL",
        ),
    ] = DurabilityChoice.DISK,
    drain_timeout: Annotated[
        float,
        seconds_option(
            "--drain-timeout",
            "Maximum time that the server waits after SIGTERM or Ctrl-C for subscribers to receive "
            "and acknowledge stored messages. Without --data-dir, the remaining messages are lost "
            "and logged. A second signal stops the server at once.",
            DRAIN_SECONDS,
            panel=TIMEOUTS,
        ),
    ] = DRAIN_SECONDS,
    heartbeat: Annotated[
        float,
        seconds_option(
            "--heartbeat",
            "Time of silence after which each side of a version 2 connection sends a heartbeat. "
            "After three times as long the connection is closed. 0 turns heartbeats off.",
            HEARTBEAT_SECONDS,
            panel=TIMEOUTS,
        ),
    ] = HEARTBEAT_SECONDS,
    keep_messages: Annotated[
        int,
        option(
            "--keep-messages",
            "Number of acknowledged messages to keep per class, for subscriptions that start "
            "earlier. The oldest are released first. 0 keeps none.",
            panel=MEMORY,
            min=0,
            metavar="COUNT",
        ),
    ] = 0,
    keep_memory: Annotated[
        int,
        size_option(
            "--keep-memory",
            "Size of the acknowledged messages to keep per class. With --keep-messages or "
            "--keep-seconds, the limit that is reached first applies. 0 sets no limit.",
            "0",
        ),
    ] = 0,
    keep_seconds: Annotated[
        float,
        seconds_option(
            "--keep-seconds",
            "Time to keep the acknowledged messages of a class. 0 sets no limit.",
            0,
            panel=MEMORY,
        ),
    ] = 0.0,
    last_values: Annotated[
        list[Any] | None,
        option(
            "--last-values",
            "Class that keeps the last message of each channel after it is acknowledged, for "
            "subscriptions that start with the last values. Repeat the option for more classes.",
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
        option("--verbose", "Print message rates to standard error once a second."),
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
        apply_reload,
        build_plan,
        count_changes,
        find_changes,
        find_widened_permissions,
        reload_plan,
    )
    from simplebus.config.environment import unread_variables
    from simplebus.config.stable_read import read_when_stable
    from simplebus.server import systemd
    from simplebus.server.observability.logs import UNLIMITED, configure_logging
    from simplebus.server.run import serve as serve_until_stopped

    try:
        plan = build_plan(context)
    except ValueError as error:
        exit_for_invalid_options(error)
    configure_logging(plan.log_level, plan.log_format)
    log = logging.getLogger("simplebus")
    root = context.find_root().command
    unread_warnings = unread_variables(os.environ, context.command, root, SECRET_VARIABLES)
    for warning in (*plan.warnings, *unread_warnings):
        log.warning("configuration: %s", warning)

    files = [*([config.path] if config else []), *([users] if users else [])]

    def reload() -> tuple[Settings, ServeOptions, Callable[[], None]]:
        """See `ServeOptions.reload`."""
        new_plan = read_when_stable(partial(reload_plan, context), files)

        def write_line() -> None:
            nonlocal plan
            changed, widened = (
                find_changes(plan, new_plan),
                find_widened_permissions(plan, new_plan),
            )
            plan = apply_reload(plan, new_plan)
            configure_logging(new_plan.log_level, new_plan.log_format)
            for change in changed[:_LOGGED_CHANGES_MAX]:
                level = logging.INFO if change.is_reloaded else logging.WARNING
                log.log(level, "configuration: %s", change, extra=UNLIMITED)
            for warning in (*new_plan.warnings, *widened):
                log.warning("configuration: %s", warning, extra=UNLIMITED)
            if len(changed) > _LOGGED_CHANGES_MAX:
                count = len(changed) - _LOGGED_CHANGES_MAX
                log.info("configuration: %d more changes", count, extra=UNLIMITED)
            log.info("reloaded the configuration: %s", count_changes(changed))

        return new_plan.settings, new_plan.options, write_line

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
        _exit_with_error(error, options.hosts)


def _exit_with_error(error: BaseException, hosts: tuple[str, ...]) -> NoReturn:
    """Print why the server failed or did not start, and exit with the matching status."""
    import logging
    import socket

    from simplebus.jetstream.cluster.cluster_id import UnusableClusterError
    from simplebus.server.tls.certificates import CertificateError
    from simplebus.storage.errors import JournalError, JournalInUseError

    for handler in logging.getLogger().handlers:
        handler.flush()  # Earlier log lines must appear before the error.
    causes = flatten_errors(error)
    if not all(isinstance(cause, (BusError, OSError, MemoryError)) for cause in causes):
        raise error  # A bug: show the traceback.
    cause, status = causes[0], 1
    message = describe_error(cause)
    match cause:
        case RemoteProtocolError():
            message, status = cause.sentence, USAGE_STATUS
        case UnusableClusterError() | CertificateError():
            status = CONFIG_STATUS
        case JournalInUseError():
            status = BUSY_STATUS
        case JournalError():
            status = JOURNAL_STATUS
        case socket.gaierror():
            message, status = (
                f"cannot listen on {' or '.join(hosts)}: {message}",
                UNAVAILABLE_STATUS,
            )
        case OSError() if message.startswith("cannot listen on"):
            status = UNAVAILABLE_STATUS
        case MemoryError():
            status = MEMORY_STATUS
    fail(message, status=status)


def exit_for_invalid_options(error: ValueError) -> NoReturn:
    """Print why the options are invalid, and exit with the status for a file or for options."""
    fail(str(error), status=CONFIG_STATUS if isinstance(error, ConfigError) else USAGE_STATUS)


def _announce(line: str) -> None:
    """Print the ready line to standard output, any other line to the log; ignore closed streams."""
    from simplebus.server.observability.logs import write_line

    with contextlib.suppress(OSError):
        if line.startswith("simplebus ready "):
            print(line, flush=True)
        else:
            write_line(line)
