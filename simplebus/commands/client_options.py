"""The options of commands that connect to a bus: whom they trust, and who they are.

Rule 1: no secret has an option: whoever lists processes would read it. A password is in the
environment, in a file, or asked for.
Rule 2: what an option says is what the environment would say: there is one place where it is read.
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
"""Under which heading the help lists them."""


_OPTIONS: dict[str, Any] = {
    "user": Annotated[
        str | None,
        option(
            "--user",
            "Who to be, where the bus asks. The password is SIMPLEBUS_PASSWORD's, or asked for; "
            "SIMPLEBUS_TOKEN is a token instead of both.",
            panel=ACCESS,
            metavar="NAME",
            show_default=False,
        ),
    ],
    "credentials": Annotated[
        Path | None,
        option(
            "--credentials",
            "A TOML file of user and password, or token, and of ca, cert and key.",
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
            "Who may have signed the bus's certificate, as PEM, for a URL of TLS, which "
            "begins with simplebuss:// or https://. Without it, whom this system trusts.",
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
            "A certificate to show to a bus that asks for one, as PEM.",
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
            "Its private key, where it is not in the same file.",
            panel=ACCESS,
            metavar="FILE",
            parser=Path,
            show_default=False,
        ),
    ],
}


def with_access(command: Callable[..., R]) -> Callable[..., R]:
    """A command that connects to a bus, with these options besides its own."""

    @functools.wraps(command)
    def run(*args: Any, **values: Any) -> R:
        _say({name: values.pop(name, None) for name in _OPTIONS})
        return command(*args, **values)

    own = inspect.signature(command)
    hints = typing.get_type_hints(command, include_extras=True)
    parameters = [
        each.replace(annotation=hints.get(name, each.annotation))
        for name, each in own.parameters.items()
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in _OPTIONS.items()
    ]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {**hints, **_OPTIONS}
    return run


def _say(given: dict[str, Any]) -> None:
    """Have the environment say what the options do, and fail if that makes no sense."""
    from simplebus.client.credentials import CREDENTIALS_VARIABLE, ENVIRONMENT_VARIABLES, Access

    variables = {name: ENVIRONMENT_VARIABLES.get(name.removeprefix("tls_"), CREDENTIALS_VARIABLE) for name in given}
    for name, value in given.items():
        if value is not None:
            os.environ[variables[name]] = str(value)
    try:
        found = Access.from_environment()
    except (ValueError, OSError) as error:
        fail(str(error), status=2)
    if found.user and not found.password:
        if not sys.stdin.isatty():
            fail(f"user {found.user!r} has no password: set {ENVIRONMENT_VARIABLES['password']}", status=2)
        os.environ[ENVIRONMENT_VARIABLES["password"]] = typer.prompt("Password", hide_input=True)
