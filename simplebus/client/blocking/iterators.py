"""Loops over a subscription without an event loop: one `for` each, which a generator serves.

Rule 1: a loop settles what it was handed: when it comes round, and when it ends, by how it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Generic, Self, TypeVar

from simplebus.client import leaving
from simplebus.client.core.inbox import Inbox

T = TypeVar("T")


class BlockingLooped(Generic[T]):
    """What a subscription is iterated as. Every `for` over it is a loop of its own."""

    def __init__(self, begin: Callable[[], Iterator[T]], one: Callable[[], T]) -> None:
        self._begin = begin
        self._one = one

    def __iter__(self) -> Iterator[T]:
        return self._begin()

    def __next__(self) -> T:
        """The next one. Says that the one before is processed."""
        return self._one()


class Looping:
    """What a generator does its work within; the inbox knows the loop by it."""

    __slots__ = ("_inbox", "_stands")

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._stands: CodeType | None = None

    def __enter__(self) -> Self:
        self._stands = leaving.statement(3)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is GeneratorExit:
            self._inbox.end_loop(self, leaving.verdict(self._stands, 3))
