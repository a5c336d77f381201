"""`simplebus systemd-unit`: prints systemd units that run this installation.

Problems that would keep the service from running are printed to standard error; the unit is printed
anyway, because they can be fixed later. Invalid options or an invalid configuration end the command
without a unit, because the unit depends on their values.
"""

from __future__ import annotations

import grp
import ipaddress
import math
import os
import stat
import sys
from collections.abc import Collection, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from simplebus.commands.serve.command import exit_for_invalid_options, parse_arguments
from simplebus.config.setting import FILE
from simplebus.console.errors import USAGE_STATUS, fail
from simplebus.console.installation import find_source_tree, install_command

# Time beyond the drain timeout to handle the signal, close connections and exit.
_STOP_MARGIN_SECONDS = 10
# Descriptors of listeners, standard streams and the event loop.
_SPARE_DESCRIPTORS = 256

STATE_DIRECTORY = Path("/var/lib/simplebus")
"""Directory of the unit's StateDirectory."""
_HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
"""Directories that ProtectHome=yes hides from the service."""
_TEMPORARY_DIRECTORIES = (Path("/tmp"), Path("/var/tmp"))
"""Directories that PrivateTmp=yes hides from the service."""
_PRIVILEGED_PORTS = range(1, 1024)


def render_service_unit(
    arguments: Sequence[str],
    *,
    ports: Collection[int],
    drain_seconds: float,
    connections: int,
    installed_in: Sequence[Path],
    files: Sequence[Path] = (),
) -> str:
    """Return a service unit that runs `simplebus serve`.

    Args:
        arguments: Arguments of `serve`.
        ports: Ports that the arguments open.
        drain_seconds: Drain timeout of the arguments.
        connections: Maximum open connections of the arguments.
        installed_in: Paths of Python and the package.
        files: Files that the service reads. Files that only their group may read add the group to
            the unit.
    """
    template = (
        resources.files("simplebus.commands")
        .joinpath("files", "simplebus.service")
        .read_text("utf-8")
    )
    return Template(template).substitute(
        command=" ".join(
            quote_argument(word)
            for word in (sys.executable, "-m", "simplebus", "serve", *arguments)
        ),
        stop_seconds=math.ceil(drain_seconds) + _STOP_MARGIN_SECONDS,
        descriptors=connections + _SPARE_DESCRIPTORS,
        protect_home="read-only" if _is_in_home(installed_in) else "yes",
        groups=" ".join(dict.fromkeys(group for file in files if (group := _file_group(file)))),
        capabilities=(
            "CAP_NET_BIND_SERVICE" if any(port in _PRIVILEGED_PORTS for port in ports) else ""
        ),
    )


def render_socket_unit(addresses: Sequence[tuple[str, int]]) -> str:
    """Return a socket unit for these hosts and ports.

    Raises:
        ValueError: If a host is a name, or a port is 0.
    """
    lines = []
    for host, port in addresses:
        try:
            version = ipaddress.ip_address(host).version
        except ValueError:
            raise ValueError(f"a socket unit needs IP addresses, got the name {host!r}") from None
        if not port:
            raise ValueError("a socket unit needs fixed ports, got 0")
        lines.append(f"ListenStream={host if version == 4 else f'[{host}]'}:{port}")
    template = (
        resources.files("simplebus.commands")
        .joinpath("files", "simplebus.socket")
        .read_text("utf-8")
    )
    return Template(template).substitute(listen="\n".join(dict.fromkeys(lines)))


def quote_argument(word: str) -> str:
    """Return an argument quoted for systemd, see systemd.syntax(7)."""
    word = word.replace("%", "%%").replace("$", "$$")
    if word and not any(c in word for c in " \t\n\r\"'\\;"):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def installed_paths() -> tuple[Path, ...]:
    """Return the paths of the interpreter and the package, as named and with links resolved."""
    python = Path(sys.executable)
    package = Path(str(resources.files("simplebus")))
    return tuple(dict.fromkeys((python, python.resolve(), package, package.resolve())))


