"""Last values of a class: the sequence of the newest message of each channel.

Only channel numbers and sequences are stored here; the messages are in the ring. A message is
scanned once, when last values are requested or many messages have arrived. A message that stopped
being a last value never becomes one again, so the search for the lowest value continues where it
ended. A channel whose newest message has an empty payload or has expired has no value.

    sequence   3    4    5    6    7    8    9
    channel    a    b    a    c    a    b    b (empty payload)
    values                    6    7              c: 6   a: 7   b: none
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simplebus.core.limits import (
    COMPACTION_BYTES_MIN,
    DELIMITER_BYTES,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    LAST_VALUES_SCANNED_PER_TURN,
    LOOKAHEAD_MESSAGES,
    REDELIVERY_MESSAGES,
    SEND_BYTES,
)
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.envelope import CHANNEL, HEADERS, KEY, STUFFED, TIMES, TIMES_BYTES
from simplebus.core.protocol.frames import Flags, FrameBatch, Integers, unaligned
from simplebus.core.ring.ring import Ring

BRIDGE_RECORDS_CLASS = "bridges"
"""Name of the class in which bridges store their positions. It keeps last values and never spills.
"""
# Up to this many messages are scanned without arrays, which have a fixed cost.
_SCALAR_MESSAGES_MAX = 8
# Up to this many messages per channel, a flag for each message takes less time than sorting.
_FLAGS_PER_VALUE_MAX = 64
# More messages than this are scanned before a request needs them. Each scan has a fixed cost.
_SCANNED_TOGETHER_MIN = 4096
# The fields before a payload are never longer, with or without byte stuffing.
_FIELDS_BYTES_MAX = 512 * 1024
_LENGTH_DTYPE: np.dtype[np.uint16] = np.dtype(">u2")
_TIME_FIELDS_BYTES = np.array(TIMES_BYTES)


class LastValues:
    """Last values of one ring. `now` is in seconds since 1970: an expired value does not count."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._last_sequences: Integers = np.full(1, -1, np.int64)
        """Sequence of the last value by channel number; -1 if the channel has none."""
        self._scanned_end = ring.floor
        """All messages below are scanned."""
        self._lowest_candidate = ring.floor
        """No message below is a last value."""
        self._compaction_end = ring.floor
        """Values below must be compacted."""
        self._check_threshold_bytes = COMPACTION_BYTES_MIN
        """Below this size it is not checked whether compaction is worthwhile."""
        self._fill_checked_head = -1
        """Head when `is_ring_mostly_values` was computed last; -1 before the first time."""
        self._is_mostly_values = False

    # Lookup --------------------------------------------------------------------------------------

    def find_sequences(self, first: int, last: int, now: float) -> Integers:
        """Return the sequences of the last values in `first <= sequence < last`, ascending."""
        self._scan_new()
        first = max(first, self._ring.floor)
        if first >= last:
            return np.zeros(0, np.int64)
        if last - first <= self._last_sequences.size:
            return np.flatnonzero(self._are_values(first, last, now)) + first
        values = self._last_sequences
        sequences = values[(values >= first) & (values < last)]
        if last - first <= _FLAGS_PER_VALUE_MAX * values.size:
            flags = np.zeros(last - first, np.bool_)
            flags[sequences - first] = True
            sequences = np.flatnonzero(flags) + first
        else:
            sequences.sort()
        expires = self._ring.read_rows_at(sequences).expires
        return sequences if expires is None else sequences[expires > now]

    def lowest_value(self, end_sequence: int, now: float) -> int:
        """Return the sequence of the lowest value below `end_sequence`, else `end_sequence`."""
        self._scan_new()
        low, step = max(self._lowest_candidate, self._ring.floor), _SCALAR_MESSAGES_MAX
        while low < end_sequence and not self._is_value(low, now):
            end = min(end_sequence, low + step)
            are_values = self._are_values(low, end, now)
            if are_values.any():
                low += int(are_values.argmax())
                break
            low = end
            step = min(8 * step, LOOKAHEAD_MESSAGES)
        self._lowest_candidate = max(self._lowest_candidate, low)
        return min(low, end_sequence)

    def leading_values_end(self, now: float) -> int:
        """Return the end of the run of values at the ring's floor, of a bounded length."""
        self._scan_new()
        first, last = self._ring.floor, min(self._ring.head, self._ring.floor + LOOKAHEAD_MESSAGES)
        if first == last or not self._is_value(first, now):
            return first
        are_values = self._are_values(first, last, now)
        return last if are_values.all() else first + int(are_values.argmin())

    def count_values(self, now: float) -> int:
        return self.find_sequences(self._ring.floor, self._ring.head, now).size

    def discard_range(self, first: int, last: int) -> None:
        """Record that messages `first` to `last - 1` were purged and are no longer values."""
        self._scan_new()
        self._last_sequences[(self._last_sequences >= first) & (self._last_sequences < last)] = -1

    def skip_missing(self, first: int, last: int) -> None:
        """Record that messages `first` to `last - 1` only stand for missing ones."""
        self._scan_until(first)
        self._scanned_end = max(self._scanned_end, last)

    def _is_value(self, sequence: int, now: float) -> bool:
        """Return True if a scanned message is a last value."""
        row = self._ring.read_row(sequence)
        return bool(self._last_sequences[row.channel] == sequence and row.expires > now)

    def _are_values(self, first: int, last: int, now: float) -> Flags:
        """Return which of the scanned messages `first` to `last - 1` are last values."""
        rows = self._ring.read_rows(first, last)
        are_values: Flags = self._last_sequences[rows.channels] == np.arange(first, last)
        if rows.expires is not None:
            are_values &= rows.expires > now
        return are_values

    # Scanning ------------------------------------------------------------------------------------

    def scan_if_many(self) -> None:
        """Scan the new messages if they are many, so that a request for values scans few."""
        if self._ring.head - self._scanned_end > _SCANNED_TOGETHER_MIN:
            self._scan_new()

    def scan_in_parts(self) -> Iterator[None]:
        """Scan most of the new messages in parts, so that a request for values scans few."""
        ring, turn_messages = self._ring, LAST_VALUES_SCANNED_PER_TURN
        # Messages that arrive meanwhile are scanned, too, but only a limited number.
        for _ in range(2 * (ring.head - self._scanned_end) // turn_messages):
            first = max(self._scanned_end, ring.floor)
            if ring.head - first <= turn_messages:
                break
            self._scan_until(first + turn_messages)
            yield

    def _scan_new(self) -> None:
        """Scan the messages that arrived since the last scan."""
        self._scan_until(self._ring.head)

    def _scan_until(self, end: int) -> None:
        ring = self._ring
        first = max(self._scanned_end, ring.floor)
        while first < end:
            last = min(end, first + LOOKAHEAD_MESSAGES)
            if last - first <= _SCALAR_MESSAGES_MAX:
                self._scan_one_by_one(first, last)
            else:
                batch, last = ring.view_batch(first, last, SEND_BYTES)
                channels = ring.read_rows(first, last).channels
                self._grow_to(channels if isinstance(channels, int) else int(channels.max()))
                # numpy assigns in order, so the newest message of a channel wins.
                sequences = np.arange(first, last)
                self._last_sequences[np.broadcast_to(channels, sequences.shape)] = np.where(
                    empty_payload_flags(batch), -1, sequences
                )
            first = last
        self._scanned_end = first

    def _scan_one_by_one(self, first: int, last: int) -> None:
        for sequence in range(first, last):
            channel = self._ring.read_row(sequence).channel
            self._grow_to(channel)
            piece, _ = self._ring.view_frames(sequence, sequence + 1, SEND_BYTES)
            self._last_sequences[channel] = -1 if has_empty_payload(piece) else sequence

    def _grow_to(self, channel_number: int) -> None:
        size = self._last_sequences.size
        if channel_number >= size:
            added = np.full(max(channel_number + 1, 2 * size) - size, -1, np.int64)
            self._last_sequences = np.concatenate([self._last_sequences, added])

    # Compaction ----------------------------------------------------------------------------------

    def find_compaction_end(self, end_sequence: int, now: float) -> int:
        """Return the end of the range whose values must be compacted.

        Messages below `end_sequence` are stored only for their last values. Compaction begins when
        other messages use most of their bytes.

        Returns:
            The ring's floor if nothing must be compacted.
        """
        ring = self._ring
        if ring.floor < min(self._compaction_end, end_sequence):
            return min(self._compaction_end, end_sequence)
        total_bytes = ring.range_bytes(ring.floor, end_sequence)
        if total_bytes <= self._check_threshold_bytes:
            if total_bytes < self._check_threshold_bytes // 4:
                self._check_threshold_bytes = max(
                    COMPACTION_BYTES_MIN, self._check_threshold_bytes // 2
                )
            return ring.floor
        value_bytes = ring.sequences_bytes(self.find_sequences(ring.floor, end_sequence, now))
        if total_bytes - value_bytes > max(value_bytes, COMPACTION_BYTES_MIN):
            self._compaction_end, self._check_threshold_bytes = end_sequence, COMPACTION_BYTES_MIN
            return end_sequence
        self._check_threshold_bytes = max(
            2 * value_bytes + COMPACTION_BYTES_MIN, total_bytes + total_bytes // 4
        )
        return ring.floor

    def oldest_values(self, end_sequence: int, size_bytes: int, now: float) -> Integers:
        """Return the oldest values below `end_sequence`, of about `size_bytes` together.

        At least one is returned if there is any.
        """
        sequences = self.find_sequences(self._ring.floor, end_sequence, now)[:REDELIVERY_MESSAGES]
        total_bytes = np.cumsum(self._ring.frame_sizes(sequences))
        return sequences[: max(1, int(total_bytes.searchsorted(size_bytes, side="right")))]

    def is_ring_mostly_values(self, now: float) -> bool:
        """Return True if over 3/4 of the ring are last values, by bytes or by number.

        The result is cached until the ring has received 1/8 more messages.
        """
        ring = self._ring
        if not 0 <= ring.head - self._fill_checked_head < max(1, len(ring) // 8):
            values = self.find_sequences(ring.floor, ring.head, now)
            self._fill_checked_head = ring.head
            self._is_mostly_values = 4 * ring.sequences_bytes(
                values
            ) > 3 * ring.frame_bytes or 4 * values.size > 3 * len(ring)
        return self._is_mostly_values


def has_empty_payload(frame: memoryview) -> bool:
    """Return True if a stored frame has an empty payload."""
    if frame[0] != frames.ENVELOPE:
        return len(frame) == FRAME_BYTES_MIN
    if len(frame) > _FIELDS_BYTES_MAX:
        return False
    return not envelope_batch.extract_payload(bytes(frame[HEADER_BYTES:-DELIMITER_BYTES]))


def empty_payload_flags(batch: FrameBatch) -> Flags:
    """Return which frames of a batch have an empty payload."""
    data, starts, ends = batch.data, batch.starts, batch.ends
    empty: Flags = ends - starts == FRAME_BYTES_MIN
    envelopes = np.flatnonzero(data[starts] == frames.ENVELOPE)
    if not envelopes.size:
        return empty
    if STUFFED in data.tobytes():  # Byte stuffing shifts the fields after it.
        view = data.data
        for index in envelopes.tolist():
            empty[index] = has_empty_payload(view[starts[index] : ends[index]])
        return empty
    fields = data[starts[envelopes] + HEADER_BYTES]
    offsets = starts[envelopes] + (HEADER_BYTES + 1) + _TIME_FIELDS_BYTES[fields & TIMES]
    lengths = unaligned(data, _LENGTH_DTYPE)
    for field_flag in (CHANNEL, KEY, HEADERS):
        with_field = np.flatnonzero(fields & field_flag)
        offsets[with_field] += 2 + lengths[offsets[with_field]].astype(np.int64)
    empty[envelopes] = offsets == ends[envelopes] - DELIMITER_BYTES
    return empty
