"""Publish queue: messages that wait for space in a full class, or for a rate limit.

Such messages are parked: they lie in `Session.parked_messages`, and their session is blocked, by
the class of its first parked message or by its rate limit.

The messages of one session are stored in order: all messages behind a parked one are parked, too.
Of the sessions that a class blocks, the one blocked longest is served first. A rate-limited session
delays no other session: it joins the queue of the class when its rate allows.

Parked messages of a version 1 session stay after it ended, as long as there is memory. Messages
of a version 2 session are discarded: they were not confirmed, so the publisher sends them again.
"""

from __future__ import annotations

import sys
from typing import Protocol

from simplebus.core.clock import BrokerClock
from simplebus.core.errors import Reason
from simplebus.core.limits import ENVELOPES_PER_PARKED_BATCH
from simplebus.core.message_class.class_registry import ClassRegistry
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol import frames
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.session.session import Session
from simplebus.core.store.rate_queue import RateQueue
from simplebus.core.subscription.delayed_wakeups import DelayedWakeups
from simplebus.core.users.rate_limit import RateLimiter, consume


class AppendingStore(Protocol):
    """Part of a `Store` that the publish queue uses."""

    def append_or_drop(self, cls: MessageClass, batch: FrameBatch, session: Session) -> int:
        """Store messages as far as there is space, apply the full-class policy, and notify
        subscribers.

        Returns how many messages were handled: stored, refused or dropped.
        """


