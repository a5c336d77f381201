"""Index of patterns with wildcards: finds all patterns that match a name, with bitmaps.

The result equals `pattern.matches` applied to every pattern. The cost hardly depends on how many
patterns share a prefix: one bit operation tests up to PATTERN_PAGE_SIZE of them.

A pattern consists of segments and an optional tail wildcard. The first PREFIX_SEGMENTS segments are
its prefix. The shape of the prefix, which is the arrangement of wildcards and names, selects a
table; few shapes occur. The names in the prefix select a bucket of the table. A bucket is a list of
pages, and each pattern is one bit of a page. `a.*.c`, `a.*.c.d`, `a.*.c.*.x`, `a.*.c.d.>` are
stored as

    prefix   name * name:  a c ──►  bucket
    page     segment 4:  d 1010  * 0100    no tail, by remaining length  0: 0001  1: 0010  2: 0100
             segment 5:  x 0100            tail, by remaining length     1: 1000
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, compress
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

from simplebus.core.channel.pattern import (
    ONE_OR_MORE,
    ONE_SEGMENT,
    TAIL_WILDCARDS,
    ZERO_OR_MORE,
    is_literal,
    split_segments,
)
from simplebus.core.channel.sharded_dict import ShardedDict
from simplebus.core.limits import PATTERN_PAGE_SIZE

PREFIX_SEGMENTS = 3
_NO_TAIL = ""
_NAMES_ONLY: tuple[tuple[None, ...], ...] = tuple((None,) * n for n in range(PREFIX_SEGMENTS + 1))
"""Shapes without wildcards, by length."""
_FLAG_OF_DIGIT = bytes.maketrans(b"01", b"\0\1")

K = TypeVar("K")
V = TypeVar("V")


class _PatternKey(NamedTuple):
    """Location of a pattern in the index."""

    pattern: str
    shape: tuple[str | None, ...]
    """Prefix segments, with None for each name; shorter patterns end with their tail wildcard or
    "".
    """
    names: tuple[str, ...]
    """Names in the prefix."""
    suffix: list[str]
    """Segments behind the prefix."""
    tail: str
    """`#`, `>` or empty. `#` for patterns shorter than the prefix: their table checks the length.
    """


class PatternPage(Generic[V]):
    """Patterns with the same prefix, one bit each."""

    __slots__ = (
        "_exact_bits_by_length",
        "_free_numbers",
        "_one_or_more_bits",
        "_segment_bits",
        "_tail_bits",
        "_tail_bits_by_length",
        "patterns",
        "used_bits",
        "values",
    )

    def __init__(self) -> None:
        self.used_bits = 0
        """Bits in use."""
        self.patterns: list[str] = []
        self.values: list[V | None] = []
        """Values by bit number; None for free bits."""
        self._free_numbers: list[int] = []
        self._segment_bits: list[dict[str, int]] = []
        """Bits of the patterns with a given segment, for each segment behind the prefix. No dict is
        empty.
        """
        self._exact_bits_by_length: dict[int, int] = {}
        """Bits of the patterns without tail wildcard, by the number of segments behind the prefix.
        """
        self._tail_bits_by_length = [0]
        """Bits of the patterns with a tail wildcard, by the number of segments behind the prefix.
        """
        self._tail_bits = self._one_or_more_bits = 0
        """Bits of all patterns with a tail wildcard, and of the patterns with `>`."""

    @property
    def is_full(self) -> bool:
        return not self._free_numbers and len(self.values) == PATTERN_PAGE_SIZE

    def add(self, key: _PatternKey, value: V) -> int:
        """Add a pattern. Returns its bit number."""
        if self._free_numbers:
            number = self._free_numbers.pop()
            self.patterns[number], self.values[number] = key.pattern, value
        else:
            number = len(self.values)
            self.patterns.append(key.pattern)
            self.values.append(value)
        while len(self._segment_bits) < len(key.suffix):
            self._segment_bits.append({})
            self._tail_bits_by_length.append(0)
        self._toggle(key, number)
        return number

    def remove(self, key: _PatternKey, number: int) -> None:
        """Remove the pattern with bit `number`."""
        self.patterns[number], self.values[number] = "", None
        self._free_numbers.append(number)
        self._toggle(key, number)
        while self._segment_bits and not self._segment_bits[-1]:
            del self._segment_bits[-1], self._tail_bits_by_length[-1]

    def _toggle(self, key: _PatternKey, number: int) -> None:
        """Set or clear the bit of a pattern in all bitmaps."""
        bit = 1 << number
        self.used_bits ^= bit
        for table, segment in zip(self._segment_bits, key.suffix, strict=False):
            _toggle_bit(table, segment, bit)
        if key.tail:
            self._tail_bits_by_length[len(key.suffix)] ^= bit
            self._tail_bits ^= bit
            if key.tail == ONE_OR_MORE:
                self._one_or_more_bits ^= bit
        else:
            _toggle_bit(self._exact_bits_by_length, len(key.suffix), bit)

    def find_matches(self, segments: list[str]) -> int:
        """Return the bits of the patterns that match these segments behind the prefix, which is
        known to match.
        """
        count = len(segments)
        exact_bits = self._exact_bits_by_length.get(count, 0)
        candidates, bits = exact_bits | self._tail_bits, 0
        if not candidates:
            return 0
        for table, segment, tail_bits in zip(
            self._segment_bits, segments, self._tail_bits_by_length, strict=False
        ):
            if tail_bits:
                bits |= candidates & tail_bits
            candidates &= table.get(segment, 0) | table.get(ONE_SEGMENT, 0)
            if not candidates:
                return bits
        if count > len(self._segment_bits):
            return bits | candidates & self._tail_bits_by_length[-1]
        return bits | candidates & (
            exact_bits | self._tail_bits_by_length[count] & ~self._one_or_more_bits
        )

    def matched_values(self, bits: int) -> list[V]:
        """Return the values of these bits."""
        flags = f"{bits:b}"[::-1].encode().translate(_FLAG_OF_DIGIT)
        return list(compress(cast("list[V]", self.values), flags))

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert [v is not None for v in self.values] == [
            bool(self.used_bits >> number & 1) for number in range(len(self.values))
        ]
        assert len(self.values) - self.used_bits.bit_count() == len(self._free_numbers)
        assert all(self._segment_bits)
        assert all(bits for table in self._segment_bits for bits in table.values())
        assert len(self._tail_bits_by_length) == len(self._segment_bits) + 1
        tail, exact = sum(self._tail_bits_by_length), sum(self._exact_bits_by_length.values())
        assert (tail, tail ^ exact, tail & exact) == (self._tail_bits, self.used_bits, 0)


PageMatches: TypeAlias = tuple[tuple[PatternPage[V], int], ...]
"""Pages, and the bits of matching patterns in them."""


class _PrefixTable(Generic[V]):
    """Buckets of the patterns with the same arrangement of wildcards and names in the prefix."""

    __slots__ = ("buckets", "name_indexes", "segments_max", "segments_min")

    def __init__(self, shape: tuple[str | None, ...]) -> None:
        self.name_indexes = [index for index, segment in enumerate(shape) if segment is None]
        """Indexes of the prefix segments that are names."""
        last = shape[-1]
        self.segments_min = len(shape) - (last in (_NO_TAIL, ZERO_OR_MORE))
        """Fewest segments of a matching name."""
        self.segments_max = self.segments_min if last == _NO_TAIL else None
        """Most segments of a matching name; None for unlimited."""
        self.buckets: ShardedDict[tuple[str, ...], list[PatternPage[V]]] = ShardedDict()
        """Pages by the names in the prefix."""

    def find_bucket(self, segments: list[str]) -> list[PatternPage[V]] | None:
        """Return the pages whose prefix matches these segments."""
        count = len(segments)
        if count < self.segments_min or (
            self.segments_max is not None and count > self.segments_max
        ):
            return None
        return self.buckets.get(tuple([segments[index] for index in self.name_indexes]))


class _PatternSlot(NamedTuple, Generic[V]):
    """Page and bit number of a pattern."""

    page: PatternPage[V]
    number: int


class PatternIndex(Generic[V]):
    """Dict from legal patterns to values other than None, with a search by name."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str | None, ...], _PrefixTable[V]] = {}
        """Tables by the shape of the prefix, with None for each name. No table or bucket is empty.
        """
        self._slots: ShardedDict[str, _PatternSlot[V]] = ShardedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, pattern: str) -> V | None:
        """Return the value of this pattern, or None."""
        slot = self._slots.get(pattern)
        return None if slot is None else slot.page.values[slot.number]

    def values(self) -> list[V]:
        """Return all values."""
        return [value for pattern in self._slots if (value := self.get(pattern)) is not None]

    def __setitem__(self, pattern: str, value: V) -> None:
        slot = self._slots.get(pattern)
        if slot is not None:
            slot.page.values[slot.number] = value
            return
        key = _parse_key(pattern)
        table = self._tables.get(key.shape)
        if table is None:
            table = self._tables[key.shape] = _PrefixTable(key.shape)
        bucket = table.buckets.get(key.names)
        if bucket is None:
            bucket = table.buckets[key.names] = [PatternPage()]
        elif bucket[-1].is_full:
            bucket.append(PatternPage())
        self._add_to_page(bucket[-1], key, value)

    def __delitem__(self, pattern: str) -> None:
        page, number = self._slots.pop(pattern)
        key = _parse_key(pattern)
        table = self._tables[key.shape]
        bucket = table.buckets[key.names]
        page.remove(key, number)
        last = bucket[-1]
        if last is not page:  # The freed bit is used again, so that only the last page has gaps.
            number = last.used_bits.bit_length() - 1
            moved, value = _parse_key(last.patterns[number]), last.values[number]
            assert value is not None
            last.remove(moved, number)
            self._add_to_page(page, moved, value)
        if not last.used_bits:
            bucket.pop()
        if not bucket:
            del table.buckets[key.names]
        if not table.buckets:
            del self._tables[key.shape]

    def _add_to_page(self, page: PatternPage[V], key: _PatternKey, value: V) -> None:
        self._slots[key.pattern] = _PatternSlot(page, page.add(key, value))

    def find_matches(self, segments: list[str]) -> PageMatches[V]:
        """Return all patterns that match the name with these segments, unordered; see
        `iter_values`.

        Until the index changes, names that match the same patterns have equal results.
        """
        matches, suffix = [], segments[PREFIX_SEGMENTS:]
        for table in self._tables.values():
            for page in table.find_bucket(segments) or ():
                bits = page.find_matches(suffix)
                if bits:
                    matches.append((page, bits))
        return tuple(matches)

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        buckets = [bucket for table in self._tables.values() for bucket in table.buckets.values()]
        assert all(table.buckets for table in self._tables.values())
        assert all(buckets)
        pages = [page for bucket in buckets for page in bucket]
        for page in pages:
            page.check()
            assert 0 < page.used_bits.bit_count() <= len(page.values) <= PATTERN_PAGE_SIZE
        assert sum(page.used_bits.bit_count() for page in pages) == len(self)
        for bucket in buckets:
            assert all(page.used_bits.bit_count() == PATTERN_PAGE_SIZE for page in bucket[:-1])
        for pattern, (page, number) in self._slots.items():
            assert page.patterns[number] == pattern


