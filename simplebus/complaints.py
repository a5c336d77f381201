"""How a command says what went wrong.

Rule 1: one sentence on standard error, and an exit status.
"""

from __future__ import annotations

from typing import NoReturn

import typer


def fail(text: str, *, status: int = 1) -> NoReturn:
    """Say it on standard error and end the command."""
    typer.echo(f"simplebus: {text}", err=True)
    raise typer.Exit(status)


def sentence(error: BaseException) -> str:
    """What an error says, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
