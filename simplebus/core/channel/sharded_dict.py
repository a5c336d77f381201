"""Dict that grows in small steps."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from itertools import chain
from typing import Any, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

_SPLIT_SIZE = 1024
"""Number of entries at which the dict is split into several parts."""
_PARTS = 61
"""Prime, so that it also spreads hashes that are addresses or numbers. The low bits of a hash
choose the place within a part.
"""


class ShardedDict(MutableMapping[K, V]):
    """Dict for very many entries, in no particular order.

    A plain dict copies all entries when it grows: 14 ms at 175,000 entries, most of it for page
    faults. This one is split into many dicts, each of which grows on its own.
    """

    __slots__ = ("_length", "_part_count", "_parts")

    def __init__(self) -> None:
        self._parts: list[dict[K, V]] = [{}]
        self._part_count = 1
        self._length = 0

    @property
    def part_sizes(self) -> list[int]:
        """Number of entries of each part. Growth of a part copies at most its entries."""
        return list(map(len, self._parts))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._parts)

    def __contains__(self, key: object) -> bool:
        return key in self._parts[hash(key) % self._part_count]

    def __getitem__(self, key: K) -> V:
        return self._parts[hash(key) % self._part_count][key]

    @overload
    def get(self, key: K, default: None = None, /) -> V | None: ...
    @overload
    def get(self, key: K, default: V | D, /) -> V | D: ...
    def get(self, key: K, default: V | D | None = None, /) -> V | D | None:
        return self._parts[hash(key) % self._part_count].get(key, default)

    def __setitem__(self, key: K, value: V) -> None:
        part = self._parts[hash(key) % self._part_count]
        self._length -= len(part)
        part[key] = value
        self._length += len(part)
        if self._part_count == 1 and self._length >= _SPLIT_SIZE:
            self._split()

    @overload
    def setdefault(self: ShardedDict[K, D | None], key: K, default: None = None, /) -> D | None: ...
    @overload
    def setdefault(self, key: K, default: V, /) -> V: ...
    def setdefault(self, key: K, default: Any = None, /) -> Any:
        part = self._parts[hash(key) % self._part_count]
        self._length -= len(part)
        value = part.setdefault(key, default)
        self._length += len(part)
        if self._part_count == 1 and self._length >= _SPLIT_SIZE:
            self._split()
        return value

    def __delitem__(self, key: K) -> None:
        del self._parts[hash(key) % self._part_count][key]
        self._length -= 1

    def __bool__(self) -> bool:
        return self._length > 0

    @overload
    def pop(self, key: K, /) -> V: ...
    @overload
    def pop(self, key: K, default: V | D, /) -> V | D: ...
    def pop(self, key: K, *default: V | D) -> V | D:
        part = self._parts[hash(key) % self._part_count]
        self._length -= len(part)
        try:
            return part.pop(key, *default)
        finally:
            self._length += len(part)

    def popitem(self) -> tuple[K, V]:
        """Remove and return an entry. Raises KeyError if the dict is empty."""
        item = next(filter(None, self._parts), self._parts[0]).popitem()
        self._length -= 1
        return item

    def _split(self) -> None:
        [entries] = self._parts
        self._parts, self._part_count = [{} for _ in range(_PARTS)], _PARTS
        for key, value in entries.items():
            self._parts[hash(key) % self._part_count][key] = value
