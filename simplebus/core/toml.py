"""Reading TOML that others have written.

Rule 1: whatever is wrong with a text is a TOMLDecodeError, however deeply it is nested: nothing of
ours is nested deeper than a few levels, and those who look at what was read go down level by level.
"""

from __future__ import annotations

import tomllib
from tomllib import TOMLDecodeError
from typing import Any

__all__ = ["TOMLDecodeError", "loads"]

_LEVELS_MAX = 32


def loads(text: str) -> dict[str, Any]:
    """What a text says. Raises TOMLDecodeError."""
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    level, depth = [found], 0
    while level:
        if depth > _LEVELS_MAX:
            raise _too_deep()
        level, depth = [below for each in level for below in _below(each)], depth + 1
    return found


def _below(each: Any) -> list[Any]:
    """The tables and arrays in one."""
    inside = each.values() if isinstance(each, dict) else each
    return [below for below in inside if isinstance(below, dict | list)]


def _too_deep() -> TOMLDecodeError:
    return TOMLDecodeError(f"it is nested too deeply, expected {_LEVELS_MAX} levels at most")
