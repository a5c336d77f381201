"""Who is sent what: one client's subscription, and a queue group of several.

Rule 1: both are sinks: what matches their subject is put to them, alone or in batches, and they say
whether anybody takes it.
Rule 2: what a client is sent of one batch is gathered first, and written in the order in which it
was published, whichever of its subscriptions it is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from simplebus.nats import writing
from simplebus.nats.events import Mix, Positions, Pub, Run

if TYPE_CHECKING:
    from simplebus.nats.session import NatsSession


class Sink(Protocol):
    """Something that takes messages. `origin` is whose they are."""

    def __hash__(self) -> int: ...

    def one(self, message: Pub, origin: NatsSession | None) -> bool:
        """Take a message. Returns whether anybody does."""

    def many(self, messages: Run | Mix, rows: Positions | None, origin: NatsSession | None) -> bool:
        """Take these of the messages, in ascending order; None for all."""


class Subscription:
    """Of one client."""

    __slots__ = ("delivered", "most", "queue", "session", "sid", "subject")

    def __init__(self, session: NatsSession, subject: bytes, queue: bytes, sid: bytes) -> None:
        self.session = session
        self.subject = subject
        self.queue = queue
        self.sid = sid
        self.delivered = 0
        """Messages since it began."""
        self.most = 0
        """With so many delivered it ends; 0 for never."""

    def takes(self, origin: NatsSession | None) -> bool:
        """Whether it is to be sent this client's messages."""
        session = self.session
        return (origin is not session or session.options.echo) and not session.is_cut

    @property
    def left(self) -> int:
        """How many messages it may still be sent, if there is an end."""
        return self.most - self.delivered

    def one(self, message: Pub, origin: NatsSession | None) -> bool:
        session = self.session
        if not self.takes(origin):
            return False
        session.send(writing.one(message, self.sid, headers=session.takes_headers))
        self._count(1)
        return True

    def many(self, messages: Run | Mix, rows: Positions | None, origin: NatsSession | None) -> bool:
        if not self.takes(origin):
            return False
        count = messages.count if rows is None else len(rows)
        if self.most and count > self.left:
            count = self.left
            rows = np.arange(count) if rows is None else rows[:count]
        self.session.gather(self.sid, rows, count * messages.mean_bytes)
        self._count(count)
        return True

    def _count(self, count: int) -> None:
        self.delivered += count
        if self.most and self.delivered >= self.most:
            self.session.end(self)


class QueueGroup:
    """The subscriptions to one subject that share its messages."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.members: list[Subscription] = []
        self._generator = generator

    def _takers(self, origin: NatsSession | None) -> list[Subscription]:
        return [member for member in self.members if member.takes(origin)]

    def one(self, message: Pub, origin: NatsSession | None) -> bool:
        takers = self._takers(origin)
        if not takers:
            return False
        chosen = (
            takers[int(self._generator.integers(len(takers)))] if len(takers) > 1 else takers[0]
        )
        return chosen.one(message, origin)

    def many(self, messages: Run | Mix, rows: Positions | None, origin: NatsSession | None) -> bool:
        takers = self._takers(origin)
        if not takers:
            return False
        if len(takers) == 1 and not takers[0].most:
            return takers[0].many(messages, rows, origin)
        everything = np.arange(messages.count) if rows is None else rows
        while takers and everything.size:
            chosen = self._generator.integers(len(takers), size=everything.size)
            left = np.zeros(everything.size, np.bool_)
            for number, member in enumerate(takers):
                mine = np.flatnonzero(chosen == number)
                if member.most and mine.size > member.left:
                    left[mine[member.left :]] = True
                    mine = mine[: member.left]
                if mine.size:
                    member.many(messages, everything[mine], origin)
            everything = everything[left]
            takers = self._takers(origin)
        return True
