"""Variables of the environment that begin with SIMPLEBUS_: of options, of others, of nothing.

Rule 1: of what no option is only names are told, never values: they may be secrets.
Rule 2: what another command reads is no mistake, and neither is what Kubernetes tells each program
of a service that is called simplebus. Of those the one that an option has, too, is not that
option's: nobody else says the same a second time.

    SIMPLEBUS_PORT=tcp://10.96.0.1:8888     SIMPLEBUS_PORT_8888_TCP=tcp://10.96.0.1:8888
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import typer

from simplebus.config.mistakes import describe_value_error

PREFIX = "SIMPLEBUS_"
_OF_BRIDGES = ("SIMPLEBUS_FROM_", "SIMPLEBUS_TO_")  # And then any of those of clients.
_OF_KUBERNETES = re.compile(
    r"SIMPLEBUS_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP)\w*)?)"
)
_LINK = re.compile(r"(tcp|udp|sctp)://\S+:(\d+)")
"""What Kubernetes, and Docker before, say of where a service is."""


def remove_service_links(environment: MutableMapping[str, str]) -> None:
    """Take what says where a service is, and is called as an option is, from the environment."""
    for name, value in list(environment.items()):
        if name.startswith(PREFIX) and name.endswith("PORT") and (link := _LINK.fullmatch(value)):
            same = environment.get(f"{name}_{link[2]}_{link[1].upper()}")
            if same == value:
                del environment[name]


def unread_variables(
    names: Iterable[str], command: Any, root_command: Any, secrets: Iterable[str]
) -> list[str]:
    """Return a warning for each environment variable that no command reads.

    Args:
        names: The names of all environment variables.
        command: The command `serve`.
        root_command: The command line, whose other commands are searched only if needed.
        secrets: Variables that `serve` reads and that no option sets.
    """
    given = sorted(name for name in names if name.startswith(PREFIX))
    own = set(_options(command))
    if own.issuperset(given):
        return []
    from simplebus.client.credentials import CREDENTIALS_VARIABLE, ENVIRONMENT_VARIABLES

    known = own.union(secrets, _options(root_command), ENVIRONMENT_VARIABLES.values(), (CREDENTIALS_VARIABLE,))
    return [
        f"{name} in the environment is read by nothing{_meant(name, known)}"
        for name in given
        if name not in known
        and not name.startswith(_OF_BRIDGES)
        and not _OF_KUBERNETES.fullmatch(name)
    ]


def find_invalid_variables(command: Any, context: Any) -> dict[Any, str]:
    """The options of a command, but for --config, whose variables make no sense, and why: a
    sentence each."""
    found = {}
    for each in command.params:
        given = None if each.name == "config" else each.value_from_envvar(context)
        try:
            if given is not None:
                each.process_value(context, given)
        except typer.BadParameter as error:
            found[each] = _describe(each, error)
    return found


def describe_invalid_variable(error: typer.BadParameter) -> str | None:
    """What is wrong with a variable, by its name; None for what something else says."""
    if error.ctx is None or error.param is None or error.param.name is None:
        return None
    source = error.ctx.get_parameter_source(error.param.name)
    is_variable = source is not None and source.name == "ENVIRONMENT"
    return _describe(error.param, error) if is_variable else None


def _describe(parameter: Any, error: typer.BadParameter) -> str:
    name = parameter.envvar
    return f"{name}: {describe_value_error(error.message, os.environ.get(name, ''))}"


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
