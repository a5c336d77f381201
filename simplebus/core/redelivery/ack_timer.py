"""When what was sent is looked at again.

Rule 1: every message that was sent and not acknowledged lies in exactly one span, wherever spans
are kept. A span may also cover messages that are acknowledged: they are left out when it is due.
Rule 2: a tick touches only what is due.

    wheel   tick 17: sent once (4, 9), twice (12, 14)   tick 18: sent once (9, 12) …
    set     (4, 6) (8, 30)                              some of the messages, and how many
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter

from simplebus.core.errors import Reason

# So few ranges are put among others one by one.
_FEW = 16

_first = attrgetter("first")


@dataclass(slots=True)
class Span:
    """Messages first..last-1 of a class, sent together."""

    first: int
    last: int
    attempts: int
    """How often they were sent, by this subscription or by whose place it took."""
    given_up: Reason | None = None
    """Why they are not to be sent any more; None for what is."""

    def __lt__(self, other: Span) -> bool:
        """By where they begin: what is put off to one time may come of one message twice."""
        return self.first < other.first

    @property
    def next_attempt(self) -> int:
        """What the next sending is called: 1 for the first one."""
        return self.attempts + 1


class TimerWheel:
    """Messages by the tick at which they are due, and by how often they were sent."""

    def __init__(self) -> None:
        self._due: dict[int, dict[int, SequenceSet]] = {}
        """By tick, then by attempts. None of them is empty."""

    def __len__(self) -> int:
        """How many spans there are."""
        return sum(1 for _ in self)

    def schedule(self, tick: int, first: int, last: int, attempts: int) -> None:
        """Messages first..last-1 are due at this tick."""
        self._set(tick, attempts).add(first, last)

    def pop_due(self, tick: int) -> list[Span]:
        """What is due at this tick, ascending."""
        return _spans(self._due.pop(tick, {}))

    def __bool__(self) -> bool:
        return bool(self._due)

    def remove(self, first: int, last: int, attempt: int = 0) -> list[Span]:
        """Take messages first..last-1 out, wherever they lie; or those that were sent so often."""
        out: list[Span] = []
        for tick, attempts, sequences in self._sets(attempt):
            out += [Span(a, b, attempts) for a, b in sequences.take(first, last)]
            self._drop_empty(tick, attempts)
        return out

    def overlaps(self, first: int, last: int, attempt: int = 0) -> bool:
        """Whether any of messages first..last-1 lies in here; or of those that were sent so
        often."""
        return any(held.overlaps(first, last) for _, _, held in self._sets(attempt))

    def sets(self, attempt: int = 0) -> list[tuple[int, int, SequenceSet]]:
        """Everything, or what was sent so often: when it is due, how often it was sent, and which
        messages."""
        return self._sets(attempt)

    def postpone(self, first: int, last: int, due: Callable[[int], int], attempt: int = 0) -> None:
        """Messages first..last-1, as far as they are in here, are due at another tick, which
        follows from their attempts; or those that were sent so often. Those that are due then are
        not touched: however often this is asked for at a time, each message is moved once."""
        for tick, attempts, sequences in self._sets(attempt):
            then = due(attempts)
            if then != tick and (ranges := sequences.take(first, last)):
                self._set(then, attempts).update(ranges)
                self._drop_empty(tick, attempts)

    def clear(self) -> list[tuple[int, Span]]:
        """Take everything out: when it is due, and what; of one tick, ascending."""
        spans = [(tick, span) for tick, held in self._due.items() for span in _spans(held)]
        self._due.clear()
        return spans

    def __iter__(self) -> Iterator[Span]:
        for by_attempts in self._due.values():
            yield from _spans(by_attempts)

    def _set(self, tick: int, attempts: int) -> SequenceSet:
        by_attempts = self._due.setdefault(tick, {})
        sequences = by_attempts.get(attempts)
        if sequences is None:
            sequences = by_attempts[attempts] = SequenceSet()
        return sequences

    def _sets(self, attempt: int) -> list[tuple[int, int, SequenceSet]]:
        """Those of all attempts for 0."""
        return [
            (tick, attempts, sequences)
            for tick, by_attempts in self._due.items()
            for attempts, sequences in by_attempts.items()
            if attempt in (0, attempts)
        ]

    def _drop_empty(self, tick: int, attempts: int) -> None:
        by_attempts = self._due[tick]
        if not by_attempts[attempts]:
            del by_attempts[attempts]
            if not by_attempts:
                del self._due[tick]


def _spans(by_attempts: dict[int, SequenceSet]) -> list[Span]:
    """Ascending."""
    spans = [Span(a, b, n) for n, sequences in by_attempts.items() for a, b in sequences]
    return sorted(spans, key=_first) if len(by_attempts) > 1 else spans


def covering(
    first: int, last: int, rows: Iterable[tuple[int, int, int]], *, otherwise: int
) -> list[Span]:
    """Messages first..last-1, by how often rows say that they were sent: messages begin..end-1, and
    a count; of what two speak of, the one that begins first. `otherwise` is for what none speaks
    of."""
    spans: list[Span] = []
    reached = first
    for begin, end, count in [*sorted(rows), (last, last, 0)]:
        begin, end = min(max(begin, reached), last), min(end, last)
        if reached < begin:
            spans.append(Span(reached, begin, otherwise))
        if begin < end:
            spans.append(Span(begin, end, count))
        reached = max(reached, begin, end)
    return spans


def parted(
    spans: Iterable[Span], rows: Iterable[tuple[int, int, float]]
) -> Iterator[tuple[Span, float | None]]:
    """Spans, and of each what the row says that is about it: messages first..last-1, a value. Both
    are ascending and disjoint; spans of which only a part is in a row are divided."""
    ahead = iter(rows)
    row = next(ahead, None)
    for span in spans:
        at = span.first
        while at < span.last:
            while row is not None and row[1] <= at:
                row = next(ahead, None)
            begin = span.last if row is None else min(max(row[0], at), span.last)
            if at < begin:
                yield replace(span, first=at, last=begin), None
            end = span.last if row is None else min(row[1], span.last)
            if row is not None and begin < end:
                yield replace(span, first=begin, last=end), row[2]
            at = max(begin, end)


class SequenceSet:
    """Sequences, kept as half-open ranges: ascending, none empty, none touching the next."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        """How many sequences there are."""
        return self._count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The ranges."""
        return zip(self._firsts, self._lasts, strict=True)

    def add(self, first: int, last: int) -> None:
        """Have first..last-1."""
        if first >= last:
            return
        if self._lasts and self._lasts[-1] == first:
            self._lasts[-1] = last
            self._count += last - first
            return
        begin, end = bisect_left(self._lasts, first), bisect_right(self._firsts, last)
        if begin < end:
            first = min(first, self._firsts[begin])
            last = max(last, self._lasts[end - 1])
        self._replace(begin, end, [(first, last)])

    def remove(self, first: int, last: int) -> None:
        """Have none of first..last-1."""
        if first >= last:
            return
        begin, end = bisect_right(self._lasts, first), bisect_left(self._firsts, last)
        if begin >= end:
            return
        ends = [(self._firsts[begin], first), (last, self._lasts[end - 1])]
        self._replace(begin, end, [(a, b) for a, b in ends if a < b])

    def within(self, first: int, last: int, most: int | None = None) -> list[tuple[int, int]]:
        """The ranges of first..last-1 that are in here; up to so many, the lowest ones."""
        begin, end = bisect_right(self._lasts, first), bisect_left(self._firsts, last)
        if most is not None:
            end = min(end, begin + most)
        if begin >= end or first >= last:
            return []
        found = list(zip(self._firsts[begin:end], self._lasts[begin:end], strict=True))
        found[0] = (max(first, found[0][0]), found[0][1])
        found[-1] = (found[-1][0], min(last, found[-1][1]))
        return found

    def take(self, first: int, last: int) -> list[tuple[int, int]]:
        """Have none of first..last-1. Returns the ranges of them that were in here."""
        taken = self.within(first, last)
        if taken:
            self.remove(first, last)
        return taken

    @property
    def ranges(self) -> int:
        """How many ranges there are."""
        return len(self._firsts)

    def update(self, ranges: list[tuple[int, int]]) -> None:
        """Have all of these ascending ranges: many at once, where one after the other would move
        what lies behind each of them."""
        if len(ranges) <= _FEW:
            for first, last in ranges:
                self.add(first, last)
            return
        firsts: list[int] = []
        lasts: list[int] = []
        for first, last in sorted([*self, *ranges]):
            if lasts and first <= lasts[-1]:
                lasts[-1] = max(last, lasts[-1])
            else:
                firsts.append(first)
                lasts.append(last)
        self._firsts, self._lasts, self._count = firsts, lasts, sum(lasts) - sum(firsts)

    def without(self, first: int, last: int) -> list[tuple[int, int]]:
        """The ranges of first..last-1 that are not in here."""
        begin, end = bisect_right(self._lasts, first), bisect_left(self._firsts, last)
        outside = []
        for at in range(begin, end):
            if first < self._firsts[at]:
                outside.append((first, self._firsts[at]))
            first = self._lasts[at]
        if first < last:
            outside.append((first, last))
        return outside

    def overlaps(self, first: int, last: int) -> bool:
        """Whether any of first..last-1 is in here."""
        at = bisect_right(self._lasts, first)
        return first < last and at < len(self._firsts) and self._firsts[at] < last

    def clear(self) -> None:
        self._firsts.clear()
        self._lasts.clear()
        self._count = 0

    def _replace(self, begin: int, end: int, ranges: list[tuple[int, int]]) -> None:
        """Have these ranges instead of those at begin..end-1."""
        self._count += sum(b - a for a, b in ranges)
        self._count -= sum(self._lasts[begin:end]) - sum(self._firsts[begin:end])
        self._firsts[begin:end] = [a for a, _ in ranges]
        self._lasts[begin:end] = [b for _, b in ranges]

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        bounds = [bound for pair in self for bound in pair]
        assert all(a < b for a, b in pairwise(bounds)), bounds
        assert self._count == sum(b - a for a, b in self), (self._count, bounds)


def check_once(spans: Iterable[Span], ranges: Iterable[tuple[int, int]]) -> None:
    """Raise AssertionError unless every sequence of these ranges lies in exactly one span."""
    edges = sorted((span.first, span.last) for span in spans if span.first < span.last)
    for first, last in ranges:
        at = first
        for begin, end in edges:
            if begin < last and end > first:
                assert max(begin, first) == at, ("not in exactly one span", at, (begin, end))
                at = min(end, last)
        assert at == last, ("in no span", at, last)