def find_problems(
    installed_in: Sequence[Path], files: Sequence[Path] = (), data_dir: Path | None = None
) -> list[str]:
    """Return the reasons why the service could not run, one sentence each.

    Args:
        installed_in: Paths of Python and the package.
        files: Files that the service reads.
        data_dir: Directory that the service writes.
    """
    problems = []
    if data_dir is not None and STATE_DIRECTORY not in (data_dir, *data_dir.parents):
        problems.append(
            f"{data_dir} is not writable for the service: it can write only below {STATE_DIRECTORY}"
        )
    sees_home = _is_in_home(installed_in)
    for file in files:
        if not file.is_absolute():
            problems.append(f"{file} is a relative path: expected an absolute path")
        elif not file.exists():
            problems.append(f"{file} does not exist")
        else:
            if not file.stat().st_mode & stat.S_IROTH and _file_group(file) is None:
                problems.append(
                    f"{file} is not readable for the service: give it to a group other than root, "
                    "run chmod 640 on it, and print the unit again"
                )
            if hidden := find_hidden_directory(file, sees_home=sees_home):
                problems.append(
                    f"{file} is not visible to the service, which sees nothing below {hidden}: "
                    "move it, such as to /etc/simplebus"
                )
    closed_directories = dict.fromkeys(find_closed_directory(place) for place in installed_in)
    for directory in closed_directories:
        if directory is not None:
            problems.append(
                f"{directory} is closed to other users, including the service: install simplebus "
                "and its Python elsewhere, such as in /opt"
            )
    hidden_directories = dict.fromkeys(
        find_hidden_directory(place, sees_home=sees_home) for place in installed_in
    )
    for directory in hidden_directories:
        if directory is not None:
            problems.append(
                f"simplebus or its Python is installed below {directory}, which is not visible to "
                "the service: install both elsewhere, such as in /opt"
            )
    if (tree := find_source_tree()) is not None:
        problems.append(
            f"simplebus runs from its source tree {tree}: install it by `{install_command()}`, "
            "without --editable, so that changes of the tree do not change the service"
        )
    return problems


def find_hidden_directory(path: Path, *, sees_home: bool) -> Path | None:
    """Return the directory above `path` that the unit hides from the service, or None.

    Args:
        path: An absolute path.
        sees_home: True if the unit does not hide home directories.
    """
    hidden = _TEMPORARY_DIRECTORIES if sees_home else (*_TEMPORARY_DIRECTORIES, *_HOMES)
    return next((directory for directory in hidden if path.is_relative_to(directory)), None)


def _is_in_home(installed_in: Sequence[Path]) -> bool:
    return any(place.is_relative_to(home) for place in installed_in for home in _HOMES)


def _file_group(file: Path) -> str | None:
    """Return the group that lets the service read a file that other users may not read.

    The group root is never returned: it may read many files that the service must not read.
    """
    if not file.is_file():
        return None
    status = file.stat()
    if status.st_mode & stat.S_IROTH or not status.st_mode & stat.S_IRGRP or not status.st_gid:
        return None
    try:
        return grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        return str(status.st_gid)


def find_closed_directory(path: Path) -> Path | None:
    """Return the first directory above `place` that other users cannot enter, or None."""
    for directory in reversed(path.parents):
        if not os.stat(directory).st_mode & stat.S_IXOTH:
            return directory
    return None


HELP = (
    "Print a systemd unit that runs this installation.\n\n"
    "Options of [bold]simplebus serve[/bold] may follow and become part of the unit. With --socket "
    "the command prints the socket unit for the same options: with both units, clients can connect "
    "while the service restarts.\n\n\b\n"
    "  simplebus systemd-unit > simplebus.service\n"
    "  simplebus systemd-unit --socket > simplebus.socket\n"
    "  simplebus systemd-unit --host 0.0.0.0 --max-memory 4GiB\n\n"
    "If the command succeeds, copy the file to /etc/systemd/system. With invalid options or an "
    "invalid configuration it prints no unit, so do not redirect its output to an installed unit."
)


def systemd_unit(
    context: typer.Context,
    socket: Annotated[
        bool, typer.Option("--socket", help="Print the socket unit instead of the service unit.")
    ] = False,
) -> None:
    from simplebus.commands.serve.settings import build_plan
    from simplebus.commands.systemd_unit import (
        find_problems,
        installed_paths,
        render_service_unit,
        render_socket_unit,
    )

    configuration = parse_arguments(context.args)
    try:
        plan = build_plan(configuration)
    except ValueError as error:
        exit_for_invalid_options(error)
    options = plan.options
    listeners = (
        (options.hosts, options.port),
        (options.hosts, options.nats_port),
        (options.http_hosts, options.http_port),
    )
    addresses = [(host, port) for hosts, port in listeners if port is not None for host in hosts]
    if socket:
        try:
            typer.echo(render_socket_unit(addresses), nl=False)
        except ValueError as error:
            fail(str(error), status=USAGE_STATUS)
        return
    places = installed_paths()
    files = [configuration.file.document.path] if configuration.file else []
    files += [
        value
        for setting, value in configuration.config.items()
        if setting.kind is FILE and value is not None
    ]
    for problem in find_problems(places, files, options.data_dir):
        typer.echo(f"simplebus: {problem}", err=True)
    nats_connections = 0 if options.nats_port is None else options.nats.limits.connections
    text = render_service_unit(
        context.args,
        ports={port for _, port in addresses},
        drain_seconds=options.drain_seconds,
        connections=plan.settings.limits.connections + nats_connections,
        installed_in=places,
        files=files,
    )
    typer.echo(text, nl=False)
