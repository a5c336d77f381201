"""Index of subscriptions: values by pattern, and a cache of the values that match a name.

The result of `match` equals `pattern.matches` applied to every pattern. Patterns without wildcards
are in a dict, the others in a `PatternIndex`. The cache is bounded in names and in values and is
invalidated by changes. Names that match the same wildcard patterns share one result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from simplebus.core.channel.matches import Matches, PatternValues, collect_matches
from simplebus.core.channel.paged_set import PagedSet
from simplebus.core.channel.pattern import check_pattern, is_literal, split_segments
from simplebus.core.channel.pattern_index import PageMatches, PatternIndex, iter_values
from simplebus.core.channel.sharded_dict import ShardedDict
from simplebus.core.limits import CACHE_NAMES_MAX, CACHE_RESULTS_MAX, CACHE_VALUES_MAX

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Hashable)

_TUPLE_VALUES_MAX = 8
"""Maximum number of values of one pattern that are kept in a tuple, which takes less memory than a
set. This is the usual case.
"""


@dataclass(frozen=True, slots=True)
class SubscriptionIndexStatistics:
    """Statistics of a subscription index."""

    subscriptions: int
    """Pairs of a pattern and a value."""
    literal_patterns: int
    """Patterns without wildcards."""
    wild_patterns: int
    """Patterns with wildcards."""
    cached_names: int
    """Names with a cached result."""
    cached_values: int
    """Values in the cached results."""
    searches: int
    """Number of matches that were not cached. Never decreases."""


class SubscriptionIndex(Generic[T]):
    """Set of (pattern, value) pairs with a search for the values whose patterns match a name."""

    def __init__(
        self,
        *,
        cache_names: int = CACHE_NAMES_MAX,
        cache_values: int = CACHE_VALUES_MAX,
        check: Callable[[str], str] = check_pattern,
    ) -> None:
        """Create an empty index. `check` raises ValueError for patterns that are not legal."""
        self._check = check
        self.generation = 0
        """Incremented by every change. Results stay valid while the number is unchanged."""
        self._literal: ShardedDict[str, PatternValues[T]] = ShardedDict()
        self._wild: PatternIndex[PatternValues[T]] = PatternIndex()
        self._length = 0
        self.insert_count = 0
        """Number of pairs ever added."""
        self._cache: _MatchCache[str, T] = _MatchCache(names=cache_names, values=cache_values)
        self._results: _MatchCache[PageMatches[PatternValues[T]], T] = _MatchCache(
            names=CACHE_RESULTS_MAX, values=cache_values
        )
        self.search_count = 0

    def __len__(self) -> int:
        """Return the number of pairs."""
        return self._length

    def insert(self, pattern: str, value: T) -> bool:
        """Add a value to a pattern. Returns False if the pair exists already.

        Raises:
            ValueError: The pattern is not legal.
        """
        self._check(pattern)
        store = self._index_for(pattern)
        values = store.get(pattern)
        if values is not None and value in values:
            return False
        _add_value(store, pattern, values, value)
        self._length += 1
        self.insert_count += 1
        self._invalidate(pattern)
        return True

    def insert_all(self, patterns: Iterable[str], value: T) -> None:
        """Add a value to several legal patterns. The value must not have any of them yet."""
        for pattern in patterns:
            store = self._index_for(pattern)
            _add_value(store, pattern, store.get(pattern), value)
            self._length += 1
            self.insert_count += 1
        self.generation += 1
        self.clear_cache()

    def remove(self, pattern: str, value: T) -> None:
        """Remove a value from a pattern. Raises KeyError if the pair does not exist."""
        store = self._index_for(pattern)
        values = store.get(pattern)
        if values is None or value not in values:
            raise KeyError(f"{value!r} was not inserted with the pattern {pattern!r}")
        if isinstance(values, tuple):
            if len(values) == 1:
                del store[pattern]
            else:
                index = values.index(value)
                store[pattern] = values[:index] + values[index + 1 :]
        else:
            values.remove(value)
            if len(values) <= _TUPLE_VALUES_MAX:
                store[pattern] = tuple(values)
        self._length -= 1
        self._invalidate(pattern)

    def match(self, name: str) -> Matches[T]:
        """Return the values of all patterns that match the name, in any order.

        A value occurs once for each of its matching patterns. The empty name is a message without a
        channel. Wildcards in the name are ordinary characters; a name with an empty segment matches
        nothing.
        """
        result = self._cache.recent.get(name)
        if result is None:
            result = self._cache.get(name)
        if result is None:
            result = self._search(name)
            self._cache.put(name, result)
        return result

    def iter_matches(self, name: str) -> Iterator[T]:
        """Yield the values that `match` returns, in any order. The index must not change meanwhile.

        The first value is found fast, but nothing is cached.
        """
        segments = split_segments(name)
        if "" in segments:
            return
        literal = self._literal.get(name)
        hits = self._wild.find_matches(segments)
        values_by_pattern: Iterator[PatternValues[T]] = iter_values(hits)
        yield from chain(literal or (), chain.from_iterable(values_by_pattern))

    def has_match(self, name: str) -> bool:
        """Return True if `match` would return any value."""
        segments = split_segments(name)
        if "" in segments:
            return False
        return name in self._literal or bool(self._wild.find_matches(segments))

    def statistics(self) -> SubscriptionIndexStatistics:
        results = self._cache.results()
        return SubscriptionIndexStatistics(
            subscriptions=self._length,
            literal_patterns=len(self._literal),
            wild_patterns=len(self._wild),
            cached_names=len(results),
            cached_values=sum(map(len, results)),
            searches=self.search_count,
        )

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        self._wild.check()
        self._cache.check()
        self._results.check()
        stored = [*self._literal.values(), *self._wild.values()]
        for values in stored:
            assert isinstance(values, tuple) == (len(values) <= _TUPLE_VALUES_MAX), values
            assert len(set(values)) == len(values) > 0, values
            if isinstance(values, PagedSet):
                values.check()
        assert sum(map(len, stored)) == self._length, (stored, self._length)

    def _index_for(
        self, pattern: str
    ) -> ShardedDict[str, PatternValues[T]] | PatternIndex[PatternValues[T]]:
        return self._literal if is_literal(pattern) else self._wild

    def _search(self, name: str) -> Matches[T]:
        """Return the result of `match` without the cache of names."""
        self.search_count += 1
        segments = split_segments(name)
        if "" in segments:
            return ()
        hits = self._wild.find_matches(segments)
        literal = self._literal.get(name)
        if literal is not None:
            return collect_matches(chain((literal,), iter_values(hits)))
        result = self._results.get(hits)
        if result is None:
            result = collect_matches(iter_values(hits))
            self._results.put(hits, result)
        return result

    def clear_cache(self) -> None:
        """Free the memory of cached results."""
        self._cache.clear()
        self._results.clear()

    def _invalidate(self, pattern: str) -> None:
        """Drop cached results that the change of `pattern` may affect.

        A pattern without wildcards affects one name. Otherwise all names are dropped: testing each
        would cost as much as searching again, and only names in use are searched again.
        """
        self.generation += 1
        if is_literal(pattern):
            self._cache.forget(pattern)
        else:
            self.clear_cache()


class _MatchCache(Generic[K, T]):
    """Cache of results in two halves.

    When the recent half is full, the older half is dropped and the recent half becomes the older
    half. An entry that is found in the older half moves to the recent half. So entries in use stay,
    without any bookkeeping to find the least recently used entry.
    """

    def __init__(self, *, names: int, values: int) -> None:
        self._names_max = names // 2
        self._values_max = values // 2
        self.recent: dict[K, Matches[T]] = {}
        """The half with the latest entries. Callers search here first, to save the call of `get`.
        """
        self._recent_values = 0
        self._older: dict[K, Matches[T]] = {}

    def get(self, name: K) -> Matches[T] | None:
        result = self.recent.get(name)
        if result is None:
            result = self._older.pop(name, None)
            if result is not None:
                self.put(name, result)
        return result

    def put(self, name: K, result: Matches[T]) -> None:
        """Store a result, unless it is larger than half of the cache."""
        if len(result) > self._values_max or not self._names_max:
            return
        values = self._recent_values + len(result)
        if values > self._values_max or len(self.recent) >= self._names_max:
            self._older, self.recent, values = self.recent, {}, len(result)
        self.recent[name] = result
        self._recent_values = values

    def forget(self, name: K) -> None:
        self._recent_values -= len(self.recent.pop(name, ()))
        self._older.pop(name, None)

    def clear(self) -> None:
        self.recent.clear()
        self._recent_values = 0
        self._older.clear()

    def results(self) -> list[Matches[T]]:
        return [*self.recent.values(), *self._older.values()]

    def check(self) -> None:
        assert self._recent_values == sum(map(len, self.recent.values())), self._recent_values
        assert self.recent.keys().isdisjoint(self._older)
        for half in (self.recent, self._older):
            assert len(half) <= self._names_max, (len(half), self._names_max)
            assert sum(map(len, half.values())) <= self._values_max


def _add_value(
    store: ShardedDict[str, PatternValues[T]] | PatternIndex[PatternValues[T]],
    pattern: str,
    values: PatternValues[T] | None,
    value: T,
) -> None:
    """Add a value to the current values of a pattern."""
    if values is None:
        store[pattern] = (value,)
    elif isinstance(values, PagedSet):
        values.add(value)
    elif len(values) < _TUPLE_VALUES_MAX:
        store[pattern] = (*values, value)
    else:
        store[pattern] = PagedSet((*values, value))
