"""How much memory this door's subscriptions take, and who has how much of it.

Rule 1: all together have a bound, and whoever subscribes leaves to the others as much as it has:
one user, or one address where nobody is asked who it is, gets half, and others get of the rest. A
little is for each client, whatever others of the same user have.
Rule 2: what a subscription takes is not measured but told from its subject, rather too much than
too little: most of it are the tables that a pattern's steps are looked up in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplebus.core.channel.pattern_index import PREFIX_SEGMENTS
from simplebus.core.limits import Limits
from simplebus.nats.limits import (
    CLIENT_SUBSCRIPTION_MEMORY_MIN_BYTES,
    PATTERN_MEMORY_BYTES,
    PATTERN_TOKEN_MEMORY_BYTES,
    QUEUE_MEMBER_MEMORY_BYTES,
    SUBJECT_CHARACTER_MEMORY_BYTES,
    SUBSCRIPTION_MEMORY_BYTES,
    SUBSCRIPTION_MEMORY_DIVISOR,
)
from simplebus.nats.subjects import has_wildcard

if TYPE_CHECKING:
    from simplebus.nats.server.subscription import NatsSubscription


def estimate_bytes(subject: bytes, queue: bytes, sid: bytes) -> int:
    """About what a subscription takes."""
    size = (
        SUBSCRIPTION_MEMORY_BYTES
        + SUBJECT_CHARACTER_MEMORY_BYTES * len(subject)
        + len(queue)
        + len(sid)
    )
    if has_wildcard(subject):
        behind = max(0, subject.count(b".") + 1 - PREFIX_SEGMENTS)
        size += PATTERN_MEMORY_BYTES + PATTERN_TOKEN_MEMORY_BYTES * behind
    return size + QUEUE_MEMBER_MEMORY_BYTES if queue else size


def memory_limit(bus: Limits) -> int:
    """What all together may take at a bus with these limits."""
    return bus.total_bytes // SUBSCRIPTION_MEMORY_DIVISOR


class SubscriptionMemory:
    """Of one front. Invariant: what all have <= used."""

    def __init__(self, limit: int) -> None:
        self.limit_bytes = limit
        self.client_min_bytes = CLIENT_SUBSCRIPTION_MEMORY_MIN_BYTES
        """What each client may have as long as there is any."""
        self.used_bytes = 0
        """What is there; also of those that are gone, as long as not all of it is forgotten."""
        self._bytes_by_account: dict[str, int] = {}

    def reserve(self, subscription: NatsSubscription) -> bool:
        """Have one more, if there is room for it."""
        session, size = subscription.session, _size(subscription)
        who, left = session.memory_account, self.limit_bytes - self.used_bytes - size
        has = self._bytes_by_account.get(who, 0) + size
        if left < 0 or (
            has > left and session.subscription_memory_bytes + size > self.client_min_bytes
        ):
            return False
        self._bytes_by_account[who] = has
        self.used_bytes += size
        session.subscription_memory_bytes += size
        subscription.memory_account = who
        return True

    def uncharge_account(self, subscription: NatsSubscription) -> None:
        """Nobody has it any more."""
        who, size = subscription.memory_account, _size(subscription)
        subscription.session.subscription_memory_bytes -= size
        self._bytes_by_account[who] -= size
        if not self._bytes_by_account[who]:
            del self._bytes_by_account[who]

    def free(self, subscription: NatsSubscription) -> None:
        """Behind that: nothing of it is left."""
        self.used_bytes -= _size(subscription)

    def check(self) -> None:
        """Raise AssertionError unless the invariant holds."""
        assert sum(self._bytes_by_account.values()) <= self.used_bytes, vars(self)
        assert all(size > 0 for size in self._bytes_by_account.values()), self._bytes_by_account


def _size(subscription: NatsSubscription) -> int:
    return estimate_bytes(subscription.subject, subscription.queue, subscription.sid)
