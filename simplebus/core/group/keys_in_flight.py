"""What one member of a group by key was sent and has not acknowledged, and when that is overdue.

Rule 1: single messages, in no order: taking one out costs the same wherever it lies.
Rule 2: what is said of a range costs what it changes, and a look at the rows that it covers; not
what it names.
Rule 3: what is taken out stays in its bucket until somebody looks there: whether it is meant is
known by when it is due and how often it was sent. (It may be sent again within the same tick, and
be due when it was before.) When most of what lies in buckets is such, they are made anew.

    held      41: due at 17    42: due at 19    90: due at 17
    buckets   due at 17, sent once: fresh 90, rows 0-255: 41 …    due at 19, sent twice: …
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

# So few messages are looked for one by one.
_FEW = 256

_ROW_BITS = 8
_ROW = 1 << _ROW_BITS

# Buckets are made anew when so many more are gone than are there.
_GONE_MIN = 1024

_Held = dict[int, tuple[int, int]]
"""By sequence, when it is overdue, and how many bytes it has."""
_NOTHING = -1, 0


class _Bucket:
    """Messages that are due at one tick, and were sent as often. Some of them may be gone."""

    __slots__ = ("_fresh", "_rows")

    def __init__(self) -> None:
        self._fresh: list[int] = []
        """Those that nobody has looked at since they came."""
        self._rows: dict[int, set[int]] = {}
        """The others, by their sequences' high bits. None of them is empty."""

    def __bool__(self) -> bool:
        return bool(self._fresh or self._rows)

    def __iter__(self) -> Iterator[int]:
        yield from self._fresh
        for row in self._rows.values():
            yield from row

    def add(self, sequences: Iterable[int]) -> None:
        self._fresh += sequences

    def discard(self, sequence: int) -> None:
        rows = self._sorted_in()
        row = rows.get(sequence >> _ROW_BITS)
        if row is not None:
            row.discard(sequence)
            if not row:
                del rows[sequence >> _ROW_BITS]

    def take(self, first: int, last: int) -> list[int]:
        """Have none of first..last-1. Returns those that were here."""
        rows = self._sorted_in()
        taken: list[int] = []
        for key in self._keys(first, last):
            row, begin = rows[key], key << _ROW_BITS
            if first <= begin and begin + _ROW <= last:
                taken += rows.pop(key)
                continue
            some = [sequence for sequence in row if first <= sequence < last]
            row.difference_update(some)
            if not row:
                del rows[key]
            taken += some
        return taken

    def find(self, first: int, last: int, meant: Callable[[Iterable[int]], list[int]]) -> bool:
        """Whether any of first..last-1 is here, and meant. Lets go of rows without any."""
        rows = self._sorted_in()
        for key in self._keys(first, last):
            row, begin = rows[key], key << _ROW_BITS
            if any(first <= sequence < last for sequence in meant(row)):
                return True
            if first <= begin and begin + _ROW <= last:
                del rows[key]
        return False

    def _keys(self, first: int, last: int) -> list[int]:
        """Of the rows in which some of first..last-1 may be."""
        rows, keys = self._rows, range(first >> _ROW_BITS, ((last - 1) >> _ROW_BITS) + 1)
        if len(keys) <= len(rows):
            return [key for key in keys if key in rows]
        return [key for key in rows if key in keys]

    def _sorted_in(self) -> dict[int, set[int]]:
        rows = self._rows
        for sequence in self._fresh:
            row = rows.get(sequence >> _ROW_BITS)
            if row is None:
                rows[sequence >> _ROW_BITS] = {sequence}
            else:
                row.add(sequence)
        self._fresh.clear()
        return rows


