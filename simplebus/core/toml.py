"""TOML parser for untrusted text.

Every defect of a text raises TOMLDecodeError, also deep nesting: the parser and recursive readers
of its result would otherwise exceed the recursion limit.
"""

from __future__ import annotations

import tomllib
from tomllib import TOMLDecodeError
from typing import Any

__all__ = ["TOMLDecodeError", "loads"]

_LEVELS_MAX = 32


def loads(text: str) -> dict[str, Any]:
    """Parse TOML. Raises TOMLDecodeError."""
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    level, depth = [document], 0
    while level:
        if depth > _LEVELS_MAX:
            raise _too_deep()
        level, depth = [child for each in level for child in _child_containers(each)], depth + 1
    return document


def _child_containers(container: Any) -> list[Any]:
    children = container.values() if isinstance(container, dict) else container
    return [child for child in children if isinstance(child, dict | list)]


def _too_deep() -> TOMLDecodeError:
    return TOMLDecodeError(f"nested too deeply, expected {_LEVELS_MAX} levels at most")
