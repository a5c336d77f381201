"""What a subscription at a door has given up, and whose dead letters are on their way.

Rule 1: a message is acknowledged to the cluster when its dead letter is stored, so that there is
either if the door dies. Until then it is the door's, and is acks to be in work.
Rule 2: only what died waits for that, and of a consumer that is told of all up to a message, what
is behind it: other messages, and other classes, do not.
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
"""When dead letters are stored: when this lot has reached the cluster, of what is in this class."""


class FeedDeadLetters:
    """Of one position; messages are numbered as in its ring."""

    def __init__(self) -> None:
        self._pending: deque[tuple[DeadLetterMark, Ranges]] = deque()
        self._messages = SequenceSet()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, ranges: Ranges, mark: DeadLetterMark) -> None:
        """Dead letters of messages first..last-1 were accepted."""
        self._pending.append((mark, ranges))
        self._messages.update(ranges)

    def remove_stored(self, is_stored: Callable[[DeadLetterMark], bool]) -> None:
        """Leave those whose dead letters are not stored."""
        while self._pending and is_stored(self._pending[0][0]):
            for first, last in self._pending.popleft()[1]:
                self._messages.remove(first, last)

    def clear(self) -> DeadLetterMark | None:
        """Nobody has the position any more. Returns when the last of them is stored; None if there
        are none."""
        mark = self._pending[-1][0] if self._pending else None
        self._pending.clear()
        self._messages.clear()
        return mark

    def limit_floor(self, floor: int) -> int:
        """Before which message nothing is pending, at most this one."""
        return min(floor, next(iter(self._messages))[0]) if self._pending else floor

    def pending_flags(self, first: int, last: int) -> Flags:
        """Which of messages first..last-1 are pending."""
        found = np.zeros(last - first, np.bool_)
        for begin, end in self._messages.ranges_within(first, last) if self._pending else ():
            found[begin - first : end - first] = True
        return found


class DeadLetteringFeed(Protocol):
    """DeadLetteringFeed of a position, as far as dead-lettering needs to know it."""

    dead_letters: FeedDeadLetters

    def pop_acked(self) -> list[ReceivedMessages]:
        """Return the messages that became acknowledged since the previous call."""
        ...


FeedT = TypeVar("FeedT", bound=DeadLetteringFeed)


class DeadLetterTracker(Generic[FeedT]):
    """Of all subscriptions at a door."""

    def __init__(self, commit_log: CommitLog, write: Callable[[bytes], None]) -> None:
        self._commit_log = commit_log
        self._write = write
        self._feeds: set[FeedT] = set()
        """Those of which something is being buried."""
        self._pending: list[tuple[DeadLetterMark, bytes]] = []
        """What is to be acks when dead letters are stored whose subscription has ended."""

    def add(self, feed: FeedT, ranges: Ranges, class_id: int) -> None:
        """There are dead letters in this class of what a subscription has given up."""
        if ranges:
            feed.dead_letters.add(ranges, (self._commit_log.log_position, class_id))
            self._feeds.add(feed)

    def update_feed(self, feed: FeedT) -> None:
        """Have what is buried acknowledged when the feed is asked next."""
        feed.dead_letters.remove_stored(self.is_stored)
        if not feed.dead_letters:
            self._feeds.discard(feed)

    def end_feed(self, feed: FeedT) -> DeadLetterMark | None:
        """A subscription has ended: what is being buried of it is acknowledged as soon as it is.
        Returns when that is; None if nothing is."""
        self._feeds.discard(feed)
        mark = feed.dead_letters.clear()
        if mark is not None:
            self._pending += [
                (mark, jetstream_codec.encode_acks(messages)) for messages in feed.pop_acked()
            ]
        return mark

    def write_stored_acks(self) -> set[FeedT]:
        """Some lots have reached the cluster. Returns the feeds that may have more to say."""
        pending, self._pending = self._pending, []
        for mark, acks in pending:
            if self.is_stored(mark):
                self._write(acks)
            else:
                self._pending.append((mark, acks))
        return self._feeds

    def is_stored(self, mark: DeadLetterMark) -> bool:
        """Whether dead letters are."""
        lot, class_id = mark
        return self._commit_log.is_producer_durable(lot, {class_id: lot})
