"""`simplebus gateway`: runs the modules of a file until it is stopped.

A file with an error changes nothing, at the start and at SIGHUP.
"""

from __future__ import annotations

import contextlib
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.commands.http_option import HttpAddress
from simplebus.config.errors import ConfigError
from simplebus.config.server_schema import SETTINGS
from simplebus.console.errors import CONFIG_STATUS, fail

if TYPE_CHECKING:
    import trio

    from simplebus.gateway.config import GatewayPlan
    from simplebus.gateway.gateway import Gateway

HELP = (
    "Run a gateway: a process of modules that send messages to each other.\n\n\b\n"
    "  simplebus gateway modules.toml\n"
    "  simplebus gateway --check modules.toml\n\nThe file lists the modules, their settings and "
    "their links:\n\n\b\n"
    "  \\[modules.clock]\n"
    '  module = "timer"                   # or package.module:Name, also beside the file\n'
    "  settings = { every = 1 }\n\n\b\n"
    "  \\[modules.log]\n"
    '  module = "logger"\n'
    '  hears = ["clock"]                  # source modules; ["*"]: all others\n\n'
    "Built-in modules are logger, tail, timer, transform and uplink. A module that fails is "
    "restarted after a backoff. SIGHUP reloads the file: new modules start, removed modules stop, "
    "changed modules restart, and the others continue. SIGTERM stops the gateway after queued "
    "messages are processed; a second SIGTERM stops it at once."
)

STATUS_SECONDS = 10.0
FORCED_EXIT_SECONDS = 5.0
"""Time until the process exits after the second signal, even if a module blocks."""
FORCED_EXIT_STATUS = 1
"""Exit status of the process after that time."""


def gateway(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="TOML file with the modules.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Check the file, print its modules, and exit.")
    ] = False,
    status_seconds: Annotated[
        float,
        typer.Option(
            "--status-seconds",
            min=1.0,
            metavar="SECONDS",
            envvar="SIMPLEBUS_STATUS_SECONDS",
            help="Interval at which changed statistics of the gateway are logged.",
        ),
    ] = 60.0,
    drain_timeout: Annotated[
        float,
        typer.Option(
            "--drain-timeout",
            min=0.0,
            metavar="SECONDS",
            envvar="SIMPLEBUS_DRAIN_TIMEOUT",
            help="Maximum time to process queued messages when the gateway stops, and maximum time "
            "that a stopping module may take for its current call.",
        ),
    ] = SETTINGS["drain_timeout"].default,
    http: HttpAddress = None,
    log_level: Annotated[Any, SETTINGS["log_level"].option(reads_variable=True)] = "info",
    log_format: Annotated[Any, SETTINGS["log_format"].option(reads_variable=True)] = "console",
) -> None:

    import trio

    from simplebus.core.broker.wait_reasons import format_count
    from simplebus.gateway import config as plans
    from simplebus.logs.configure import configure_logging
    from simplebus.logs.event_logger import EventLogger

    sys.path.insert(0, str(file.resolve().parent))  # The user's modules are beside the file.
    try:
        plan = plans.read(file)
    except ConfigError as error:
        fail(str(error), status=CONFIG_STATUS)
    if check:
        if warning := _readable_secrets_warning(file, plan):
            typer.echo(f"simplebus: {warning}", err=True)
        for module in plan.modules:
            sources = [source for source, sink in plan.links if sink == module.name]
            typer.echo(
                f"{module.name}: {module.module}, receives from {', '.join(sources) or 'none'}"
            )
        modules, links = len(plan.modules), len(plan.links)
        typer.echo(f"{file}: {format_count(modules, 'module')}, {format_count(links, 'link')}")
        return
    configure_logging(log_level, log_format)
    if warning := _readable_secrets_warning(file, plan):
        EventLogger("simplebus.gateway").warning(
            "gateway_file.readable", "{problem}", problem=warning
        )
    trio.run(_run, file, plan, status_seconds, drain_timeout, http)


def _readable_secrets_warning(file: Path, plan: GatewayPlan) -> str:
    """Return a warning if the file contains secrets and every user may read it; else ""."""
    with contextlib.suppress(OSError):
        has_secrets = any(getattr(module.settings, "has_secrets", False) for module in plan.modules)
        if has_secrets and file.stat().st_mode & stat.S_IROTH:
            return f"{file} holds passwords or tokens, and every user may read it"
    return ""


