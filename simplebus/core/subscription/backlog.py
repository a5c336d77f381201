"""Number of messages ahead of a position's cursor that match its filter.

Each message is inspected once when it is counted and once when the cursor passes it. New messages
are counted at once, older ones in parts, so the count is too low until all are counted.

    cursor ─── counted ─── counted_end ─── not counted yet ─── head
"""

from __future__ import annotations

from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.ring.ring import Ring
from simplebus.core.subscription import selection
from simplebus.core.subscription.channel_filter import ChannelFilter


class BacklogCounter:
    """Incremental count of one position's backlog."""

    def __init__(self, ring: Ring, window: AckWindow, channel_filter: ChannelFilter | None) -> None:
        self._ring = ring
        self._window = window
        self._channel_filter = channel_filter
        self._seen_head = ring.head
        """Head of the ring at the last count."""
        self.counted_end = window.cursor
        self.count = 0
        """Matching messages from the cursor to `counted_end`."""
        self.last_scan_max = 0
        """Messages that the last call of `count_more` was allowed to inspect."""
        self.last_backlog_max = 0
        """Messages that the last call of `count_more` was allowed to inspect beyond new ones."""

    def count_more(self, backlog_max: int) -> int:
        """Count twice as many messages as are new, plus up to `backlog_max` older ones.

        Returns:
            Number of older messages that were inspected.
        """
        ring, head = self._ring, self._ring.head
        new_count = head - self._seen_head
        self.last_backlog_max, self.last_scan_max = backlog_max, 2 * new_count + backlog_max
        is_uniform = self._channel_filter is None or not ring.has_channels
        if is_uniform:
            self.last_scan_max = head - self._window.cursor  # All messages match or none.
        self._seen_head = head
        first, self.counted_end = self.counted_end, min(head, self.counted_end + self.last_scan_max)
        self.count += selection.count_matching(ring, first, self.counted_end, self._channel_filter)
        return 0 if is_uniform else max(0, self.counted_end - first - new_count)

    def advance_cursor(self, cursor: int) -> None:
        """Subtract the messages that the cursor is about to pass. They must still be stored."""
        if cursor < self.counted_end:
            self.count -= selection.count_matching(
                self._ring, self._window.cursor, cursor, self._channel_filter
            )
        else:
            self.count, self.counted_end = 0, cursor
