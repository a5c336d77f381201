"""Queue of the spans that a position sends again, or for the first time after a delay.

Overdue messages may be tens of thousands of ranges. They are added as sets, and a range becomes a
`Span` when it is first in the queue, so that adding them costs the same for any number of ranges.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from operator import attrgetter
from typing import Any

from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.redelivery.timer_wheel import Span

SpanSet = tuple[int, SequenceSet]
"""Attempt count, and the messages with this count. A queue owns the sets that were added to it."""

_first = attrgetter("first")

# Ranges of several sets that become one span. A longer one would take too long to build.
_JOINED_MAX = 64

# Small sets are united until they have this many ranges, because each source of spans takes time.
_UNITED_RANGES = 1024

# Inserting a span by binary search compares it with fewer spans than this.
_SEARCH_STEPS_MAX = 20


class RedeliveryQueue:
    """Queue of spans. The first one may be changed in place until it is removed."""

    def __init__(self) -> None:
        self._entries: deque[Span | _MergedSpans] = deque()
        """Spans and merged spans. The first entry is a span, and no merged spans are empty."""
        self._sort_key: Callable[[Any], Any] | None = None
        """Key by which the first `_sorted_count` entries are sorted."""
        self._sorted_count = 0
        """Number of leading entries that are sorted; all of them are spans."""

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __iter__(self) -> Iterator[Span]:
        """Yield all spans in the order of the queue."""
        for entry in self._entries:
            if isinstance(entry, Span):
                yield entry
            else:
                yield from entry

    def iter_unordered(self) -> Iterator[Span]:
        """Yield all spans in any order, which takes less time for the first ones."""
        for entry in self._entries:
            if isinstance(entry, Span):
                yield entry
            else:
                yield from entry.iter_unordered()

    def count_messages(self, spans_max: int) -> int:
        """Return the number of messages in at most `spans_max` spans."""
        return sum(span.last - span.first for span in islice(self.iter_unordered(), spans_max))

    @property
    def first(self) -> Span:
        """First span. The queue must not be empty."""
        span = self._entries[0]
        assert isinstance(span, Span)
        return span

    def pop_first(self) -> Span:
        """Remove and return the first span."""
        span = self._entries.popleft()
        self._sorted_count = max(0, self._sorted_count - 1)
        self._expose_first()
        assert isinstance(span, Span)
        return span

    def append(self, span: Span) -> None:
        """Append a span."""
        self._entries.append(span)

    def extend(self, spans: Iterable[Span]) -> None:
        """Append spans in their order."""
        self._entries.extend(spans)

    def extend_front(self, spans: list[Span]) -> None:
        """Insert spans before all others, in their order."""
        self._sorted_count = 0
        self._entries.extendleft(reversed(spans))

    def append_sets(self, sets: list[SpanSet]) -> None:
        """Append the messages of sets, in the order of their sequences.

        The order includes the sets of earlier calls that are still last in the queue, unless one of
        their messages was already the first of the queue.
        """
        last = self._entries[-1] if self._entries else None
        if isinstance(last, _MergedSpans) and not last.is_started:
            last.add_sets(sets)
        elif any(sequences for _, sequences in sets):
            self._append_merged([], sets)

    def sort_with(self, sets: list[SpanSet], spans: Iterable[Span]) -> None:
        """Add the messages of `sets` and `spans`, and sort all spans by their first sequence."""
        sources: list[_Source] = []
        single_spans = list(spans)
        for entry in self._entries:
            if isinstance(entry, Span):
                single_spans.append(entry)
            else:
                sources += entry.remaining_sources()
        if single_spans:
            sources.append(_SpanSource(deque(sorted(single_spans, key=_first))))
        self._clear()
        if sources or any(sequences for _, sequences in sets):
            self._append_merged(sources, sets)

    def pop_all(self) -> list[Span]:
        """Remove and return all spans."""
        spans: list[Span] = []
        for entry in self._entries:
            if isinstance(entry, Span):
                spans.append(entry)
            else:
                spans += _join_ranges(entry.remaining_sources())
        self._clear()
        return spans

    def sort(self, key: Callable[[Any], Any]) -> int:
        """Sort all spans. The key of a span in the queue must not change.

        If few spans were added since it was sorted by the same key, only these are moved.

        Returns:
            The number of spans that were moved.
        """
        entries = self._entries
        sorted_count = self._sorted_count if key == self._sort_key else 0
        added: list[Span] = []
        while len(entries) > sorted_count and isinstance(span := entries[-1], Span):
            if _SEARCH_STEPS_MAX * len(added) >= sorted_count:
                break
            added.append(span)
            entries.pop()
        if len(entries) > sorted_count:
            sources: list[_Source] = []
            for entry in entries:
                if isinstance(entry, Span):
                    added.append(entry)
                else:
                    sources += entry.remaining_sources()
            entries.clear()
            added = sorted([*_join_ranges(sources), *added], key=key)
            entries.extend(added)
        else:
            for span in reversed(added):
                entries.insert(bisect_right(entries, key(span), key=key), span)
        self._sort_key, self._sorted_count = key, len(entries)
        return len(added)

    def _clear(self) -> None:
        self._entries.clear()
        self._sorted_count = 0

    def _append_merged(self, sources: list[_Source], sets: list[SpanSet]) -> None:
        """Append the spans of sources and sets, which are not all empty."""
        merged = _MergedSpans(sources)
        merged.add_sets(sets)
        self._entries.append(merged)
        self._expose_first()

    def _expose_first(self) -> None:
        """If the first entry consists of merged spans, take its first span out, in front of it."""
        if self._entries and isinstance(merged := self._entries[0], _MergedSpans):
            span = merged.pop_first()
            if merged.is_empty:
                self._entries.popleft()
            self._entries.appendleft(span)


class _RangeSource:
    """Ascending spans of messages with the same attempt count, created one by one from a set."""

    def __init__(self, attempts: int, sequences: SequenceSet) -> None:
        self.attempts = attempts
        self._firsts, self._lasts = sequences.bounds
        self._index = 0

    @property
    def is_empty(self) -> bool:
        return self._index == len(self._firsts)

    @property
    def next_sequence(self) -> int:
        """First sequence of the next span. There must be one."""
        return self._firsts[self._index]

    def rows(self) -> Iterable[tuple[int, int, int]]:
        """Return (first, last, attempts) of all spans."""
        firsts, lasts = self._firsts[self._index :], self._lasts[self._index :]
        return zip(firsts, lasts, repeat(self.attempts), strict=False)

    def pop_first(self) -> Span:
        index, self._index = self._index, self._index + 1
        return Span(self._firsts[index], self._lasts[index], self.attempts)

    def __iter__(self) -> Iterator[Span]:
        for index in range(self._index, len(self._firsts)):
            yield Span(self._firsts[index], self._lasts[index], self.attempts)


class _SpanSource:
    """Ascending spans."""

    def __init__(self, spans: deque[Span]) -> None:
        self._spans = spans

    @property
    def is_empty(self) -> bool:
        return not self._spans

    @property
    def next_sequence(self) -> int:
        """First sequence of the next span. There must be one."""
        return self._spans[0].first

    def pop_first(self) -> Span:
        return self._spans.popleft()

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)


_Source = _RangeSource | _SpanSource


class _MergedSpans:
    """Spans of several ascending sources, in ascending order.

    Sources can be added until the first span is removed.
    """

    def __init__(self, sources: list[_Source]) -> None:
        self._sources = sources
        self._small_sets: dict[int, list[SequenceSet]] = {}
        """Sets by attempts that are not part of a source yet. None is empty."""
        self._small_range_count = 0
        """Number of ranges in `_small_sets`."""
        self._heap: list[tuple[int, int]] | None = None
        """First sequence of each source that is not empty, and the number of the source; None
        until a span is removed.
        """

    def __iter__(self) -> Iterator[Span]:
        return heapq.merge(*self.remaining_sources(), key=_first)

    @property
    def is_started(self) -> bool:
        """True if a span was removed."""
        return self._heap is not None

    @property
    def is_empty(self) -> bool:
        """True if all spans were removed."""
        return self._heap == []

    def add_sets(self, sets: list[SpanSet]) -> None:
        """Add the messages of sets. No span may have been removed."""
        for attempts, sequences in sets:
            if sequences.range_count >= _UNITED_RANGES:
                self._sources.append(_RangeSource(attempts, sequences))
            elif sequences:
                self._small_sets.setdefault(attempts, []).append(sequences)
                self._small_range_count += sequences.range_count
                if self._small_range_count >= _UNITED_RANGES:
                    self._unite_small_sets()

    def _unite_small_sets(self) -> None:
        """Make the small sets sources."""
        for attempts, sets in self._small_sets.items():
            self._sources.append(_RangeSource(attempts, SequenceSet.union(sets)))
        self._small_sets.clear()
        self._small_range_count = 0

    def iter_unordered(self) -> Iterator[Span]:
        """Yield the spans in any order."""
        return chain.from_iterable(self.remaining_sources())

    def remaining_sources(self) -> list[_Source]:
        """Return the sources that are not empty."""
        if self._heap is not None:
            return [self._sources[number] for _, number in self._heap]
        self._unite_small_sets()
        return list(self._sources)

    def pop_first(self) -> Span:
        """Remove and return the first span, with the ranges of other sources that continue it.

        There must be one.
        """
        if self._heap is None:
            self._heap = self._build_heap()
        span = self._pop_first_part(self._heap)
        for _ in range(_JOINED_MAX):
            if not self._heap or self._heap[0][0] != span.last:
                break
            source = self._sources[self._heap[0][1]]
            if not _continues(source, span):
                break
            span.last = self._pop_first_part(self._heap).last
        return span

    def _build_heap(self) -> list[tuple[int, int]]:
        """Return the first sequence and the number of each source."""
        sources = enumerate(self.remaining_sources())
        heap = [(source.next_sequence, number) for number, source in sources]
        heapq.heapify(heap)
        return heap

    def _pop_first_part(self, heap: list[tuple[int, int]]) -> Span:
        """Remove and return the first span of a source."""
        number = heap[0][1]
        source = self._sources[number]
        span = source.pop_first()
        if source.is_empty:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (source.next_sequence, number))
        return span


def _continues(source: _Source, span: Span) -> bool:
    """Return True if the first range of a source differs from `span` only in its sequences."""
    if not isinstance(source, _RangeSource) or source.attempts != span.attempts:
        return False
    return not span.backoff_tick


def _join_ranges(sources: list[_Source]) -> list[Span]:
    """Return the spans of all sources by their first sequence. Ranges that continue each other are
    one span.
    """
    rows: list[tuple[int, int, int]] = []
    span_sources = [source for source in sources if isinstance(source, _SpanSource)]
    for source in sources:
        if isinstance(source, _RangeSource):
            rows += source.rows()
    joined: list[Span] = []
    for first, last, attempts in sorted(rows):
        if joined and joined[-1].last == first and joined[-1].attempts == attempts:
            joined[-1].last = last
        else:
            joined.append(Span(first, last, attempts))
    return list(heapq.merge(joined, *span_sources, key=_first)) if span_sources else joined