async def _run(
    file: Path,
    plan: GatewayPlan,
    status_seconds: float,
    drain: float,
    http: tuple[str, int] | None,
) -> None:
    import signal

    import trio

    from simplebus.gateway.gateway import log, open_gateway
    from simplebus.server.signals import STOP_SIGNALS, log_ignored_signal
    from simplebus.server.signals import open_signal_receiver as signals_of_process
    from simplebus.server.systemd import notify

    changing = trio.CancelScope()  # Contains all changes; the first change starts all modules.
    read_again = trio.Event()
    running: Gateway | None = None

    async def open_signal_receiver(nursery: trio.Nursery) -> None:
        """Handle signals, also while a change waits for a module."""
        nonlocal read_again
        async for number in signals:
            if number == signal.SIGHUP:
                read_again.set()
                if running is not None:
                    _announce_change(file, running)
            elif number not in STOP_SIGNALS:
                log_ignored_signal(number)
            elif not changing.cancel_called:
                changing.cancel()
            else:
                log.warning("gateway.interrupted", "second stop signal: exiting at once")
                nursery.cancel_scope.cancel()
                _exit_after_timeout()

    async with (
        signals_of_process(ignore_afterwards=True) as signals,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(open_signal_receiver, nursery)
        async with open_gateway(drain=drain, grace=drain) as running:
            http_text = await _open_http(running, file, http, nursery) if http else ""
            with changing:
                await running.apply(plan)
                nursery.start_soon(_report_status, running, status_seconds)
                typer.echo(f"simplebus gateway ready modules={len(running.names)}{http_text}")
                sys.stdout.flush()
                notify("READY=1", f"STATUS={running.statistics()}")
                while True:
                    await read_again.wait()
                    read_again = trio.Event()
                    await _reload(file, running)
            notify("STOPPING=1")
            before = running.statistics()
            log.info("gateway.stopping", "stopping: {status}", status=before)
        if lost := running.statistics().lost - before.lost:
            log.warning(
                "module_messages.lost", "{count:,} queued messages were not processed", count=lost
            )
        nursery.cancel_scope.cancel()


def _exit_after_timeout() -> None:
    """Exit the process after `FORCED_EXIT_SECONDS`, even if a module shields itself."""
    import os
    import threading

    timer = threading.Timer(FORCED_EXIT_SECONDS, os._exit, [FORCED_EXIT_STATUS])
    timer.daemon = True
    timer.start()


def _announce_change(file: Path, running: Gateway) -> None:
    """Pass the new file to the gateway, so that a change does not wait for a removed module."""
    from simplebus.gateway import config as plans

    with contextlib.suppress(ConfigError):  # `_reload` logs the error.
        running.expect(plans.read(file))


async def _reload(file: Path, running: Gateway) -> None:
    from simplebus.gateway import config as plans
    from simplebus.gateway.gateway import log

    try:
        await running.apply(plans.read(file))
    except ConfigError as error:
        log.error(
            "gateway.reload_rejected",
            "cannot reload, keeping the current modules: {error}",
            error=error,
        )
    else:
        log.info(
            "gateway.reloaded", "reloaded {path}: {status}", path=file, status=running.statistics()
        )


async def _open_http(
    running: Gateway, file: Path, http: tuple[str, int], nursery: trio.Nursery
) -> str:
    """Start the HTTP server. Return its part of the ready line."""
    from simplebus.gateway.metrics import gateway_health, gateway_snapshot
    from simplebus.monitor.dashboard import Dashboard
    from simplebus.server.http.server import start_http_server

    dashboard = Dashboard(
        lambda detailed: gateway_snapshot(running, subtitle=file.name),
        lambda: gateway_health(running),
    )
    (at, *_) = await start_http_server(dashboard, [http[0]], http[1], nursery)
    return f" http={at}"


async def _report_status(running: Gateway, seconds: float) -> None:
    import trio

    from simplebus.gateway.gateway import log
    from simplebus.server.systemd import notify

    logged, next_line = "", trio.current_time() + seconds
    while True:
        await trio.sleep(min(STATUS_SECONDS, seconds))
        status = str(running.statistics())
        if status != logged:
            notify(f"STATUS={status}")
        if trio.current_time() >= next_line:
            next_line += seconds
            if status != logged:
                log.info("gateway.progressed", "{status}", status=status)
                logged = status
