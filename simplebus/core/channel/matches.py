"""Values whose patterns match a name: a tuple, or pages if they are very many."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Generic, TypeAlias, TypeVar

from simplebus.core.channel.paged_set import PAGE_SIZE, PagedSet
from simplebus.core.limits import MATCHES_IN_TUPLE_MAX

T = TypeVar("T")

PatternValues: TypeAlias = tuple[T, ...] | PagedSet[T]
"""Values of one pattern: a tuple if they are few, because it takes less memory."""


class PagedMatches(Generic[T]):
    """Very many values in pages. Equal to itself only: comparing the values would take long.

    The pages of a pattern with many values are shared, not copied. Copying 180,000 values would
    take 4 ms, and the garbage collection that then examines the copy takes longer.
    """

    __slots__ = ("_length", "pages")

    def __init__(self, pages: Sequence[Collection[T]]) -> None:
        self.pages = pages
        """The values, at most PAGE_SIZE per page. They stay the same if the index changes."""
        self._length = sum(map(len, pages))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self.pages)


Matches: TypeAlias = tuple[T, ...] | PagedMatches[T]
"""At most MATCHES_IN_TUPLE_MAX values as a tuple, or more of them in pages."""


def pages_of(matches: Matches[T]) -> Sequence[Collection[T]]:
    """Return the pages of the values. A tuple is one page."""
    return matches.pages if isinstance(matches, PagedMatches) else (matches,)


def collect_matches(values_by_pattern: Iterable[PatternValues[T]]) -> Matches[T]:
    """Return the values of all patterns that match a name.

    Examines each pattern once: there may be thousands of them, in one step of the event loop.
    """
    values, sets = list[T](), list[PagedSet[T]]()
    for each in values_by_pattern:
        if isinstance(each, tuple):
            values += each
        else:
            sets.append(each)
    if len(values) + sum(map(len, sets)) <= MATCHES_IN_TUPLE_MAX:
        return tuple(chain(values, *sets))
    starts = range(0, len(values), PAGE_SIZE)
    pages: list[Collection[T]] = [values[first : first + PAGE_SIZE] for first in starts]
    for each in sets:
        pages += each.share_pages()
    return PagedMatches(pages)
