"""TOML parser for untrusted text.

Every defect of a text raises TOMLDecodeError, also deep nesting: the parser and recursive readers
of its result would otherwise exceed the recursion limit.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from tomllib import TOMLDecodeError
from typing import Any

__all__ = ["TOMLDecodeError", "loads"]

_LEVELS_MAX = 32
_INTEGER_BITS_MAX = 10_000
_LONG_NUMBER = re.compile(r"[\da-fxob_]{2500,}", re.IGNORECASE)
"""Number that Python does not convert from or to decimal digits."""


def loads(text: str) -> dict[str, Any]:
    """Parse TOML. Raises TOMLDecodeError."""
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except TOMLDecodeError:
        raise
    except ValueError:
        raise _too_long(text) from None
    level, depth = [document], 0
    while level:
        if depth > _LEVELS_MAX:
            raise _too_deep()
        if any(_has_long_integer(container) for container in level):
            raise _too_long(text)
        level, depth = (
            [child for container in level for child in _child_containers(container)],
            depth + 1,
        )
    return document


def _children(container: Any) -> Collection[Any]:
    return container.values() if isinstance(container, dict) else container


def _child_containers(container: Any) -> list[Any]:
    return [child for child in _children(container) if isinstance(child, dict | list)]


def _has_long_integer(container: Any) -> bool:
    return any(
        isinstance(child, int) and child.bit_length() > _INTEGER_BITS_MAX
        for child in _children(container)
    )


def _too_long(text: str) -> TOMLDecodeError:
    number = _LONG_NUMBER.search(text)
    start = number.start() if number is not None else 0
    line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
    return TOMLDecodeError(f"the number is too long (at line {line}, column {column})")


def _too_deep() -> TOMLDecodeError:
    return TOMLDecodeError(f"nested too deeply, expected {_LEVELS_MAX} levels at most")
