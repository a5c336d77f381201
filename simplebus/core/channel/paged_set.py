"""Set that grows in small steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

PAGE_SIZE = 16 * 1024
"""Number of values of a page."""


class PagedSet(Generic[T]):
    """Set for very many values, which are iterated fast.

    Consists of dicts, of which only the last one is not full. A single dict would copy all values
    when it grows: 7 ms at 175,000 values. In a `ShardedDict`, values that are neighbors in memory
    are in different parts: iteration over 200,000 values takes 3.5 ms instead of 1 ms.
    """

    __slots__ = ("_pages",)

    def __init__(self, values: Iterable[T]) -> None:
        """Create a set of these different values."""
        self._pages: list[dict[T, None]] = []
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return sum(map(len, self._pages))

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._pages)

    def __contains__(self, value: object) -> bool:
        return self._find_page(value) is not None

    def add(self, value: T) -> None:
        """Add a value that the set does not contain."""
        if not self._pages or len(self._pages[-1]) == PAGE_SIZE:
            self._pages.append({})
        self._pages[-1][value] = None

    def remove(self, value: T) -> None:
        """Remove a value that the set contains. A value of the last page replaces it."""
        page, last = self._find_page(value), self._pages[-1]
        assert page is not None
        del page[value]
        if page is not last:
            moved, _ = last.popitem()
            page[moved] = None
        if not last:
            self._pages.pop()

    def _find_page(self, value: object) -> dict[T, None] | None:
        for page in self._pages:
            if value in page:
                return page
        return None

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        sizes = [len(page) for page in self._pages]
        assert all(size == PAGE_SIZE for size in sizes[:-1]), sizes
        assert all(0 < size <= PAGE_SIZE for size in sizes), sizes
        assert len(set(self)) == len(self)
