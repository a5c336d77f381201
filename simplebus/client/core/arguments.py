"""Checks of public arguments.

Each function raises TypeError for a value of the wrong type and ValueError for a value out of
range. The message names the argument, the received value and the expected one. Publishing bytes
without options, the hot path, calls none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches


def check_seconds(
    name: str, value: float, *, minimum: float = 0.0, maximum: float = math.inf
) -> float:
    """Return `value` if it is a number of seconds from `minimum` to `maximum`."""
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
    """Return `value` if it is a timeout in seconds or None, which means no timeout.

    A negative timeout is allowed and has passed already.
    """
    return value if value is None else check_seconds(name, value, minimum=-math.inf)


def timeout_or_infinity(name: str, value: float | None) -> float:
    """Return a checked timeout in seconds; `math.inf` for None."""
    timeout = check_timeout(name, value)
    return math.inf if timeout is None else timeout


def check_integer(name: str, value: int, *, minimum: int, maximum: int) -> int:
    """Return `value` if it is an integer from `minimum` to `maximum`. A bool is not an integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _type_error(name, "a whole number", value)
    if not minimum <= value <= maximum:
        raise ValueError(f"{name} must be from {minimum} to {maximum}, got {value!r}")
    return value


def check_text(name: str, value: str) -> str:
    """Return `value` if it is a str."""
    if not isinstance(value, str):
        raise _type_error(name, "text", value)
    return value


def reject_unknown_names(unknown_names: Iterable[str], known_names: Iterable[str]) -> None:
    """Raise TypeError for the first of `unknown_names`, with a similar known name as a hint."""
    for name in unknown_names:
        similar_names = get_close_matches(name, known_names, 1)
        hint = (
            f"did you mean {similar_names[0]}?"
            if similar_names
            else f"expected one of {', '.join(known_names)}"
        )
        raise TypeError(f"there is no argument {name!r}; {hint}")


def _type_error(name: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {expected}, got {value!r}")
