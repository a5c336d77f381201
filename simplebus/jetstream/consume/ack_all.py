"""Acknowledgement state of a consumer that belongs to one server (ack policy `all`).

One ack covers all messages up to a sequence, so a message is acknowledged only after all earlier
ones. Deliveries are numbered without gaps. After a gap the later messages are rejected, and the
consumer is recreated after the last acknowledged message.

    deliveries  1 2 3 4 5 │ 8 9 …      6 and 7 are lost: 8 and 9 are rejected
    sequences   11 12 14 15 16         13 was not in the stream, which is no gap
"""

from __future__ import annotations

from collections import deque

import numpy as np

from simplebus.core.protocol.frames import Flags, Integers
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamDeliveries


class AckAllConsumer:
    """Received and acknowledged messages of a consumer with ack policy `all`."""

    def __init__(self, delivered_before: int = 0) -> None:
        """Start empty. Messages up to `delivered_before` were delivered by a predecessor."""
        self.delivered_before = delivered_before
        self.highest = 0
        """Highest received stream sequence; 0 for none."""
        self.has_gap = False
        """True if a delivery was lost, so that the consumer must be recreated."""
        self._next_count = 1
        self._acked_to = 0
        """Stream sequence up to which everything is acknowledged."""
        self._unacked: deque[tuple[Integers, ReceivedMessages]] = deque()
        """Received messages without an ack, ascending, for their ack subjects."""

    @property
    def received_count(self) -> int:
        """Number of received deliveries, including redeliveries."""
        return self._next_count - 1

    def accept(self, deliveries: JetStreamDeliveries, messages: ReceivedMessages) -> Flags:
        """Return the flags of the messages that are new and follow no gap: shape (n,)."""
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
        """Acknowledge everything up to a stream sequence.

        Returns:
            The message whose ack is to be written; None if there is nothing to acknowledge.
        """
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
        """Return the received messages without an ack."""
        return [messages for _, messages in self._unacked]

    def restart(self) -> None:
        """Expect the unacknowledged messages again, from a recreated consumer with other ack
        subjects.
        """
        self._unacked.clear()
        self._acked_to = 0
        self._next_count = 1
        self.has_gap = False
