"""Helpers for long work that is a generator, so that other work is possible after each step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


def run_to_end(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end at once. Returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


def drain_list(items: list[T]) -> Iterator[T]:
    """Remove the items of a list and yield them in order.

    Use it for a copy of a collection of sessions that is iterated in several steps. Otherwise the
    copy keeps the sessions that end between the steps, and frees all of them at once: 13 ms for
    5,000 sessions.
    """
    items.reverse()
    while items:
        yield items.pop()
