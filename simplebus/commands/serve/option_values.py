"""Option values of a command as its function receives them, for every supported typer version.

typer before 0.29 converts paths, enums and lists only when it calls the command's function, and
leaves the unconverted values in `Context.params`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import typer


def convert_params(context: typer.Context) -> None:
    """Replace the values in `context.params` by those that the command's function receives."""
    function = inspect.unwrap(context.command.callback)  # type: ignore[arg-type]
    with context.scope(cleanup=False):
        context.params.update(_value_collector(function)(**context.params))


@functools.cache
def _value_collector(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return a typer callback with the parameters of `function` that returns converted values."""
    context_names = {
        name
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if parameter.annotation is typer.Context
    }

    @functools.wraps(function)
    def collect(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name not in context_names}

    app = typer.Typer(add_completion=False)
    app.command()(collect)
    callback = typer.main.get_command(app).callback
    assert callback is not None
    return callback