class Sent:
    """Of one member."""

    def __init__(self, attempts_of: Mapping[int, int]) -> None:
        """`attempts_of` says how often each message that is held was sent."""
        self._attempts_of = attempts_of
        self.held: _Held = {}
        """Only to be read."""
        self._buckets: dict[int, dict[int, _Bucket]] = {}
        """By tick, then by attempts: what is due then, and perhaps what is gone."""
        self._gone = 0
        """About how much of that is gone."""

    def put(self, sequences: list[int], sizes: Iterable[int], *, attempts: int, due: int) -> None:
        """These were sent, with this one so often; who does not acknowledge them until this tick
        is late."""
        self.held.update((s, (due, size)) for s, size in zip(sequences, sizes, strict=True))
        self._bucket(due, attempts).add(sequences)

    def holds(self, first: int, last: int, attempt: int = 0) -> bool:
        """Whether any of first..last-1 is held; or of those that were sent so often."""
        if last - first <= _FEW:
            return any(True for _ in self._few(first, last, attempt))
        return any(
            bucket.find(first, last, partial(self._meant, due=due, attempts=attempts))
            for due, attempts, bucket in self._looked_at(attempt)
        )

    def lose(self, sequences: Iterable[int]) -> tuple[list[int], int]:
        """These are not held any longer. Returns those that were, and how many bytes they have."""
        lost: list[int] = []
        size, pop = 0, self.held.pop
        for sequence in sequences:
            sent = pop(sequence, None)
            if sent is not None:
                lost.append(sequence)
                size += sent[1]
        self._gone += len(lost)
        if self._gone > 2 * len(self.held) + _GONE_MIN:
            self._begin_anew()
        return lost, size

    def lose_range(self, first: int, last: int, attempt: int = 0) -> tuple[list[int], int]:
        """The same for first..last-1, or for what of them was sent so often, ascending."""
        if last - first <= _FEW:
            return self.lose(list(self._few(first, last, attempt)))
        lost: list[int] = []
        for due, attempts, bucket in self._looked_at(attempt):
            lost += self._meant(bucket.take(first, last), due, attempts)
            self._drop_empty(due, attempts)
        pop = self.held.pop
        return sorted(lost), sum([pop(sequence)[1] for sequence in lost])

    def overdue(self, tick: int) -> list[int]:
        """What is due at this tick. It is still held."""
        buckets = self._buckets.pop(tick, {}).items()
        return list({s: None for n, bucket in buckets for s in self._meant(bucket, tick, n)})

    def postpone(self, first: int, last: int, due: Callable[[int], int], attempt: int = 0) -> None:
        """What is held of first..last-1 is due at another tick, which follows from how often it was
        sent; or what of them was sent so often. However often this is asked for at a time, each
        message is moved once."""
        held = self.held
        if last - first <= _FEW:
            for sequence in self._few(first, last, attempt):
                attempts = self._attempts_of[sequence]
                (before, size), then = held[sequence], due(attempts)
                if then != before:
                    self._bucket(before, attempts).discard(sequence)
                    self._drop_empty(before, attempts)
                    held[sequence] = then, size
                    self._bucket(then, attempts).add((sequence,))
            return
        for before, attempts, bucket in self._looked_at(attempt):
            then = due(attempts)
            if then != before and (
                moved := self._meant(bucket.take(first, last), before, attempts)
            ):
                self._bucket(then, attempts).add(moved)
                for sequence in moved:
                    held[sequence] = then, held[sequence][1]
            self._drop_empty(before, attempts)

    def _few(self, first: int, last: int, attempt: int) -> Iterator[int]:
        """What is held of first..last-1, or was sent so often."""
        held, attempts_of = self.held, self._attempts_of
        for sequence in range(first, last):
            if sequence in held and attempt in (0, attempts_of[sequence]):
                yield sequence

    def _meant(self, sequences: Iterable[int], due: int, attempts: int) -> list[int]:
        """Those that are held, due at this tick, and were sent so often."""
        held, attempts_of = self.held.get, self._attempts_of
        return [s for s in sequences if held(s, _NOTHING)[0] == due and attempts_of[s] == attempts]

    def _bucket(self, due: int, attempts: int) -> _Bucket:
        by_attempts = self._buckets.setdefault(due, {})
        bucket = by_attempts.get(attempts)
        if bucket is None:
            bucket = by_attempts[attempts] = _Bucket()
        return bucket

    def _looked_at(self, attempt: int) -> list[tuple[int, int, _Bucket]]:
        """Buckets of all attempts for 0."""
        return [
            (due, attempts, bucket)
            for due, by_attempts in self._buckets.items()
            for attempts, bucket in by_attempts.items()
            if attempt in (0, attempts)
        ]

    def _drop_empty(self, due: int, attempts: int) -> None:
        by_attempts = self._buckets[due]
        if not by_attempts[attempts]:
            del by_attempts[attempts]
            if not by_attempts:
                del self._buckets[due]

    def _begin_anew(self) -> None:
        self._gone = 0
        self._buckets.clear()
        for sequence, (due, _) in self.held.items():
            self._bucket(due, self._attempts_of[sequence]).add((sequence,))

    def check(self) -> None:
        """Raise AssertionError unless all that is held is where it is looked for."""
        found = [
            (sequence, due)
            for due, attempts, bucket in self._looked_at(0)
            for sequence in self._meant(set(bucket), due, attempts)
        ]
        assert sorted(found) == sorted((s, due) for s, (due, _) in self.held.items())
        assert all(self._buckets.values()), "an empty tick"
