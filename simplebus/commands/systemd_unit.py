"""`simplebus systemd-unit`: units for this installation, with the options of `serve` in them.

Rule 1: what would keep the service from running is said, on standard error; the unit is printed all
the same, as that may be put right behind it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from simplebus.commands.config import serve_command_of
from simplebus.commands.serve import fail_for
from simplebus.complaints import USAGE_STATUS, fail

HELP = (
    "Print a systemd unit that runs this installation.\n\n"
    "Options of [bold]simplebus serve[/bold] may follow; they become part of it. With --socket it "
    "is the unit that listens, for the same options: with both, nobody is refused while the "
    "service is started again.\n\n\b\n"
    "  simplebus systemd-unit > /etc/systemd/system/simplebus.service\n"
    "  simplebus systemd-unit --socket > /etc/systemd/system/simplebus.socket\n"
    "  simplebus systemd-unit --host 0.0.0.0 --max-memory 4GiB"
)


def systemd_unit(
    context: typer.Context,
    socket: Annotated[
        bool, typer.Option("--socket", help="Print the socket unit, not the service.")
    ] = False,
) -> None:
    from simplebus.commands.serving import planned
    from simplebus.commands.unit import complaints, installation, socket_unit, unit

    with serve_command_of().make_context("simplebus serve", list(context.args)) as given:
        try:
            plan = planned(cast(typer.Context, given))
        except ValueError as error:
            fail_for(error)
        values = given.params
    options = plan.options
    doors = (
        (options.hosts, options.port),
        (options.hosts, options.nats_port),
        (options.http_hosts, options.http_port),
    )
    open_doors = [(host, port) for hosts, port in doors if port is not None for host in hosts]
    if socket:
        try:
            typer.echo(socket_unit(open_doors), nl=False)
        except ValueError as error:
            fail(str(error), status=USAGE_STATUS)
        return
    places = installation()
    files = [values["config"].path] if values["config"] else []
    paths = {name: each for name, each in values.items() if isinstance(each, Path)}
    files += [path for name, path in paths.items() if name != "data_dir"]
    for complaint in complaints(places, files, values["data_dir"]):
        typer.echo(f"simplebus: {complaint}", err=True)
    guests = 0 if options.nats_port is None else options.nats.limits.connections
    text = unit(
        context.args,
        ports={port for _, port in open_doors},
        drain_seconds=options.drain_seconds,
        connections=plan.settings.limits.connections + guests,
        installed_in=places,
    )
    typer.echo(text, nl=False)
