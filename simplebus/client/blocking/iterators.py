"""View of a blocking subscription as messages or batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class BlockingIterable(Generic[T]):
    """View of a subscription as messages or batches. Every `for` gets its own iterator."""

    def __init__(self, new_iterator: Callable[[], Iterator[T]], get: Callable[[], T]) -> None:
        self._new_iterator = new_iterator
        self._get = get

    def __iter__(self) -> Iterator[T]:
        return self._new_iterator()

    def __next__(self) -> T:
        """Return the next item. Acknowledges the one before."""
        return self._get()
