"""Who has subscribed to what matches a channel, and what of this was asked lately.

Rule 1: a sublist is a set of pairs of a pattern and a value; `match` is `channels.matches` asked of
each pattern. Everything else in this file makes that fast.
Rule 2: patterns without wildcards lie in a dict, the others in a sieve. What is remembered of names
has a ceiling in names and in values, and never outlives a change that concerns it.
Rule 3: names that the same patterns with wildcards match share one result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from simplebus.core.channel.pattern import check_pattern, is_literal, split
from simplebus.core.channel.pattern_index import Hits, Sieve, values_of
from simplebus.core.limits import CACHE_NAMES_MAX, CACHE_RESULTS_MAX, CACHE_VALUES_MAX

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Hashable)

_Values: TypeAlias = tuple[int, T] | dict[T, int]
"""The values of one pattern, each with its place in the order of insertion. A single one, which is
most often all, takes a pair: a third of a dict's memory."""


@dataclass(frozen=True, slots=True)
class SublistStatistics:
    """A snapshot of one sublist."""

    subscriptions: int
    """Pairs of a pattern and a value."""
    literal_patterns: int
    """Patterns without wildcards."""
    wild_patterns: int
    """The others."""
    cached_names: int
    """Names whose matches are remembered."""
    cached_values: int
    """Values that these matches name."""
    searches: int
    """Matches that were not remembered. It only grows."""


class Sublist(Generic[T]):
    """Pairs of a pattern and a value; and for a name, the values of all patterns that match it."""

    def __init__(
        self,
        *,
        cache_names: int = CACHE_NAMES_MAX,
        cache_values: int = CACHE_VALUES_MAX,
        check: Callable[[str], str] = check_pattern,
    ) -> None:
        """`check` raises ValueError for a pattern that is not legal."""
        self._check = check
        self.generation = 0
        """Grows with every change. As long as it stays, so does what was matched."""
        self._literal: dict[str, _Values[T]] = {}
        self._wild: Sieve[_Values[T]] = Sieve()
        self._length = 0
        self.inserts = 0
        """Pairs that were ever added."""
        self._place = 0
        """Of the next pair, in the order of insertion."""
        self._cache: _Cache[str, T] = _Cache(names=cache_names, values=cache_values)
        self._results: _Cache[Hits[_Values[T]], T] = _Cache(
            names=CACHE_RESULTS_MAX, values=cache_values
        )
        self.searches = 0

    def __len__(self) -> int:
        """Pairs of a pattern and a value."""
        return self._length

    def insert(self, pattern: str, value: T) -> bool:
        """Add a value to a pattern. Returns whether it is new: the same pair again changes nothing.

        Raises ValueError when the pattern is not legal.
        """
        self._check(pattern)
        store = self._store(pattern)
        values = store.get(pattern)
        if values is None:
            store[pattern] = (self._place, value)
        else:
            if value in (values[1:] if isinstance(values, tuple) else values):
                return False
            if isinstance(values, tuple):
                store[pattern] = values = {values[1]: values[0]}
            values[value] = self._place
        self._place += 1
        self._length += 1
        self.inserts += 1
        self._changed(pattern)
        return True

    def remove(self, pattern: str, value: T) -> None:
        """Take a value from a pattern. Raises KeyError when it is not there."""
        store = self._store(pattern)
        values = store.get(pattern)
        if isinstance(values, dict) and value in values:
            del values[value]
            if len(values) == 1:
                store[pattern] = next((place, last) for last, place in values.items())
        elif isinstance(values, tuple) and values[1] == value:
            del store[pattern]
        else:
            raise KeyError(f"{value!r} was not inserted with the pattern {pattern!r}")
        self._length -= 1
        self._changed(pattern)

    def match(self, name: str) -> tuple[T, ...]:
        """The values of all patterns that match the name, in the order in which they were inserted.

        A value comes once for each of its patterns that matches. The empty name is a message
        without a channel. The name's wildcards are letters; a name with an empty segment is none,
        and nothing matches it.
        """
        found = self._cache.get(name)
        if found is None:
            found = self._search(name)
            self._cache.keep(name, found)
        return found

    def matches(self, name: str) -> bool:
        """Whether `match` finds any."""
        segments = split(name)
        if "" in segments:
            return False
        return name in self._literal or bool(self._wild.matching(segments))

    def statistics(self) -> SublistStatistics:
        """A snapshot."""
        results = self._cache.results()
        return SublistStatistics(
            subscriptions=self._length,
            literal_patterns=len(self._literal),
            wild_patterns=len(self._wild),
            cached_names=len(results),
            cached_values=sum(map(len, results)),
            searches=self.searches,
        )

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        self._wild.check()
        self._cache.check()
        self._results.check()
        stored = [*self._literal.values(), *self._wild.values()]
        places = [place for place, _ in _pairs(stored)]
        assert len(places) == len(set(places)) == self._length, (places, self._length)
        assert all(place < self._place for place in places), (places, self._place)

    def _store(self, pattern: str) -> dict[str, _Values[T]] | Sieve[_Values[T]]:
        return self._literal if is_literal(pattern) else self._wild

    def _search(self, name: str) -> tuple[T, ...]:
        """What `match` returns, without the cache."""
        self.searches += 1
        segments = split(name)
        if "" in segments:
            return ()
        hits = self._wild.matching(segments)
        literal = self._literal.get(name)
        if literal is not None:
            return _in_order([*values_of(hits), literal])
        found = self._results.get(hits)
        if found is None:
            found = _in_order(values_of(hits))
            self._results.keep(hits, found)
        return found

    def forget_matches(self) -> None:
        """Give back the memory of what was matched: it is not needed for now."""
        self._cache.clear()
        self._results.clear()

    def _changed(self, pattern: str) -> None:
        """Forget what may not hold any more.

        A pattern without wildcards matches one name. With wildcards, all names are forgotten: to
        ask of each whether the pattern matches costs what a new search does, and only those in
        use are searched again.
        """
        self.generation += 1
        if is_literal(pattern):
            self._cache.forget(pattern)
        else:
            self.forget_matches()


