"""Messages in flight to one member of a key-ordered group, and when each is overdue.

Messages are held singly, so removing one costs the same wherever it is. The cost of a range
operation depends on the number of changed messages, not on the length of the range. Removed
messages stay in their bucket until the bucket is read; an entry is current if its due tick and
attempt count match. When most entries are stale, the buckets are rebuilt.

    held      41: due at 17    42: due at 19    90: due at 17
    buckets   due at 17, attempt 1: unsorted 90, row 0: 41 …    due at 19, attempt 2: …
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

# Ranges up to this length are checked message by message.
_SCALAR_MESSAGES_MAX = 256

_ROW_BITS = 8
_ROW_SIZE = 1 << _ROW_BITS

# Buckets are rebuilt when stale entries exceed the current ones by this much.
_STALE_MIN = 1024

_HeldMessages = dict[int, tuple[int, int]]
"""Due tick and bytes of each message, by sequence."""
_NOT_HELD = -1, 0


class _DueBucket:
    """Messages with the same due tick and attempt count. Some entries may be stale."""

    __slots__ = ("_row_by_high_bits", "_unsorted")

    def __init__(self) -> None:
        self._unsorted: list[int] = []
        """Sequences added since the bucket was last read."""
        self._row_by_high_bits: dict[int, set[int]] = {}
        """Sequences that were sorted into sets, by their high bits. No set is empty."""

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
        """Remove and return the entries of first..last-1."""
        rows = self._sort_into_rows()
        removed: list[int] = []
        for key in self._row_keys(first, last):
            row, begin = rows[key], key << _ROW_BITS
            if first <= begin and begin + _ROW_SIZE <= last:
                removed += rows.pop(key)
                continue
            matching = [sequence for sequence in row if first <= sequence < last]
            row.difference_update(matching)
            if not row:
                del rows[key]
            removed += matching
        return removed

    def has_current(
        self, first: int, last: int, select_current: Callable[[Iterable[int]], list[int]]
    ) -> bool:
        """Return True if any entry of first..last-1 is current. Drops rows that have none."""
        rows = self._sort_into_rows()
        for key in self._row_keys(first, last):
            row, begin = rows[key], key << _ROW_BITS
            if any(first <= sequence < last for sequence in select_current(row)):
                return True
            if first <= begin and begin + _ROW_SIZE <= last:
                del rows[key]
        return False

    def _row_keys(self, first: int, last: int) -> list[int]:
        """Return the keys of the rows that may contain some of first..last-1."""
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
    """Messages in flight to one member."""

    def __init__(self, attempts_by_sequence: Mapping[int, int]) -> None:
        """Create an empty set.

        `attempts_by_sequence` must have the attempt count of every message held.
        """
        self._attempts_by_sequence = attempts_by_sequence
        self.held_messages: _HeldMessages = {}
        """Due tick and bytes by sequence. Read-only for other classes."""
        self._bucket_by_due_and_attempts: dict[int, dict[int, _DueBucket]] = {}
        """Entries by due tick, then by attempt count; some are stale."""
        self._stale_count = 0
        """Approximate number of stale entries."""

    def add_sent(
        self, sequences: list[int], sizes: Iterable[int], *, attempts: int, due_tick: int
    ) -> None:
        """Add messages that were sent with this attempt count and are overdue at `due_tick`."""
        self.held_messages.update(
            (s, (due_tick, size)) for s, size in zip(sequences, sizes, strict=True)
        )
        self._get_bucket(due_tick, attempts).add(sequences)

    def has_in_flight(self, first: int, last: int, attempt: int = 0) -> bool:
        """Return True if any of first..last-1 is held; with an `attempt`, as that attempt."""
        if last - first <= _SCALAR_MESSAGES_MAX:
            return any(True for _ in self._iter_held(first, last, attempt))
        return any(
            bucket.has_current(
                first, last, partial(self._select_current, due_tick=due, attempts=attempts)
            )
            for due, attempts, bucket in self._matching_buckets(attempt)
        )

    def remove_sequences(self, sequences: Iterable[int]) -> tuple[list[int], int]:
        """Remove messages. Returns the removed sequences, and the total size of their messages in
        bytes.
        """
        removed: list[int] = []
        size, pop = 0, self.held_messages.pop
        for sequence in sequences:
            due_and_size = pop(sequence, None)
            if due_and_size is not None:
                removed.append(sequence)
                size += due_and_size[1]
        self._stale_count += len(removed)
        if self._stale_count > 2 * len(self.held_messages) + _STALE_MIN:
            self._rebuild_buckets()
        return removed, size

    def remove_range(self, first: int, last: int, attempt: int = 0) -> tuple[list[int], int]:
        """Remove the messages first..last-1; with `attempt` other than 0, only of this attempt.

        Returns:
            The removed sequences in ascending order, and the total size of their messages in bytes.
        """
        if last - first <= _SCALAR_MESSAGES_MAX:
            return self.remove_sequences(list(self._iter_held(first, last, attempt)))
        removed: list[int] = []
        for due, attempts, bucket in self._matching_buckets(attempt):
            removed += self._select_current(bucket.pop_range(first, last), due, attempts)
            self._drop_empty(due, attempts)
        pop = self.held_messages.pop
        return sorted(removed), sum([pop(sequence)[1] for sequence in removed])

    def has_due(self, tick: int) -> bool:
        """Return True if messages may be overdue at `tick`."""
        return tick in self._bucket_by_due_and_attempts

    def find_overdue(self, tick: int) -> list[int]:
        """Return the messages that are overdue at `tick`. They stay held."""
        buckets = self._bucket_by_due_and_attempts.pop(tick, {}).items()
        return list(
            {s: None for n, bucket in buckets for s in self._select_current(bucket, tick, n)}
        )

    def extend_timeouts(
        self, first: int, last: int, due_tick_for: Callable[[int], int], attempt: int = 0
    ) -> None:
        """Move the due tick of the held messages of first..last-1.

        Each message moves at most once per tick, however often this is called.

        Args:
            first: First sequence.
            last: End of the range.
            due_tick_for: Returns the new due tick for an attempt count.
            attempt: Only messages of this delivery attempt; 0 for any.
        """
        messages = self.held_messages
        if last - first <= _SCALAR_MESSAGES_MAX:
            for sequence in self._iter_held(first, last, attempt):
                attempts = self._attempts_by_sequence[sequence]
                (old_due, size), new_due = messages[sequence], due_tick_for(attempts)
                if new_due != old_due:
                    self._get_bucket(old_due, attempts).discard(sequence)
                    self._drop_empty(old_due, attempts)
                    messages[sequence] = new_due, size
                    self._get_bucket(new_due, attempts).add((sequence,))
            return
        for old_due, attempts, bucket in self._matching_buckets(attempt):
            new_due = due_tick_for(attempts)
            if new_due != old_due and (
                moved := self._select_current(bucket.pop_range(first, last), old_due, attempts)
            ):
                self._get_bucket(new_due, attempts).add(moved)
                for sequence in moved:
                    messages[sequence] = new_due, messages[sequence][1]
            self._drop_empty(old_due, attempts)

    def _iter_held(self, first: int, last: int, attempt: int) -> Iterator[int]:
        """Yield the held sequences of first..last-1; with `attempt` other than 0, only of this
        attempt.
        """
        messages, attempts_of = self.held_messages, self._attempts_by_sequence
        for sequence in range(first, last):
            if sequence in messages and attempt in (0, attempts_of[sequence]):
                yield sequence

    def _select_current(self, sequences: Iterable[int], due_tick: int, attempts: int) -> list[int]:
        """Return the sequences that are held with this due tick and attempt count."""
        get_message, attempts_of = self.held_messages.get, self._attempts_by_sequence
        return [
            s
            for s in sequences
            if get_message(s, _NOT_HELD)[0] == due_tick and attempts_of[s] == attempts
        ]

    def _get_bucket(self, due_tick: int, attempts: int) -> _DueBucket:
        by_attempts = self._bucket_by_due_and_attempts.setdefault(due_tick, {})
        bucket = by_attempts.get(attempts)
        if bucket is None:
            bucket = by_attempts[attempts] = _DueBucket()
        return bucket

    def _matching_buckets(self, attempt: int) -> list[tuple[int, int, _DueBucket]]:
        """Return the buckets with this attempt count, or all for 0."""
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
        """Raise AssertionError unless every held message is in its bucket."""
        entries = [
            (sequence, due)
            for due, attempts, bucket in self._matching_buckets(0)
            for sequence in self._select_current(set(bucket), due, attempts)
        ]
        assert sorted(entries) == sorted((s, due) for s, (due, _) in self.held_messages.items())
        assert all(self._bucket_by_due_and_attempts.values()), "an empty tick"
