"""Set that grows in small steps."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from simplebus.core.channel.sharded_dict import ShardedDict

T = TypeVar("T", bound=Hashable)

PAGE_SIZE = 128
"""Number of values of a page. Copying it takes 6 us if they are not in the processor's cache."""


class PagedSet(Generic[T]):
    """Set for very many values, which are iterated fast and can be shared without copying them.

    The values are in lists, of which only the last one is not full. A single list would be copied
    as a whole: 4 ms for 180,000 values.
    """

    __slots__ = ("_length", "_pages", "_places", "_shared_bits")

    def __init__(self, values: Iterable[T]) -> None:
        """Create a set of these different values."""
        self._pages: list[list[T]] = []
        self._length = 0
        self._places: ShardedDict[T, int] | None = None
        """Index of each value, counted through all pages. None while there is only one page."""
        self._shared_bits = 0
        """Bits of the pages that must be copied before they change, the first page's lowest."""
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._pages)

    def __contains__(self, value: object) -> bool:
        if self._places is not None:
            return value in self._places
        return any(value in page for page in self._pages)

    def share_pages(self) -> list[Collection[T]]:
        """Return the values in pages, which stay the same when the set changes."""
        self._shared_bits = (1 << len(self._pages)) - 1
        return list(self._pages)

    def add(self, value: T) -> None:
        """Add a value that the set does not contain."""
        place = self._length
        if place % PAGE_SIZE == 0:
            self._pages.append([])
            if place and self._places is None:
                self._places = ShardedDict()
                for index, each in enumerate(self):
                    self._places[each] = index
        self._own_page(place // PAGE_SIZE).append(value)
        if self._places is not None:
            self._places[value] = place
        self._length += 1

    def remove(self, value: T) -> None:
        """Remove a value. The last value takes its place.

        Raises:
            KeyError: The set does not contain the value.
        """
        place = self._pop_place(value)
        last = self._own_page(len(self._pages) - 1).pop()
        self._length -= 1
        if place < self._length:
            self._own_page(place // PAGE_SIZE)[place % PAGE_SIZE] = last
            if self._places is not None:
                self._places[last] = place
        if not self._pages[-1]:
            self._pages.pop()

    def _pop_place(self, value: T) -> int:
        """Return the index of a value, and forget it. Raises KeyError."""
        if self._places is not None:
            return self._places.pop(value)
        if value not in self:
            raise KeyError(value)
        return self._pages[0].index(value)

    def _own_page(self, index: int) -> list[T]:
        """Return a page that may be changed."""
        bit = 1 << index
        if self._shared_bits & bit:
            self._shared_bits ^= bit
            self._pages[index] = self._pages[index].copy()
        return self._pages[index]

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        sizes = [len(page) for page in self._pages]
        assert all(size == PAGE_SIZE for size in sizes[:-1]), sizes
        assert all(0 < size <= PAGE_SIZE for size in sizes), sizes
        assert sum(sizes) == self._length
        assert len(set(self)) == self._length
        if self._places is not None:
            assert {value: place for place, value in enumerate(self)} == dict(self._places)
        assert self._shared_bits >> len(self._pages) == 0, self._shared_bits
