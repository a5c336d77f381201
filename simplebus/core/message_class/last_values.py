"""The last message of each channel of one class: which of its stored messages that are.

Rule 1: this file knows channel numbers and sequences. A ring holds the messages; what lies below
its floor is nobody's last one any more.
Rule 2: messages are looked at when somebody asks, each of them once, and never when they come.
Rule 3: a message that is not the last one of its channel never becomes it again; so the lowest
value is found by going on from the one before.
Rule 4: an empty payload takes its channel's value away, and what has expired is no value.

    sequence   3    4    5    6    7    8    9
    channel    a    b    a    c    a    b    b and nothing else
    values                    6    7              c: 6   a: 7   b: none
"""

from __future__ import annotations

import numpy as np

from simplebus.core.limits import (
    CLUTTER_BYTES_MIN,
    DELIMITER_BYTES,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    LOOK_AHEAD_MESSAGES,
    REDELIVERY_MESSAGES,
    SEND_BYTES,
)
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.envelope import CHANNEL, HEADERS, KEY, STUFFED, TIMES, TIMES_BYTES
from simplebus.core.protocol.frames import Flags, FrameBatch, Integers, unaligned
from simplebus.core.ring.ring import Ring

BRIDGE_RECORDS_CLASS = "bridges"
"""The class in which bridges write down where they are, on every bus: it keeps its last values, and
so never spills."""
# So few are looked at one after the other: arrays have a price of their own.
_SCALAR_MESSAGES_MAX = 8
# Fields that can stand before an empty payload are never longer, stuffed or not.
_FIELDS_BYTES_MAX = 512 * 1024
_LENGTH_DTYPE: np.dtype[np.uint16] = np.dtype(">u2")
_TIME_FIELDS_BYTES = np.array(TIMES_BYTES)


