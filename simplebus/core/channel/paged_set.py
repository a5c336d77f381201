"""Set that grows in small steps."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from simplebus.core.channel.sharded_dict import ShardedDict

T = TypeVar("T", bound=Hashable)

PAGE_SIZE = 128
"""Number of values of a page. Copying a page whose values are not in the cache takes 6 us."""


class PagedSet(Generic[T]):
    """Set for very many values, which are iterated fast, and of which copies are cheap.

    The values are in lists, of which only the last one is not full. A single list would be copied
    as a whole: 4 ms for 180,000 values.
    """

    __slots__ = ("_pages", "_places", "_shared")

    def __init__(self, values: Iterable[T]) -> None:
        """Create a set of these different values."""
        self._pages: list[list[T]] = []
        self._places: ShardedDict[T, int] = ShardedDict()
        """Index of each value in all pages together."""
        self._shared: set[int] = set()
        """Indexes of the pages that must be copied before they change."""
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._pages)

    def __contains__(self, value: object) -> bool:
        return value in self._places

    def share_pages(self) -> list[Collection[T]]:
        """Return the values in pages, which stay the same when the set changes."""
        self._shared.update(range(len(self._pages)))
        return list(self._pages)

    def add(self, value: T) -> None:
        """Add a value that the set does not contain."""
        place = self._places[value] = len(self._places)
        if place % PAGE_SIZE == 0:
            self._pages.append([])
        self._own_page(place // PAGE_SIZE).append(value)

    def remove(self, value: T) -> None:
        """Remove a value. The last value takes its place.

        Raises:
            KeyError: The set does not contain the value.
        """
        place = self._places.pop(value)
        last = self._own_page(len(self._pages) - 1).pop()
        if place < len(self._places):
            self._own_page(place // PAGE_SIZE)[place % PAGE_SIZE] = last
            self._places[last] = place
        if not self._pages[-1]:
            self._pages.pop()

    def _own_page(self, index: int) -> list[T]:
        """Return a page that may be changed."""
        if index in self._shared:
            self._shared.remove(index)
            self._pages[index] = self._pages[index].copy()
        return self._pages[index]

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        sizes = [len(page) for page in self._pages]
        assert all(size == PAGE_SIZE for size in sizes[:-1]), sizes
        assert all(0 < size <= PAGE_SIZE for size in sizes), sizes
        assert {value: place for place, value in enumerate(self)} == dict(self._places)
        assert all(index < len(self._pages) for index in self._shared), self._shared
