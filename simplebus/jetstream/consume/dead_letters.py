"""What a subscription at a door has given up, and whose dead letters are on their way.

Rule 1: a message is acknowledged to the cluster when its dead letter is stored, so that there is
either if the door dies. Until then it is the door's, and is said to be in work.
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

Mark = tuple[int, int]
"""When dead letters are stored: when this lot has reached the cluster, of what is in this class."""


class Burying:
    """Of one position; messages are numbered as in its ring."""

    def __init__(self) -> None:
        self._owed: deque[tuple[Mark, Ranges]] = deque()
        self._messages = SequenceSet()

    def __bool__(self) -> bool:
        return bool(self._owed)

    def add(self, ranges: Ranges, mark: Mark) -> None:
        """Dead letters of messages first..last-1 were accepted."""
        self._owed.append((mark, ranges))
        self._messages.update(ranges)

    def settle(self, is_stored: Callable[[Mark], bool]) -> None:
        """Leave those whose dead letters are not stored."""
        while self._owed and is_stored(self._owed[0][0]):
            for first, last in self._owed.popleft()[1]:
                self._messages.remove(first, last)

    def end(self) -> Mark | None:
        """Nobody has the position any more. Returns when the last of them is stored; None if there
        are none."""
        mark = self._owed[-1][0] if self._owed else None
        self._owed.clear()
        self._messages.clear()
        return mark

    def floor(self, floor: int) -> int:
        """Before which message nothing is owed, at most this one."""
        return min(floor, next(iter(self._messages))[0]) if self._owed else floor

    def flags(self, first: int, last: int) -> Flags:
        """Which of messages first..last-1 are owed."""
        found = np.zeros(last - first, np.bool_)
        for begin, end in self._messages.ranges_within(first, last) if self._owed else ():
            found[begin - first : end - first] = True
        return found


class DeadLetteringFeed(Protocol):
    """DeadLetteringFeed of a position, as far as dead-lettering needs to know it."""

    burying: Burying

    def acked(self) -> list[ReceivedMessages]:
        """Return the messages that became acknowledged since the previous call."""
        ...


class DeadLetteringFeed(Protocol):
    """DeadLetteringFeed of a position, as far as dead-lettering needs to know it."""

    burying: Burying

    def acked(self) -> list[ReceivedMessages]:
        """Return the messages that became acknowledged since the previous call."""
        ...


FeedT = TypeVar("FeedT", bound=DeadLetteringFeed)


class Burials(Generic[FeedT]):
    """Of all subscriptions at a door."""

    def __init__(self, commit_log: CommitLog, write: Callable[[bytes], None]) -> None:
        self._commit_log = commit_log
        self._write = write
        self._feeds: set[FeedT] = set()
        """Those of which something is being buried."""
        self._owed: list[tuple[Mark, bytes]] = []
        """What is to be said when dead letters are stored whose subscription has ended."""

    def add(self, feed: FeedT, ranges: Ranges, class_id: int) -> None:
        """There are dead letters in this class of what a subscription has given up."""
        if ranges:
            feed.burying.add(ranges, (self._commit_log.log_position, class_id))
            self._feeds.add(feed)

    def settle(self, feed: FeedT) -> None:
        """Have what is buried acknowledged when the feed is asked next."""
        feed.burying.settle(self.is_stored)
        if not feed.burying:
            self._feeds.discard(feed)

    def end(self, feed: FeedT) -> Mark | None:
        """A subscription has ended: what is being buried of it is acknowledged as soon as it is.
        Returns when that is; None if nothing is."""
        self._feeds.discard(feed)
        mark = feed.burying.end()
        if mark is not None:
            self._owed += [
                (mark, jetstream_codec.encode_acks(messages)) for messages in feed.acked()
            ]
        return mark

    def go_on(self) -> set[FeedT]:
        """Some lots have reached the cluster. Returns the feeds that may have more to say."""
        owed, self._owed = self._owed, []
        for mark, said in owed:
            if self.is_stored(mark):
                self._write(said)
            else:
                self._owed.append((mark, said))
        return self._feeds

    def is_stored(self, mark: Mark) -> bool:
        """Whether dead letters are."""
        lot, class_id = mark
        return self._commit_log.is_producer_durable(lot, {class_id: lot})
