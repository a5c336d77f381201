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
_SCALAR_MESSAGES_MAX = 256

_ROW_BITS = 8
_ROW_SIZE = 1 << _ROW_BITS

# Buckets are made anew when so many more are gone than are there.
_STALE_MIN = 1024

_HeldMessages = dict[int, tuple[int, int]]
"""By sequence, when it is overdue, and how many bytes it has."""
_NOT_HELD = -1, 0


class _DueBucket:
    """Messages that are due at one tick, and were sent as often. Some of them may be gone."""

    __slots__ = ("_row_by_high_bits", "_unsorted")

    def __init__(self) -> None:
        self._unsorted: list[int] = []
        """Those that nobody has looked at since they came."""
        self._row_by_high_bits: dict[int, set[int]] = {}
        """The others, by their sequences' high bits. None of them is empty."""

    def __bool__(self) -> bool:
        return bool(self._unsorted or self._row_by_high_bits)

    def __iter__(self) -> Iterator[int]:
        yield from self._unsorted
        for row in self._row_by_high_bits.values():
            yield from row

    def add(self, sequences: Iterable[int]) -> None:
        self._unsorted += sequences

    def discard(self, sequence: int) -> None:
        rows = self._sort_into_rows()
        row = rows.get(sequence >> _ROW_BITS)
        if row is not None:
            row.discard(sequence)
            if not row:
                del rows[sequence >> _ROW_BITS]

    def pop_range(self, first: int, last: int) -> list[int]:
        """Have none of first..last-1. Returns those that were here."""
        rows = self._sort_into_rows()
        taken: list[int] = []
        for key in self._row_keys(first, last):
            row, begin = rows[key], key << _ROW_BITS
            if first <= begin and begin + _ROW_SIZE <= last:
                taken += rows.pop(key)
                continue
            some = [sequence for sequence in row if first <= sequence < last]
            row.difference_update(some)
            if not row:
                del rows[key]
            taken += some
        return taken

    def has_current(
        self, first: int, last: int, select_current: Callable[[Iterable[int]], list[int]]
    ) -> bool:
        """Whether any of first..last-1 is here, and meant. Lets go of rows without any."""
        rows = self._sort_into_rows()
        for key in self._row_keys(first, last):
            row, begin = rows[key], key << _ROW_BITS
            if any(first <= sequence < last for sequence in select_current(row)):
                return True
            if first <= begin and begin + _ROW_SIZE <= last:
                del rows[key]
        return False

    def _row_keys(self, first: int, last: int) -> list[int]:
        """Of the rows in which some of first..last-1 may be."""
        rows, keys = (
            self._row_by_high_bits,
            range(first >> _ROW_BITS, ((last - 1) >> _ROW_BITS) + 1),
        )
        if len(keys) <= len(rows):
            return [key for key in keys if key in rows]
        return [key for key in rows if key in keys]

    def _sort_into_rows(self) -> dict[int, set[int]]:
        rows = self._row_by_high_bits
        for sequence in self._unsorted:
            row = rows.get(sequence >> _ROW_BITS)
            if row is None:
                rows[sequence >> _ROW_BITS] = {sequence}
            else:
                row.add(sequence)
        self._unsorted.clear()
        return rows