class PatternSet:
    """Set of legal patterns, with a search by name."""

    __slots__ = ("_literal", "_wild")

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._literal: set[str] = set()
        self._wild: PatternIndex[bool] = PatternIndex()
        self.update(patterns)

    def update(self, patterns: Iterable[str]) -> None:
        """Add patterns."""
        for pattern in patterns:
            if is_literal(pattern):
                self._literal.add(pattern)
            else:
                self._wild[pattern] = True

    def has_match(self, name: str) -> bool:
        """Return True if a pattern matches the name. The empty name is a message without a
        channel.
        """
        segments = split_segments(name)
        if "" in segments:
            return False
        return name in self._literal or bool(self._wild.find_matches(segments))


def iter_values(hits: PageMatches[V]) -> Iterator[V]:
    """Yield the values of the matching patterns."""
    return chain.from_iterable(page.matched_values(bits) for page, bits in hits)


def _parse_key(pattern: str) -> _PatternKey:
    segments = pattern.split(".")
    tail = segments.pop() if segments[-1] in TAIL_WILDCARDS else _NO_TAIL
    prefix = segments[:PREFIX_SEGMENTS]
    shape: tuple[str | None, ...]
    if ONE_SEGMENT in prefix:
        shape = tuple([segment if segment == ONE_SEGMENT else None for segment in prefix])
        names = tuple([segment for segment in prefix if segment != ONE_SEGMENT])
    else:
        shape, names = _NAMES_ONLY[len(prefix)], tuple(prefix)
    if len(prefix) < PREFIX_SEGMENTS:
        return _PatternKey(pattern, (*shape, tail), names, [], ZERO_OR_MORE)
    return _PatternKey(pattern, shape, names, segments[PREFIX_SEGMENTS:], tail)


def _toggle_bit(table: dict[K, int], key: K, bit: int) -> None:
    """Set or clear a bit of an entry. Entries without bits are removed."""
    bits = table.get(key, 0) ^ bit
    if bits:
        table[key] = bits
    else:
        del table[key]