class PublishQueue:
    """Parked messages of one broker. A `WakeupTarget` for messages that wait for a rate limit."""

    def __init__(
        self,
        store: AppendingStore,
        class_registry: ClassRegistry,
        clock: BrokerClock,
        delayed_wakeups: DelayedWakeups,
    ) -> None:
        self.scanned_count = 0
        """Always 0: the work of one wakeup is bounded by the rates."""
        self._store = store
        self._classes = class_registry.classes
        self._budget = class_registry.budget
        self._dead_letter_budget = class_registry.dead_letter_budget
        """Memory of dead-letter classes, which may never be consumed."""
        self.progressed_sessions: dict[Session, None] = {}
        """Sessions that had parked messages stored. The reader clears it."""
        self.blocked_classes: dict[MessageClass, None] = {}
        """Classes with blocked sessions."""
        self.classes_to_retry: dict[MessageClass, None] = {}
        """Classes for which `retry` must be called again in a later turn."""
        self.batches_per_turn = sys.maxsize
        """Batches of parked messages that one call of `retry` stores."""
        self._remaining_batch_count = 0
        self.rate_queue = RateQueue(clock)
        self._delayed_wakeups = delayed_wakeups

    def park(
        self,
        session: Session,
        cls: MessageClass,
        batch: FrameBatch,
        *,
        is_rate_limited: bool = False,
    ) -> None:
        """Park messages that must wait for space in their class, or for the rate limit."""
        if not session.parked_messages:
            self._block_session(session, self.rate_queue if is_rate_limited else cls)
        session.add_parked(cls.class_id, batch)

    def retry_later(self, cls: MessageClass) -> None:
        """Store the parked messages of a class in a later turn: this turn has done enough."""
        self.classes_to_retry[cls] = None

    def retry(self, cls: MessageClass) -> None:
        """Store parked messages of a class that may have space now.

        After `batches_per_turn` batches, the class is added to `classes_to_retry`.
        """
        self._remaining_batch_count = self.batches_per_turn
        classes_to_retry = [cls]
        while classes_to_retry:
            cls = classes_to_retry.pop()
            while cls.blocked_sessions:
                if self._remaining_batch_count <= 0:
                    self.classes_to_retry |= dict.fromkeys([cls, *classes_to_retry])
                    return
                session = cls.blocked_sessions[0]
                next_queue = self._store_parked(session, cls)
                if next_queue is cls:
                    if self._remaining_batch_count <= 0 or self._discard_orphan(cls):
                        continue
                    break
                self._unblock_session(session, cls)
                if next_queue is not None:
                    self._block_session(session, next_queue)
                if isinstance(next_queue, MessageClass):
                    classes_to_retry.append(next_queue)

    @property
    def next_wakeup(self) -> float:
        """Time of the next call of `handle_wakeup`."""
        return self.rate_queue.next_allowed_time

    def handle_wakeup(self) -> bool:
        """Store messages of the rate-limited sessions that may publish again."""
        for session in self.rate_queue.allowed_sessions():
            self._queue_for_class(session)
        return False

    def set_token_buckets(self, session: Session, token_buckets: tuple[RateLimiter, ...]) -> None:
        """Replace the token buckets of a session, which may be waiting."""
        if session.token_buckets == token_buckets:
            return
        if session not in self.rate_queue.waiting_sessions:
            session.set_token_buckets(token_buckets)
            return
        self.rate_queue.remove(session)
        session.set_token_buckets(token_buckets)
        self._block_session(session, self.rate_queue)

    def _queue_for_class(self, session: Session) -> None:
        """Move a session whose rate allows publishing again to the queue of its class."""
        self._unblock_session(session)
        cls = self._classes[session.parked_messages[0][0]]
        self._block_session(session, cls)
        if cls.blocked_sessions[0] is session:
            self.retry(cls)

    def orphan(self, session: Session) -> None:
        """Keep the parked messages of a session that ended, if there is memory for them."""
        if session.parked_messages and not self._budget.acquire(session.parked_bytes):
            self.discard(session)

    def discard(self, session: Session) -> None:
        """Drop the parked messages of a session."""
        if session.parked_messages:
            self._unblock_session(session)
            self._drop_parked(session)

    def orphaned_bytes(self) -> int:
        """Return the memory of parked messages whose sessions ended."""
        return sum(s.parked_bytes for s in self.blocked_sessions() if s.is_closed)

    def blocked_sessions(self) -> list[Session]:
        """Return all sessions with parked messages."""
        return [
            *self.rate_queue.waiting_sessions,
            *(
                blocked_session
                for cls in self.blocked_classes
                for blocked_session in cls.blocked_sessions
            ),
        ]

    def is_short_of_memory(self) -> bool:
        """Return True if a session is blocked by memory that another class may have to release."""
        return any(
            len(cls.ring) < cls.ring.messages_max
            for cls in self.blocked_classes
            if self.needs_space(cls)
        )

    def needs_space(self, cls: MessageClass) -> bool:
        """Return True if publishers wait for space in a class, and not only for a later turn."""
        return bool(cls.blocked_sessions) and cls not in self.classes_to_retry

    def _block_session(self, session: Session, target: MessageClass | RateQueue) -> None:
        if isinstance(target, RateQueue):
            target.add(session)
            self._delayed_wakeups.schedule_wakeup(self.next_wakeup, self)
            return
        target.blocked_sessions.append(session)
        self.blocked_classes[target] = None

    def _unblock_session(self, session: Session, cls: MessageClass | None = None) -> None:
        """Remove a session from the queue of `cls`, or if `cls` is None, of the class of its first
        parked message.
        """
        if session in self.rate_queue.waiting_sessions:
            self.rate_queue.remove(session)
            return
        cls = cls or self._classes[session.parked_messages[0][0]]
        cls.blocked_sessions.remove(session)
        if not cls.blocked_sessions:
            del self.blocked_classes[cls]

    def _store_parked(self, session: Session, cls: MessageClass) -> MessageClass | RateQueue | None:
        """Store parked messages of a session, in order, as far as they are for `cls` and fit.

        Returns:
            The class or rate queue that blocks the session next. None if all messages were stored.
        """
        while session.parked_messages:
            class_id, batch = session.parked_messages[0]
            if class_id != cls.class_id:
                return self._classes[class_id]
            if self._remaining_batch_count <= 0:
                return cls
            self._remaining_batch_count -= 1
            allowed = self.rate_queue.count_allowed(session, batch)
            if not allowed:
                return self.rate_queue
            handled = self._store.append_or_drop(cls, batch.slice(0, allowed), session)
            if batch.data[0] == frames.ENVELOPE:
                self._remaining_batch_count -= handled // ENVELOPES_PER_PARKED_BATCH
            stored_bytes = int(batch.bounds[handled])
            consume(session.token_buckets, handled, stored_bytes)
            if handled:
                self.progressed_sessions[session] = None
                session.remove_parked(handled)
            if session.is_closed:
                self._budget.release(stored_bytes)
            if handled < batch.count:
                return cls if handled < allowed else self.rate_queue
        return None

    def _discard_orphan(self, cls: MessageClass) -> bool:
        """Drop parked messages of a session that ended, if such messages use up all memory.

        Otherwise no ring could grow for the sessions in front of them, or for themselves.
        Memory for channels and patterns does not count. Returns True if messages were dropped.
        """
        if len(cls.ring):
            return False
        channels = sum(
            other_class.channels.memory_bytes
            for other_class in self._classes.values()
            if other_class.ring.budget is self._budget
        )
        if (
            self._budget.used_bytes - self._dead_letter_budget.used_bytes
            > self.orphaned_bytes() + channels
        ):
            return False
        session = next((s for s in reversed(cls.blocked_sessions) if s.is_closed), None)
        if session is None:
            return False
        self._unblock_session(session, cls)
        self._budget.release(session.parked_bytes)
        self._drop_parked(session)
        return True

    def _drop_parked(self, session: Session) -> None:
        for class_id, batch in session.parked_messages:
            self._classes[class_id].dropped_counts[Reason.UNDELIVERED_AT_CLOSE] += batch.count
        session.discard_parked()
