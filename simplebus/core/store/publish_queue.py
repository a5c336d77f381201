"""Messages that wait for room in a full class, or came too fast, and who gets in first.

Rule 1: what one session published is stored in its order: behind one message that waits, all wait.
Rule 2: of sessions that wait for the same class, the one that waits longest is let in first.
Rule 3: who publishes faster than it may waits for that, and holds up nobody: it comes behind those
who wait for the class then.
Rule 4: what a peer left behind when it went is kept as long as there is memory. Not in version 2:
nobody told its publisher that it was stored, and it comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from simplebus.core.clock import BrokerClock
from simplebus.core.errors import Reason
from simplebus.core.limits import PARKED_BATCH_BYTES
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.session.session import Session
from simplebus.core.store.rate_queue import RateQueue
from simplebus.core.users.rate_limit import consume


class PublishQueue:
    """Of one broker."""

    def __init__(
        self,
        classes: Mapping[int, MessageClass],
        budget: MemoryBudget,
        append_batch: Callable[[MessageClass, FrameBatch, Session], int],
        dead_letter_budget: MemoryBudget,
        clock: BrokerClock,
    ) -> None:
        self._classes = classes
        self._budget = budget
        self._append_batch = append_batch
        """Stores what fits, wakes who wants it, and returns how many messages it dealt with."""
        self._dead_letter_budget = dead_letter_budget
        """Memory of classes that hold what nobody may ever take."""
        self.progressed_sessions: dict[Session, None] = {}
        """Sessions of whose messages some found room; whoever looks at them clears it."""
        self.blocked_classes: dict[MessageClass, None] = {}
        """The classes in which somebody waits for room."""
        self.rate_queue = RateQueue(clock, self._queue_for_class)

    def enqueue(
        self,
        session: Session,
        cls: MessageClass,
        batch: FrameBatch,
        *,
        is_rate_limited: bool = False,
    ) -> None:
        """Keep messages aside until their class has room; or, if it has, until their publisher may
        go on."""
        if not session.parked_messages:
            self._start_waiting(session, self.rate_queue if is_rate_limited else cls)
        session.parked_bytes += batch.data.size
        if session.parked_messages and session.parked_messages[-1][0] == cls.class_id:
            last = session.parked_messages[-1][1]
            alike = last.data[0] == batch.data[0]
            if alike and last.data.size < PARKED_BATCH_BYTES:
                session.parked_messages[-1] = (cls.class_id, last.concatenate(batch))
                return
        assert session.decoder is not None
        session.decoder.mark_parked(batch)
        session.parked_messages.append((cls.class_id, batch.copy()))

    def retry(self, cls: MessageClass) -> None:
        """There may be room in a class: let in who waits for it."""
        with_room = [cls]
        while with_room:
            cls = with_room.pop()
            while cls.blocked_sessions:
                session = cls.blocked_sessions[0]
                goes_on_in = self._store_parked(session, cls)
                if goes_on_in is cls:
                    if self._discard_orphan(cls):
                        continue
                    break
                self._stop_waiting(session, cls)
                if goes_on_in is not None:
                    self._start_waiting(session, goes_on_in)
                if isinstance(goes_on_in, MessageClass):
                    with_room.append(goes_on_in)

    def _queue_for_class(self, session: Session) -> None:
        """A session may publish again: it is in line for its class."""
        self._stop_waiting(session)
        cls = self._classes[session.parked_messages[0][0]]
        self._start_waiting(session, cls)
        if cls.blocked_sessions[0] is session:
            self.retry(cls)

    def orphan(self, session: Session) -> None:
        """A peer is gone: keep what it parked, if there is memory."""
        if session.parked_messages and not self._budget.acquire(session.parked_bytes):
            self.discard(session)

    def discard(self, session: Session) -> None:
        """Drop what a session has parked."""
        if session.parked_messages:
            self._stop_waiting(session)
            self._drop_parked(session)

    def orphaned_bytes(self) -> int:
        """Memory of what peers that are gone have parked."""
        return sum(s.parked_bytes for s in self.blocked_sessions() if s.is_closed)

    def blocked_sessions(self) -> list[Session]:
        return [
            *self.rate_queue.waiting_sessions,
            *(each for cls in self.blocked_classes for each in cls.blocked_sessions),
        ]

    def is_short_of_memory(self) -> bool:
        """Whether somebody waits for room that another class may have to make."""
        return any(len(cls.ring) < cls.ring.messages_max for cls in self.blocked_classes)

    def _start_waiting(self, session: Session, target: MessageClass | RateQueue) -> None:
        if isinstance(target, RateQueue):
            target.add(session)
            return
        target.blocked_sessions.append(session)
        self.blocked_classes[target] = None

    def _stop_waiting(self, session: Session, cls: MessageClass | None = None) -> None:
        """`cls` is the one for which it has waited, if that is not the one of its first message."""
        if session in self.rate_queue.waiting_sessions:
            self.rate_queue.remove(session)
            return
        cls = cls or self._classes[session.parked_messages[0][0]]
        cls.blocked_sessions.remove(session)
        if not cls.blocked_sessions:
            del self.blocked_classes[cls]

    def _store_parked(self, session: Session, cls: MessageClass) -> MessageClass | RateQueue | None:
        """Store what a session has parked, in order, as far as it is for `cls` and fits.

        Returns what it needs next: room in a class, or time; None when nothing is left.
        """
        while session.parked_messages:
            class_id, batch = session.parked_messages[0]
            if class_id != cls.class_id:
                return self._classes[class_id]
            fits = self.rate_queue.count_allowed(session, batch)
            if not fits:
                return self.rate_queue
            taken = self._append_batch(cls, batch.slice(0, fits), session)
            stored = int(batch.bounds[taken])
            session.parked_bytes -= stored
            consume(session.token_buckets, taken, stored)
            if taken:
                self.progressed_sessions[session] = None
                assert session.decoder is not None
                session.decoder.mark_unparked(batch, taken)
            if session.is_closed:
                self._budget.release(stored)
            if taken < batch.count:
                if taken:
                    session.parked_messages[0] = (class_id, batch.slice(taken, batch.count))
                return cls if taken < fits else self.rate_queue
            session.parked_messages.popleft()
        return None

    def _discard_orphan(self, cls: MessageClass) -> bool:
        """Drop what a peer left behind here, when such messages take all the memory in use that is
        not for channels and patterns: no ring could make room for those that wait in front of them,
        or for themselves."""
        if len(cls.ring):
            return False
        channels = sum(
            each.channels.memory_bytes
            for each in self._classes.values()
            if each.ring.budget is self._budget
        )
        if (
            self._budget.used_bytes - self._dead_letter_budget.used_bytes
            > self.orphaned_bytes() + channels
        ):
            return False
        session = next((s for s in reversed(cls.blocked_sessions) if s.is_closed), None)
        if session is None:
            return False
        self._stop_waiting(session, cls)
        self._budget.release(session.parked_bytes)
        self._drop_parked(session)
        return True

    def _drop_parked(self, session: Session) -> None:
        for class_id, batch in session.parked_messages:
            self._classes[class_id].dropped_counts[Reason.UNDELIVERED_AT_CLOSE] += batch.count
        session.parked_messages.clear()
        session.parked_bytes = 0
