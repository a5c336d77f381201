"""What a handler may be, in both clients.

Rule 1: a function that nobody would run to its end is refused when it is registered; where that
cannot be seen, its message is not acknowledged.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

Handler = Callable[[Any], Awaitable[object] | object]

# A bus answers a question before it sends messages. What it has for a program when it answers comes
# before its next answer: when nothing came by then, it had nothing.
QUIET_ANSWERS = 2


def check_handler(handler: Handler, *, may_wait: bool) -> None:
    """Raise TypeError for what is no handler; `may_wait`: it may be an async function."""
    if not callable(handler):
        raise TypeError(f"a handler must be a function, got {handler!r}")
    if inspect.isasyncgenfunction(handler) or inspect.isgeneratorfunction(handler):
        raise TypeError(
            f"the handler {handler!r} holds a yield, so calling it runs nothing of it; expected a "
            "function that returns"
        )
    if inspect.iscoroutinefunction(handler) and not may_wait:
        raise TypeError(
            f"the handler {handler!r} is an async function, which needs an event loop; expected a "
            "plain one, or a bus of simplebus.connect"
        )


def check_outcome(outcome: object) -> None:
    """Raise TypeError for what a handler has returned instead of doing its work."""
    if outcome is None:
        return
    if inspect.iscoroutine(outcome):
        outcome.close()  # Otherwise Python warns that nobody has awaited it.
    elif not (inspect.isgenerator(outcome) or inspect.isasyncgen(outcome)):
        return
    raise TypeError(
        f"the handler returned {outcome!r} that nobody runs; expected it to do its work"
    )
