"""Checks of what a caller gives: each error names the argument, what came and what was expected.

Rule 1: TypeError for what is of the wrong kind, ValueError for what is out of range.
Rule 2: they stand where a call is slow anyway. What is published as plain bytes meets none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches


def check_seconds(name: str, value: float, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
    """A span of time."""
    if isinstance(value, str | bytes):
        raise _type_error(name, "seconds", value)
    try:
        is_in_range = minimum <= value <= maximum
    except TypeError:
        raise _type_error(name, "seconds", value) from None
    if not is_in_range:
        upper = "on" if maximum == math.inf else f"to {maximum:g}"
        raise ValueError(f"{name} must be seconds from {minimum:g} {upper}, got {value!r}")
    return value


def check_timeout(name: str, value: float | None) -> float | None:
    """How long somebody waits: None for ever, and not at all below 0."""
    return value if value is None else check_seconds(name, value, minimum=-math.inf)


def timeout_or_infinity(name: str, value: float | None) -> float:
    """The same as a number."""
    timeout = check_timeout(name, value)
    return math.inf if timeout is None else timeout


def check_integer(name: str, value: int, *, minimum: int, maximum: int) -> int:
    """A whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _type_error(name, "a whole number", value)
    if not minimum <= value <= maximum:
        raise ValueError(f"{name} must be from {minimum} to {maximum}, got {value!r}")
    return value


def check_text(name: str, value: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise _type_error(name, "text", value)
    return value


def reject_unknown_names(unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError if there are arguments that nobody knows."""
    for name in unknown:
        similar_names = get_close_matches(name, known, 1)
        hint = f"did you mean {similar_names[0]}?" if similar_names else f"expected one of {', '.join(known)}"
        raise TypeError(f"there is no argument {name!r}; {hint}")


def _type_error(name: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {expected}, got {value!r}")
