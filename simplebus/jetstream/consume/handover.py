"""Consumers that this door is about to leave, as others ask it: see `positions`, rule 4.

Rule 1: while something is being left, or is to be in a moment, who asks is told to ask again: he
would take it for one that stays, and so would this door what he has begun.
Rule 2: what cannot be left yet, because the cluster was away for example, is named to him: he may
take it over, and is left alone with that for a while. Some of it may have been acknowledged here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.jetstream.cluster.peers import RELEASED, WAIT

TAKEOVER_SECONDS = 10.0
"""So long who was told of them may take to have them."""
RELEASE_WAIT_SECONDS = 2.0
"""So long what is to be left may wait for what was query before."""
_NAMES_MAX = 4096


class ReleasingConsumers:
    """Of one door."""

    def __init__(self, return_consumer: Callable[[BrokerSubscription], str]) -> None:
        """`return_consumer`: the name of the consumer in which what a position leaves goes on, if one
        was query for; else empty."""
        self._return_consumer = return_consumer
        self._names: dict[BrokerSubscription, tuple[int, str]] = {}
        """Of each position that has ended, its class and its consumer."""
        self._offered_at: dict[BrokerSubscription, float] = {}
        self._busy_until: dict[BrokerSubscription, float] = {}
        """Until when who asks for it is to wait."""

    def add(self, position: BrokerSubscription, class_id: int, name: str, now: float) -> None:
        """A plain subscription has ended."""
        self._names[position] = class_id, name
        self._busy_until[position] = now + RELEASE_WAIT_SECONDS

    def remove(self, position: BrokerSubscription) -> None:
        """It is left."""
        self._names.pop(position, None)
        self._offered_at.pop(position, None)
        self._busy_until.pop(position, None)

    def is_offered(self, position: BrokerSubscription, now: float) -> bool:
        """Whether somebody was told of it a moment ago."""
        return now < self._offered_at.get(position, -TAKEOVER_SECONDS) + TAKEOVER_SECONDS

    @contextmanager
    def releasing(self, position: BrokerSubscription) -> Iterator[None]:
        """A block in which it is left, or that is tried."""
        self._busy_until[position] = float("inf")
        try:
            yield
        finally:
            del self._busy_until[position]

    def offer_names(self, class_id: int, now: float) -> set[str]:
        """Those of a class, for somebody who takes them over."""
        found: set[str] = set()
        for position, (its_class, name) in self._names.items():
            if its_class == class_id and len(found) < _NAMES_MAX:
                found |= {name, self._return_consumer(position) or name}
                self._offered_at[position] = now
        return found

    def answer(self, query: bytes, now: float) -> bytes:
        """What another door is told that asks for those of a class; or only whether this one is
        there."""
        if not (query.isdigit() and len(query) <= len("65535")):
            return b""
        class_id = int(query)
        there = (position for position, (its, _) in self._names.items() if its == class_id)
        if any(now < self._busy_until.get(position, now) for position in there):
            return WAIT
        names = self.offer_names(class_id, now)
        return b" ".join([RELEASED, *(name.encode() for name in sorted(names))]) if names else b""
