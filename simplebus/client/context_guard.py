"""The blocks that a bus is there within: context managers that say so when they are left out.

Rule 1: who uses the block itself as if it were the bus is told how the block begins.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Told:
    """Answers for what is not there."""

    _entry_hint: str

    if not TYPE_CHECKING:  # A type checker tells by itself.

        def __getattr__(self, name: str) -> object:
            raise not_entered_error(name, self._begins)


def not_entered_error(name: str, begins: str) -> AttributeError:
    """Somebody has asked a block for something that is the bus's."""
    return AttributeError(f"{name!r} is asked of what is no bus yet: enter it first, {begins}")


class Block(_Told, AbstractAsyncContextManager[T]):
    """An `async with` block."""

    def __init__(self, inner: AbstractAsyncContextManager[T], begins: str) -> None:
        self._inner = inner
        self._entry_hint = begins

    async def __aenter__(self) -> T:
        return await self._inner.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, traceback)


class BlockingBlock(_Told, AbstractContextManager[T]):
    """A `with` block."""

    def __init__(self, inner: AbstractContextManager[T], begins: str) -> None:
        self._inner = inner
        self._entry_hint = begins

    def __enter__(self) -> T:
        return self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._inner.__exit__(kind, error, traceback)


def guarded_async_context(
    begins: str,
) -> Callable[[Callable[P, AsyncIterator[T]]], Callable[P, GuardedAsyncContext[T]]]:
    """What `asynccontextmanager` makes of a function, and how such a block begins."""

    def decorate(function: Callable[P, AsyncIterator[T]]) -> Callable[P, GuardedAsyncContext[T]]:
        make = asynccontextmanager(function)

        @functools.wraps(function)
        def block(*args: P.args, **options: P.kwargs) -> GuardedAsyncContext[T]:
            return GuardedAsyncContext(make(*args, **options), begins)

        return block

    return decorate


def guarded_context(
    begins: str,
) -> Callable[[Callable[P, Iterator[T]]], Callable[P, GuardedContext[T]]]:
    """What `contextmanager` makes of a function, and how such a block begins."""

    def decorate(function: Callable[P, Iterator[T]]) -> Callable[P, GuardedContext[T]]:
        make = contextmanager(function)

        @functools.wraps(function)
        def block(*args: P.args, **options: P.kwargs) -> GuardedContext[T]:
            return GuardedContext(make(*args, **options), begins)

        return block

    return decorate
