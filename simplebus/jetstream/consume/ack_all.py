"""A consumer that is one door's alone, which acknowledges a message together with all before it.

Rule 1: nothing is said of a message before all that were sent before it are done with: then one
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


class Sole:
    """What was taken from one, and what was said of it."""

    def __init__(self, sent_to: int = 0) -> None:
        """What lies before or at `sent_to` was sent to somebody before."""
        self.sent_to = sent_to
        self.highest = 0
        """The last message of the stream that was taken; 0 for none."""
        self.is_broken = False
        """Whether something was lost: to be made anew."""
        self._next_count = 1
        self._said = 0
        """All up to this message of the stream was said to be done with."""
        self._subjects: deque[tuple[Integers, ReceivedMessages]] = deque()
        """What was not, by the ack subjects of messages; ascending."""

    @property
    def taken(self) -> int:
        """How many it has sent that have come, those counted that it sent again."""
        return self._next_count - 1

    def admit(self, told: JetStreamDeliveries, messages: ReceivedMessages) -> Flags:
        """Which of these are new, and behind no gap."""
        fresh = np.zeros(messages.count, np.bool_)
        if self.is_broken:
            return fresh
        gaps = np.flatnonzero(told.counts != self._next_count + np.arange(messages.count))
        count = int(gaps[0]) if gaps.size else messages.count
        self.is_broken = bool(gaps.size)
        self._next_count += count
        sequences = told.sequences[:count]
        if not count:
            return fresh
        last = self._subjects[-1][0][-1] if self._subjects else self._said
        before = np.maximum.accumulate(np.concatenate([[last], sequences[:-1]]))
        ahead = sequences > before
        if ahead.any():
            at = slice(0, count) if ahead.all() else np.flatnonzero(ahead)
            self._subjects.append((sequences[at], messages.pick(at)))
        fresh[:count] = sequences > np.maximum(before, self.highest)
        self.highest = max(self.highest, int(sequences.max()))
        return fresh

    def word(self, done: int) -> ReceivedMessages | None:
        """All up to this message of the stream is done with: the one of which that is to be said,
        if anything is."""
        found: ReceivedMessages | None = None
        if done <= self._said:
            return None
        subjects = self._subjects
        while subjects and subjects[0][0][-1] <= done:
            _, messages = subjects.popleft()
            found = messages.pick(slice(messages.count - 1, None))
        if subjects and subjects[0][0][0] <= done:
            sequences, messages = subjects[0]
            row = int(sequences.searchsorted(done, side="right"))
            found = messages.pick(slice(row - 1, row))
            subjects[0] = sequences[row:], messages.pick(slice(row, None))
        if found is not None:
            self._said = done
        return found

    def open(self) -> list[ReceivedMessages]:
        """Those of which nothing was said."""
        return [messages for _, messages in self._subjects]

    def begin_anew(self) -> None:
        """There is another consumer, which begins at or before the first message of which nothing
        was said: what is here comes again, with other ack subjects."""
        self._subjects.clear()
        self._said = 0
        self._next_count = 1
        self.is_broken = False
