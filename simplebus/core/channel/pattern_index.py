"""A dict of patterns that can be asked which of them match a name.

Rule 1: what it finds is what `channels.matches` says of each pattern; it only finds it sooner.
Rule 2: what a name costs does not grow with how many patterns match its beginning: they are asked
together, a thousand by one operation on bits.

A pattern is its steps: its segments but for an open end. The first HEAD_STEPS of them, or fewer and
the end, lead to its box by a look into a table; there is one for each way in which wildcards and
names take turns there, and of these there are few. In a box, patterns lie in sheets of
SHEET_PATTERNS_MAX, and in a sheet each has a bit. `a.*.c`, `a.*.c.d`, `a.*.c.*.x`, `a.*.c.d.>` are

    head     name * name:  a c ──►  box
    sheet    step 4:  d 1010  * 0100     closed, behind so many steps  0: 0001  1: 0010  2: 0100
             step 5:  x 0100             open, behind so many          1: 1000
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeAlias, TypeVar

from simplebus.core.channel.pattern import ONE, OPEN, REST, SOME, split
from simplebus.core.limits import SHEET_PATTERNS_MAX

HEAD_STEPS = 3
_END = ""

K = TypeVar("K")
V = TypeVar("V")


class _Way(NamedTuple):
    """Where a pattern is to be found."""

    pattern: str
    shape: tuple[str | None, ...]
    """What the first steps are: None for a name."""
    names: tuple[str, ...]
    """These names."""
    steps: list[str]
    """Those behind the head."""
    end: str
    """`#`, `>` or nothing. `#` where the head is all there is: nothing else is to be known then."""


class Sheet(Generic[V]):
    """Patterns that have a head in common, each a bit."""

    __slots__ = (
        "_closed",
        "_free",
        "_open",
        "_opens",
        "_somes",
        "_steps",
        "bits",
        "patterns",
        "values",
    )

    def __init__(self) -> None:
        self.bits = 0
        """Those in use."""
        self.patterns: list[str] = []
        self.values: list[V | None] = []
        """By the number of the bit; None where it is not in use."""
        self._free: list[int] = []
        self._steps: list[dict[str, int]] = []
        """For each step behind the head, whose it is. None is empty."""
        self._closed: dict[int, int] = {}
        """Who has so many steps behind the head, and no open end."""
        self._opens = [0]
        """Whose open end comes behind so many steps, up to all there are."""
        self._open = self._somes = 0
        """Who has an open end, and whose is `>`."""

    @property
    def is_full(self) -> bool:
        return not self._free and len(self.values) == SHEET_PATTERNS_MAX

    def add(self, way: _Way, value: V) -> int:
        """Have this pattern. Returns the number of its bit."""
        if self._free:
            number = self._free.pop()
            self.patterns[number], self.values[number] = way.pattern, value
        else:
            number = len(self.values)
            self.patterns.append(way.pattern)
            self.values.append(value)
        more = range(len(self._steps), len(way.steps))
        self._steps += [{} for _ in more]
        self._opens += [0 for _ in more]
        self._flip(way, number)
        return number

    def remove(self, way: _Way, number: int) -> None:
        """Have it no longer."""
        self.patterns[number], self.values[number] = "", None
        self._free.append(number)
        self._flip(way, number)
        while self._steps and not self._steps[-1]:
            del self._steps[-1], self._opens[-1]

    def _flip(self, way: _Way, number: int) -> None:
        """Set its bit wherever it belongs, or take it away from there."""
        bit = 1 << number
        self.bits ^= bit
        for table, step in zip(self._steps, way.steps, strict=False):
            _flip(table, step, bit)
        if way.end:
            self._opens[len(way.steps)] ^= bit
            self._open ^= bit
            if way.end == SOME:
                self._somes ^= bit
        else:
            _flip(self._closed, len(way.steps), bit)

    def matching(self, segments: list[str]) -> int:
        """The bits of the patterns that match the segments behind the head, of which it is known
        that the head matches them."""
        count = len(segments)
        closed = self._closed.get(count, 0)
        alive, found = closed | self._open, 0
        if not alive:
            return 0
        for table, segment, opens in zip(self._steps, segments, self._opens, strict=False):
            if opens:
                found |= alive & opens
            alive &= table.get(segment, 0) | table.get(ONE, 0)
            if not alive:
                return found
        if count > len(self._steps):
            return found | alive & self._opens[-1]
        return found | alive & (closed | self._opens[count] & ~self._somes)

    def values_of(self, found: int) -> list[V]:
        """The values of these bits."""
        flags = f"{found:b}"[::-1]
        return [
            value
            for value, flag in zip(self.values, flags, strict=False)
            if flag == "1" and value is not None
        ]

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert [v is not None for v in self.values] == [
            bool(self.bits >> number & 1) for number in range(len(self.values))
        ]
        assert len(self.values) - self.bits.bit_count() == len(self._free)
        assert all(self._steps)
        assert all(bits for table in self._steps for bits in table.values())
        assert len(self._opens) == len(self._steps) + 1
        opens, closed = sum(self._opens), sum(self._closed.values())
        assert (opens, opens ^ closed, opens & closed) == (self._open, self.bits, 0)


Hits: TypeAlias = tuple[tuple[Sheet[V], int], ...]
"""Sheets, and the bits of patterns in them."""


class _Head(Generic[V]):
    """The patterns in whose first steps wildcards and names take turns in one way."""

    __slots__ = ("boxes", "least", "most", "names_at")

    def __init__(self, shape: tuple[str | None, ...]) -> None:
        self.names_at = [at for at, step in enumerate(shape) if step is None]
        """Where no wildcard is."""
        last = shape[-1]
        self.least = len(shape) - (last in (_END, REST))
        """How many segments a name must have."""
        self.most = self.least if last == _END else None
        """And how many at most."""
        self.boxes: dict[tuple[str, ...], list[Sheet[V]]] = {}
        """By the names."""

    def box(self, segments: list[str]) -> list[Sheet[V]] | None:
        """Where patterns may lie that match these segments."""
        count = len(segments)
        if count < self.least or (self.most is not None and count > self.most):
            return None
        return self.boxes.get(tuple([segments[at] for at in self.names_at]))


class _Place(NamedTuple, Generic[V]):
    """Where a pattern lies."""

    sheet: Sheet[V]
    number: int


class Sieve(Generic[V]):
    """One value for each legal pattern, never None."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str | None, ...], _Head[V]] = {}
        """By what the first steps are, None for a name. None is empty, nor is a box."""
        self._places: dict[str, _Place[V]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def get(self, pattern: str) -> V | None:
        """The value of this very pattern, or None."""
        place = self._places.get(pattern)
        return None if place is None else place.sheet.values[place.number]

    def values(self) -> list[V]:
        """All there are."""
        return [value for pattern in self._places if (value := self.get(pattern)) is not None]

    def __setitem__(self, pattern: str, value: V) -> None:
        place = self._places.get(pattern)
        if place is not None:
            place.sheet.values[place.number] = value
            return
        way = _way(pattern)
        head = self._heads.get(way.shape)
        if head is None:
            head = self._heads[way.shape] = _Head(way.shape)
        box = head.boxes.setdefault(way.names, [])
        if not box or box[-1].is_full:
            box.append(Sheet())
        self._put(box[-1], way, value)

    def __delitem__(self, pattern: str) -> None:
        sheet, number = self._places.pop(pattern)
        way = _way(pattern)
        head = self._heads[way.shape]
        box = head.boxes[way.names]
        sheet.remove(way, number)
        last = box[-1]
        if last is not sheet:  # No other one has free bits.
            number = last.bits.bit_length() - 1
            moved, value = _way(last.patterns[number]), last.values[number]
            assert value is not None
            last.remove(moved, number)
            self._put(sheet, moved, value)
        if not last.bits:
            box.pop()
        if not box:
            del head.boxes[way.names]
        if not head.boxes:
            del self._heads[way.shape]

    def _put(self, sheet: Sheet[V], way: _Way, value: V) -> None:
        self._places[way.pattern] = _Place(sheet, sheet.add(way, value))

    def matching(self, segments: list[str]) -> Hits[V]:
        """All patterns that match the name of these segments, in no order; see `values_of`. As long
        as nothing changes, who is matched by the same patterns has equal hits."""
        hits, behind = [], segments[HEAD_STEPS:]
        for head in self._heads.values():
            for sheet in head.box(segments) or ():
                found = sheet.matching(behind)
                if found:
                    hits.append((sheet, found))
        return tuple(hits)

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        boxes = [box for head in self._heads.values() for box in head.boxes.values()]
        assert all(head.boxes for head in self._heads.values())
        assert all(boxes)
        sheets = [sheet for box in boxes for sheet in box]
        for sheet in sheets:
            sheet.check()
            assert 0 < sheet.bits.bit_count() <= len(sheet.values) <= SHEET_PATTERNS_MAX
        assert sum(sheet.bits.bit_count() for sheet in sheets) == len(self)
        for box in boxes:
            assert all(sheet.bits.bit_count() == SHEET_PATTERNS_MAX for sheet in box[:-1])
        for pattern, (sheet, number) in self._places.items():
            assert sheet.patterns[number] == pattern


def values_of(hits: Hits[V]) -> list[V]:
    """The values of the patterns that were hit."""
    return [value for sheet, found in hits for value in sheet.values_of(found)]


def _way(pattern: str) -> _Way:
    steps, end = split(pattern), _END
    if steps[-1] in OPEN:
        end = steps.pop()
    head, behind = steps[:HEAD_STEPS], steps[HEAD_STEPS:]
    shape = tuple([step if step == ONE else None for step in head])
    names = tuple([step for step in head if step != ONE])
    if len(head) < HEAD_STEPS:
        return _Way(pattern, (*shape, end), names, [], REST)
    return _Way(pattern, shape, names, behind, end)


def _flip(table: dict[K, int], key: K, bit: int) -> None:
    """Set a bit that is not set, or the other way round. What has none does not stay."""
    bits = table.get(key, 0) ^ bit
    if bits:
        table[key] = bits
    else:
        del table[key]
