"""Memory bound of the subscriptions of NATS clients.

An account (user, or address network without authentication) may use at most as much as is left
for others. Each client may always use `client_min_bytes` while there is space. Sizes are estimated
from the subject, on the high side: most memory is used by the index tables of a pattern.
"""

from __future__ import annotations

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
from simplebus.nats.server.session import NatsSession, NatsSubscription
from simplebus.nats.subjects import has_wildcard


def estimate_bytes(subject: bytes, queue: bytes, sid: bytes) -> int:
    """Return the estimated memory of a subscription."""
    size = (
        SUBSCRIPTION_MEMORY_BYTES
        + SUBJECT_CHARACTER_MEMORY_BYTES * len(subject)
        + len(queue)
        + len(sid)
    )
    if has_wildcard(subject):
        extra_tokens = max(0, subject.count(b".") + 1 - PREFIX_SEGMENTS)
        size += PATTERN_MEMORY_BYTES + PATTERN_TOKEN_MEMORY_BYTES * extra_tokens
    return size + QUEUE_MEMBER_MEMORY_BYTES if queue else size


def memory_limit(bus: Limits) -> int:
    """Return the memory limit of all subscriptions on a bus with these limits."""
    return bus.total_bytes // SUBSCRIPTION_MEMORY_DIVISOR


class SubscriptionMemory:
    """Memory accounting by account. sum of all accounts <= used_bytes <= limit_bytes."""

    def __init__(self, limit: int) -> None:
        self.limit_bytes = limit
        self.client_min_bytes = CLIENT_SUBSCRIPTION_MEMORY_MIN_BYTES
        """Memory that each client may use while there is space."""
        self.used_bytes = 0
        """Memory in use, including ended subscriptions that are not removed yet."""
        self._bytes_by_account: dict[str, int] = {}

    def reserve(self, subscription: NatsSubscription) -> bool:
        """Charge a subscription to its account. Returns False if the limit does not allow it."""
        session, size = subscription.session, _size(subscription)
        account, free_bytes = session.memory_account, self.limit_bytes - self.used_bytes - size
        account_bytes = self._bytes_by_account.get(account, 0) + size
        if free_bytes < 0 or (
            account_bytes > free_bytes
            and session.subscription_memory_bytes + size > self.client_min_bytes
        ):
            return False
        self._bytes_by_account[account] = account_bytes
        self.used_bytes += size
        session_bytes = session.subscription_bytes_by_account
        session_bytes[account] = session_bytes.get(account, 0) + size
        subscription.memory_account = account
        return True

    def uncharge_account(self, subscription: NatsSubscription) -> None:
        """Remove a subscription from its account; its memory stays used until `free`."""
        self._uncharge(subscription.session, subscription.memory_account, _size(subscription))

    def uncharge_session(self, session: NatsSession) -> None:
        """Remove all subscriptions of a session from their accounts, as `uncharge_account` does."""
        for account, size in list(session.subscription_bytes_by_account.items()):
            self._uncharge(session, account, size)

    def _uncharge(self, session: NatsSession, account: str, size: int) -> None:
        for bytes_by_account in (self._bytes_by_account, session.subscription_bytes_by_account):
            bytes_by_account[account] -= size
            if not bytes_by_account[account]:
                del bytes_by_account[account]

    def free(self, subscription: NatsSubscription) -> None:
        """Release the memory of a removed subscription. Called after `uncharge_account`."""
        self.used_bytes -= _size(subscription)

    def check(self) -> None:
        """Raise AssertionError unless the invariant holds."""
        assert sum(self._bytes_by_account.values()) <= self.used_bytes, vars(self)
        assert all(size > 0 for size in self._bytes_by_account.values()), self._bytes_by_account


def _size(subscription: NatsSubscription) -> int:
    return estimate_bytes(subscription.subject, subscription.queue, subscription.sid)
