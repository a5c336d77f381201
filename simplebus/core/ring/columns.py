"""What a ring knows of its messages beside their frames: channel, expiry, opening time.

Rule 1: a column exists from the first message on that needs it: a class whose messages are plain
pays nothing. Rows are the ring's slots.
Rule 2: this file knows slots and numbers; what a channel number means is the channel table's
business.

    slot       0    1    2    3 …
    channels   0    3    3    1      0: none
    expires    inf  inf  12.5 inf    seconds of the driver's clock; inf: never
    opens      0    0    0    99.0   not to be delivered before; 0: at once
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Channels = npt.NDArray[np.uint32]
"""Shape (n,): channel numbers; 0 for none."""
Times = npt.NDArray[np.float64]
"""Shape (n,): seconds."""

NEVER = float("inf")
AT_ONCE = 0.0


@dataclass(frozen=True, slots=True)
class MessageRows:
    """What is known of some messages in a row. None says that a column has nothing for them."""

    count: int
    channels: Channels | int = 0
    expires: Times | None = None
    not_before: Times | None = None

    def slice(self, first: int, last: int) -> MessageRows:
        """Messages first..last-1 of these."""
        here = slice(first, last)
        return MessageRows(
            last - first,
            self.channels if isinstance(self.channels, int) else self.channels[here],
            None if self.expires is None else self.expires[here],
            None if self.not_before is None else self.not_before[here],
        )

    @property
    def is_plain(self) -> bool:
        return isinstance(self.channels, int) and self.channels == 0 and not self.is_timed

    @property
    def is_timed(self) -> bool:
        return self.expires is not None or self.not_before is not None


class MessageRow(NamedTuple):
    """What is known of one message."""

    channel: int = 0
    expires: float = NEVER
    not_before: float = AT_ONCE


Blank: TypeAlias = tuple[
    npt.NDArray[np.uint32] | None, npt.NDArray[np.float64] | None, npt.NDArray[np.float64] | None
]
"""Columns of channels and of times, each if there is one."""


class Columns:
    """The columns that a ring has, each as long as the ring has slots."""

    def __init__(self) -> None:
        self.channels: Channels | None = None
        self.expires: Times | None = None
        self.opens: Times | None = None
        self.row_bytes = 0
        """Memory of one row of the columns that exist."""
        self.uses = np.zeros(1, np.int64)
        """By channel number, but for 0: how many stored messages carry it."""

    def missing_bytes(self, rows: MessageRows) -> int:
        """Memory of one row of the columns that these rows need and that do not exist."""
        missing = 0
        if self.channels is None and not (isinstance(rows.channels, int) and rows.channels == 0):
            missing += 4
        if self.expires is None and rows.expires is not None:
            missing += 8
        if self.opens is None and rows.not_before is not None:
            missing += 8
        return missing

    def add_for(self, rows: MessageRows, slots: int) -> None:
        """Make the columns that these rows need. Raises MemoryError, and makes none then."""
        missing, columns = self.missing_bytes(rows), (self.channels, self.expires, self.opens)
        channels, expires, opens = columns
        if channels is None and not (isinstance(rows.channels, int) and rows.channels == 0):
            channels = np.zeros(slots, np.uint32)
        if expires is None and rows.expires is not None:
            expires = np.full(slots, NEVER)
        if opens is None and rows.not_before is not None:
            opens = np.full(slots, AT_ONCE)
        self.channels, self.expires, self.opens = channels, expires, opens
        self.row_bytes += missing

    def lacks(self, row: MessageRow) -> bool:
        """Whether there is no place for something that is known of this message."""
        return bool(
            (row.channel and self.channels is None)
            or (row.expires != NEVER and self.expires is None)
            or (row.not_before != AT_ONCE and self.opens is None)
        )

    def put_one(self, slot: int, row: MessageRow) -> None:
        """Write one row, for which nothing is lacking."""
        if self.channels is not None:
            self.channels[slot] = row.channel
        if self.expires is not None:
            self.expires[slot] = row.expires
        if self.opens is not None:
            self.opens[slot] = row.not_before

    def get_one(self, slot: int) -> MessageRow:
        """One row."""
        channels, expires, opens = self.channels, self.expires, self.opens
        return MessageRow(
            0 if channels is None else int(channels[slot]),
            NEVER if expires is None else float(expires[slot]),
            AT_ONCE if opens is None else float(opens[slot]),
        )

    def use(self, channels: Channels | int, count: int) -> None:
        """So many messages that carry these channels, or all of them this one, are stored."""
        top = channels if isinstance(channels, int) else int(channels.max(initial=0))
        size = self.uses.size
        if top >= size:
            more = np.zeros(max(top + 1, 2 * size) - size, np.int64)
            self.uses = np.concatenate([self.uses, more])
        if isinstance(channels, int):
            self.uses[channels] += count
        else:
            np.add.at(self.uses, channels, 1)

    def rest(self) -> None:
        """No stored message carries a channel, and none has for long."""
        assert not self.uses[1:].any()
        self.uses = np.zeros(1, np.int64)

    def let_go(self, pieces: list[tuple[int, int]]) -> None:
        """Messages in these slot ranges are stored no longer."""
        assert self.channels is not None
        for start, stop in pieces:
            np.subtract.at(self.uses, self.channels[start:stop], 1)

    def put(self, pieces: list[tuple[int, int]], rows: MessageRows) -> None:
        """Write rows into the slot ranges `pieces`, which hold as many."""
        done = 0
        for start, stop in pieces:
            here, part = slice(start, stop), slice(done, done + stop - start)
            done += stop - start
            if self.channels is not None:
                value = rows.channels
                self.channels[here] = value if isinstance(value, int) else value[part]
            if self.expires is not None:
                self.expires[here] = NEVER if rows.expires is None else rows.expires[part]
            if self.opens is not None:
                self.opens[here] = AT_ONCE if rows.not_before is None else rows.not_before[part]

    def get(self, pieces: list[tuple[int, int]]) -> MessageRows:
        """Copies of the rows in these slot ranges."""
        count = sum(stop - start for start, stop in pieces)
        channels: Channels | int = 0
        if self.channels is not None:
            channels = np.concatenate([self.channels[a:b] for a, b in pieces])
        expires, opens = self.expires, self.opens
        return MessageRows(
            count,
            channels,
            None if expires is None else np.concatenate([expires[a:b] for a, b in pieces]),
            None if opens is None else np.concatenate([opens[a:b] for a, b in pieces]),
        )

    def channels_in(self, pieces: list[tuple[int, int]]) -> Channels | int:
        """The channels in these slot ranges, not copied where they lie in one; or the one number
        that all have."""
        if self.channels is None:
            return 0
        if len(pieces) > 1:
            return np.concatenate([self.channels[a:b] for a, b in pieces])
        start, stop = pieces[0]
        return self.channels[start:stop]

    def get_at(self, slots: npt.NDArray[np.int64]) -> MessageRows:
        """The same of these slots."""
        channels, expires, opens = self.channels, self.expires, self.opens
        return MessageRows(
            slots.size,
            0 if channels is None else channels[slots],
            None if expires is None else expires[slots],
            None if opens is None else opens[slots],
        )

    def blank(self, slots: int) -> Blank:
        """The same columns with so many slots, and nothing in them. Raises MemoryError."""
        return (
            None if self.channels is None else np.zeros(slots, np.uint32),
            None if self.expires is None else np.full(slots, NEVER),
            None if self.opens is None else np.full(slots, AT_ONCE),
        )

    def resize(self, rows: MessageRows, blank: Blank, pieces: list[tuple[int, int]]) -> None:
        """Go over to these columns, with these rows in the slot ranges `pieces`."""
        self.channels, self.expires, self.opens = blank
        if rows.count:
            self.put(pieces, rows)