class LastValues:
    """Of one ring."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._last_sequences: Integers = np.full(1, -1, np.int64)
        """By channel number, the sequence of its last message; -1 where that took the value away.
        """
        self._scanned_end = ring.floor
        """Messages below it were looked at."""
        self._lowest_candidate = ring.floor
        """There is no value below it."""
        self._compaction_end = ring.floor
        """Values below it are to be stored anew."""
        self._check_threshold_bytes = CLUTTER_BYTES_MIN
        """So many bytes may be held before it is looked how many of them are values'."""
        self._fill_checked_head = -1
        self._is_mostly_values = False

    # What they are -------------------------------------------------------------------------------

    def find_sequences(self, first: int, last: int, now: float) -> Integers:
        """The values among messages first..last-1, ascending."""
        self._scan_new()
        first = max(first, self._ring.floor)
        if first >= last:
            return np.zeros(0, np.int64)
        if last - first <= self._last_sequences.size:
            return np.flatnonzero(self._are_values(first, last, now)) + first
        found = np.sort(
            self._last_sequences[(self._last_sequences >= first) & (self._last_sequences < last)]
        )
        expires = self._ring.rows_at(found).expires
        return found if expires is None else found[expires > now]

    def lowest_value(self, end_sequence: int, now: float) -> int:
        """The lowest value below `until`, or `until`."""
        self._scan_new()
        low, many = max(self._lowest_candidate, self._ring.floor), _SCALAR_MESSAGES_MAX
        while low < end_sequence and not self._is_value(low, now):
            end = min(end_sequence, low + many)
            here = self._are_values(low, end, now)
            if here.any():
                low += int(here.argmax())
                break
            low = end
            many = min(8 * many, LOOK_AHEAD_MESSAGES)
        self._lowest_candidate = max(self._lowest_candidate, low)
        return min(low, end_sequence)

    def leading_values_end(self, now: float) -> int:
        """The first message that is no value, of so many that are looked at at once; or behind
        these."""
        self._scan_new()
        first, last = self._ring.floor, min(self._ring.head, self._ring.floor + LOOK_AHEAD_MESSAGES)
        if first == last or not self._is_value(first, now):
            return first
        here = self._are_values(first, last, now)
        return last if here.all() else first + int(here.argmin())

    def count_values(self, now: float) -> int:
        """How many there are."""
        return self.find_sequences(self._ring.floor, self._ring.head, now).size

    def discard_range(self, first: int, last: int) -> None:
        """Messages first..last-1 are nobody's, and no values."""
        self._scan_new()
        self._last_sequences[(self._last_sequences >= first) & (self._last_sequences < last)] = -1

    def _is_value(self, sequence: int, now: float) -> bool:
        """Whether this message, which was looked at, is one."""
        row = self._ring.row(sequence)
        return bool(self._last_sequences[row.channel] == sequence and row.expires > now)

    def _are_values(self, first: int, last: int, now: float) -> Flags:
        """Which of messages first..last-1, which were looked at, are values."""
        rows = self._ring.rows(first, last)
        here: Flags = self._last_sequences[rows.channels] == np.arange(first, last)
        if rows.expires is not None:
            here &= rows.expires > now
        return here

    # Looking -------------------------------------------------------------------------------------

    def _scan_new(self) -> None:
        """At what has come since it was looked last."""
        ring = self._ring
        at = max(self._scanned_end, ring.floor)
        while at < ring.head:
            last = min(ring.head, at + LOOK_AHEAD_MESSAGES)
            if last - at <= _SCALAR_MESSAGES_MAX:
                self._scan_one_by_one(at, last)
            else:
                batch, last = ring.batch(at, last, SEND_BYTES)
                channels = ring.rows(at, last).channels
                self._grow_to(channels if isinstance(channels, int) else int(channels.max()))
                # Of several in one channel the last one counts: they are written in order.
                numbers = np.arange(at, last)
                self._last_sequences[np.broadcast_to(channels, numbers.shape)] = np.where(
                    empty_payload_flags(batch), -1, numbers
                )
            at = last
        self._scanned_end = at

    def _scan_one_by_one(self, first: int, last: int) -> None:
        for sequence in range(first, last):
            channel = self._ring.row(sequence).channel
            self._grow_to(channel)
            piece, _ = self._ring.piece(sequence, sequence + 1, SEND_BYTES)
            self._last_sequences[channel] = -1 if has_empty_payload(piece) else sequence

    def _grow_to(self, channel_number: int) -> None:
        size = self._last_sequences.size
        if channel_number >= size:
            more = np.full(max(channel_number + 1, 2 * size) - size, -1, np.int64)
            self._last_sequences = np.concatenate([self._last_sequences, more])

    # What lies between them ----------------------------------------------------------------------

    def find_compaction_end(self, end_sequence: int, now: float) -> int:
        """Messages below `until` are held for their values alone. Where most of their bytes are
        others', values are to be stored anew: those below what is returned, if there are any."""
        ring = self._ring
        if ring.floor < min(self._compaction_end, end_sequence):
            return min(self._compaction_end, end_sequence)
        held = ring.size(ring.floor, end_sequence)
        if held <= self._check_threshold_bytes:
            if held < self._check_threshold_bytes // 4:
                self._check_threshold_bytes = max(
                    CLUTTER_BYTES_MIN, self._check_threshold_bytes // 2
                )
            return ring.floor
        values = ring.sizes(self.find_sequences(ring.floor, end_sequence, now))
        if held - values > max(values, CLUTTER_BYTES_MIN):
            self._compaction_end, self._check_threshold_bytes = end_sequence, CLUTTER_BYTES_MIN
            return end_sequence
        self._check_threshold_bytes = max(2 * values + CLUTTER_BYTES_MIN, held + held // 4)
        return ring.floor

    def oldest_values(self, end_sequence: int, size_bytes: int, now: float) -> Integers:
        """The oldest values below `until`, about `size` bytes of them, one at least if there is."""
        found = self.find_sequences(self._ring.floor, end_sequence, now)[:REDELIVERY_MESSAGES]
        begins, ends = self._ring.places(found)
        together = np.cumsum(ends - begins)
        return found[: max(1, int(together.searchsorted(size_bytes, side="right")))]

    def is_ring_mostly_values(self, now: float) -> bool:
        """Whether nearly all that is stored are values, by bytes or by number. Where little has
        come since this was asked last, the answer is the same."""
        ring = self._ring
        if not 0 <= ring.head - self._fill_checked_head < max(1, len(ring) // 8):
            values = self.find_sequences(ring.floor, ring.head, now)
            self._fill_checked_head = ring.head
            self._is_mostly_values = 4 * ring.sizes(
                values
            ) > 3 * ring.frame_bytes or 4 * values.size > 3 * len(ring)
        return self._is_mostly_values


def has_empty_payload(frame: memoryview) -> bool:
    """Whether a stored frame has an empty payload."""
    if frame[0] != frames.ENVELOPE:
        return len(frame) == FRAME_BYTES_MIN
    if len(frame) > _FIELDS_BYTES_MAX:
        return False
    return not envelope_batch.payload_of(bytes(frame[HEADER_BYTES:-DELIMITER_BYTES]))


def empty_payload_flags(batch: FrameBatch) -> Flags:
    """The same of each frame of a batch."""
    data, starts, ends = batch.data, batch.starts, batch.ends
    empty: Flags = ends - starts == FRAME_BYTES_MIN
    at = np.flatnonzero(data[starts] == frames.ENVELOPE)
    if not at.size:
        return empty
    if STUFFED in data.tobytes():  # What stands behind one is shifted.
        view = data.data
        for index in at.tolist():
            empty[index] = has_empty_payload(view[starts[index] : ends[index]])
        return empty
    fields = data[starts[at] + HEADER_BYTES]
    places = starts[at] + (HEADER_BYTES + 1) + _TIME_FIELDS_BYTES[fields & TIMES]
    lengths = unaligned(data, _LENGTH_DTYPE)
    for text in (CHANNEL, KEY, HEADERS):
        has = np.flatnonzero(fields & text)
        places[has] += 2 + lengths[places[has]].astype(np.int64)
    empty[at] = places == ends[at] - DELIMITER_BYTES
    return empty
