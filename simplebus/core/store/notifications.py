"""Notifications of subscriptions whose class has new messages."""

from __future__ import annotations

import sys
from collections.abc import Collection
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simplebus.core.subscription.subscription import BrokerSubscription


class Notifications:
    """Queues subscriptions in the outboxes of their sessions: at once, or some in each turn."""

    def __init__(self) -> None:
        self.per_turn = sys.maxsize
        """Subscriptions of a class that are notified at once. A driver that sets it calls
        `notify_waiting` while `has_waiting` is True.
        """
        self._waiting: dict[BrokerSubscription, None] = {}

    def __contains__(self, subscription: BrokerSubscription) -> bool:
        """Return True if a subscription waits for its notification."""
        return subscription in self._waiting

    def notify(self, subscriptions: Collection[BrokerSubscription]) -> None:
        """Notify all subscriptions of a class. If they are too many, all of them wait."""
        if len(subscriptions) > self.per_turn:
            self._waiting.update(dict.fromkeys(subscriptions))
            return
        for subscription in subscriptions:
            subscription.outbox.enqueue(subscription)

    @property
    def has_waiting(self) -> bool:
        """True if `notify_waiting` has work to do."""
        return bool(self._waiting)

    def notify_waiting(self) -> None:
        """Notify the next `per_turn` of the waiting subscriptions."""
        for subscription in list(islice(self._waiting, self.per_turn)):
            del self._waiting[subscription]
            subscription.outbox.enqueue(subscription)

    def discard(self, subscription: BrokerSubscription) -> None:
        """Notify a subscription no more, because it ends."""
        self._waiting.pop(subscription, None)
