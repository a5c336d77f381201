"""Columns of a ring: channel, expiry and delay of each stored message.

A column is allocated with the first message that needs it, so a class of plain messages has none.
Indexes are the slots of the ring. The channel filter of the class maps channel numbers to names.

    slot         0    1    2    3 …
    channels     0    3    3    1      0: no channel
    expires      inf  inf  12.5 inf    seconds of the broker's clock; inf: never
    not_before   0    0    0    99.0   seconds of the broker's clock; 0: at once
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Channels = npt.NDArray[np.uint32]
"""Channel numbers, shape (n,); 0 for no channel."""
Times = npt.NDArray[np.float64]
"""Seconds, shape (n,)."""

NEVER = float("inf")
NO_DELAY = 0.0


@dataclass(frozen=True, slots=True)
class MessageRows:
    """Columns of consecutive messages. None means the default for all of them."""

    count: int
    channels: Channels | int = 0
    expires: Times | None = None
    not_before: Times | None = None

    def slice(self, first: int, last: int) -> MessageRows:
        """Return messages first..last-1 of these."""
        selection = slice(first, last)
        return MessageRows(
            last - first,
            self.channels if isinstance(self.channels, int) else self.channels[selection],
            None if self.expires is None else self.expires[selection],
            None if self.not_before is None else self.not_before[selection],
        )

    @property
    def is_plain(self) -> bool:
        return isinstance(self.channels, int) and self.channels == 0 and not self.is_timed

    @property
    def is_timed(self) -> bool:
        return self.expires is not None or self.not_before is not None


class MessageRow(NamedTuple):
    """Columns of one message."""

    channel: int = 0
    expires: float = NEVER
    not_before: float = NO_DELAY


ColumnArrays: TypeAlias = tuple[
    npt.NDArray[np.uint32] | None, npt.NDArray[np.float64] | None, npt.NDArray[np.float64] | None
]
"""Arrays of channels, expiries and delays; None for a column that does not exist."""


class RingColumns:
    """Columns of a ring, each as long as the ring has slots."""

    def __init__(self) -> None:
        self.channels: Channels | None = None
        self.expires: Times | None = None
        self.not_before: Times | None = None
        self.row_bytes = 0
        """Memory of one row of the existing columns."""
        self.channel_counts = np.zeros(1, np.int64)
        """Number of stored messages by channel number; entry 0 is not maintained."""

    def missing_row_bytes(self, rows: MessageRows) -> int:
        """Return the memory per row of the columns that these rows need and that do not exist."""
        byte_count = 0
        if self.channels is None and not (isinstance(rows.channels, int) and rows.channels == 0):
            byte_count += 4
        if self.expires is None and rows.expires is not None:
            byte_count += 8
        if self.not_before is None and rows.not_before is not None:
            byte_count += 8
        return byte_count

    def add_missing_columns(self, rows: MessageRows, slot_count: int) -> None:
        """Allocate the columns that these rows need. Raises MemoryError without allocating any."""
        missing, columns = (
            self.missing_row_bytes(rows),
            (self.channels, self.expires, self.not_before),
        )
        channels, expires, opens = columns
        if channels is None and not (isinstance(rows.channels, int) and rows.channels == 0):
            channels = np.zeros(slot_count, np.uint32)
        if expires is None and rows.expires is not None:
            expires = np.full(slot_count, NEVER)
        if opens is None and rows.not_before is not None:
            opens = np.full(slot_count, NO_DELAY)
        self.channels, self.expires, self.not_before = channels, expires, opens
        self.row_bytes += missing

    def is_missing_column_for(self, row: MessageRow) -> bool:
        """Return True if `row` needs a column that does not exist."""
        return bool(
            (row.channel and self.channels is None)
            or (row.expires != NEVER and self.expires is None)
            or (row.not_before != NO_DELAY and self.not_before is None)
        )

    def write_row(self, slot: int, row: MessageRow) -> None:
        """Write one row. Its columns exist."""
        if self.channels is not None:
            self.channels[slot] = row.channel
        if self.expires is not None:
            self.expires[slot] = row.expires
        if self.not_before is not None:
            self.not_before[slot] = row.not_before

    def read_row(self, slot: int) -> MessageRow:
        """Return one row."""
        channels, expires, opens = self.channels, self.expires, self.not_before
        return MessageRow(
            0 if channels is None else int(channels[slot]),
            NEVER if expires is None else float(expires[slot]),
            NO_DELAY if opens is None else float(opens[slot]),
        )

    def add_channels(self, channels: Channels | int, count: int) -> None:
        """Count `count` stored messages with these channels, or all with this one channel."""
        top = channels if isinstance(channels, int) else int(channels.max(initial=0))
        size = self.channel_counts.size
        if top >= size:
            more = np.zeros(max(top + 1, 2 * size) - size, np.int64)
            self.channel_counts = np.concatenate([self.channel_counts, more])
        if isinstance(channels, int):
            self.channel_counts[channels] += count
        else:
            np.add.at(self.channel_counts, channels, 1)

    def reset_channel_counts(self) -> None:
        """Free the counts. No stored message has a channel."""
        assert not self.channel_counts[1:].any()
        self.channel_counts = np.zeros(1, np.int64)

    def subtract_channels(self, slot_ranges: list[tuple[int, int]]) -> None:
        """Subtract the messages in these slot ranges from the counts."""
        assert self.channels is not None
        for start, stop in slot_ranges:
            np.subtract.at(self.channel_counts, self.channels[start:stop], 1)

    def write_rows(self, slot_ranges: list[tuple[int, int]], rows: MessageRows) -> None:
        """Write rows into slot ranges of the same total length."""
        written_count = 0
        for start, stop in slot_ranges:
            target, source = slice(start, stop), slice(written_count, written_count + stop - start)
            written_count += stop - start
            if self.channels is not None:
                value = rows.channels
                self.channels[target] = value if isinstance(value, int) else value[source]
            if self.expires is not None:
                self.expires[target] = NEVER if rows.expires is None else rows.expires[source]
            if self.not_before is not None:
                self.not_before[target] = (
                    NO_DELAY if rows.not_before is None else rows.not_before[source]
                )

    def read_rows(self, slot_ranges: list[tuple[int, int]]) -> MessageRows:
        """Return a copy of the rows in these slot ranges."""
        count = sum(stop - start for start, stop in slot_ranges)
        channels: Channels | int = 0
        if self.channels is not None:
            channels = np.concatenate([self.channels[a:b] for a, b in slot_ranges])
        expires, opens = self.expires, self.not_before
        return MessageRows(
            count,
            channels,
            None if expires is None else np.concatenate([expires[a:b] for a, b in slot_ranges]),
            None if opens is None else np.concatenate([opens[a:b] for a, b in slot_ranges]),
        )

    def read_channels(self, slot_ranges: list[tuple[int, int]]) -> Channels | int:
        """Return the channels in these slot ranges: a view of a single range, or the number that
        all share.
        """
        if self.channels is None:
            return 0
        if len(slot_ranges) > 1:
            return np.concatenate([self.channels[a:b] for a, b in slot_ranges])
        start, stop = slot_ranges[0]
        return self.channels[start:stop]

    def read_rows_at(self, slots: npt.NDArray[np.int64]) -> MessageRows:
        """Return a copy of the rows in these slots."""
        channels, expires, opens = self.channels, self.expires, self.not_before
        return MessageRows(
            slots.size,
            0 if channels is None else channels[slots],
            None if expires is None else expires[slots],
            None if opens is None else opens[slots],
        )

    def allocate_arrays(self, slot_count: int) -> ColumnArrays:
        """Return empty arrays of `slot_count` slots for the existing columns.

        Raises MemoryError if the system has not enough memory.
        """
        return (
            None if self.channels is None else np.zeros(slot_count, np.uint32),
            None if self.expires is None else np.full(slot_count, NEVER),
            None if self.not_before is None else np.full(slot_count, NO_DELAY),
        )

    def replace_arrays(
        self, rows: MessageRows, arrays: ColumnArrays, slot_ranges: list[tuple[int, int]]
    ) -> None:
        """Replace the columns by `arrays` and write `rows` into the slot ranges."""
        self.channels, self.expires, self.not_before = arrays
        if rows.count:
            self.write_rows(slot_ranges, rows)
