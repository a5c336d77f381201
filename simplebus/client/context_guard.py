"""Context managers that explain a missing `with` or `async with`.

`simplebus.connect(…)` returns a context manager, not a bus. Using it as a bus raises an
AttributeError that shows the right statement.
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


class _NotEnteredGuard:
    """Base class that raises a helpful error for attributes of the object that `with` returns."""

    _entry_hint: str

    if not TYPE_CHECKING:  # A type checker reports the missing attribute itself.

        def __getattr__(self, name: str) -> object:
            raise not_entered_error(name, self._entry_hint)


def not_entered_error(name: str, entry_hint: str) -> AttributeError:
    """Return the error for an attribute access before the `with` statement."""
    return AttributeError(
        f"{name!r} was used before the context manager was entered; expected {entry_hint}"
    )


class GuardedAsyncContext(_NotEnteredGuard, AbstractAsyncContextManager[T]):
    """Guarded context manager for `async with`."""

    def __init__(self, inner: AbstractAsyncContextManager[T], entry_hint: str) -> None:
        self._inner = inner
        self._entry_hint = entry_hint

    async def __aenter__(self) -> T:
        return await self._inner.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, traceback)


class GuardedContext(_NotEnteredGuard, AbstractContextManager[T]):
    """Guarded context manager for `with`."""

    def __init__(self, inner: AbstractContextManager[T], entry_hint: str) -> None:
        self._inner = inner
        self._entry_hint = entry_hint

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
    entry_hint: str,
) -> Callable[[Callable[P, AsyncIterator[T]]], Callable[P, GuardedAsyncContext[T]]]:
    """Return a decorator like `asynccontextmanager`; errors show the statement `entry_hint`."""

    def decorate(function: Callable[P, AsyncIterator[T]]) -> Callable[P, GuardedAsyncContext[T]]:
        make = asynccontextmanager(function)

        @functools.wraps(function)
        def block(*args: P.args, **options: P.kwargs) -> GuardedAsyncContext[T]:
            return GuardedAsyncContext(make(*args, **options), entry_hint)

        return block

    return decorate


def guarded_context(
    entry_hint: str,
) -> Callable[[Callable[P, Iterator[T]]], Callable[P, GuardedContext[T]]]:
    """Return a decorator like `contextmanager`; errors show the statement `entry_hint`."""

    def decorate(function: Callable[P, Iterator[T]]) -> Callable[P, GuardedContext[T]]:
        make = contextmanager(function)

        @functools.wraps(function)
        def block(*args: P.args, **options: P.kwargs) -> GuardedContext[T]:
            return GuardedContext(make(*args, **options), entry_hint)

        return block

    return decorate
