"""Subjects as numbers: one by one, and of many messages at once.

Rule 1: equality of bytes decides, never of hashes.
Rule 2: there are at most SUBJECTS_MAX; when there would be more, all are forgotten.
Rule 3: a subject that arrays do not find has its number nevertheless: the dict has them all.

    slots    [ 0  2  0  1 … ]     where a subject's hash may lead, its number + 1; 0 for none
    hashes   [ –  h  h … ]        by number + 1, as all that follow
    columns  [ –  "orders.e" … ]  its bytes, eight at a time
             [ –  "u" …        ]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simplebus.core.frames import Words
from simplebus.nats.limits import SUBJECT_BYTES_FAST, SUBJECTS_MAX

Numbers = npt.NDArray[np.int32]
Positions = npt.NDArray[np.int64]

_SIZE = 8
_SLOT_BITS = 18
_SLOTS = 1 << _SLOT_BITS
# A subject lies where its hash leads by one of these shifts, if it found one of them free.
_SHIFTS = (64 - _SLOT_BITS, 64 - 2 * _SLOT_BITS, 64 - 3 * _SLOT_BITS)
_FACTOR = 0x9E3779B97F4A7C15
_FOLD = 32
_ALL = (1 << 64) - 1

# By how many bytes of a word belong to a subject: those bits.
_KEEP: Words = np.array([(1 << 8 * n) - 1 for n in range(_SIZE + 1)], np.uint64)

assert _SLOTS >= 4 * SUBJECTS_MAX


def _hash(subject: bytes) -> int:
    """What `_hashes` makes of the same bytes."""
    value = len(subject) * _FACTOR & _ALL
    for at in range(0, len(subject), _SIZE):
        value ^= int.from_bytes(subject[at : at + _SIZE], "little")
        value = value * _FACTOR & _ALL
        value ^= value >> _FOLD
    return value * _FACTOR & _ALL


class SubjectTable:
    """Of one front: shared by all sessions."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        """By number."""
        self.generation = 0
        """Grows when all are forgotten."""
        self._numbers: dict[bytes, int] = {}
        self._slots: Numbers = np.zeros(_SLOTS, np.int32)
        self._hashes: Words = np.zeros(SUBJECTS_MAX + 1, np.uint64)
        self._lengths: Positions = np.zeros(SUBJECTS_MAX + 1, np.int64)
        self._columns = [np.zeros(SUBJECTS_MAX + 1, np.uint64)]

    def number(self, subject: bytes) -> int:
        """This subject's. May forget all others."""
        number = self._numbers.get(subject)
        if number is None:
            self.make_room(1)
            number = self._numbers[subject] = len(self.names)
            self.names.append(subject)
            if 0 < len(subject) <= SUBJECT_BYTES_FAST:
                self._place(subject, number + 1)
        return number

    def make_room(self, count: int) -> None:
        """See to it that so many more, at most SUBJECTS_MAX, can come without forgetting any."""
        if len(self.names) + count <= SUBJECTS_MAX:
            return
        self.names.clear()
        self._numbers.clear()
        self._slots.fill(0)
        self.generation += 1

    def find(self, words: Words, starts: Positions, lengths: Positions) -> Numbers:
        """The numbers of many subjects; -1 for one that is not known, or not found by arrays.

        `words` are the eight bytes at every byte of a buffer; starts and lengths, shape (n,), are
        in bytes, and lengths from 1 to SUBJECT_BYTES_FAST.
        """
        parts = _parts(words, starts, lengths)
        hashes = _hashes(parts, lengths)
        found = self._slots.take((hashes >> np.uint64(_SHIFTS[0])).view(np.int64))
        rest = np.flatnonzero(self._hashes.take(found) != hashes)
        for shift in _SHIFTS[1:]:
            if not rest.size:
                break
            those = hashes[rest]
            slots = those >> np.uint64(shift)
            slots &= np.uint64(_SLOTS - 1)
            other = self._slots.take(slots.view(np.int64))
            found[rest] = other
            rest = rest[self._hashes.take(other) != those]
        equal = self._lengths.take(found) == lengths
        for column, (rows, part) in zip(self._columns, parts, strict=False):
            if rows is None:
                equal &= column.take(found) == part
            else:
                equal[rows] &= column.take(found[rows]) == part
        found *= equal
        found -= 1
        return found

    def _place(self, subject: bytes, index: int) -> None:
        """Have arrays find it."""
        value = _hash(subject)
        self._hashes[index] = value
        self._lengths[index] = len(subject)
        for number, at in enumerate(range(0, len(subject), _SIZE)):
            if number == len(self._columns):
                self._columns.append(np.zeros(SUBJECTS_MAX + 1, np.uint64))
            part = int.from_bytes(subject[at : at + _SIZE], "little")
            self._columns[number][index] = part
        for shift in _SHIFTS:
            slot = value >> shift & _SLOTS - 1
            if not self._slots[slot]:
                self._slots[slot] = index
                return


def _parts(
    words: Words, starts: Positions, lengths: Positions
) -> list[tuple[Positions | None, Words]]:
    """Subjects, eight bytes at a time: whose they are, None for everybody's, and the bytes."""
    first = words[starts]
    first &= _KEEP.take(lengths, mode="clip")
    parts: list[tuple[Positions | None, Words]] = [(None, first)]
    rows: Positions | None = None
    for at in range(_SIZE, SUBJECT_BYTES_FAST, _SIZE):
        longer = np.flatnonzero((lengths if rows is None else lengths[rows]) > at)
        if not longer.size:
            break
        if rows is not None:
            longer = rows[longer]
        rows = None if longer.size == lengths.size else longer
        those_starts, those_lengths = starts, lengths
        if rows is not None:
            those_starts, those_lengths = starts[rows], lengths[rows]
        part = words[those_starts + at]
        part &= _KEEP.take(those_lengths - at, mode="clip")
        parts.append((rows, part))
    return parts


def _hashes(parts: list[tuple[Positions | None, Words]], lengths: Positions) -> Words:
    """Of each subject."""
    factor, fold = np.uint64(_FACTOR), np.uint64(_FOLD)
    hashes = lengths.view(np.uint64) * factor
    for rows, part in parts:
        those = part ^ (hashes if rows is None else hashes[rows])
        those *= factor
        those ^= those >> fold
        if rows is None:
            hashes = those
        else:
            hashes[rows] = those
    hashes *= factor
    return hashes
