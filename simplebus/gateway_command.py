"""`simplebus gateway`: modules of a file, run until somebody ends them.

Rule 1: nothing heavy is imported before the command runs.
Rule 2: a file that has a mistake changes nothing: not at the start, and not at SIGHUP.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simplebus.complaints import fail
from simplebus.config_mistakes import ConfigError

if TYPE_CHECKING:
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
) -> None:
    import logging

    import trio

    from simplebus.gateway import plan as plans

    sys.path.insert(0, str(file.resolve().parent))  # Where modules of one's own are.
    try:
        plan = plans.read(file)
    except ConfigError as error:
        fail(str(error), status=2)
    if check:
        for each in plan.modules:
            heard = [source for source, sink in plan.links if sink == each.name]
            typer.echo(f"{each.name}: {each.module}, hears {', '.join(heard) or 'nobody'}")
        typer.echo(f"{file}: {len(plan.modules)} modules, {len(plan.links)} links")
        return
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    trio.run(_run, file, plan, status_seconds)


async def _run(file: Path, plan: object, status_seconds: float) -> None:
    import signal

    import trio

    from simplebus.gateway import plan as plans
    from simplebus.gateway.gateway import log, open_gateway
    from simplebus.server.notify import notify

    assert isinstance(plan, plans.GatewayPlan)
    heard = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    with trio.open_signal_receiver(*heard) as signals:
        async with trio.open_nursery() as nursery:
            ending = trio.Event()

            async def listen(running: Gateway) -> None:
                """Until the second signal to end."""
                async for number in signals:
                    if number != signal.SIGHUP:
                        if ending.is_set():
                            log.warning("ends at once")
                            nursery.cancel_scope.cancel()
                        ending.set()
                        continue
                    try:
                        await running.apply(plans.read(file))
                    except ConfigError as error:
                        log.error("all goes on as before: %s", error)
                    else:
                        log.info("read %s again: %s", file, running.statistics())

            async with open_gateway(plan) as running:
                nursery.start_soon(listen, running)
                nursery.start_soon(_say_status, running, status_seconds)
                typer.echo(f"simplebus gateway ready modules={len(running.names)}")
                sys.stdout.flush()
                notify("READY=1", f"STATUS={running.statistics()}")
                await ending.wait()
                notify("STOPPING=1")
                log.info("ends: %s", running.statistics())
            if lost := running.statistics().lost:
                log.warning("%s messages were not heard out", f"{lost:,}")
            nursery.cancel_scope.cancel()


async def _say_status(running: Gateway, seconds: float) -> None:
    import trio

    from simplebus.gateway.gateway import log
    from simplebus.server.notify import notify

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
