"""Consumers that this door is about to leave, as others ask it: see `positions`, rule 4.

Rule 1: what waits to be left, because the cluster was away for example, is named to who asks: he
may take it over, and is left alone with that for a while.
Rule 2: while it is being left, who asks is told to ask again: he would take it for one that stays,
and so would this door what he has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from simplebus.core.subscription import Subscription

TAKING_SECONDS = 10.0
"""So long who was told of them may take to have them."""
LEFT, WAIT = b"left", b"wait"
_NAMES_MAX = 4096


class Going:
    """Of one door."""

    def __init__(self, goes_on_as: Callable[[Subscription], str]) -> None:
        """`goes_on_as`: the name of the consumer in which what a position leaves goes on, if one
        was asked for; else empty."""
        self._goes_on_as = goes_on_as
        self._names: dict[Subscription, tuple[int, str]] = {}
        """Of each position that has ended, its class and its consumer."""
        self._told_at: dict[Subscription, float] = {}
        self._under_way: set[Subscription] = set()

    def put(self, position: Subscription, class_id: int, name: str) -> None:
        """A plain subscription has ended."""
        self._names.setdefault(position, (class_id, name))

    def remove(self, position: Subscription) -> None:
        """It is left."""
        self._names.pop(position, None)
        self._told_at.pop(position, None)

    def is_being_taken(self, position: Subscription, now: float) -> bool:
        """Whether somebody was told of it a moment ago."""
        return now < self._told_at.get(position, -TAKING_SECONDS) + TAKING_SECONDS

    @contextmanager
    def leaving(self, position: Subscription) -> Iterator[None]:
        """A block in which it is left."""
        self._under_way.add(position)
        try:
            yield
        finally:
            self._under_way.discard(position)

    def names(self, class_id: int, now: float) -> set[str]:
        """Those of a class, for somebody who takes them over."""
        found: set[str] = set()
        for position, (its_class, name) in self._names.items():
            if its_class == class_id and len(found) < _NAMES_MAX:
                found |= {name, self._goes_on_as(position) or name}
                self._told_at[position] = now
        return found

    def answer(self, asked: bytes, now: float) -> bytes:
        """What another door is told that asks for those of a class; or only whether this one is
        there."""
        if not (asked.isdigit() and len(asked) <= len("65535")):
            return b""
        class_id = int(asked)
        if any(self._names.get(position, (None,))[0] == class_id for position in self._under_way):
            return WAIT
        names = self.names(class_id, now)
        return b" ".join([LEFT, *(name.encode() for name in sorted(names))]) if names else b""
