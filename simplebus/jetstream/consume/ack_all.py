"""A consumer that is one door's alone, which acknowledges a message together with all before it.

Rule 1: nothing is said of a message before all that were sent before it are sequence with: then one
word is enough for all of them.
Rule 2: it numbers what it sends without a gap. Where there is one, something was lost on the way:
nothing behind it is taken, and the consumer is made anew from what was acknowledged last.

    counts     1 2 3 4 5 │ 8 9 …      6 and 7 are lost: 8 and 9 are not taken
    sequences  11 12 14 15 16         13 was not in the stream: that is none of a gap
"""

from __future__ import annotations

from collections import deque

import numpy as np

from simplebus.core.protocol.frames import Flags, Integers
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamDeliveries


class AckAllConsumer:
    """What was taken from one, and what was said of it."""

    def __init__(self, delivered_before: int = 0) -> None:
        """What lies before or at `delivered_before` was sent to somebody before."""
        self.delivered_before = delivered_before
        self.highest = 0
        """The last message of the stream that was taken; 0 for none."""
        self.has_gap = False
        """Whether something was lost: to be made anew."""
        self._next_count = 1
        self._acked_to = 0
        """All up to this message of the stream was said to be sequence with."""
        self._unacked: deque[tuple[Integers, ReceivedMessages]] = deque()
        """What was not, by the ack unacked of messages; ascending."""

    @property
    def received_count(self) -> int:
        """How many it has sent that have come, those counted that it sent again."""
        return self._next_count - 1

    def accept(self, deliveries: JetStreamDeliveries, messages: ReceivedMessages) -> Flags:
        """Which of these are new, and behind no gap."""
        is_new = np.zeros(messages.count, np.bool_)
        if self.has_gap:
            return is_new
        gaps = np.flatnonzero(deliveries.counts != self._next_count + np.arange(messages.count))
        count = int(gaps[0]) if gaps.size else messages.count
        self.has_gap = bool(gaps.size)
        self._next_count += count
        sequences = deliveries.sequences[:count]
        if not count:
            return is_new
        last = self._unacked[-1][0][-1] if self._unacked else self._acked_to
        before = np.maximum.accumulate(np.concatenate([[last], sequences[:-1]]))
        ahead = sequences > before
        if ahead.any():
            at = slice(0, count) if ahead.all() else np.flatnonzero(ahead)
            self._unacked.append((sequences[at], messages.pick(at)))
        is_new[:count] = sequences > np.maximum(before, self.highest)
        self.highest = max(self.highest, int(sequences.max()))
        return is_new

    def ack_through(self, sequence: int) -> ReceivedMessages | None:
        """All up to this message of the stream is sequence with: the one of which that is to be said,
        if anything is."""
        found: ReceivedMessages | None = None
        if sequence <= self._acked_to:
            return None
        unacked = self._unacked
        while unacked and unacked[0][0][-1] <= sequence:
            _, messages = unacked.popleft()
            found = messages.pick(slice(messages.count - 1, None))
        if unacked and unacked[0][0][0] <= sequence:
            sequences, messages = unacked[0]
            row = int(sequences.searchsorted(sequence, side="right"))
            found = messages.pick(slice(row - 1, row))
            unacked[0] = sequences[row:], messages.pick(slice(row, None))
        if found is not None:
            self._acked_to = sequence
        return found

    def unacked_messages(self) -> list[ReceivedMessages]:
        """Those of which nothing was said."""
        return [messages for _, messages in self._unacked]

    def restart(self) -> None:
        """There is another consumer, which begins at or before the first message of which nothing
        was said: what is here comes again, with other ack unacked."""
        self._unacked.clear()
        self._acked_to = 0
        self._next_count = 1
        self.has_gap = False