class KeyOrderedInFlight:
    """Of one member."""

    def __init__(self, attempts_by_sequence: Mapping[int, int]) -> None:
        """`attempts_of` says how often each message that is held was sent."""
        self._attempts_by_sequence = attempts_by_sequence
        self.held_messages: _HeldMessages = {}
        """Only to be read."""
        self._bucket_by_due_and_attempts: dict[int, dict[int, _DueBucket]] = {}
        """By tick, then by attempts: what is due then, and perhaps what is gone."""
        self._stale_count = 0
        """About how much of that is gone."""

    def add_sent(
        self, sequences: list[int], sizes: Iterable[int], *, attempts: int, due_tick: int
    ) -> None:
        """These were sent, with this one so often; who does not acknowledge them until this tick
        is late."""
        self.held_messages.update(
            (s, (due_tick, size)) for s, size in zip(sequences, sizes, strict=True)
        )
        self._get_bucket(due_tick, attempts).add(sequences)

    def has_in_flight(self, first: int, last: int, attempt: int = 0) -> bool:
        """Whether any of first..last-1 is held; or of those that were sent so often."""
        if last - first <= _SCALAR_MESSAGES_MAX:
            return any(True for _ in self._iter_held(first, last, attempt))
        return any(
            bucket.has_current(
                first, last, partial(self._select_current, due_tick=due, attempts=attempts)
            )
            for due, attempts, bucket in self._matching_buckets(attempt)
        )

    def remove_sequences(self, sequences: Iterable[int]) -> tuple[list[int], int]:
        """These are not held any longer. Returns those that were, and how many bytes they have."""
        lost: list[int] = []
        size, pop = 0, self.held_messages.pop
        for sequence in sequences:
            sent = pop(sequence, None)
            if sent is not None:
                lost.append(sequence)
                size += sent[1]
        self._stale_count += len(lost)
        if self._stale_count > 2 * len(self.held_messages) + _STALE_MIN:
            self._rebuild_buckets()
        return lost, size

    def remove_range(self, first: int, last: int, attempt: int = 0) -> tuple[list[int], int]:
        """The same for first..last-1, or for what of them was sent so often, ascending."""
        if last - first <= _SCALAR_MESSAGES_MAX:
            return self.remove_sequences(list(self._iter_held(first, last, attempt)))
        lost: list[int] = []
        for due, attempts, bucket in self._matching_buckets(attempt):
            lost += self._select_current(bucket.pop_range(first, last), due, attempts)
            self._drop_empty(due, attempts)
        pop = self.held_messages.pop
        return sorted(lost), sum([pop(sequence)[1] for sequence in lost])

    def find_overdue(self, tick: int) -> list[int]:
        """What is due at this tick. It is still held."""
        buckets = self._bucket_by_due_and_attempts.pop(tick, {}).items()
        return list(
            {s: None for n, bucket in buckets for s in self._select_current(bucket, tick, n)}
        )

    def extend_timeouts(
        self, first: int, last: int, due_tick_for: Callable[[int], int], attempt: int = 0
    ) -> None:
        """What is held of first..last-1 is due at another tick, which follows from how often it was
        sent; or what of them was sent so often. However often this is asked for at a time, each
        message is moved once."""
        held = self.held_messages
        if last - first <= _SCALAR_MESSAGES_MAX:
            for sequence in self._iter_held(first, last, attempt):
                attempts = self._attempts_by_sequence[sequence]
                (before, size), then = held[sequence], due_tick_for(attempts)
                if then != before:
                    self._get_bucket(before, attempts).discard(sequence)
                    self._drop_empty(before, attempts)
                    held[sequence] = then, size
                    self._get_bucket(then, attempts).add((sequence,))
            return
        for before, attempts, bucket in self._matching_buckets(attempt):
            then = due_tick_for(attempts)
            if then != before and (
                moved := self._select_current(bucket.pop_range(first, last), before, attempts)
            ):
                self._get_bucket(then, attempts).add(moved)
                for sequence in moved:
                    held[sequence] = then, held[sequence][1]
            self._drop_empty(before, attempts)

    def _iter_held(self, first: int, last: int, attempt: int) -> Iterator[int]:
        """What is held of first..last-1, or was sent so often."""
        held, attempts_of = self.held_messages, self._attempts_by_sequence
        for sequence in range(first, last):
            if sequence in held and attempt in (0, attempts_of[sequence]):
                yield sequence

    def _select_current(self, sequences: Iterable[int], due_tick: int, attempts: int) -> list[int]:
        """Those that are held, due at this tick, and were sent so often."""
        held, attempts_of = self.held_messages.get, self._attempts_by_sequence
        return [
            s for s in sequences if held(s, _NOT_HELD)[0] == due_tick and attempts_of[s] == attempts
        ]

    def _get_bucket(self, due_tick: int, attempts: int) -> _DueBucket:
        by_attempts = self._bucket_by_due_and_attempts.setdefault(due_tick, {})
        bucket = by_attempts.get(attempts)
        if bucket is None:
            bucket = by_attempts[attempts] = _DueBucket()
        return bucket

    def _matching_buckets(self, attempt: int) -> list[tuple[int, int, _DueBucket]]:
        """Buckets of all attempts for 0."""
        return [
            (due, attempts, bucket)
            for due, by_attempts in self._bucket_by_due_and_attempts.items()
            for attempts, bucket in by_attempts.items()
            if attempt in (0, attempts)
        ]

    def _drop_empty(self, due_tick: int, attempts: int) -> None:
        by_attempts = self._bucket_by_due_and_attempts[due_tick]
        if not by_attempts[attempts]:
            del by_attempts[attempts]
            if not by_attempts:
                del self._bucket_by_due_and_attempts[due_tick]

    def _rebuild_buckets(self) -> None:
        self._stale_count = 0
        self._bucket_by_due_and_attempts.clear()
        for sequence, (due, _) in self.held_messages.items():
            self._get_bucket(due, self._attempts_by_sequence[sequence]).add((sequence,))

    def check_invariants(self) -> None:
        """Raise AssertionError unless all that is held is where it is looked for."""
        found = [
            (sequence, due)
            for due, attempts, bucket in self._matching_buckets(0)
            for sequence in self._select_current(set(bucket), due, attempts)
        ]
        assert sorted(found) == sorted((s, due) for s, (due, _) in self.held_messages.items())
        assert all(self._bucket_by_due_and_attempts.values()), "an empty tick"
