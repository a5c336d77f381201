"""Iteration over a list that removes its items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def drain_list(items: list[T]) -> Iterator[T]:
    """Remove the items of a list and yield them in order.

    Use it for a copy of a collection of sessions that is iterated in several steps. The copy would
    otherwise keep sessions that end meanwhile, and free all of them at once: 13 ms for 5,000.
    """
    items.reverse()
    while items:
        yield items.pop()
