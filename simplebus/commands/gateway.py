"""`simplebus gateway`: modules of a file, run until somebody ends them.

Rule 1: nothing heavy is imported before the command runs.
Rule 2: a file that has a mistake changes nothing: not at the start, and not at SIGHUP.
"""

from __future__ import annotations

import contextlib
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simplebus.commands.serve import http_options, log_options
from simplebus.config.mistakes import ConfigError
from simplebus.config.parse import DRAIN_SECONDS, LogFormat, LogLevel
from simplebus.console.errors import CONFIG_STATUS, fail

if TYPE_CHECKING:
    import trio

    from simplebus.gateway.config import GatewayPlan
    from simplebus.gateway.gateway import Gateway

HELP = (
    "Run a gateway: modules of this process that hear each other.\n\n\b\n"
    "  simplebus gateway modules.toml\n"
    "  simplebus gateway --check modules.toml\n\nThe file says which modules "
    "there are, what is set for each, and who hears whom:\n\n\b\n"
    "  \\[modules.clock]\n"
    '  module = "timer"                   # or package.module:Name, also from beside the file\n'
    "  settings = { every = 1 }\n\n\b\n"
    "  \\[modules.log]\n"
    '  module = "logger"\n'
    '  hears = ["clock"]                  # or ["*"]: everyone else\n\n'
    "Shipped are logger, tail, timer, transform and uplink. A module that fails is made again "
    "after a pause. SIGHUP reads the file again: modules that are new in it come, those that are "
    "not in it any more end, those that are otherwise in it are made again, and the rest go on. "
    "SIGTERM has what was said heard out; a second one does not wait for that."
)

STATUS_S = 10.0
AT_ONCE_S = 5.0
"""How long "at once" takes at most,"""
AT_ONCE_STATUS = 1
"""and how the process ends then."""


def gateway(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="A TOML file of modules.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Look the file over, say what is in it, and end.")
    ] = False,
    status_seconds: Annotated[
        float,
        typer.Option(
            "--status-seconds",
            min=1.0,
            metavar="SECONDS",
            envvar="SIMPLEBUS_STATUS_SECONDS",
            help="How often the log says how the gateway is doing, if that has changed.",
        ),
    ] = 60.0,
    drain_timeout: Annotated[
        float,
        typer.Option(
            "--drain-timeout",
            min=0.0,
            metavar="SECONDS",
            envvar="SIMPLEBUS_DRAIN_TIMEOUT",
            help="How long what was said is heard out when the gateway ends; and how long modules "
            "that end may stay in their calls.",
        ),
    ] = DRAIN_SECONDS,
    http: http_options.At = None,
    log_level: log_options.Level = LogLevel.INFO,
    log_format: log_options.Format = LogFormat.TEXT,
) -> None:
    import logging

    import trio

    from simplebus.gateway import config as plans
    from simplebus.server.observability.logs import configure_logging

    sys.path.insert(0, str(file.resolve().parent))  # Where modules of one's own are.
    try:
        plan = plans.read(file)
    except ConfigError as error:
        fail(str(error), status=CONFIG_STATUS)
    if check:
        if complaint := _shown_secrets(file, plan):
            typer.echo(f"simplebus: {complaint}", err=True)
        for each in plan.modules:
            heard = [source for source, sink in plan.links if sink == each.name]
            typer.echo(f"{each.name}: {each.module}, hears {', '.join(heard) or 'nobody'}")
        typer.echo(f"{file}: {len(plan.modules)} modules, {len(plan.links)} links")
        return
    configure_logging(log_level, log_format)
    if complaint := _shown_secrets(file, plan):
        logging.getLogger("simplebus.gateway").warning("%s", complaint)
    trio.run(_run, file, plan, status_seconds, drain_timeout, http)


def _shown_secrets(file: Path, plan: GatewayPlan) -> str:
    """What there is to say of a file with secrets that every user may read; empty for nothing."""
    with contextlib.suppress(OSError):
        has_secrets = any(getattr(each.settings, "has_secrets", False) for each in plan.modules)
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

    changing = trio.CancelScope()  # All changes: the first one begins all modules.
    read_again = trio.Event()
    running: Gateway | None = None

    async def open_signal_receiver(nursery: trio.Nursery) -> None:
        """Until the second signal to end. It is heard whatever a module is waited for."""
        nonlocal read_again
        async for number in signals:
            if number == signal.SIGHUP:
                read_again.set()
                if running is not None:
                    _expect(file, running)
            elif number not in STOP_SIGNALS:
                log_ignored_signal(number)
            elif not changing.cancel_called:
                changing.cancel()
            else:
                log.warning("ends at once")
                nursery.cancel_scope.cancel()
                _end_for_sure()

    async with (
        signals_of_process(ignore_afterwards=True) as signals,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(open_signal_receiver, nursery)
        async with open_gateway(drain=drain, grace=drain) as running:
            where = await _open_http(running, file, http, nursery) if http else ""
            with changing:
                await running.apply(plan)
                nursery.start_soon(_say_status, running, status_seconds)
                typer.echo(f"simplebus gateway ready modules={len(running.names)}{where}")
                sys.stdout.flush()
                notify("READY=1", f"STATUS={running.statistics()}")
                while True:
                    await read_again.wait()
                    read_again = trio.Event()
                    await _read_again(file, running)
            notify("STOPPING=1")
            before = running.statistics()
            log.info("ends: %s", before)
        if lost := running.statistics().lost - before.lost:
            log.warning("%s messages were not heard out", f"{lost:,}")
        nursery.cancel_scope.cancel()


def _end_for_sure() -> None:
    """A module may shield itself from being given up: then the process ends all the same."""
    import os
    import threading

    timer = threading.Timer(AT_ONCE_S, os._exit, [AT_ONCE_STATUS])
    timer.daemon = True
    timer.start()


def _expect(file: Path, running: Gateway) -> None:
    """A change that waits for a module that is to go, by now, goes on."""
    from simplebus.gateway import config as plans

    with contextlib.suppress(ConfigError):  # It is told when the file is read again.
        running.expect(plans.read(file))


async def _read_again(file: Path, running: Gateway) -> None:
    from simplebus.gateway import config as plans
    from simplebus.gateway.gateway import log

    try:
        await running.apply(plans.read(file))
    except ConfigError as error:
        log.error("all goes on as before: %s", error)
    else:
        log.info("read %s again: %s", file, running.statistics())


async def _open_http(
    running: Gateway, file: Path, http: tuple[str, int], nursery: trio.Nursery
) -> str:
    """Answer how it is doing. Returns what the ready line says of it."""
    from simplebus.gateway.metrics import gateway_snapshot, gateway_health
    from simplebus.monitor.dashboard import Dashboard
    from simplebus.server.http.server import start_http_server

    dashboard = Dashboard(
        lambda detailed: gateway_snapshot(running, subtitle=file.name), lambda: gateway_health(running)
    )
    (at, *_) = await start_http_server(dashboard, [http[0]], http[1], nursery)
    return f" http={at}"


async def _say_status(running: Gateway, seconds: float) -> None:
    import trio

    from simplebus.gateway.gateway import log
    from simplebus.server.systemd import notify

    said, next_line = "", trio.current_time() + seconds
    while True:
        await trio.sleep(min(STATUS_S, seconds))
        status = str(running.statistics())
        if status != said:
            notify(f"STATUS={status}")
        if trio.current_time() >= next_line:
            next_line += seconds
            if status != said:
                log.info("%s", status)
                said = status
