"""When what was sent is looked at again.

Rule 1: every message that was sent and not acknowledged lies in exactly one span, wherever spans
are kept. A span may also cover messages that are acknowledged: they are left out when it is due.
Rule 2: a tick touches only what is due.

    wheel   tick 17: (4, 9)  tick 18: (9, 30) …      ascending within a tick
    set     (4, 6) (8, 30)                           some of the messages, and how many
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

INHERITED = -1
"""The attempts of messages that somebody else was sent, who knows how often."""

_first = attrgetter("first")


@dataclass(slots=True)
class Span:
    """Messages first..last-1 of a class, sent together."""

    first: int
    last: int
    attempts: int
    """How often this subscription was sent them; INHERITED when a former one left them."""

    @property
    def next_attempt(self) -> int:
        """What the next sending is called: 1 for the first one, 0 when nobody knows."""
        return self.attempts + 1


class Wheel:
    """Spans by the tick at which they are due."""

    def __init__(self) -> None:
        self._due: dict[int, list[Span]] = {}

    def __len__(self) -> int:
        """How many spans there are."""
        return sum(map(len, self._due.values()))

    def put(self, tick: int, first: int, last: int, attempts: int) -> None:
        """Messages first..last-1 are due at this tick."""
        spans = self._due.setdefault(tick, [])
        if spans and spans[-1].last == first and spans[-1].attempts == attempts:
            spans[-1].last = last
        else:
            insort(spans, Span(first, last, attempts), key=_first)

    def pop(self, tick: int) -> list[Span]:
        """What is due at this tick."""
        return self._due.pop(tick, [])

    def cut(self, first: int, last: int) -> list[Span]:
        """Take messages first..last-1 out, wherever they lie."""
        out: list[Span] = []
        for tick, spans in list(self._due.items()):
            at = max(0, bisect_right(spans, first, key=_first) - 1)
            while at < len(spans) and spans[at].first < last:
                span = spans[at]
                begin, end = max(first, span.first), min(last, span.last)
                if begin >= end:
                    at += 1
                    continue
                out.append(Span(begin, end, span.attempts))
                left = [Span(span.first, begin, span.attempts)] if span.first < begin else []
                right = [Span(end, span.last, span.attempts)] if end < span.last else []
                spans[at : at + 1] = left + right
                at += len(left)
            if not spans:
                del self._due[tick]
        return out

    def clear(self) -> list[Span]:
        """Take everything out, ascending."""
        spans = sorted(self, key=_first)
        self._due.clear()
        return spans

    def __iter__(self) -> Iterator[Span]:
        for spans in self._due.values():
            yield from spans


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
