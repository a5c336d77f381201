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
from simplebus.core.subscription.channel_filter import Wanted


class Ahead:
    """Of one position."""

    def __init__(self, ring: Ring, window: AckWindow, wanted: Wanted | None) -> None:
        self._ring = ring
        self._window = window
        self._wanted = wanted
        self._head = ring.head
        """Where the head was when it was looked last."""
        self.until = window.cursor
        self.count = 0
        """Messages for it from the cursor to `until`."""
        self.most = 0
        """How many messages were worth a look the last time."""
        self.part = 0
        """And how many of those that have piled up."""

    def look(self, part: int) -> int:
        """Count on: twice what is new, so that all is counted some day, and a part of the rest.
        Returns how much longer that took than what is new alone."""
        ring, head = self._ring, self._ring.head
        new = head - self._head
        self.part, self.most = part, 2 * new + part
        is_uniform = self._wanted is None or ring.columns.channels is None
        if is_uniform:
            self.most = head - self._window.cursor  # One look says it of them all.
        self._head = head
        first, self.until = self.until, min(head, self.until + self.most)
        self.count += selection.count(ring, first, self.until, self._wanted)
        return 0 if is_uniform else max(0, self.until - first - new)

    def reach(self, cursor: int) -> None:
        """The cursor is about to be there. What it passes must still be stored."""
        if cursor < self.until:
            self.count -= selection.count(self._ring, self._window.cursor, cursor, self._wanted)
        else:
            self.count, self.until = 0, cursor
