"""Delivery to one subscription of a NATS client.

A batch is gathered per client first and encoded once, in publication order across the client's
subscriptions.
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
    """Receiver of messages of a subject. `origin` is the publishing session; None for the bus."""

    def __hash__(self) -> int: ...

    @property
    def is_ordered(self) -> bool:
        """True if the rows of a mixed batch must arrive in one call, in publication order."""

    def deliver(self, message: Pub, origin: NatsSession | None) -> bool:
        """Deliver a message. Returns True if a receiver accepted it."""

    def deliver_batch(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> None:
        """Deliver these rows of a batch, in ascending order; None for all rows."""


class NatsSubscription:
    """Subscription of one client to a subject."""

    __slots__ = (
        "delivered_count",
        "denied_subjects",
        "has_ended",
        "max_messages",
        "memory_account",
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
        """Account charged for the memory of the subscription."""
        self.delivered_count = 0
        """Messages delivered so far."""
        self.max_messages = 0
        """Number of messages after which the subscription ends; 0 for no limit."""
        self.has_ended = False
        """True if the subscription has ended but is not yet removed from the routes."""
        self.denied_subjects = denied_subjects
        """Cache of subjects whose messages are not delivered; None if nothing is denied."""

    @property
    def is_ordered(self) -> bool:
        """True with `max_messages`: the last messages are known only if all rows arrive together."""
        return self.max_messages > 0

    def accepts_from(self, origin: NatsSession | None) -> bool:
        """Return True if messages of this publisher are delivered."""
        session = self.session
        if self.has_ended or session.is_disconnecting:
            return False
        return origin is not session or session.options.echo

    def accepts(self, subject: bytes, origin: NatsSession | None) -> bool:
        """Return True if messages of this publisher on this subject are delivered."""
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
        """Deliver rows of a batch; None for all. Returns the rows that were not accepted."""
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
        """Return the deliverable rows and the denied rows."""
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