class _Cache(Generic[K, T]):
    """The matches of names in use, or of whatever else decides what is found, in two halves.

    When the recent half is full, the older one is forgotten, and the recent one becomes the older.
    A name that is found in the older half moves to the recent one. So the names in use stay,
    however many others are asked once; and no name is ever moved or counted to find the oldest.
    """

    def __init__(self, *, names: int, values: int) -> None:
        self._names_max = names // 2
        self._values_max = values // 2
        self._recent: dict[K, tuple[T, ...]] = {}
        self._recent_values = 0
        self._older: dict[K, tuple[T, ...]] = {}

    def get(self, name: K) -> tuple[T, ...] | None:
        found = self._recent.get(name)
        if found is None:
            found = self._older.pop(name, None)
            if found is not None:
                self.keep(name, found)
        return found

    def keep(self, name: K, found: tuple[T, ...]) -> None:
        """Remember what is not remembered, unless it alone is more than half of what may be."""
        if len(found) > self._values_max or not self._names_max:
            return
        values = self._recent_values + len(found)
        if values > self._values_max or len(self._recent) >= self._names_max:
            self._older, self._recent, values = self._recent, {}, len(found)
        self._recent[name] = found
        self._recent_values = values

    def forget(self, name: K) -> None:
        self._recent_values -= len(self._recent.pop(name, ()))
        self._older.pop(name, None)

    def clear(self) -> None:
        self._recent.clear()
        self._recent_values = 0
        self._older.clear()

    def results(self) -> list[tuple[T, ...]]:
        return [*self._recent.values(), *self._older.values()]

    def check(self) -> None:
        assert self._recent_values == sum(map(len, self._recent.values())), self._recent_values
        assert self._recent.keys().isdisjoint(self._older)
        for half in (self._recent, self._older):
            assert len(half) <= self._names_max, (len(half), self._names_max)
            assert sum(map(len, half.values())) <= self._values_max


def _in_order(stored: Iterable[_Values[T]]) -> tuple[T, ...]:
    """All values of some patterns, in the order in which they were inserted."""
    pairs = _pairs(stored)
    pairs.sort()  # No two places are equal: values are never compared.
    return tuple([value for _, value in pairs])


def _pairs(stored: Iterable[_Values[T]]) -> list[tuple[int, T]]:
    """All places and values of some patterns."""
    pairs: list[tuple[int, T]] = []
    for values in stored:
        if isinstance(values, tuple):
            pairs.append(values)
        else:
            pairs += [(place, value) for value, place in values.items()]
    return pairs
