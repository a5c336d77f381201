"""`simplebus systemd-unit`: units for this installation, with the options of `serve` in them.

Rule 1: what would keep the service from running is said, on standard error; the unit is printed all
the same, as that may be put right behind it.
"""

from __future__ import annotations

import ipaddress
import math
import os
import stat
import sys
from collections.abc import Collection, Sequence
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import Annotated, cast

import typer

from simplebus.commands.check_config import serve_command_of
from simplebus.commands.serve.command import fail_for
from simplebus.console.errors import USAGE_STATUS, fail

# Beyond the drain: to notice the signal, to say farewell, to exit.
_STOP_MARGIN_SECONDS = 10
# Listeners, standard streams, the event loop's own.
_SPARE_DESCRIPTORS = 256

STATE_DIRECTORY = Path("/var/lib/simplebus")
"""What the unit's StateDirectory amounts to."""
_HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
_PRIVILEGED_PORTS = range(1, 1024)


def unit(
    arguments: Sequence[str],
    *,
    ports: Collection[int],
    drain_seconds: float,
    connections: int,
    installed_in: Sequence[Path],
) -> str:
    """The text of a unit that runs `simplebus serve` with these arguments.

    The other parameters say what the arguments amount to.
    """
    template = (
        resources.files("simplebus.commands")
        .joinpath("files", "simplebus.service")
        .read_text("utf-8")
    )
    at_home = any(place.is_relative_to(home) for place in installed_in for home in _HOMES)
    return Template(template).substitute(
        command=" ".join(
            quoted(word) for word in (sys.executable, "-m", "simplebus", "serve", *arguments)
        ),
        stop_seconds=math.ceil(drain_seconds) + _STOP_MARGIN_SECONDS,
        descriptors=connections + _SPARE_DESCRIPTORS,
        protect_home="read-only" if at_home else "yes",
        capabilities=(
            "CAP_NET_BIND_SERVICE" if any(port in _PRIVILEGED_PORTS for port in ports) else ""
        ),
    )


def socket_unit(addresses: Sequence[tuple[str, int]]) -> str:
    """The text of a unit that listens on these hosts and ports. Raises ValueError for a host that
    is a name, and for a port that is not known before."""
    lines = []
    for host, port in addresses:
        try:
            version = ipaddress.ip_address(host).version
        except ValueError:
            raise ValueError(f"a socket unit needs addresses, {host!r} is a name") from None
        if not port:
            raise ValueError("a socket unit needs ports, and 0 stands for any")
        lines.append(f"ListenStream={host if version == 4 else f'[{host}]'}:{port}")
    template = (
        resources.files("simplebus.commands")
        .joinpath("files", "simplebus.socket")
        .read_text("utf-8")
    )
    return Template(template).substitute(listen="\n".join(dict.fromkeys(lines)))


def quoted(word: str) -> str:
    """A word of a command line as systemd reads it: see systemd.syntax(7)."""
    word = word.replace("%", "%%").replace("$", "$$")
    if word and not any(c in word for c in " \t\n\r\"'\\;"):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def installation() -> tuple[Path, ...]:
    """Where the service's files lie: the interpreter, as named and in truth, and the package."""
    python = Path(sys.executable)
    package = Path(str(resources.files("simplebus")))
    return tuple(dict.fromkeys((python, python.resolve(), package, package.resolve())))


def complaints(
    installed_in: Sequence[Path], files: Sequence[Path] = (), data_dir: Path | None = None
) -> list[str]:
    """Why a service of this installation, which reads these files and writes into this directory,
    could not run, one sentence each."""
    found = []
    if data_dir is not None and STATE_DIRECTORY not in (data_dir, *data_dir.parents):
        found.append(
            f"{data_dir} is closed to the service: it may write only in {STATE_DIRECTORY} and below"
        )
    for file in files:
        if not file.is_absolute():
            found.append(f"{file} is not found by the service: write the whole path")
        elif not file.exists():
            found.append(f"{file} does not exist")
        elif not file.stat().st_mode & stat.S_IROTH:
            found.append(
                f"{file} is closed to other users, and so to the service: give it to a group, and "
                "name the group in the unit as SupplementaryGroups="
            )
    closed = dict.fromkeys(unreadable(place) for place in installed_in)
    for directory in closed:
        if directory is not None:
            found.append(
                f"{directory} is closed to other users, and so to the service: install simplebus "
                "and its Python elsewhere, such as in /opt"
            )
    try:
        metadata.version("simplebus")
    except metadata.PackageNotFoundError:
        found.append(
            "simplebus is run from its source: the service finds it only when it is installed"
        )
    return found


def unreadable(place: Path) -> Path | None:
    """The first directory above `place` that another user may not enter, if there is one."""
    for directory in reversed(place.parents):
        if not os.stat(directory).st_mode & stat.S_IXOTH:
            return directory
    return None


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
    from simplebus.commands.serve.settings import planned
    from simplebus.commands.systemd_unit import complaints, installation, socket_unit, unit

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
