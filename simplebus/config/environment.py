"""Environment variables that begin with `SIMPLEBUS_`.

Warnings about unknown variables contain names only, because values may be secrets. Kubernetes sets
variables for each service; those of a service named `simplebus` look like ours and are ignored:

    SIMPLEBUS_PORT=tcp://10.96.0.1:8888     SIMPLEBUS_PORT_8888_TCP=tcp://10.96.0.1:8888
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import typer

from simplebus.config.server_schema import SETTINGS
from simplebus.config.setting import PREFIX

NATS_SECRETS = ("SIMPLEBUS_NATS_TOKEN", "SIMPLEBUS_NATS_USER", "SIMPLEBUS_NATS_PASSWORD")
"""Environment variables with a token, or a user and password, that NATS clients must present."""
ENGINE_SECRETS = {
    "user": "SIMPLEBUS_ENGINE_USER",
    "password": "SIMPLEBUS_ENGINE_PASSWORD",
    "token": "SIMPLEBUS_ENGINE_TOKEN",
    "seed": "SIMPLEBUS_ENGINE_SEED",
}
"""Environment variables with the server's NATS credentials: user and password, token, or nkey seed.

They have no options, because every user can list command lines.
"""
_BRIDGE_PREFIXES = ("SIMPLEBUS_FROM_", "SIMPLEBUS_TO_")  # Then any variable of clients.
_KUBERNETES_NAME = re.compile(
    r"SIMPLEBUS_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP)\w*)?)"
)
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://\S+:(\d+)")
"""Address of a service, as Kubernetes and Docker set it."""


def remove_service_links(environment: MutableMapping[str, str]) -> None:
    """Remove service addresses of Kubernetes that have the name of an option's variable."""
    for name, value in list(environment.items()):
        if (
            name.startswith(PREFIX)
            and name.endswith("PORT")
            and (link := _SERVICE_LINK.fullmatch(value))
        ):
            port_value = environment.get(f"{name}_{link[2]}_{link[1].upper()}")
            if port_value == value:
                del environment[name]


def unread_variables(names: Iterable[str], root_command: Any) -> list[str]:
    """Return a warning for each environment variable that no command reads.

    Args:
        names: The names of all environment variables.
        root_command: The command line, whose commands are searched only if needed.
    """
    variables = sorted(name for name in names if name.startswith(PREFIX))
    names_read = {PREFIX + "CONFIG", *NATS_SECRETS, *ENGINE_SECRETS.values()} | {
        spelled.variable for setting in SETTINGS.values() for spelled in (setting, *setting.former)
    }
    if names_read.issuperset(variables):
        return []
    from simplebus.client.credentials import CREDENTIALS_VARIABLE, ENVIRONMENT_VARIABLES

    names_read.update(
        _variables(root_command), ENVIRONMENT_VARIABLES.values(), (CREDENTIALS_VARIABLE,)
    )
    return [
        f"no command reads {name} in the environment{_suggestion(name, names_read)}"
        for name in variables
        if name not in names_read
        and not name.startswith(_BRIDGE_PREFIXES)
        and not _KUBERNETES_NAME.fullmatch(name)
    ]


def describe_invalid_variable(error: typer.BadParameter) -> str | None:
    """Return the error with the variable's name; None if the value is not from the environment."""
    if error.ctx is None or error.param is None or error.param.name is None:
        return None
    source = error.ctx.get_parameter_source(error.param.name)
    if source is None or source.name != "ENVIRONMENT":
        return None
    name: Any = error.param.envvar
    return f"{name}: {error.message}"


def _suggestion(name: str, known_names: Iterable[str]) -> str:
    names = [known_name.removeprefix(PREFIX) for known_name in sorted(known_names)]
    matches = difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1)
    return f"; did you mean {PREFIX}{matches[0]}?" if matches else ""


def _variables(command: Any) -> Iterator[str]:
    """Yield the variables of a command's options and of its subcommands."""
    for parameter in command.params:
        variable = parameter.envvar
        yield from [variable] if isinstance(variable, str) else variable or ()
    for subcommand in getattr(command, "commands", {}).values():
        yield from _variables(subcommand)
