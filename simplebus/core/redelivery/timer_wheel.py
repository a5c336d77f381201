"""Timer wheel of messages by the tick at which they are due.

A position has two: one of deliveries that wait for an ack, and one of rejected messages that wait
for their backoff. A message is in at most one span. A span may also cover acknowledged messages:
they are skipped when the span is due. A tick examines only the spans that are due.

    tick 17: sent once (4, 9), twice (12, 14)    tick 18: sent once (9, 12) …
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from simplebus.core.errors import Reason
from simplebus.core.redelivery.sequence_set import SequenceSet

_first = attrgetter("first")


@dataclass(slots=True)
class Span:
    """Messages first..last-1 of a class with equal attempts, handled together."""

    first: int
    last: int
    attempts: int
    """Number of deliveries so far, by this position or its predecessors; 0 if never sent."""
    give_up_reason: Reason | None = None
    """Reason for giving the messages up; None if they are to be sent."""
    backoff_tick: int = 0
    """Tick at which the backoff of the messages ends, if they are delayed until a time because of
    it; else 0.
    """

    def __lt__(self, other: Span) -> bool:
        """Compare by first sequence, so that spans with equal due times can be in one heap."""
        return self.first < other.first

    @property
    def next_attempt(self) -> int:
        """Attempt number of the next delivery; 1 for the first."""
        return self.attempts + 1


class TimerWheel:
    """Messages by the tick at which they are due and by their attempts."""

    def __init__(self) -> None:
        self._due: defaultdict[int, defaultdict[int, SequenceSet]] = defaultdict(
            lambda: defaultdict(SequenceSet)
        )
        """Sets by tick, then by attempts. No set is empty."""

    def __len__(self) -> int:
        """Return the number of spans."""
        return sum(1 for _ in self)

    def schedule(self, tick: int, first: int, last: int, attempts: int) -> None:
        """Schedule messages first..last-1 for `tick`."""
        self._due[tick][attempts].add(first, last)

    def schedule_set(self, tick: int, attempts: int, sequences: SequenceSet) -> None:
        """Schedule the messages of a set for `tick`."""
        self._due[tick][attempts].unite(sequences)

    def pop_due(self, tick: int) -> list[Span]:
        """Remove and return the spans that are due at `tick`, in ascending order."""
        return _spans(self._due.pop(tick, {}))

    def pop_due_sets(self, tick: int) -> list[tuple[int, SequenceSet]]:
        """Remove the messages that are due at `tick`. Returns them as (attempts, messages)."""
        return list(self._due.pop(tick, {}).items())

    def pop_sets_until(self, tick: int) -> list[tuple[int, SequenceSet]]:
        """Remove the messages that are due at `tick` or before. See `pop_due_sets`."""
        ticks = sorted(due_tick for due_tick in self._due if due_tick <= tick)
        return [due for due_tick in ticks for due in self.pop_due_sets(due_tick)]

    def __bool__(self) -> bool:
        return bool(self._due)

    def remove(self, first: int, last: int, attempt: int = 0) -> list[Span]:
        """Remove and return messages first..last-1; with `attempt` other than 0, only of this
        attempt.
        """
        removed: list[Span] = []
        for tick, attempts, sequences in self.scheduled_sets(attempt):
            removed += [Span(a, b, attempts) for a, b in sequences.pop_ranges(first, last)]
            self._drop_empty(tick, attempts)
        return removed

    def pop_range(self, first: int, last: int) -> list[SequenceSet]:
        """Remove messages first..last-1. Returns them as sets, none of which is empty."""
        removed: list[SequenceSet] = []
        for tick, attempts, sequences in self.scheduled_sets():
            if part := sequences.pop(first, last):
                removed.append(part)
                self._drop_empty(tick, attempts)
        return removed

    def pop_set(self, messages: SequenceSet) -> list[SequenceSet]:
        """Remove the messages of a set. Returns them as sets, none of which is empty."""
        removed: list[SequenceSet] = []
        for tick, attempts, sequences in self.scheduled_sets():
            if part := sequences.pop_set(messages):
                removed.append(part)
                self._drop_empty(tick, attempts)
        return removed

    def overlaps(self, first: int, last: int, attempt: int = 0) -> bool:
        """Return True if any of first..last-1 is scheduled; `attempt` is as for `remove`."""
        return any(
            sequences.overlaps(first, last) for _, _, sequences in self.scheduled_sets(attempt)
        )

    def scheduled_sets(self, attempt: int = 0) -> list[tuple[int, int, SequenceSet]]:
        """Return (due tick, attempts, messages) of all entries; with `attempt` other than 0, only
        of this attempt.
        """
        return [
            (tick, attempts, sequences)
            for tick, by_attempts in self._due.items()
            for attempts, sequences in by_attempts.items()
            if attempt in (0, attempts)
        ]

    def reschedule(
        self, first: int, last: int, due_tick: Callable[[int], int], attempt: int = 0
    ) -> None:
        """Move messages first..last-1 to the tick that `due_tick` returns for their attempts.

        Messages that are due at this tick already are not moved, so repeated calls within one tick
        move each message once. `attempt` is as for `remove`.
        """
        moved: dict[tuple[int, int], list[SequenceSet]] = {}
        for tick, attempts, sequences in self.scheduled_sets(attempt):
            new_tick = due_tick(attempts)
            if new_tick != tick and (part := sequences.pop(first, last)):
                moved.setdefault((new_tick, attempts), []).append(part)
                self._drop_empty(tick, attempts)
        for (new_tick, attempts), parts in moved.items():
            self._due[new_tick][attempts].unite(SequenceSet.union(parts))

    def postpone(self, ticks: int) -> None:
        """Move everything by this number of ticks."""
        for tick in sorted(self._due, reverse=True):
            self._due[tick + ticks] = self._due.pop(tick)

    def pop_all(self) -> list[tuple[int, Span]]:
        """Remove everything. Returns (due tick, span) pairs; the spans of one tick ascend."""
        spans = [
            (tick, span) for tick, sequences in self._due.items() for span in _spans(sequences)
        ]
        self._due.clear()
        return spans

    def pop_all_sets(self) -> list[tuple[int, int, SequenceSet]]:
        """Remove everything. Returns the result of `scheduled_sets`."""
        sets = self.scheduled_sets()
        self._due.clear()
        return sets

    def __iter__(self) -> Iterator[Span]:
        for _, attempts, sequences in self.scheduled_sets():
            for first, last in sequences:
                yield Span(first, last, attempts)

    def _drop_empty(self, tick: int, attempts: int) -> None:
        by_attempts = self._due[tick]
        if not by_attempts[attempts]:
            del by_attempts[attempts]
            if not by_attempts:
                del self._due[tick]


def _spans(by_attempts: dict[int, SequenceSet]) -> list[Span]:
    """Return the sets as spans in ascending order."""
    spans = [Span(a, b, n) for n, sequences in by_attempts.items() for a, b in sequences]
    return sorted(spans, key=_first) if len(by_attempts) > 1 else spans


def spans_by_attempts(
    first: int, last: int, rows: Iterable[tuple[int, int, int]], *, default: int
) -> list[Span]:
    """Divide first..last-1 into spans by their number of attempts.

    Args:
        rows: (first, last, attempts) of some messages. Of overlapping rows, the first one counts.
        default: Attempts of messages that no row covers.
    """
    spans: list[Span] = []
    sequence = first
    for begin, end, count in sorted(rows):
        begin = begin if begin > sequence else sequence  # `max` would take most of the time.
        end = end if end < last else last
        if begin >= end:
            continue
        if sequence < begin:
            spans.append(Span(sequence, begin, default))
        spans.append(Span(begin, end, count))
        sequence = end
    if sequence < last:
        spans.append(Span(sequence, last, default))
    return spans


def split_spans(
    spans: Iterable[Span], rows: Iterable[tuple[int, int, float]]
) -> Iterator[tuple[Span, float | None]]:
    """Split spans at the bounds of rows and yield each part with the value of its row.

    A span that is not split is yielded itself.

    Args:
        spans: Ascending, disjoint spans.
        rows: (first, last, value) of messages, ascending and disjoint.

    Yields:
        A part of a span, and the value of the row that covers it; None if no row does.
    """
    remaining_rows = iter(rows)
    row = next(remaining_rows, None)
    for span in spans:
        sequence = span.first
        while row is not None and row[1] <= sequence:
            row = next(remaining_rows, None)
        if row is None or span.last <= row[0]:
            if sequence < span.last:
                yield span, None
            continue
        while sequence < span.last:
            while row is not None and row[1] <= sequence:
                row = next(remaining_rows, None)
            begin = span.last if row is None else min(max(row[0], sequence), span.last)
            if sequence < begin:
                yield _part(span, sequence, begin), None
            end = span.last if row is None else min(row[1], span.last)
            if row is not None and begin < end:
                yield _part(span, begin, end), row[2]
            sequence = max(begin, end)


def _part(span: Span, first: int, last: int) -> Span:
    """Return messages first..last-1 of a span; the span itself if these are all."""
    if first == span.first and last == span.last:
        return span
    return Span(first, last, span.attempts, span.give_up_reason, span.backoff_tick)


def check_covered_once(spans: Iterable[Span], ranges: Iterable[tuple[int, int]]) -> None:
    """Raise AssertionError unless every sequence of these ranges is in exactly one span."""
    bounds = sorted((span.first, span.last) for span in spans if span.first < span.last)
    for first, last in ranges:
        sequence = first
        for begin, end in bounds:
            if begin < last and end > first:
                is_next = max(begin, first) == sequence
                assert is_next, ("not in exactly one span", sequence, (begin, end))
                sequence = min(end, last)
        assert sequence == last, ("in no span", sequence, last)
