"""Who is sent what: one client's subscription.

Rule 1: it is a sink: what matches its subject is put to it, alone or in batches, and it says
whether anybody takes it.
Rule 2: what a client is sent of one batch is gathered first, and written in the order in which it
was published, whichever of its subscriptions it is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from simplebus.nats.protocol import encode
from simplebus.nats.protocol.events import MixedBatch, Indexes, Pub, UniformBatch, row_indexes
from simplebus.nats.server.permissions import Verdicts

if TYPE_CHECKING:
    from simplebus.nats.server.session import NatsSession

_NONE: Indexes = np.empty(0, np.int64)


class Sink(Protocol):
    """Something that takes messages. `origin` is whose they are."""

    def __hash__(self) -> int: ...

    @property
    def is_ordered(self) -> bool:
        """Whether all messages of a batch that are for it are to be put to it together: which come
        first matters to it."""

    def one(self, message: Pub, origin: NatsSession | None) -> bool:
        """Take a message. Returns whether anybody does."""

    def many(self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None) -> None:
        """Take these of the messages, in ascending order; None for all."""


class Subscription:
    """Of one client."""

    __slots__ = (
        "account",
        "delivered",
        "denied",
        "is_over",
        "most",
        "queue",
        "session",
        "sid",
        "subject",
    )

    def __init__(
        self,
        session: NatsSession,
        subject: bytes,
        queue: bytes,
        sid: bytes,
        denied: Verdicts | None = None,
    ) -> None:
        self.session = session
        self.subject = subject
        self.queue = queue
        self.sid = sid
        self.account = ""
        """Who answers for the memory that it takes."""
        self.delivered = 0
        """Messages since it began."""
        self.most = 0
        """With so many delivered it ends; 0 for never."""
        self.is_over = False
        """Whether it has ended, and is still there."""
        self.denied = denied
        """Subjects of which it is sent nothing; None for none."""

    @property
    def is_ordered(self) -> bool:
        """Whether it will end: which messages are its last ones is told by all that are for it."""
        return self.most > 0

    def hears(self, origin: NatsSession | None) -> bool:
        """Whether it is to be sent this client's messages."""
        session = self.session
        if self.is_over or session.is_cut:
            return False
        return origin is not session or session.options.echo

    def takes(self, subject: bytes, origin: NatsSession | None) -> bool:
        """Whether it is to be sent this client's messages on this subject."""
        return self.hears(origin) and not (self.denied and self.denied.one(subject))

    def one(self, message: Pub, origin: NatsSession | None) -> bool:
        if not self.takes(message.subject, origin):
            return False
        session = self.session
        session.send(encode.encode_message(message, self.sid, headers=session.takes_headers))
        if message.reply and session.replies is not None:
            session.replies.heard(message.reply)
        self._count(1)
        return True

    def many(self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None) -> None:
        self.part(messages, rows, origin)

    def part(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> Indexes:
        """The same; returns those that it does not take."""
        if not self.hears(origin):
            return row_indexes(messages, rows)
        left = _NONE
        if self.denied is not None:
            rows, left = self._allowed(messages, rows, self.denied)
        count = messages.count if rows is None else len(rows)
        most = self.most - self.delivered
        if self.most and count > most:
            rows = row_indexes(messages, rows)
            left = np.sort(np.concatenate((left, rows[most:])))
            rows, count = rows[:most], most
        if count:
            session = self.session
            session.gather(self.sid, rows, count * messages.mean_message_bytes)
            if isinstance(messages, UniformBatch) and messages.first_message.reply and session.replies is not None:
                session.replies.heard(messages.first_message.reply)
            self._count(count)
        return left

    def _allowed(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, denied: Verdicts
    ) -> tuple[Indexes | None, Indexes]:
        """Those of the messages that may be delivered, and the others."""
        if isinstance(messages, UniformBatch):
            if denied.one(messages.first_message.subject):
                return _NONE, row_indexes(messages, rows)
            return rows, _NONE
        numbers = messages.subject_numbers if rows is None else messages.subject_numbers[rows]
        if messages.subject_names is None:
            are_denied = denied.of(numbers)
        else:
            are_denied = np.array([denied.one(name) for name in messages.subject_names])[numbers]
        if not are_denied.any():
            return rows, _NONE
        rows = row_indexes(messages, rows)
        return rows[~are_denied], rows[are_denied]

    def _count(self, count: int) -> None:
        self.delivered += count
        self.session.out_messages += count
        if self.most and self.delivered >= self.most:
            self.session.end(self)
