"""Messages whose dead letters are not stored yet.

A message is acknowledged to the cluster after its dead letter is stored, so that one of them always
exists. Until then it counts as in progress. Only such messages wait, and those after them in a
consumer with ack policy `all`; other classes do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from simplebus.core.commit_log import CommitLog
from simplebus.core.protocol.frames import Flags
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.subscription.selection import Ranges
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.events import ReceivedMessages

DeadLetterMark = tuple[int, int]
"""Log position and dead-letter class: the dead letters are stored when the class has reached the
position.
"""


class FeedDeadLetters:
    """Pending dead letters of one position, numbered as in its ring."""

    def __init__(self) -> None:
        self._pending: deque[tuple[DeadLetterMark, Ranges]] = deque()
        self._messages = SequenceSet()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, ranges: Ranges, mark: DeadLetterMark) -> None:
        """Add messages whose dead letters were accepted."""
        self._pending.append((mark, ranges))
        self._messages.update(ranges)

    def remove_stored(self, is_stored: Callable[[DeadLetterMark], bool]) -> None:
        """Remove messages whose dead letters are stored."""
        while self._pending and is_stored(self._pending[0][0]):
            for first, last in self._pending.popleft()[1]:
                self._messages.remove(first, last)

    def clear(self) -> DeadLetterMark | None:
        """Remove all messages. Returns the mark of the last dead letter; None if there was none."""
        mark = self._pending[-1][0] if self._pending else None
        self._pending.clear()
        self._messages.clear()
        return mark

    def limit_floor(self, floor: int) -> int:
        """Return `floor`, or the first message with a pending dead letter if that is lower."""
        return min(floor, next(iter(self._messages))[0]) if self._pending else floor

    def pending_flags(self, first: int, last: int) -> Flags:
        """Return the flags of messages first..last-1 with pending dead letters."""
        found = np.zeros(last - first, np.bool_)
        for begin, end in self._messages.ranges_within(first, last) if self._pending else ():
            found[begin - first : end - first] = True
        return found


class DeadLetteringFeed(Protocol):
    """The parts of a feed that the tracker needs."""

    dead_letters: FeedDeadLetters

    def pop_acked(self) -> list[ReceivedMessages]:
        """Return the messages that became acknowledged since the previous call."""
        ...


FeedT = TypeVar("FeedT", bound=DeadLetteringFeed)


class DeadLetterTracker(Generic[FeedT]):
    """Pending dead letters of all feeds of a server."""

    def __init__(self, commit_log: CommitLog, write: Callable[[bytes], None]) -> None:
        self._commit_log = commit_log
        self._write = write
        self._feeds: set[FeedT] = set()
        """Feeds with pending dead letters."""
        self._pending: list[tuple[DeadLetterMark, bytes]] = []
        """Acks of closed positions, to be written after the mark."""

    def add(self, feed: FeedT, ranges: Ranges, class_id: int) -> None:
        """Add messages of a feed whose dead letters were appended to a class."""
        if ranges:
            feed.dead_letters.add(ranges, (self._commit_log.log_position, class_id))
            self._feeds.add(feed)

    def update_feed(self, feed: FeedT) -> None:
        """Release the messages of a feed whose dead letters are stored."""
        feed.dead_letters.remove_stored(self.is_stored)
        if not feed.dead_letters:
            self._feeds.discard(feed)

    def end_feed(self, feed: FeedT) -> DeadLetterMark | None:
        """Take over the pending acks of a closed feed.

        Returns:
            The mark after which all dead letters of the feed are stored; None without dead letters.
        """
        self._feeds.discard(feed)
        mark = feed.dead_letters.clear()
        if mark is not None:
            self._pending += [
                (mark, jetstream_codec.encode_acks(messages)) for messages in feed.pop_acked()
            ]
        return mark

    def write_stored_acks(self) -> set[FeedT]:
        """Write acks that became possible. Returns the feeds that may have acks, too."""
        pending, self._pending = self._pending, []
        for mark, acks in pending:
            if self.is_stored(mark):
                self._write(acks)
            else:
                self._pending.append((mark, acks))
        return self._feeds

    def is_stored(self, mark: DeadLetterMark) -> bool:
        """Return True if the dead letters up to a mark are stored."""
        position, class_id = mark
        return self._commit_log.is_producer_durable(position, {class_id: position})
