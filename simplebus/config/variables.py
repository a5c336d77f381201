"""Variables of the environment that begin with SIMPLEBUS_: read by nothing, or set by others.

Rule 1: only names are told, never values: they may be secrets.
Rule 2: what another command reads is no mistake, and neither is what Kubernetes tells each program
of a service that is called simplebus. Of those the one that an option has, too, is not that
option's: nobody else says the same a second time.

    SIMPLEBUS_PORT=tcp://10.96.0.1:8888     SIMPLEBUS_PORT_8888_TCP=tcp://10.96.0.1:8888
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

PREFIX = "SIMPLEBUS_"
_OF_BRIDGES = ("SIMPLEBUS_FROM_", "SIMPLEBUS_TO_")  # And then any of those of clients.
_OF_KUBERNETES = re.compile(
    r"SIMPLEBUS_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP)\w*)?)"
)
_LINK = re.compile(r"(tcp|udp|sctp)://\S+:(\d+)")
"""What Kubernetes, and Docker before, say of where a service is."""


def leave_out_links(environment: MutableMapping[str, str]) -> None:
    """Take what says where a service is, and is called as an option is, from the environment."""
    for name, value in list(environment.items()):
        if name.startswith(PREFIX) and name.endswith("PORT") and (link := _LINK.fullmatch(value)):
            same = environment.get(f"{name}_{link[2]}_{link[1].upper()}")
            if same == value:
                del environment[name]


def unread(environment: Iterable[str], command: Any) -> list[str]:
    """A sentence for each variable, of these names, that no command reads. `command` is `serve`."""
    given = sorted(name for name in environment if name.startswith(PREFIX))
    own = set(_options(command))
    if own.issuperset(given):
        return []  # As nearly always: the other commands need not be loaded.
    known = own | set(_secrets()) | set(_others())
    return [
        f"{name} in the environment is read by nothing{_meant(name, known)}"
        for name in given
        if name not in known
        and not name.startswith(_OF_BRIDGES)
        and not _OF_KUBERNETES.fullmatch(name)
    ]


def _meant(name: str, known: Iterable[str]) -> str:
    names = [each.removeprefix(PREFIX) for each in sorted(known)]
    near = difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1)
    return f"; did you mean {PREFIX}{near[0]}?" if near else ""


def _options(command: Any) -> Iterator[str]:
    """The variables of a command's options, and of the commands below it."""
    for parameter in command.params:
        variable = parameter.envvar
        yield from [variable] if isinstance(variable, str) else variable or ()
    for each in getattr(command, "commands", {}).values():
        yield from _options(each)


def _secrets() -> Iterator[str]:
    """What `serve` reads that is no option."""
    from simplebus.commands import engine_flags, nats_flags

    yield from nats_flags.SECRETS
    yield from engine_flags.SECRETS.values()


def _others() -> Iterator[str]:
    """What other commands and programs read."""
    import typer

    from simplebus.cli import app
    from simplebus.client.access import FILE_VARIABLE, VARIABLES

    yield from _options(typer.main.get_command(app))
    yield from VARIABLES.values()
    yield FILE_VARIABLE
