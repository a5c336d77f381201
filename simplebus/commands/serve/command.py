"""The `serve` command: its options, which come from the schema, and the run of the server.

Heavy modules are imported when the command runs, so that `--help` is fast.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from simplebus.config.errors import ConfigError
from simplebus.config.parse import option
from simplebus.config.server_schema import SETTINGS
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

if TYPE_CHECKING:
    from simplebus.config.configuration import Configuration
    from simplebus.core.settings import Settings
    from simplebus.logs.event_logger import EventLogger
    from simplebus.server.run import ServeOptions

FROM_ENVIRONMENT = (
    "Each option can be set by an environment variable too: --port by SIMPLEBUS_PORT, and so on."
)

CONFIG_OPTION = option(
    "--config",
    "TOML file that sets these options, users, classes and bridges. Options on the command line "
    "take precedence.",
    metavar="FILE",
    show_default=False,
    parser=Path,
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


def serve(context: typer.Context, config: Path | None, **flags: Any) -> None:
    """Run the server until it is stopped; `serve` of the command line."""
    import logging
    from dataclasses import replace
    from functools import partial

    import trio

    from simplebus.commands.serve.settings import build_plan, reload_plan
    from simplebus.commands.serve.stable_read import read_when_stable
    from simplebus.config.changed_values import apply_reload, count_changes, find_changes
    from simplebus.config.environment import unread_variables
    from simplebus.logs.configure import configure_logging, level_number
    from simplebus.logs.event_logger import EventLogger
    from simplebus.server import systemd
    from simplebus.server.run import serve as serve_until_stopped

    configuration = read_context(context)
    try:
        plan = build_plan(configuration)
    except ValueError as error:
        exit_for_invalid_options(error)
    configure_logging(plan.log_level, plan.log_format)
    log = EventLogger("simplebus")
    root = context.find_root().command
    unread_warnings = unread_variables(os.environ, root)

    def log_warnings(warnings: Iterable[str]) -> None:
        for warning in warnings:
            log.warning(
                "configuration.questioned",
                "configuration: {problem}",
                problem=warning,
                is_unlimited=True,
            )

    log_warnings((*plan.warnings, *unread_warnings))
    files = [path for path in (config, configuration.config.users.users) if path is not None]

    def reload() -> tuple[Settings, ServeOptions, Callable[[], None]]:
        """See `ServeOptions.reload`."""
        new_plan = read_when_stable(partial(reload_plan, configuration), files)

        def log_changes() -> None:
            nonlocal plan
            changes = find_changes(plan.values, new_plan.values)
            levels = plan.log_level, new_plan.log_level
            plan = replace(new_plan, values=apply_reload(plan.values, new_plan.values))
            # A change to a higher level is logged, too.
            configure_logging(min(levels, key=level_number), new_plan.log_format)
            for change in changes[:_LOGGED_CHANGES_MAX]:
                log.log(
                    logging.INFO if change.is_reloaded else logging.WARNING,
                    "setting.changed",
                    "configuration: {change}",
                    change=change,
                    setting=change.key,
                    value=change.value,
                    previous=change.previous,
                    is_unlimited=True,
                )
            if (count := len(changes) - _LOGGED_CHANGES_MAX) > 0:
                log.info(
                    "setting.changes_omitted",
                    "configuration: {count} more changes",
                    count=count,
                    is_unlimited=True,
                )
            log_warnings(new_plan.warnings)
            log.info(
                "configuration.reloaded",
                "reloaded the configuration: {changes}",
                changes=count_changes(changes),
                is_unlimited=True,
            )
            configure_logging(new_plan.log_level, new_plan.log_format)

        return new_plan.settings, new_plan.options, log_changes

    options = plan.options
    ports = {"tcp": options.port, "nats": options.nats_port, "http": options.http_port}
    sockets = systemd.assign_sockets(systemd.take_inherited_sockets(os.environ), ports)
    options = replace(
        options, inherited=sockets, reload=reload if files else None, owns_process=True
    )
    try:
        run = partial(serve_until_stopped, plan.settings, options, announce=_announce)
        if plan.bridges:
            from simplebus.bridge.runner import serve_with_bridges

            run = partial(serve_with_bridges, run, plan.bridges)
        trio.run(run)
    except (BaseExceptionGroup, BusError, OSError, MemoryError) as error:
        _exit_with_error(error, options.hosts, configuration, log)


def parse_arguments(arguments: Sequence[str]) -> Configuration:
    """Return the values of all settings for arguments of `serve`. Raises typer.BadParameter."""
    app = typer.Typer(add_completion=False)
    app.command()(serve)
    with typer.main.get_command(app).make_context("simplebus serve", list(arguments)) as context:
        return read_context(cast(typer.Context, context))


def read_context(context: typer.Context) -> Configuration:
    """Return the values of all settings for the arguments in a context of `serve`."""
    from simplebus.config.configuration import read_configuration

    sources = {name: context.get_parameter_source(name) for name in context.params}
    flags = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in context.params.items()
        if (source := sources[name]) is not None and source.name == "COMMANDLINE"
    }
    path = context.params["config"]
    flags.pop("config", None)
    return read_configuration(flags, os.environ, path)


def declare_options() -> None:
    """Give `serve` one parameter for each setting, from which typer declares its option."""
    annotations: dict[str, Any] = {"context": typer.Context}
    defaults: dict[str, Any] = {}
    for setting in SETTINGS.values():
        annotations[setting.name] = Annotated[setting.option_type, setting.option()]
        defaults[setting.name] = setting.option_default
        for former in setting.former:
            hidden = former.option(is_hidden=True)
            annotations[former.name] = Annotated[former.option_type, hidden]
            defaults[former.name] = former.option_default
    annotations["config"], defaults["config"] = Annotated[Any, CONFIG_OPTION], None
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(
            name, kind, default=defaults.get(name, inspect.Parameter.empty), annotation=annotation
        )
        for name, annotation in annotations.items()
    ]
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = annotations


declare_options()


def _exit_with_error(
    error: BaseException, hosts: tuple[str, ...], configuration: Configuration, log: EventLogger
) -> NoReturn:
    """Print why the server failed or did not start, and exit with the matching status.

    In the log format json, the error is an event.
    """
    import logging
    import socket

    from simplebus.config.parse import LogFormat
    from simplebus.jetstream.cluster.cluster_id import UnusableClusterError
    from simplebus.server.listeners import ListenError
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
        case UnusableClusterError():
            status = CONFIG_STATUS
        case CertificateError():
            message, status = _locate_error(message, configuration), CONFIG_STATUS
        case JournalInUseError():
            status = BUSY_STATUS
        case JournalError():
            status = JOURNAL_STATUS
        case socket.gaierror():
            message, status = (
                f"cannot listen on {' or '.join(hosts)}: {message}",
                UNAVAILABLE_STATUS,
            )
        case ListenError():
            status = UNAVAILABLE_STATUS
        case MemoryError():
            status = MEMORY_STATUS
    if configuration.config.general.log_format is LogFormat.JSON:
        for line in message.splitlines():
            log.error("server.failed", "{error}", error=line, is_unlimited=True)
        raise typer.Exit(status)
    fail(message, status=status)


def _locate_error(message: str, configuration: Configuration) -> str:
    """Return an error about a file with the key and the line that name the file, if there are."""
    from simplebus.commands.serve.settings import find_errors

    found = find_errors(configuration)[1] if configuration.file else ()
    return "\n".join(candidate for candidate in found if message in candidate) or message


def exit_for_invalid_options(error: ValueError) -> NoReturn:
    """Print why the options are invalid, and exit with the status for a file or for options."""
    fail(str(error), status=CONFIG_STATUS if isinstance(error, ConfigError) else USAGE_STATUS)


def _announce(line: str) -> None:
    """Print the ready line to standard output; ignore a closed stream."""
    with contextlib.suppress(OSError):
        # One write: with PYTHONUNBUFFERED, print() writes the end of the line separately, and the
        # lines of two servers that share a pipe could mix.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
