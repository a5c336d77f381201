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

from simplebus.core.errors import Reason
from simplebus.core.limits import PARKED_PIECE_BYTES
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.redelivery.delivery_policy import Clock
from simplebus.core.ring.memory_budget import MemoryBudget
from simplebus.core.session.session import Session
from simplebus.core.store.rate_queue import Pacing
from simplebus.core.users.rate_limit import charge


class Room:
    """Of one broker."""

    def __init__(
        self,
        classes: Mapping[int, MessageClass],
        budget: MemoryBudget,
        append: Callable[[MessageClass, FrameBatch, Session], int],
        set_aside: MemoryBudget,
        clock: Clock,
    ) -> None:
        self._classes = classes
        self._budget = budget
        self._append = append
        """Stores what fits, wakes who wants it, and returns how many messages it dealt with."""
        self._set_aside = set_aside
        """Memory of classes that hold what nobody may ever take."""
        self.let_in: dict[Session, None] = {}
        """Sessions of whose messages some found room; whoever looks at them clears it."""
        self.awaited: dict[MessageClass, None] = {}
        """The classes in which somebody waits for room."""
        self.pacing = Pacing(clock, self._let_go_on)

    def park(
        self, session: Session, cls: MessageClass, batch: FrameBatch, *, has_room: bool = False
    ) -> None:
        """Keep messages aside until their class has room; or, if it has, until their publisher may
        go on."""
        if not session.parked:
            self._wait(session, self.pacing if has_room else cls)
        session.parked_bytes += batch.data.size
        if session.parked and session.parked[-1][0] == cls.class_id:
            last = session.parked[-1][1]
            alike = last.data[0] == batch.data[0]
            if alike and last.data.size < PARKED_PIECE_BYTES:
                session.parked[-1] = (cls.class_id, last.join(batch))
                return
        assert session.dialect is not None
        session.dialect.parks(batch)
        session.parked.append((cls.class_id, batch.copy()))

    def made(self, cls: MessageClass) -> None:
        """There may be room in a class: let in who waits for it."""
        with_room = [cls]
        while with_room:
            cls = with_room.pop()
            while cls.blocked:
                session = cls.blocked[0]
                goes_on_in = self._unpark(session, cls)
                if goes_on_in is cls:
                    if self._give_way(cls):
                        continue
                    break
                self._wait_no_more(session, cls)
                if goes_on_in is not None:
                    self._wait(session, goes_on_in)
                if isinstance(goes_on_in, MessageClass):
                    with_room.append(goes_on_in)

    def _let_go_on(self, session: Session) -> None:
        """A session may publish again: it is in line for its class."""
        self._wait_no_more(session)
        cls = self._classes[session.parked[0][0]]
        self._wait(session, cls)
        if cls.blocked[0] is session:
            self.made(cls)

    def left_behind(self, session: Session) -> None:
        """A peer is gone: keep what it parked, if there is memory."""
        if session.parked and not self._budget.take(session.parked_bytes):
            self.forget(session)

    def forget(self, session: Session) -> None:
        """Drop what a session has parked."""
        if session.parked:
            self._wait_no_more(session)
            self._drop(session)

    def kept_bytes(self) -> int:
        """Memory of what peers that are gone have parked."""
        return sum(s.parked_bytes for s in self.blocked_sessions() if s.closed)

    def blocked_sessions(self) -> list[Session]:
        return [*self.pacing.waiting, *(each for cls in self.awaited for each in cls.blocked)]

    def is_short_of_memory(self) -> bool:
        """Whether somebody waits for room that another class may have to make."""
        return any(len(cls.ring) < cls.ring.messages_max for cls in self.awaited)

    def _wait(self, session: Session, what_for: MessageClass | Pacing) -> None:
        if isinstance(what_for, Pacing):
            what_for.wait(session)
            return
        what_for.blocked.append(session)
        self.awaited[what_for] = None

    def _wait_no_more(self, session: Session, cls: MessageClass | None = None) -> None:
        """`cls` is the one for which it has waited, if that is not the one of its first message."""
        if session in self.pacing.waiting:
            self.pacing.wait_no_more(session)
            return
        cls = cls or self._classes[session.parked[0][0]]
        cls.blocked.remove(session)
        if not cls.blocked:
            del self.awaited[cls]

    def _unpark(self, session: Session, cls: MessageClass) -> MessageClass | Pacing | None:
        """Store what a session has parked, in order, as far as it is for `cls` and fits.

        Returns what it needs next: room in a class, or time; None when nothing is left.
        """
        while session.parked:
            class_id, batch = session.parked[0]
            if class_id != cls.class_id:
                return self._classes[class_id]
            fits = self.pacing.fits(session, batch)
            if not fits:
                return self.pacing
            taken = self._append(cls, batch.slice(0, fits), session)
            stored = int(batch.bounds[taken])
            session.parked_bytes -= stored
            charge(session.meters, taken, stored)
            if taken:
                self.let_in[session] = None
                assert session.dialect is not None
                session.dialect.unparks(batch, taken)
            if session.closed:
                self._budget.give(stored)
            if taken < batch.count:
                if taken:
                    session.parked[0] = (class_id, batch.slice(taken, batch.count))
                return cls if taken < fits else self.pacing
            session.parked.popleft()
        return None

    def _give_way(self, cls: MessageClass) -> bool:
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
        if self._budget.used - self._set_aside.used > self.kept_bytes() + channels:
            return False
        session = next((s for s in reversed(cls.blocked) if s.closed), None)
        if session is None:
            return False
        self._wait_no_more(session, cls)
        self._budget.give(session.parked_bytes)
        self._drop(session)
        return True

    def _drop(self, session: Session) -> None:
        for class_id, batch in session.parked:
            self._classes[class_id].dropped[Reason.UNDELIVERED_AT_CLOSE] += batch.count
        session.parked.clear()
        session.parked_bytes = 0
