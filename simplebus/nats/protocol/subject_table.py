"""Numbers for subjects, looked up for many messages at once.

Subjects are compared by their bytes, never by hashes alone. The table has at most SUBJECTS_MAX
subjects and is cleared when it needs more. The dict contains every subject; the arrays may lack one
after hash collisions.

    slots    [ 0  2  0  1 … ]     subject number + 1 by hash; 0 for none
    hashes   [ –  h  h … ]        by number + 1, like the rows below
    columns  [ –  "orders.e" … ]  bytes of the subject, eight at a time
             [ –  "u" …        ]
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from simplebus.core.protocol.frames import Flags, Words
from simplebus.nats.limits import BULK_SUBJECT_BYTES_MAX, SUBJECTS_FREED_PER_TURN, SUBJECTS_MAX

SubjectNumbers = npt.NDArray[np.int32]
Indexes = npt.NDArray[np.int64]
SubjectWords: TypeAlias = list[tuple[Indexes | None, Words]]
"""Subjects in words of eight bytes: the rows that have such a word (None for all) and the words."""

_SIZE = 8
_SLOT_BITS = 18
_SLOTS = 1 << _SLOT_BITS
# A subject may occupy one of three slots, each selected by one of these shifts of its hash.
_SHIFTS = (64 - _SLOT_BITS, 64 - 2 * _SLOT_BITS, 64 - 3 * _SLOT_BITS)
_FACTOR = 0x9E3779B97F4A7C15
_FOLD = 32
_ONES, _TOPS, _BLANKS, _TABS = (np.uint64(n * 0x0101010101010101) for n in (1, 0x80, 0x20, 0x09))

# Masks by the number of bytes of a word that belong to the subject.
_KEEP: Words = np.array([(1 << 8 * n) - 1 for n in range(_SIZE + 1)], np.uint64)

assert _SLOTS >= 4 * SUBJECTS_MAX


class SubjectTable:
    """Table of subjects, shared by all sessions of a server."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        """Subjects by number."""
        self.generation = 0
        """Number that grows whenever the table is cleared."""
        self._numbers: dict[bytes, int] = {}
        self._forgotten: dict[bytes, int] = {}
        """Subjects of before the table was cleared: freeing all of them takes milliseconds."""
        self._slots: SubjectNumbers = np.zeros(_SLOTS, np.int32)
        self._hashes: Words = np.zeros(SUBJECTS_MAX + 1, np.uint64)
        self._lengths: Indexes = np.zeros(SUBJECTS_MAX + 1, np.int64)
        self._columns = [np.zeros(SUBJECTS_MAX + 1, np.uint64)]

    def reserve(self, count: int) -> None:
        """Make space for `count` more subjects, at most SUBJECTS_MAX, by clearing the
        table if necessary.
        """
        for _ in range(min(len(self._forgotten), SUBJECTS_FREED_PER_TURN)):
            self._forgotten.popitem()
        if len(self.names) + count <= SUBJECTS_MAX:
            return
        self.names.clear()
        self._forgotten, self._numbers = self._numbers, {}
        self._slots.fill(0)
        self.generation += 1

    def find(self, words: Words, starts: Indexes, lengths: Indexes) -> SubjectNumbers:
        """Return the numbers of many subjects; -1 for a subject that the arrays do not find.

        Args:
            words: The eight bytes at every byte of a buffer.
            starts: Offsets of the subjects in bytes, shape (n,).
            lengths: Lengths in bytes, from 1 to BULK_SUBJECT_BYTES_MAX, shape (n,).
        """
        parts = _split_words(words, starts, lengths)
        hashes = _hash_subjects(parts, lengths)
        numbers = self._slots.take(_slots_of(hashes, _SHIFTS[0]))
        unmatched_rows = np.flatnonzero(self._hashes.take(numbers) != hashes)
        for shift in _SHIFTS[1:]:
            if not unmatched_rows.size:
                break
            unmatched_hashes = hashes[unmatched_rows]
            candidates = self._slots.take(_slots_of(unmatched_hashes, shift))
            numbers[unmatched_rows] = candidates
            unmatched_rows = unmatched_rows[self._hashes.take(candidates) != unmatched_hashes]
        equal = self._lengths.take(numbers) == lengths
        for column, (rows, part) in zip(self._columns, parts, strict=False):
            if rows is None:
                equal &= column.take(numbers) == part
            else:
                equal[rows] &= column.take(numbers[rows]) == part
        numbers *= equal
        numbers -= 1
        return numbers

    def assign_numbers(
        self, subjects: list[bytes], words: Words, starts: Indexes, lengths: Indexes
    ) -> list[int]:
        """Return the numbers of subjects that `find` missed; new ones are added. Call `reserve`
        before.
        """
        numbers, first_new_number = self._numbers, len(self.names)
        assigned: list[int] = []
        rows: list[int] = []  # First rows of the new subjects.
        for row, subject in enumerate(subjects):
            number = numbers.get(subject)
            if number is None:
                number = numbers[subject] = len(self.names)
                self.names.append(subject)
            if number >= first_new_number + len(rows):
                rows.append(row)
            assigned.append(number)
        if rows:
            new_rows = np.array(rows)
            self._index_subjects(
                first_new_number,
                _split_words(words, starts[new_rows], lengths[new_rows]),
                lengths[new_rows],
            )
        return assigned

    def _index_subjects(self, number: int, parts: SubjectWords, lengths: Indexes) -> None:
        """Add subjects, numbered from `number`, to the arrays."""
        indexes = np.arange(number + 1, number + 1 + lengths.size, dtype=np.int32)
        hashes = _hash_subjects(parts, lengths)
        self._hashes[indexes] = hashes
        self._lengths[indexes] = lengths
        for column, (rows, part) in enumerate(parts):
            if column == len(self._columns):
                self._columns.append(np.zeros(SUBJECTS_MAX + 1, np.uint64))
            self._columns[column][indexes if rows is None else indexes[rows]] = part
        for shift in _SHIFTS:
            slots = _slots_of(hashes, shift)
            free = np.flatnonzero(self._slots.take(slots) == 0)
            self._slots[slots[free]] = indexes[free]
            # Subjects with an occupied slot get a slot by the next shift.
            is_unplaced = self._slots.take(slots) != indexes
            indexes, hashes = indexes[is_unplaced], hashes[is_unplaced]


def count_until(flags: Flags, limit: int) -> int:
    """Return the number of leading entries of which at most `limit` are True."""
    rows = np.flatnonzero(flags)
    return int(rows[limit]) if rows.size > limit else flags.size


def have_no_blanks(words: Words, starts: Indexes, lengths: Indexes) -> Flags:
    """Return a flag for each subject that contains neither a blank nor a tab. Arguments as in
    `find`.
    """
    good = np.ones(starts.size, np.bool_)
    for rows, part in _split_words(words, starts, lengths):
        for repeated in (_BLANKS, _TABS):
            differences = part ^ repeated
            has_match = (((differences - _ONES) & ~differences) & _TOPS) == 0
            if rows is None:
                good &= has_match
            else:
                good[rows] &= has_match
    return good


def _slots_of(hashes: Words, shift: int) -> Indexes:
    """Return the slots of hashes with this shift."""
    slots = hashes >> np.uint64(shift)
    slots &= np.uint64(_SLOTS - 1)
    return slots.view(np.int64)


def _split_words(words: Words, starts: Indexes, lengths: Indexes) -> SubjectWords:
    """Return the words of the subjects at these offsets."""
    first = words[starts]
    first &= _KEEP.take(lengths, mode="clip")
    parts: SubjectWords = [(None, first)]
    rows: Indexes | None = None
    for offset in range(_SIZE, BULK_SUBJECT_BYTES_MAX, _SIZE):
        longer = np.flatnonzero((lengths if rows is None else lengths[rows]) > offset)
        if not longer.size:
            break
        if rows is not None:
            longer = rows[longer]
        rows = None if longer.size == lengths.size else longer
        row_starts, row_lengths = starts, lengths
        if rows is not None:
            row_starts, row_lengths = starts[rows], lengths[rows]
        part = words[row_starts + offset]
        part &= _KEEP.take(row_lengths - offset, mode="clip")
        parts.append((rows, part))
    return parts


def _hash_subjects(parts: SubjectWords, lengths: Indexes) -> Words:
    """Return the hash of each subject."""
    factor, fold = np.uint64(_FACTOR), np.uint64(_FOLD)
    hashes = lengths.view(np.uint64) * factor
    for rows, part in parts:
        mixed = part ^ (hashes if rows is None else hashes[rows])
        mixed *= factor
        mixed ^= mixed >> fold
        if rows is None:
            hashes = mixed
        else:
            hashes[rows] = mixed
    hashes *= factor
    return hashes
