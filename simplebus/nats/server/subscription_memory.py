"""How much memory this door's subscriptions take, and who has how much of it.

Rule 1: all together have a bound, and whoever subscribes leaves to the others as much as it has:
one user, or one address where nobody is asked who it is, gets half, and others get of the rest. A
little is for each client, whatever others of the same user have.
Rule 2: what a subscription takes is not measured but told from its subject, rather too much than
too little: most of it are the tables that a pattern's steps are looked up in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplebus.core.channel.pattern_index import HEAD_STEPS
from simplebus.core.limits import Limits
from simplebus.nats.limits import (
    INTEREST_LITTLE_BYTES,
    INTEREST_PART,
    KEPT_BYTES_OF_BYTE,
    KEPT_BYTES_OF_PATTERN,
    KEPT_BYTES_OF_QUEUE,
    KEPT_BYTES_OF_STEP,
    KEPT_BYTES_OF_SUBSCRIPTION,
)
from simplebus.nats.subjects import has_wildcard

if TYPE_CHECKING:
    from simplebus.nats.server.subscription import Subscription


def kept_bytes(subject: bytes, queue: bytes, sid: bytes) -> int:
    """About what a subscription takes."""
    size = KEPT_BYTES_OF_SUBSCRIPTION + KEPT_BYTES_OF_BYTE * len(subject) + len(queue) + len(sid)
    if has_wildcard(subject):
        behind = max(0, subject.count(b".") + 1 - HEAD_STEPS)
        size += KEPT_BYTES_OF_PATTERN + KEPT_BYTES_OF_STEP * behind
    return size + KEPT_BYTES_OF_QUEUE if queue else size


def limit_of(bus: Limits) -> int:
    """What all together may take at a bus with these limits."""
    return bus.total_bytes // INTEREST_PART


class Interest:
    """Of one front. Invariant: what all have <= used."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.little = INTEREST_LITTLE_BYTES
        """What each client may have as long as there is any."""
        self.used = 0
        """What is there; also of those that are gone, as long as not all of it is forgotten."""
        self._of: dict[str, int] = {}

    def take(self, subscription: Subscription) -> bool:
        """Have one more, if there is room for it."""
        session, size = subscription.session, _size(subscription)
        who, left = session.account, self.limit - self.used - size
        has = self._of.get(who, 0) + size
        if left < 0 or (has > left and session.interest_bytes + size > self.little):
            return False
        self._of[who] = has
        self.used += size
        session.interest_bytes += size
        subscription.account = who
        return True

    def leave(self, subscription: Subscription) -> None:
        """Nobody has it any more."""
        who, size = subscription.account, _size(subscription)
        subscription.session.interest_bytes -= size
        self._of[who] -= size
        if not self._of[who]:
            del self._of[who]

    def give(self, subscription: Subscription) -> None:
        """Behind that: nothing of it is left."""
        self.used -= _size(subscription)

    def check(self) -> None:
        """Raise AssertionError unless the invariant holds."""
        assert sum(self._of.values()) <= self.used, vars(self)
        assert all(size > 0 for size in self._of.values()), self._of


def _size(subscription: Subscription) -> int:
    return kept_bytes(subscription.subject, subscription.queue, subscription.sid)
