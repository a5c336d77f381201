"""Array parser for messages of many subjects and sizes in one read.

Every line that looks like PUB is a candidate, also inside payloads; a candidate is a message only
if another message ends where it begins. Every byte and candidate is examined once per read. Only
`PUB subject size CR LF` with single blanks is handled; the line parser handles all other commands,
and acks: each has a new subject, which would fill the subject table.

    bytes      PUB a 3 ␍␊ x␊x ␍␊ PUB b 0 ␍␊ ␍␊
    feeds               ↑   ↑    ↑          ↑   ↑      every LF
    starts     ↑                 ↑                     after CR LF, where `PUB ` follows
    lines               ↑                   ↑          the LF that follows each start
    ends                         ↑              ↑      from the size in the line
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from simplebus.core.protocol.frames import Bytes, Flags, Integers, Words, unaligned
from simplebus.nats.limits import (
    BULK_SUBJECT_BYTES_MAX,
    MIXED_BATCH_MESSAGES_MAX,
    MIXED_BATCH_MESSAGES_MIN,
    NEW_SUBJECT_MESSAGES_MAX,
    NatsLimits,
)
from simplebus.nats.numbers import parse_digits
from simplebus.nats.protocol.events import MixedBatch
from simplebus.nats.protocol.subject_table import (
    SubjectNumbers,
    SubjectTable,
    count_until,
    have_no_blanks,
)
from simplebus.nats.subjects import ACK_PREFIX

_VERB = b"PUB "
_CR_LF = b"\r\n"
_WORD: np.dtype[np.uint64] = np.dtype("<u8")
_SIZE = _WORD.itemsize
# The flags of one block fit into the L2 cache.
_BLOCK_WORDS = 32 * 1024
_LINE_FEED = np.uint8(0x0A)

_HEAD = np.uint64(int.from_bytes(_CR_LF + _VERB, "little"))
_HEAD_BITS = np.uint64((1 << 8 * len(_CR_LF + _VERB)) - 1)


def _repeat_byte(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


_ZEROS, _LOW_BITS, _NINES_UP, _TOPS = (
    _repeat_byte(0x30),
    _repeat_byte(0x7F),
    _repeat_byte(0x76),
    _repeat_byte(0x80),
)
_ACK_WORD = np.uint64(int.from_bytes(ACK_PREFIX, "little"))
_EIGHT, _TOP_BYTE, _EXPONENT = np.uint64(8), np.uint64(56), np.uint64(52)
_SEVEN_TOPS = np.uint64(int(_TOPS) >> 8)
_BIAS = 1023
# Masks by the position of the blank before the size in the last eight bytes of a line without LF:
# the digits, after all bytes have been moved up by one.
_DIGITS: Words = np.array([(1 << 64) - (1 << 16 + 8 * n) for n in range(6)] + [0, 0], np.uint64)
_BLANKS: Words = np.array([0x20 << 8 * n for n in range(6)] + [0, 0], np.uint64)
_BLANK_BITS: Words = np.array([0xFF << 8 * n for n in range(6)] + [0, 0], np.uint64)
_BLANK_MAX = 5


def find_line_feeds(raw: bytearray, first: int, last: int) -> Integers:
    """Return the ascending offsets of LF in raw[first:last]. Reads up to eight bytes more."""
    begin = first - first % _SIZE
    count = -(-(last - begin) // _SIZE)
    data = np.frombuffer(raw, np.uint8, count * _SIZE, begin)
    hits = np.empty(-(-count // _SIZE) * _SIZE, np.bool_)
    hits[count:] = False
    flags = np.empty(min(count, _BLOCK_WORDS) * _SIZE, np.bool_)
    for block_start in range(0, count, _BLOCK_WORDS):
        block = min(_BLOCK_WORDS, count - block_start)
        block_flags = flags[: block * _SIZE]
        np.equal(
            data[block_start * _SIZE : (block_start + block) * _SIZE], _LINE_FEED, out=block_flags
        )
        np.not_equal(block_flags.view(_WORD), 0, out=hits[block_start : block_start + block])
    groups = hits.view(_WORD)
    group_indexes = np.flatnonzero(groups != 0)
    within = np.flatnonzero(groups.take(group_indexes).view(np.bool_))
    words = group_indexes.take(within >> 3)
    words <<= 3
    words += within & 7
    # From words that contain at least one LF to bytes.
    bytes_of = data.view(_WORD).take(words).view(np.uint8)
    within = np.flatnonzero(bytes_of == _LINE_FEED)
    feeds = words.take(within >> 3)
    feeds <<= 3
    feeds += within & 7
    feeds += begin
    return feeds[feeds.searchsorted(first) : feeds.searchsorted(last)]


class BulkParser:
    """Candidates in raw[first:last], where a command begins at `first`.

    Valid until raw changes. At least 16 bytes must follow `last`; their values do not matter.
    """

    def __init__(
        self, raw: bytearray, first: int, last: int, limits: NatsLimits, table: SubjectTable
    ) -> None:
        self._raw = raw
        self._last = last
        self._table = table
        self._data: Bytes = np.frombuffer(raw, np.uint8)
        self._words = unaligned(self._data, _WORD)
        self._find_starts(first)
        self._parse_lines(limits)
        self._look_up_subjects()
        self._link_candidates()

    def _find_starts(self, first: int) -> None:
        """Find the start and the LF of each candidate."""
        feeds = find_line_feeds(self._raw, first, self._last)
        heads = self._words[feeds - 1]
        heads &= _HEAD_BITS
        lines = np.flatnonzero(heads == _HEAD)
        lines += 1
        if self._raw.startswith(_VERB, first):
            lines = np.concatenate([[0], lines])
        if lines.size and lines[-1] == feeds.size:
            lines = lines[:-1]
        self.starts: Integers = feeds.take(lines - 1)
        self.starts += 1
        if lines.size and lines[0] == 0:
            self.starts[0] = first
        self._lines: Integers = feeds.take(lines)

    def _parse_lines(self, limits: NatsLimits) -> None:
        """Parse the subjects and sizes of the candidates and flag those in plain form."""
        words = self._words[self._lines - _SIZE]
        digits = words ^ _ZEROS
        # The top bit of each byte that is not a digit, except the last byte, which must be CR.
        marks = digits & _LOW_BITS
        marks += _NINES_UP
        marks |= digits
        marks &= _SEVEN_TOPS
        # The highest mark is the blank before the size. Its bit number is the exponent of the marks
        # as a float: they fit into the mantissa.
        blanks = (marks.astype(np.float64).view(np.uint64) >> _EXPONENT).view(np.int64)
        blanks -= _BIAS
        blanks >>= 3
        plain: Flags = (blanks >= 0) & (blanks <= _BLANK_MAX)
        plain &= (words >> _TOP_BYTE) == _CR_LF[0]
        blanks = np.minimum(blanks.view(np.uint64), 7).view(np.int64)
        plain &= (words & _BLANK_BITS.take(blanks)) == _BLANKS.take(blanks)
        digits <<= _EIGHT
        digits &= _DIGITS.take(blanks)
        sizes = parse_digits(digits)
        plain &= sizes <= limits.max_payload
        lengths = self._lines - self.starts
        lengths += blanks
        lengths -= _SIZE + len(_VERB)
        # A subject, a blank and six digits are no longer than a line may be.
        longest = min(BULK_SUBJECT_BYTES_MAX, limits.max_control_line - 7)
        plain &= (lengths >= 1) & (lengths <= longest)
        self.ends: Integers = self._lines + sizes
        self.ends += 1 + len(_CR_LF)
        plain &= self.ends <= self._last
        plain &= self._words[self.starts + len(_VERB)] != _ACK_WORD
        self._plain = plain
        self._lengths: Integers = np.where(plain, lengths, 1)

    def _look_up_subjects(self) -> None:
        """Look up the numbers of known subjects and check that unknown ones contain no blank."""
        subjects = self.starts + len(_VERB)
        self._numbers: SubjectNumbers = self._table.find(self._words, subjects, self._lengths)
        self._generation = self._table.generation
        unknown_rows = np.flatnonzero(self._plain & (self._numbers < 0))
        if unknown_rows.size:
            good = have_no_blanks(self._words, subjects[unknown_rows], self._lengths[unknown_rows])
            self._plain[unknown_rows] = good

    def _link_candidates(self) -> None:
        """Find the candidate that begins where each candidate ends.

        Usually it is the next one. `_breaks` are the rows of all others, and `_jumps` the rows of
        their followers; -1 for none.
        """
        linked = np.zeros(self.starts.size, np.bool_)
        np.equal(self.ends[:-1], self.starts[1:], out=linked[:-1])
        linked &= self._plain
        breaks = np.flatnonzero(~linked)
        ends = self.ends[breaks]
        jumps = self.starts.searchsorted(ends)
        good = jumps < self.starts.size
        good[good] = self.starts[jumps[good]] == ends[good]
        good &= self._plain[breaks]
        self._breaks: list[int] = breaks.tolist()
        self._jumps: list[int] = np.where(good, jumps, -1).tolist()

    def parse_batch(self, offset: int) -> MixedBatch | None:
        """Return the messages from `offset` on, where a command begins.

        At most MIXED_BATCH_MESSAGES_MAX messages, and NEW_SUBJECT_MESSAGES_MAX with new subjects;
        None for fewer than MIXED_BATCH_MESSAGES_MIN.
        """
        row = int(self.starts.searchsorted(offset))
        if row == self.starts.size or self.starts[row] != offset:
            return None
        pieces: list[tuple[int, int]] = []
        count = 0
        step = bisect_left(self._breaks, row)
        while True:
            stop = self._breaks[step]
            following = self._jumps[step]
            if following >= 0 or self._is_complete(stop):
                stop += 1
            stop = min(stop, row + MIXED_BATCH_MESSAGES_MAX - count)
            if stop > row:
                pieces.append((row, stop))
                count += stop - row
            if following < 0 or count == MIXED_BATCH_MESSAGES_MAX:
                break
            row = following
            step = bisect_left(self._breaks, row, step + 1)
        if count < MIXED_BATCH_MESSAGES_MIN:
            return None
        return self._build_batch(pieces, offset)

    def _is_complete(self, row: int) -> bool:
        """Return True if a candidate without a successor is plain and ends with CR LF."""
        end = int(self.ends[row])
        return bool(self._plain[row]) and self._raw.startswith(_CR_LF, end - len(_CR_LF))

    def _build_batch(self, pieces: list[tuple[int, int]], offset: int) -> MixedBatch:
        """Return the messages in these ranges of candidates."""
        rows: slice | Integers
        if len(pieces) == 1:
            rows = slice(*pieces[0])
        else:
            rows = np.concatenate([np.arange(*piece) for piece in pieces])
        rows = self._limit_new_subjects(rows)
        starts = self.starts[rows]
        end = int(self.ends[rows][-1])
        bounds = np.empty(starts.size + 1, np.int64)
        np.subtract(starts, offset, out=bounds[:-1])
        bounds[-1] = end - offset
        subject_ends = bounds[:-1] + self._lengths[rows]
        subject_ends += len(_VERB)
        bodies = self._lines[rows] - (offset - 1)
        return MixedBatch(
            self._data[offset:end], bounds, subject_ends, bodies, self._assign_numbers(rows)
        )

    def _limit_new_subjects(self, rows: slice | Integers) -> slice | Integers:
        """Return the leading candidates, of which at most NEW_SUBJECT_MESSAGES_MAX have subjects
        that are not in the table, and make space for these subjects.
        """
        new_count = int(np.count_nonzero(self._numbers[rows] < 0))
        self._table.reserve(min(new_count, NEW_SUBJECT_MESSAGES_MAX))
        if self._table.generation != self._generation:
            self._generation = self._table.generation
            self._numbers = self._table.find(self._words, self.starts + len(_VERB), self._lengths)
        is_new = self._numbers[rows] < 0
        count = count_until(is_new, NEW_SUBJECT_MESSAGES_MAX)
        if count == is_new.size:
            return rows
        return (
            rows[:count] if isinstance(rows, np.ndarray) else slice(rows.start, rows.start + count)
        )

    def _assign_numbers(self, rows: slice | Integers) -> SubjectNumbers:
        """Return the subject numbers of these plain candidates; unknown subjects are added to the
        table, which must have space.
        """
        numbers = self._numbers[rows]
        unknown_rows = np.flatnonzero(numbers < 0)
        if unknown_rows.size:
            candidates = np.arange(self.starts.size)[rows][unknown_rows]
            starts, lengths = self.starts[candidates] + len(_VERB), self._lengths[candidates]
            raw = self._raw
            subjects = [
                bytes(raw[begin:end])
                for begin, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
            ]
            assigned = self._table.assign_numbers(subjects, self._words, starts, lengths)
            numbers[unknown_rows] = self._numbers[candidates] = assigned
        return numbers
