"""Checks of what a caller gives: each error names the argument, what came and what was expected.

Rule 1: TypeError for what is of the wrong kind, ValueError for what is out of range.
Rule 2: they stand where a call is slow anyway. What is published as plain bytes meets none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches


def seconds(name: str, given: float, *, least: float = 0.0, most: float = math.inf) -> float:
    """A span of time."""
    if isinstance(given, str | bytes):
        raise _wrong_kind(name, "seconds", given)
    try:
        is_in_range = least <= given <= most
    except TypeError:
        raise _wrong_kind(name, "seconds", given) from None
    if not is_in_range:
        upper = "on" if most == math.inf else f"to {most:g}"
        raise ValueError(f"{name} must be seconds from {least:g} {upper}, got {given!r}")
    return given


def patience(name: str, given: float | None) -> float | None:
    """How long somebody waits: None for ever, and not at all below 0."""
    return given if given is None else seconds(name, given, least=-math.inf)


def limit(name: str, given: float | None) -> float:
    """The same as a number."""
    found = patience(name, given)
    return math.inf if found is None else found


def whole(name: str, given: int, *, least: int, most: int) -> int:
    """A whole number."""
    if not isinstance(given, int) or isinstance(given, bool):
        raise _wrong_kind(name, "a whole number", given)
    if not least <= given <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {given!r}")
    return given


def text(name: str, given: str) -> str:
    """A text."""
    if not isinstance(given, str):
        raise _wrong_kind(name, "text", given)
    return given


def refuse_unknown(unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError if there are arguments that nobody knows."""
    for name in unknown:
        alike = get_close_matches(name, known, 1)
        hint = f"did you mean {alike[0]}?" if alike else f"expected one of {', '.join(known)}"
        raise TypeError(f"there is no argument {name!r}; {hint}")


def _wrong_kind(name: str, expected: str, given: object) -> TypeError:
    return TypeError(f"{name} must be {expected}, got {given!r}")
