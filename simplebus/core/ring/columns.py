"""Columns of a segment: channel, expiry and delay of each stored message.

A column is allocated with the first message that needs it, so a class of plain messages has none.
Indexes are the slots of the segment. The channel table of the class maps channel numbers to names.

    slot         0    1    2    3 …
    channels     0    3    3    1      0: no channel
    expires      inf  inf  12.5 inf    seconds of the broker's clock; inf: never
    not_before   0    0    0    99.0   seconds of the broker's clock; 0: at once
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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

    def take(self, indexes: npt.NDArray[np.intp]) -> MessageRows:
        """Return a copy of the rows with these indexes."""
        return MessageRows(
            indexes.size,
            self.channels if isinstance(self.channels, int) else self.channels[indexes],
            None if self.expires is None else self.expires[indexes],
            None if self.not_before is None else self.not_before[indexes],
        )

    @property
    def row_bytes(self) -> int:
        """Memory of one row of the columns that these rows need."""
        has_channels = not (isinstance(self.channels, int) and self.channels == 0)
        return 4 * has_channels + 8 * (self.expires is not None) + 8 * (self.not_before is not None)

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


def concatenate_rows(parts: list[MessageRows]) -> MessageRows:
    """Return consecutive rows as one object, which is a copy. There is at least one part."""
    channels: Channels | int = 0
    if not all(isinstance(part.channels, int) and part.channels == 0 for part in parts):
        channels = np.concatenate(
            [np.broadcast_to(np.asarray(part.channels, np.uint32), part.count) for part in parts]
        )
    return MessageRows(
        sum(part.count for part in parts),
        channels,
        _concatenate_times([(part.count, part.expires) for part in parts], NEVER),
        _concatenate_times([(part.count, part.not_before) for part in parts], NO_DELAY),
    )


def _concatenate_times(parts: list[tuple[int, Times | None]], default: float) -> Times | None:
    if all(times is None for _, times in parts):
        return None
    return np.concatenate(
        [np.full(count, default) if times is None else times for count, times in parts]
    )


class SegmentColumns:
    """Columns of a segment, each as long as the segment has slots."""

    __slots__ = ("channels", "expires", "not_before", "row_bytes")

    def __init__(self) -> None:
        self.channels: Channels | None = None
        self.expires: Times | None = None
        self.not_before: Times | None = None
        self.row_bytes = 0
        """Memory of one row of the existing columns."""

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

    def add_missing(self, rows: MessageRows, slot_count: int) -> int:
        """Allocate the columns that these rows need, and return their bytes.

        Raises:
            MemoryError: The system has not enough memory. No column was added.
        """
        missing = self.missing_row_bytes(rows)
        channels, expires, not_before = self.channels, self.expires, self.not_before
        if channels is None and not (isinstance(rows.channels, int) and rows.channels == 0):
            channels = np.zeros(slot_count, np.uint32)
        if expires is None and rows.expires is not None:
            expires = np.full(slot_count, NEVER)
        if not_before is None and rows.not_before is not None:
            not_before = np.full(slot_count, NO_DELAY)
        self.channels, self.expires, self.not_before = channels, expires, not_before
        self.row_bytes += missing
        return missing * slot_count

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
        channels, expires, not_before = self.channels, self.expires, self.not_before
        return MessageRow(
            0 if channels is None else int(channels[slot]),
            NEVER if expires is None else float(expires[slot]),
            NO_DELAY if not_before is None else float(not_before[slot]),
        )

    def write_rows(self, slot: int, rows: MessageRows) -> None:
        """Write rows from `slot` on. Their columns exist."""
        target = slice(slot, slot + rows.count)
        if self.channels is not None:
            self.channels[target] = rows.channels
        if self.expires is not None:
            self.expires[target] = NEVER if rows.expires is None else rows.expires
        if self.not_before is not None:
            self.not_before[target] = NO_DELAY if rows.not_before is None else rows.not_before

    def view_rows(self, first: int, last: int) -> MessageRows:
        """Return a view of the rows of slots first..last-1."""
        selection = slice(first, last)
        return self._rows(last - first, selection)

    def read_rows_at(self, slots: npt.NDArray[np.int64]) -> MessageRows:
        """Return a copy of the rows in these slots."""
        return self._rows(slots.size, slots)

    def _rows(self, count: int, selection: slice | npt.NDArray[np.int64]) -> MessageRows:
        channels, expires, not_before = self.channels, self.expires, self.not_before
        return MessageRows(
            count,
            0 if channels is None else channels[selection],
            None if expires is None else expires[selection],
            None if not_before is None else not_before[selection],
        )


class ChannelCounts:
    """Number of stored messages of each channel."""

    __slots__ = ("by_number",)

    def __init__(self) -> None:
        self.by_number = np.zeros(1, np.int64)
        """Counts by channel number; entry 0 is not maintained."""

    def add(self, channels: Channels | int, count: int) -> None:
        """Count `count` stored messages with these channels, or all with this one channel."""
        top = channels if isinstance(channels, int) else int(channels.max(initial=0))
        size = self.by_number.size
        if top >= size:
            added = np.zeros(max(top + 1, 2 * size) - size, np.int64)
            self.by_number = np.concatenate([self.by_number, added])
        if isinstance(channels, int):
            self.by_number[channels] += count
        else:
            np.add.at(self.by_number, channels, 1)

    def subtract(self, channels: Channels) -> None:
        """Subtract messages with these channels."""
        np.subtract.at(self.by_number, channels, 1)

    def clear(self) -> None:
        """Set all counts to 0."""
        self.by_number.fill(0)

    def reset(self) -> None:
        """Free the counts. No stored message has a channel."""
        assert not self.by_number[1:].any()
        self.by_number = np.zeros(1, np.int64)
