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
from simplebus.nats.protocol.events import Indexes, MixedBatch, Pub, UniformBatch, row_indexes
from simplebus.nats.server.permissions import PermissionCache

if TYPE_CHECKING:
    from simplebus.nats.server.session import NatsSession

_NONE: Indexes = np.empty(0, np.int64)


class SubjectSink(Protocol):
    """Something that takes messages. `origin` is whose they are."""

    def __hash__(self) -> int: ...

    @property
    def is_ordered(self) -> bool:
        """Whether all messages of a batch that are for it are to be put to it together: which come
        first matters to it."""

    def deliver(self, message: Pub, origin: NatsSession | None) -> bool:
        """Take a message. Returns whether anybody does."""

    def deliver_batch(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> None:
        """Take these of the messages, in ascending order; None for all."""


class NatsSubscription:
    """Of one client."""

    __slots__ = (
        "memory_account",
        "delivered_count",
        "denied_subjects",
        "has_ended",
        "max_messages",
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
        denied_subjects: PermissionCache | None = None,
    ) -> None:
        self.session = session
        self.subject = subject
        self.queue = queue
        self.sid = sid
        self.memory_account = ""
        """Who answers for the memory that it takes."""
        self.delivered_count = 0
        """Messages since it began."""
        self.max_messages = 0
        """With so many delivered it ends; 0 for never."""
        self.has_ended = False
        """Whether it has ended, and is still there."""
        self.denied_subjects = denied_subjects
        """Subjects of which it is sent nothing; None for none."""

    @property
    def is_ordered(self) -> bool:
        """Whether it will end: which messages are its last ones is told by all that are for it."""
        return self.max_messages > 0

    def accepts_from(self, origin: NatsSession | None) -> bool:
        """Whether it is to be sent this client's messages."""
        session = self.session
        if self.has_ended or session.is_disconnecting:
            return False
        return origin is not session or session.options.echo

    def accepts(self, subject: bytes, origin: NatsSession | None) -> bool:
        """Whether it is to be sent this client's messages on this subject."""
        return self.accepts_from(origin) and not (
            self.denied_subjects and self.denied_subjects.get(subject)
        )

    def deliver(self, message: Pub, origin: NatsSession | None) -> bool:
        if not self.accepts(message.subject, origin):
            return False
        session = self.session
        session.send(encode.encode_message(message, self.sid, headers=session.accepts_headers))
        if message.reply and session.open_replies is not None:
            session.open_replies.add(message.reply)
        self._count_delivered(1)
        return True

    def deliver_batch(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> None:
        self.deliver_rows(messages, rows, origin)

    def deliver_rows(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> Indexes:
        """The same; returns those that it does not take."""
        if not self.accepts_from(origin):
            return row_indexes(messages, rows)
        left = _NONE
        if self.denied_subjects is not None:
            rows, left = self._split_denied(messages, rows, self.denied_subjects)
        count = messages.count if rows is None else len(rows)
        most = self.max_messages - self.delivered_count
        if self.max_messages and count > most:
            rows = row_indexes(messages, rows)
            left = np.sort(np.concatenate((left, rows[most:])))
            rows, count = rows[:most], most
        if count:
            session = self.session
            session.gather(self.sid, rows, count * messages.mean_message_bytes)
            if (
                isinstance(messages, UniformBatch)
                and messages.first_message.reply
                and session.open_replies is not None
            ):
                session.open_replies.add(messages.first_message.reply)
            self._count_delivered(count)
        return left

    def _split_denied(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, denied: PermissionCache
    ) -> tuple[Indexes | None, Indexes]:
        """Those of the messages that may be delivered, and the others."""
        if isinstance(messages, UniformBatch):
            if denied.get(messages.first_message.subject):
                return _NONE, row_indexes(messages, rows)
            return rows, _NONE
        numbers = messages.subject_numbers if rows is None else messages.subject_numbers[rows]
        if messages.subject_names is None:
            are_denied = denied.get_many(numbers)
        else:
            are_denied = np.array([denied.get(name) for name in messages.subject_names])[numbers]
        if not are_denied.any():
            return rows, _NONE
        rows = row_indexes(messages, rows)
        return rows[~are_denied], rows[are_denied]

    def _count_delivered(self, count: int) -> None:
        self.delivered_count += count
        self.session.out_messages += count
        if self.max_messages and self.delivered_count >= self.max_messages:
            self.session.on_subscription_complete(self)
