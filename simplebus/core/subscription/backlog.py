"""How many of the messages ahead of a position's cursor are for it.

Rule 1: a message is looked at once when it is counted and once when the cursor passes it, however
often the number is asked for.
Rule 2: what has piled up is counted a part at a time, what is new always: until all is counted, the
number is too low. Whoever asks says how long the part may be.

    cursor ─── counted ─── until ─── not counted yet ─── head
"""

from __future__ import annotations

from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.ring.ring import Ring
from simplebus.core.subscription import selection
from simplebus.core.subscription.channel_filter import ChannelFilter


class BacklogCounter:
    """Of one position."""

    def __init__(self, ring: Ring, window: AckWindow, channel_filter: ChannelFilter | None) -> None:
        self._ring = ring
        self._window = window
        self._channel_filter = channel_filter
        self._seen_head = ring.head
        """Where the head was when it was looked last."""
        self.counted_end = window.cursor
        self.count = 0
        """Messages for it from the cursor to `until`."""
        self.last_scan_max = 0
        """How many messages were worth a look the last time."""
        self.last_backlog_max = 0
        """And how many of those that have piled up."""

    def count_more(self, backlog_max: int) -> int:
        """Count on: twice what is new, so that all is counted some day, and a part of the rest.
        Returns how much longer that took than what is new alone."""
        ring, head = self._ring, self._ring.head
        new = head - self._seen_head
        self.last_backlog_max, self.last_scan_max = backlog_max, 2 * new + backlog_max
        is_uniform = self._channel_filter is None or ring.columns.channels is None
        if is_uniform:
            self.last_scan_max = head - self._window.cursor  # One look says it of them all.
        self._seen_head = head
        first, self.counted_end = self.counted_end, min(head, self.counted_end + self.last_scan_max)
        self.count += selection.count_matching(ring, first, self.counted_end, self._channel_filter)
        return 0 if is_uniform else max(0, self.counted_end - first - new)

    def advance_cursor(self, cursor: int) -> None:
        """The cursor is about to be there. What it passes must still be stored."""
        if cursor < self.counted_end:
            self.count -= selection.count_matching(
                self._ring, self._window.cursor, cursor, self._channel_filter
            )
        else:
            self.count, self.counted_end = 0, cursor
