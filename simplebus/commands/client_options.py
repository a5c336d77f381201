"""Options of every command that connects to a server: credentials and TLS.

Secrets have no options, because every user can list command lines. The options set the environment
variables that the client reads.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from simplebus.config.parse import option
from simplebus.console.errors import fail

R = TypeVar("R")

ACCESS = "Access"
"""Heading of these options in the help."""


_OPTIONS: dict[str, Any] = {
    "user": Annotated[
        str | None,
        option(
            "--user",
            "User name, if the server needs one. The password is read from SIMPLEBUS_PASSWORD or "
            "the terminal. SIMPLEBUS_TOKEN is a token that replaces both.",
            panel=ACCESS,
            metavar="NAME",
            show_default=False,
        ),
    ],
    "credentials": Annotated[
        Path | None,
        option(
            "--credentials",
            "TOML file with user and password, or token, and with ca, cert and key.",
            panel=ACCESS,
            metavar="FILE",
            parser=Path,
            show_default=False,
        ),
    ],
    "tls_ca": Annotated[
        Path | None,
        option(
            "--tls-ca",
            "PEM file of the certificate authorities to trust, for a URL with simplebuss:// or "
            "https://. By default, the system's authorities.",
            panel=ACCESS,
            metavar="FILE",
            parser=Path,
            show_default=False,
        ),
    ],
    "tls_cert": Annotated[
        Path | None,
        option(
            "--tls-cert",
            "PEM file with a client certificate, for a server that asks for one.",
            panel=ACCESS,
            metavar="FILE",
            parser=Path,
            show_default=False,
        ),
    ],
    "tls_key": Annotated[
        Path | None,
        option(
            "--tls-key",
            "PEM file with the private key of --tls-cert, unless it is in the same file.",
            panel=ACCESS,
            metavar="FILE",
            parser=Path,
            show_default=False,
        ),
    ],
}


def with_client_options(command: Callable[..., R]) -> Callable[..., R]:
    """Return `command` with the client options added to its own."""

    @functools.wraps(command)
    def run(*args: Any, **values: Any) -> R:
        _apply_to_environment({name: values.pop(name, None) for name in _OPTIONS})
        return command(*args, **values)

    signature = inspect.signature(command)
    hints = typing.get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints.get(name, parameter.annotation))
        for name, parameter in signature.parameters.items()
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in _OPTIONS.items()
    ]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {**hints, **_OPTIONS}
    return run


def _apply_to_environment(options: dict[str, Any]) -> None:
    """Set the client's environment variables from the options; exit if they are invalid."""
    from simplebus.client.credentials import CREDENTIALS_VARIABLE, ENVIRONMENT_VARIABLES, Access

    variables = {
        name: ENVIRONMENT_VARIABLES.get(name.removeprefix("tls_"), CREDENTIALS_VARIABLE)
        for name in options
    }
    for name, value in options.items():
        if value is not None:
            os.environ[variables[name]] = str(value)
    try:
        access = Access.from_environment()
    except (ValueError, OSError) as error:
        fail(str(error), status=2)
    if access.user and not access.password:
        if not sys.stdin.isatty():
            fail(
                f"user {access.user!r} has no password: set {ENVIRONMENT_VARIABLES['password']}",
                status=2,
            )
        os.environ[ENVIRONMENT_VARIABLES["password"]] = typer.prompt("Password", hide_input=True)
