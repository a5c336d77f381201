"""The bus itself: classes, who publishes into them, who is sent what.

Rule 1: everything happens in `receive`, `close`, `tick` and in taking bytes from an outbox. No
socket, no clock, no thread; a driver brings bytes and beats, and sends what outboxes show.
Rule 2: a message that cannot be kept is counted by reason, never just forgotten.
Rule 3: a class's floor is the lowest one of its subscriptions; with none, what waits stays.

    bytes ─► Session ─► events ─► Broker ─► Ring ─► Subscription ─► Outbox ─► bytes
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from simplebus.core import frames
from simplebus.core.acks import AckWindow, nearest_sequence
from simplebus.core.delivery import Subscription
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.events import (
    Acked,
    AckedOne,
    Connected,
    Event,
    Published,
    PublishedOne,
    Subscribed,
)
from simplebus.core.frames import FrameBatch
from simplebus.core.limits import (
    ACK_REST_MESSAGES_MAX,
    MESSAGE_ID_MASK,
    PARKED_PIECE_BYTES,
    PLAIN_FRAMES_MAX,
    PUBLISHER_TICKS,
    Limits,
)
from simplebus.core.receive import ReceiveBuffer
from simplebus.core.ring import MemoryBudget, Ring
from simplebus.core.session import Session
from simplebus.core.statistics import BrokerStatistics, ClassStatistics

# Its Connect reply would hold the delimiter, and could not be told from an empty one.
_SESSION_ID_UNSENDABLE = int.from_bytes(frames.DELIMITER, "little")


class FullPolicy(enum.StrEnum):
    """What happens to a message for a class that is at its limit."""

    BLOCK = "block"
    """Its publisher waits."""
    DROP_OLDEST = "drop_oldest"
    """The oldest message makes room."""
    DROP_NEWEST = "drop_newest"
    """It is dropped itself."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a broker behaves.

    Raises ValueError for an ack timeout that the wire cannot carry.
    """

    limits: Limits = field(default_factory=Limits)
    ack_timeout: int = 6
    """Ticks after which an unacknowledged message is sent again, the first time."""
    tick_seconds: float = 1.0
    full_policy: FullPolicy = FullPolicy.BLOCK

    def __post_init__(self) -> None:
        if not 1 <= self.ack_timeout <= 0xFFFF:
            raise ValueError(f"ack_timeout must be from 1 to 65535 ticks, got {self.ack_timeout}")
        if not self.tick_seconds > 0:
            raise ValueError(f"tick_seconds must be above 0, got {self.tick_seconds}")


class MessageClass:
    """One class: its ring, and everybody who has to do with it."""

    def __init__(self, ring: Ring) -> None:
        self.class_id = ring.class_id
        self.ring = ring
        self.subscriptions: list[Subscription] = []
        self.waiting = AckWindow(floor=0)
        """The position of nobody: what the next first subscription takes over. Only meaningful
        while there is no subscription."""
        self.blocked: deque[Session] = deque()
        """Whose parked messages wait for room here, longest wait first."""
        self.dropped: Counter[Reason] = Counter()
        self.delivered = self.redelivered = self.acknowledged = 0
        """Of subscriptions that are gone."""

    def floor(self) -> int:
        """The lowest sequence that somebody may still need."""
        if self.subscriptions:
            return min([s.window.floor for s in self.subscriptions])
        return self.waiting.floor

    def statistics(self) -> ClassStatistics:
        subscriptions = tuple(s.statistics() for s in self.subscriptions)
        return ClassStatistics(
            class_id=self.class_id,
            ring=self.ring.statistics(),
            published=self.ring.head,
            delivered=self.delivered + sum(s.delivered for s in subscriptions),
            redelivered=self.redelivered + sum(s.redelivered for s in subscriptions),
            acknowledged=self.acknowledged + sum(s.acknowledged for s in subscriptions),
            in_flight=sum(s.in_flight for s in subscriptions),
            dropped=dict(self.dropped),
            blocked_sessions=len(self.blocked),
            parked=sum(
                batch.count
                for session in self.blocked
                for class_id, batch in session.parked
                if class_id == self.class_id
            ),
            subscriptions=subscriptions,
        )


class Broker:
    """The engine. See the module's law for how it is driven."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.tick_number = 0
        self.classes: dict[int, MessageClass] = {}
        self.sessions: dict[int, Session] = {}
        self.refused: Counter[Reason] = Counter()
        self.budget = MemoryBudget(self.settings.limits.total_bytes)
        self._next_session_id = 0
        self._early_subscribers: dict[int, dict[Session, None]] = {}
        """Who subscribed to classes that nobody has named yet."""
        self._ready: dict[int, None] = {}
        self._unblocked: dict[Session, None] = {}

    # Sessions ------------------------------------------------------------------------------------

    def open(self, peer: str = "") -> Session:
        """A peer has connected."""
        session_id = self._next_session_id
        while session_id in self.sessions or session_id == _SESSION_ID_UNSENDABLE:
            session_id = (session_id + 1) & MESSAGE_ID_MASK
        self._next_session_id = (session_id + 1) & MESSAGE_ID_MASK
        session = Session(
            session_id,
            frame_bytes_max=self.settings.limits.frame_bytes,
            known_classes=self.classes.keys(),
            peer=peer or f"session {session_id}",
        )
        self.sessions[session.session_id] = session
        return session

    def receive(self, session: Session, buffer: ReceiveBuffer, count: int) -> None:
        """`count` fresh bytes of this session are in the buffer.

        Raises RemoteProtocolError after everything before the offence was applied; close the
        session then.
        """
        assert not session.closed
        single = session.receive_one(buffer, count)
        if single is not None:
            self._apply(session, single)
            if not session.parked:
                return
        else:
            for event in session.receive(buffer, count):
                self._apply(session, event)
        if session.pending_bytes > self.settings.limits.pending_bytes:
            raise RemoteProtocolError(
                Reason.PENDING_LIMIT,
                f"{session.pending_bytes} bytes wait for this connection, "
                f"{self.settings.limits.pending_bytes} are allowed",
            )

    def close(self, session: Session) -> None:
        """The peer is gone. What it published stays; what it did not acknowledge goes on waiting
        for the class's other or next subscriptions."""
        if session.closed:
            return
        del self.sessions[session.session_id]
        for class_id in session.early:
            waiting = self._early_subscribers.get(class_id, {})
            waiting.pop(session, None)
            if not waiting:
                self._early_subscribers.pop(class_id, None)
        for subscription in session.subscriptions.values():
            self._unsubscribe(subscription)  # What is parked may find the room that this makes.
        session.subscriptions.clear()
        session.closed = True
        self._keep_parked(session)
        self._ready.pop(session.session_id, None)

    def take_ready(self) -> list[int]:
        """Ids of sessions whose outbox has something new. Each is named once until taken."""
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def take_unblocked(self) -> list[Session]:
        """Sessions none of whose messages wait for room any longer."""
        unblocked = [s for s in self._unblocked if not (s.parked or s.closed)]
        self._unblocked.clear()
        return unblocked

    # Events --------------------------------------------------------------------------------------

    def _apply(self, session: Session, event: Event) -> None:
        match event:
            case PublishedOne():
                self._publish_one(session, event.class_id, event.frame)
            case AckedOne():
                self._ack_one(session, event.class_id, event.first, event.last)
            case Published():
                self._publish(session, event.class_id, event.frames)
            case Acked():
                self._ack(session, event)
            case Connected():
                self._open_classes(event.class_ids)
                session.outbox.reply(
                    frames.encode(frames.CONNECT, content=session.session_id.to_bytes(4, "little"))
                )
                self._ready[session.session_id] = None
            case Subscribed():
                self._subscribe(session, event.class_id)

    def _open_classes(self, class_ids: tuple[int, ...]) -> None:
        new = [class_id for class_id in class_ids if class_id not in self.classes]
        most = self.settings.limits.classes
        if len(self.classes) + len(new) > most:
            raise RemoteProtocolError(
                Reason.TOO_MANY_CLASSES,
                f"a Connect named {len(new)} new classes; {len(self.classes)} exist, "
                f"{most} may exist",
            )
        for class_id in new:
            self._open_class(class_id)

    def _open_class(self, class_id: int) -> None:
        limits = self.settings.limits
        ring = Ring(
            class_id=class_id,
            messages_max=limits.class_messages,
            bytes_max=limits.class_bytes,
            budget=self.budget,
        )
        self.classes[class_id] = MessageClass(ring)
        for session in self._early_subscribers.pop(class_id, {}):
            session.early.discard(class_id)
            self._subscribe(session, class_id)

    def _subscribe(self, session: Session, class_id: int) -> None:
        if class_id in session.subscriptions:
            return
        cls = self.classes.get(class_id)
        if cls is None:
            session.early.add(class_id)
            if len(session.early) > self.settings.limits.classes:
                raise RemoteProtocolError(
                    Reason.TOO_MANY_CLASSES,
                    f"the peer subscribed to {len(session.early)} classes that nobody has named; "
                    f"{self.settings.limits.classes} classes may exist",
                )
            self._early_subscribers.setdefault(class_id, {})[session] = None
            return
        window = AckWindow(floor=cls.ring.head) if cls.subscriptions else cls.waiting
        subscription = Subscription(
            class_id=class_id,
            ring=cls.ring,
            window=window,
            outbox=session.outbox,
            ack_timeout=self.settings.ack_timeout,
        )
        cls.subscriptions.append(subscription)
        session.subscriptions[class_id] = subscription
        session.outbox.wake(subscription)
        self._ready[session.session_id] = None

    def _unsubscribe(self, subscription: Subscription) -> None:
        cls = self.classes[subscription.class_id]
        cls.subscriptions.remove(subscription)
        subscription.outbox.forget(subscription)
        cls.delivered += subscription.delivered
        cls.redelivered += subscription.redelivered
        cls.acknowledged += subscription.acknowledged
        if not cls.subscriptions:
            cls.waiting = subscription.window
        self._release(cls)

    def _publish(self, session: Session, class_id: int, batch: FrameBatch) -> None:
        session.published_tick = self.tick_number
        cls = self.classes[class_id]
        if session.parked or cls.blocked:
            self._park(session, cls, batch)
            return
        taken = self._append(cls, batch)
        if taken < batch.count:
            rest = batch.slice(taken, batch.count)
            match self.settings.full_policy:
                case FullPolicy.BLOCK:
                    self._park(session, cls, rest)
                case FullPolicy.DROP_NEWEST:
                    cls.dropped[Reason.DROP_NEWEST] += rest.count
                case FullPolicy.DROP_OLDEST:
                    self._append_dropping_oldest(cls, rest)

    def _publish_one(self, session: Session, class_id: int, frame: memoryview) -> None:
        session.published_tick = self.tick_number
        cls = self.classes[class_id]
        timer_index = self.tick_number % self.settings.ack_timeout
        if session.parked or cls.blocked or not cls.ring.append_one(frame, timer_index):
            self._publish(session, class_id, FrameBatch.of_one(frame))
        else:
            self._wake(cls)

    def _append(self, cls: MessageClass, batch: FrameBatch) -> int:
        taken = cls.ring.append(batch, self.tick_number % self.settings.ack_timeout)
        if taken:
            self._wake(cls)
        return taken

    def _wake(self, cls: MessageClass) -> None:
        """There is something new for everyone subscribed to the class."""
        for subscription in cls.subscriptions:
            subscription.outbox.wake(subscription)
            self._ready[subscription.outbox.session_id] = None

    def _append_dropping_oldest(self, cls: MessageClass, batch: FrameBatch) -> None:
        ring = cls.ring
        while True:
            if not len(ring):  # Not even an empty ring takes it: other classes hold the memory.
                cls.dropped[Reason.DROP_NEWEST] += batch.count
                return
            too_many = len(ring) + batch.count - ring.messages_max
            if too_many > 0:
                floor = min(ring.floor + too_many, ring.head)
            else:
                floor = ring.after(batch.data.size)
            cls.dropped[Reason.DROP_OLDEST] += floor - ring.floor
            for subscription in cls.subscriptions:
                subscription.skip_to(floor)
            if not cls.subscriptions:
                cls.waiting.skip_to(floor)
            ring.release(cls.floor())
            taken = self._append(cls, batch)
            if taken == batch.count:
                return
            batch = batch.slice(taken, batch.count)

    def _ack(self, session: Session, event: Acked) -> None:
        """What `_ack_one` does, for many ranges at once."""
        if event.firsts.size <= PLAIN_FRAMES_MAX:
            for first, last in zip(event.firsts.tolist(), event.lasts.tolist(), strict=True):
                self._ack_one(session, event.class_id, first, last)
            return
        subscription = session.subscriptions.get(event.class_id)
        if subscription is None:
            self.refused[Reason.ACK_UNSUBSCRIBED] += event.firsts.size
            return
        session.acknowledged += int((event.lasts - event.firsts).sum())
        window = subscription.window
        firsts, lasts = window.sequences(event.firsts, event.lasts)
        unsent = int(np.count_nonzero(lasts > window.cursor))
        if unsent:
            self.refused[Reason.ACK_UNSENT] += unsent
            lasts = lasts.clip(max=window.cursor)
            firsts = firsts.clip(max=window.cursor)
        if window.ack(firsts, lasts):
            self._release(self.classes[event.class_id])

    def _ack_one(self, session: Session, class_id: int, first_id: int, last_id: int) -> None:
        session.acknowledged += last_id - first_id
        subscription = session.subscriptions.get(class_id)
        if subscription is None:
            self.refused[Reason.ACK_UNSUBSCRIBED] += 1
            return
        window = subscription.window
        before = window.floor
        first = nearest_sequence(first_id, before)
        last = first + last_id - first_id
        if last > window.cursor:
            self.refused[Reason.ACK_UNSENT] += 1
            last = window.cursor
        if first < last:
            window.ack_range(first, last)
            if window.floor != before:
                self._release(self.classes[class_id])

    # Room ----------------------------------------------------------------------------------------

    def _release(self, cls: MessageClass) -> None:
        """Let go of what nobody needs any longer, and let the blocked ones in."""
        cls.ring.release(cls.floor())
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
                cls.blocked.popleft()
                if goes_on_in is not None:
                    goes_on_in.blocked.append(session)
                    with_room.append(goes_on_in)

    def _park(self, session: Session, cls: MessageClass, batch: FrameBatch) -> None:
        """Keep messages aside until their class has room."""
        if not session.parked:
            cls.blocked.append(session)
        session.parked_bytes += batch.data.size
        if session.parked and session.parked[-1][0] == cls.class_id:
            last = session.parked[-1][1]
            if last.data.size < PARKED_PIECE_BYTES:
                session.parked[-1] = (cls.class_id, last.join(batch))
                return
        session.parked.append((cls.class_id, batch.copy()))

    def _unpark(self, session: Session, cls: MessageClass) -> MessageClass | None:
        """Store what a session has parked, in order, as far as it is for `cls` and fits.

        Returns the class whose room it needs next, or None when nothing is left.
        """
        while session.parked:
            class_id, batch = session.parked[0]
            if class_id != cls.class_id:
                return self.classes[class_id]
            taken = self._append(cls, batch)
            stored = int(batch.bounds[taken])
            session.parked_bytes -= stored
            if session.closed:
                self.budget.give(stored)
            if taken < batch.count:
                if taken:
                    session.parked[0] = (class_id, batch.slice(taken, batch.count))
                return cls
            session.parked.popleft()
        if not session.closed:
            self._unblocked[session] = None
        return None

    def _keep_parked(self, session: Session) -> None:
        """A peer left messages behind that wait for room: keep them, if there is memory."""
        if session.parked and not self.budget.take(session.parked_bytes):
            self.classes[session.parked[0][0]].blocked.remove(session)
            self._drop_parked(session)

    def _give_way(self, cls: MessageClass) -> bool:
        """Drop what a peer left behind here, when such messages take all the memory in use: no ring
        could make room for those that wait in front of them, or for themselves."""
        if len(cls.ring) or self.budget.used > self._kept_bytes():
            return False
        session = next((s for s in reversed(cls.blocked) if s.closed), None)
        if session is None:
            return False
        cls.blocked.remove(session)
        self.budget.give(session.parked_bytes)
        self._drop_parked(session)
        return True

    def _drop_parked(self, session: Session) -> None:
        for class_id, batch in session.parked:
            self.classes[class_id].dropped[Reason.UNDELIVERED_AT_CLOSE] += batch.count
        session.parked.clear()
        session.parked_bytes = 0

    # Time ----------------------------------------------------------------------------------------

    def tick(self) -> list[tuple[Session, RemoteProtocolError]]:
        """One beat of the ack timer. Returns the sessions to be cut off, each with the reason."""
        self.tick_number += 1
        for cls in self.classes.values():
            cls.ring.tick()
            for subscription in cls.subscriptions:
                subscription.tick(self.tick_number)
                if subscription.queued:
                    self._ready[subscription.outbox.session_id] = None
            if cls.blocked:
                self._release(cls)  # Other classes may have given memory back.
        limits, seconds = self.settings.limits, self.settings.tick_seconds
        overdue = []
        for session in self.sessions.values():
            error = session.tick(limits, seconds, holds_back=self.holds_back(session))
            if error is not None:
                overdue.append((session, error))
        return overdue

    def may_rest(self, session: Session) -> bool:
        """Whether reading this session's acks a little later delays nobody. Asked after each read.

        So it is for a peer that acknowledges few messages at a time, has not published lately, and
        holds back no full class.
        """
        acknowledged, session.acknowledged = session.acknowledged, 0
        return (
            0 < acknowledged <= ACK_REST_MESSAGES_MAX
            and self.tick_number - session.published_tick >= PUBLISHER_TICKS
            and not self.holds_back(session)
        )

    def holds_back(self, session: Session) -> bool:
        """Whether somebody waits for this session's acknowledgements."""
        short_of_memory = any(
            cls.blocked and len(cls.ring) < cls.ring.messages_max for cls in self.classes.values()
        )
        return any(
            window.floor == cls.ring.floor < cls.ring.head and (cls.blocked or short_of_memory)
            for class_id, subscription in session.subscriptions.items()
            if (cls := self.classes[class_id]) and (window := subscription.window)
        )

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        memory = 0
        for cls in self.classes.values():
            cls.ring.check()
            memory += cls.ring.statistics().memory_bytes
            assert cls.ring.floor == cls.floor()
            for subscription in cls.subscriptions:
                subscription.check()
            for session in cls.blocked:
                assert session.parked
                assert session.parked[0][0] == cls.class_id
        assert memory + self._kept_bytes() == self.budget.used <= self.budget.limit

    def _kept_bytes(self) -> int:
        """Memory of what peers that are gone have parked."""
        return sum(s.parked_bytes for s in self._blocked_sessions() if s.closed)

    def _blocked_sessions(self) -> list[Session]:
        return [session for cls in self.classes.values() for session in cls.blocked]

    def statistics(self) -> BrokerStatistics:
        return BrokerStatistics(
            sessions=len(self.sessions),
            memory_bytes=self.budget.used,
            parked_bytes=sum(s.parked_bytes for s in self._blocked_sessions()),
            refused=dict(self.refused),
            classes=tuple(cls.statistics() for cls in self.classes.values()),
        )
