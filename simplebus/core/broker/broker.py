"""The bus itself: who publishes, who is sent what.

Rule 1: everything happens in `receive`, `close`, `tick`, `wake_due` and in taking bytes from an
outbox. No socket, no clock, no thread; a driver brings bytes, beats and clock readings, and sends
what outboxes show.
Rule 2: this file says who does what; how a class keeps messages, and who is granted what, stands in
`store` and `answers`.

    bytes ─► Session ─► events ─► Broker ─► Store ─► Ring ─► Subscription ─► Outbox ─► bytes
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from simplebus.core import commit_log
from simplebus.core.authorization.durable_owners import Owners
from simplebus.core.authorization.session_permissions import Right, check_right, explained
from simplebus.core.broker.acknowledge import Verdicts
from simplebus.core.broker.fetch import Lookups
from simplebus.core.broker.inquire import Explaining
from simplebus.core.broker.subscription_manager import Answers
from simplebus.core.commit_log import Ledger
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.group.group import Group
from simplebus.core.limits import (
    ACK_REST_MESSAGES_MAX,
    GREETING_BYTES_MAX,
    MESSAGE_ID_MASK,
    PUBLISHER_TICKS,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import (
    Acked,
    AckedOne,
    Connected,
    Event,
    FetchAsked,
    Greeted,
    InquiryAsked,
    Nacked,
    Published,
    PublishedOne,
    PurgeAsked,
    Refused,
    StillWorking,
    Subscribed,
    SubscriptionAsked,
    Terminated,
    UnsubscriptionAsked,
)
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.protocol.requests import ErrorReply
from simplebus.core.redelivery.delivery_policy import Clock
from simplebus.core.session.admission import Visits, admit
from simplebus.core.session.outbox import Outbox
from simplebus.core.session.pending_limits import Begun, check_pending, too_heavy
from simplebus.core.session.rate_limits import Metering
from simplebus.core.session.session import Session
from simplebus.core.session.version2 import Version2
from simplebus.core.settings import FullPolicy, Settings
from simplebus.core.statistics import BrokerStatistics
from simplebus.core.store.publisher_confirms import Confirming
from simplebus.core.store.store import Store
from simplebus.core.subscription.delayed_wakeups import Alarms, Waiter
from simplebus.core.subscription.subscription import Subscription
from simplebus.core.users.permissions import Grants
from simplebus.core.users.users import Users

__all__ = ["Broker", "FullPolicy", "MessageClass", "Settings"]

# Its Connect reply would hold the delimiter, and could not be told from an empty one.
_SESSION_ID_UNSENDABLE = int.from_bytes(frames.DELIMITER, "little")

Asked = SubscriptionAsked | UnsubscriptionAsked | FetchAsked | PurgeAsked | InquiryAsked
"""What is answered: by one frame of the type that asked, or by an Error about that type."""

_ABOUT: dict[type[Asked], int] = {
    SubscriptionAsked: frames.SUBSCRIBE,
    UnsubscriptionAsked: frames.UNSUBSCRIBE,
    FetchAsked: frames.FETCH,
    PurgeAsked: frames.PURGE,
    InquiryAsked: frames.INQUIRE,
}


_HEAVY = (SubscriptionAsked, Greeted, Connected)
"""Events of which one may take long."""


class Broker:
    """The engine. See the module's law for how it is driven."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        identity: str = "",
        run: str = "",
        ledger: Ledger | None = None,
    ) -> None:
        """`identity` tells this bus's memory from that of every other one, and `run` this broker
        from others that have had the same; empty where no other has. What it is to keep past the
        process is noted in `ledger`."""
        self.settings = settings or Settings()
        if self.settings.spills and ledger is None:
            raise ValueError(
                "the policy spill keeps what does not fit into memory on disk: it needs a journal"
            )
        self.users: Users | None = None
        """Who may come in; None for everybody, who may do everything then."""
        self.clock = Clock()
        """The driver sets `now` before it brings anything."""
        self.sessions: dict[int, Session] = {}
        self.metering = Metering(self.clock)
        self.visits = Visits(self.sessions, self.metering)
        self.refused: Counter[Reason] = Counter()
        self.alarms = Alarms(self.clock, self._woken)
        self.store = Store(
            self.settings,
            self.clock,
            ready=self.make_ready,
            refuse=self._refuse,
            end=self._end_slow,
            ledger=ledger,
        )
        self.store.room.pacing.put_off = self.alarms.put_off
        self.ledger = ledger
        self.confirming = Confirming(ledger, self.refused, self.make_ready)
        self._confirm = self.confirming.confirm
        self.answers = Answers(
            self.store,
            identity=identity,
            run=run or identity,
            ready=self.make_ready,
            put_off=self.alarms.put_off,
            end_session=self._end_session,
            owners=Owners(lambda: self.users, self.sessions, lambda *cut: self._cut.append(cut)),
            answer=self.confirming.answer,
        )
        self.explaining = Explaining(self.store, self.sessions, self.refused, identity=identity)
        self._verdicts = Verdicts(self.store, self.refused, self.make_ready)
        self.lookups = Lookups(self.store, self.make_ready, self.answers.wake)
        self.classes = self.store.classes
        self.budget = self.store.budget
        self.spilling = self.store.spilling
        self._loose = self.store.loose
        self._let_in = self.store.room.let_in
        self._next_session_id = 0
        self._ready: dict[int, None] = {}
        self._unblocked: dict[Session, None] = {}
        self._cut: list[tuple[Session, RemoteProtocolError]] = []
        self._begun = Begun()

    @property
    def tick_number(self) -> int:
        """Beats of the ack timer."""
        return self.clock.tick

    # Sessions ------------------------------------------------------------------------------------

    def open(self, peer: str = "", *, address: str = "") -> Session:
        """A peer has connected, from this address."""
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
        session.address = address
        session.meters = self.metering.meters(None, address)
        if self.users is not None:
            session.is_admitted = False
            session.receiver.frame_bytes_max = min(
                GREETING_BYTES_MAX, self.settings.limits.frame_bytes
            )
        self.sessions[session.session_id] = session
        return session

    def enter(self, peer: str = "", *, user: str = "", grants: Grants | None = None) -> Session:
        """A peer has come through another door, which understands its bytes, see `apply`, and knows
        who it is. Its outbox shows what it is sent, as if it spoke version 2."""
        session = self.open(peer)
        session.is_admitted, session.user, session.grants = True, user, grants
        session.enter()
        return session

    def apply(self, session: Session, event: Event) -> None:
        """Another door has understood this. Raises RemoteProtocolError (pending_limit) when too
        much waits for room; `close` the session then."""
        self._apply(session, event)
        check_pending(session, self.settings.limits)

    def receive(self, session: Session, buffer: ReceiveBuffer, count: int) -> None:
        """`count` fresh bytes of this session are in the buffer.

        Raises RemoteProtocolError after everything before the offence was applied; `fail` and close
        the session then.
        """
        assert not session.closed
        single = session.receive_one(buffer, count)
        if single is not None:
            self._apply(session, single)
        else:
            most = self.settings.limits.pending_bytes
            events = heavy = 0
            try:
                for event in session.receive(buffer, count):
                    events += 1
                    if isinstance(event, _HEAVY):
                        heavy += event.heavy
                    if not session.is_admitted:
                        admit(self.users, session, event, self.visits, self.refused)
                        session.receiver.frame_bytes_max = self.settings.limits.frame_bytes
                    self._apply(session, event)
                    if session.outbox.pending_bytes > most:
                        break  # Little said may ask for much.
            finally:
                self._confirm(session)
            session.took(count, events, heavy)
            check_pending(session, self.settings.limits)
            self._weigh(session, count)
            return
        if isinstance(session.dialect, Version2):
            self._confirm(session)
            check_pending(session, self.settings.limits)
        elif session.parked:
            check_pending(session, self.settings.limits)

    def _weigh(self, session: Session, count: int) -> None:
        """Between two beats so much may come that all together need too much."""
        kept = count if session.parked else min(count, session.receiver.tail_bytes)
        most = self.settings.limits.total_pending_bytes
        if kept and self._begun.came(kept, most):
            self._cut += too_heavy(self.sessions.values(), most)

    def fail(self, session: Session, error: RemoteProtocolError) -> None:
        """A session is to be closed for this reason: tell the peer, if its version has a word."""
        if isinstance(session.dialect, Version2) and not session.closed:
            reply = ErrorReply(code=error.reason, message=error.sentence, fatal=True)
            session.outbox.reply(frames.encode(frames.ERROR, content=reply.encode()))

    def close(self, session: Session) -> None:
        """The peer is gone. What it published stays; what it did not acknowledge goes on waiting
        for the class's other or next subscriptions."""
        if session.closed:
            return
        del self.sessions[session.session_id]
        if isinstance(session.dialect, Version2):
            self._leave_publisher(session, session.dialect)
        self.answers.leave(session)  # What is parked may find the room that this makes.
        session.closed = True
        self.store.room.left_behind(session)
        self._ready.pop(session.session_id, None)

    def _leave_publisher(self, session: Session, dialect: Version2) -> None:
        """Remember how far its messages are stored. What is not will come again."""
        publisher, publishers = dialect.publisher, self.answers.publishers
        if publisher.key:
            said = session.confirmed
            ahead = dialect.stored_ahead(said, [batch for _, batch in session.parked])
            publishers.note(publisher, said, ahead)
        self.store.room.forget(session)
        if publisher.session_id == session.session_id:
            publishers.leave(publisher, self.clock.now)

    def take_ready(self) -> list[int]:
        """Ids of sessions whose outbox has something new. Each is named once until taken; ask until
        there is none."""
        if self._loose:
            self.store.release_loose()
        if self.spilling is not None and self.spilling.behind:
            self.spilling.go_on()
        if self._let_in:
            self._hear_of_room()
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def feeds_others(self, session_id: int) -> bool:
        """Whether another session's outbox has something new that was not asked for yet."""
        return any(ready != session_id for ready in self._ready)

    def take_unblocked(self) -> list[Session]:
        """Sessions none of whose messages wait for room any longer."""
        if self._let_in:
            self._hear_of_room()
        if not self._unblocked:
            return []
        unblocked = [s for s in self._unblocked if not (s.parked or s.closed)]
        self._unblocked.clear()
        return unblocked

    def _hear_of_room(self) -> None:
        """Tell publishers what is stored now, and note who may go on."""
        for session in self._let_in:
            self._confirm(session)
            if not session.parked:
                self._unblocked[session] = None
        self._let_in.clear()

    def reach(self, lot: int, *, has_space: bool = True) -> None:
        """What the ledger has given out, up to this lot, is as safe as was asked for. Without space
        nothing more is accepted."""
        ledger = self.ledger
        assert ledger is not None
        ledger.reach(lot, has_space=has_space)
        self.confirming.reach()
        for cls in [cls for cls in self.store.room.awaited if cls.spill is not None]:
            self.store.room.made(cls)  # What is written may leave the memory.
        if not ledger.is_behind:
            for session in ledger.lagging:
                session.lags = False
                self._unblocked[session] = None
            ledger.lagging.clear()

    def fail_to_keep(self, reason: Reason, sentence: str) -> None:
        """What the ledger has given out cannot be kept for now; `reach` says when it can."""
        assert self.ledger is not None
        if self.ledger.failure is None:
            self.confirming.fail(reason, sentence)
        self.ledger.failure = reason, sentence

    def take_cut(self) -> list[tuple[Session, RemoteProtocolError]]:
        """Sessions to be cut off, and why."""
        cut, self._cut = self._cut, []
        return cut

    def _end_session(self, session_id: int, error: RemoteProtocolError) -> None:
        """The same program has come again: its former session ends."""
        session = self.sessions[session_id]
        self.fail(session, error)
        self._cut.append((session, error))
        self.close(session)

    # Events --------------------------------------------------------------------------------------

    def _apply(self, session: Session, event: Event) -> None:
        match event:
            case PublishedOne():
                session.published_tick = self.clock.tick
                self.store.publish_one(session, event.class_id, event.frame)
                session.handled += 1
            case AckedOne():
                self._verdicts.ack_one(session, event.key, event.first, event.last)
            case Published():
                session.published_tick = self.clock.tick
                self.store.publish(session, event.class_id, event.frames)
                session.handled += event.frames.count
            case Acked():
                self._verdicts.ack(session, event)
            case Connected():
                self.answers.connect(session, event.class_ids)
            case Subscribed():
                self.answers.subscribe(session, event.class_id)
            case Greeted():
                self._greet(session, event)
            case Nacked() | StillWorking() | Terminated():
                self._verdicts.not_yet(session, event)
            case SubscriptionAsked() | UnsubscriptionAsked() | FetchAsked():
                self._ask(session, event)
            case PurgeAsked() | InquiryAsked():
                self._ask(session, event)
            case Refused():
                self._refuse(session, explained(session, event))
                session.handled += event.published

    def _greet(self, session: Session, event: Greeted) -> None:
        dialect = session.dialect
        assert isinstance(dialect, Version2)
        try:
            self.answers.greet(session, event)
        except RemoteProtocolError as error:
            if not dialect.is_greeted:
                raise
            self._refuse(
                session,
                Refused(error.reason, error.sentence, frames.CONNECT, refers_to=event.request),
            )

    def _ask(self, session: Session, event: Asked) -> None:
        try:
            match event:
                case SubscriptionAsked():
                    self.answers.grant(session, event)
                case UnsubscriptionAsked():
                    self.answers.unsubscribe(session, event)
                case FetchAsked():
                    refuse = partial(self._refuse_asked, session, event)
                    self.lookups.fetch(session, event, refuse)
                case PurgeAsked() if self.lookups.purge_elsewhere(
                    session, event, partial(self._refuse_asked, session, event)
                ):
                    pass
                case PurgeAsked():
                    last = self.lookups.check_purge(session, event)
                    session.outbox.owe(partial(self._purge, session, event, last))
                    self.make_ready(session.outbox)
                case InquiryAsked():
                    check_right(session, Right.INQUIRE)
                    refuse = partial(self._refuse_asked, session, event)
                    self.explaining.inquire(session, event, refuse, self.make_ready)
        except RemoteProtocolError as error:
            self._refuse_asked(session, event, error)

    def _purge(self, session: Session, asked: PurgeAsked, last: int) -> None:
        """In its turn: every position of the class is looked at. Of a session that has ended, what
        is left is not done: its last answers are made all at once."""
        if session.closed:
            return
        try:
            self.lookups.purge(session, asked, last)
        except RemoteProtocolError as error:
            self._refuse_asked(session, asked, error)

    def _refuse_asked(self, session: Session, asked: Asked, error: RemoteProtocolError) -> None:
        self._refuse(
            session,
            Refused(
                error.reason,
                error.sentence,
                _ABOUT[type(asked)],
                class_id=getattr(asked, "class_id", 0),
                refers_to=asked.request,
            ),
        )

    def _refuse(self, session: Session, refused: Refused) -> None:
        """Version 2: a frame has no effect, and its peer is told."""
        if not refused.again:
            self.refused[refused.reason] += refused.count
            session.refused[refused.reason] += refused.count
            commit_log.refuse(self.ledger, self.answers.publishers, session, refused)
        reply = ErrorReply(code=refused.reason, message=refused.sentence, count=refused.count)
        session.outbox.reply(
            frames.encode(
                frames.ERROR,
                class_id=refused.class_id,
                message_id=refused.refers_to,
                timer_index=refused.frame_type,
                content=reply.encode(),
            )
        )
        self.make_ready(session.outbox)

    def _end_slow(self, position: Subscription) -> None:
        """A subscription is too slow, and wants to be cut off then."""
        pending = position.pending()
        sentence = f"{pending} messages wait for it, {position.terms.pending_max} are allowed"
        self._tell_ended(position, Reason.SLOW_CONSUMER, sentence)
        self.answers.end_slow(position)

    def take_back(self, position: Subscription, error: RemoteProtocolError) -> None:
        """A position that was granted cannot be had after all."""
        self._tell_ended(position, error.reason, error.sentence)
        self.answers.end(position)

    def _tell_ended(self, position: Subscription, reason: Reason, sentence: str) -> None:
        """Whoever has a subscription of this position has it no longer."""
        for holder in list(position.members) if isinstance(position, Group) else [position]:
            session = self.sessions.get(holder.outbox.session_id)
            if session is not None:
                self.answers.drop(session, holder.number)
                self._refuse(
                    session,
                    Refused(
                        reason,
                        sentence,
                        frames.SUBSCRIBE,
                        class_id=position.class_id,
                        refers_to=holder.request,
                    ),
                )

    def make_ready(self, outbox: Outbox) -> None:
        """There is something new in it."""
        self._ready[outbox.session_id] = None

    # Time ----------------------------------------------------------------------------------------

    def tick(self) -> list[tuple[Session, RemoteProtocolError]]:
        """One beat of the ack timer. Returns the sessions to be cut off, each with the reason."""
        self.clock.tick += 1
        self.store.timer_index = self.clock.tick % self.settings.ack_timeout
        for cls in list(self.classes.values()):
            for subscription in cls.subscriptions:
                subscription.tick(self.clock.tick)
                if subscription.queued:
                    self.make_ready(subscription.outbox)
            for group in cls.groups:
                self._verdicts.hand_out(group)
        self.store.tick()
        self.answers.tick()
        limits, seconds = self.settings.limits, self.settings.tick_seconds
        overdue = []
        room = self.store.room
        short_of_memory = room.is_short_of_memory()
        for session in self.sessions.values():
            holds_back = bool(room.awaited) and self._holds_back(session, short_of_memory)
            error = session.tick(limits, seconds, holds_back=holds_back)
            if error is not None:
                overdue.append((session, error))
            elif session.heartbeat_seconds and not session.outbox.idle:
                self.make_ready(session.outbox)
        return overdue + too_heavy(self.sessions.values(), limits.total_pending_bytes)

    @property
    def due(self) -> float:
        """When `wake_due` is to be called; infinite for not at all."""
        return self.alarms.due

    def wake_due(self) -> None:
        """Send what was put off until now."""
        self.alarms.wake_due()

    def _woken(self, waiter: Waiter) -> int:
        """Somebody has something to send that was put off. Returns how much that took."""
        if isinstance(waiter, Group):
            self._verdicts.hand_out(waiter)
            return waiter.looked
        if isinstance(waiter, Subscription) and waiter.is_connected:
            self.make_ready(waiter.outbox)
        return 0

    def may_rest(self, session: Session) -> bool:
        """Whether reading this session's acks a little later delays nobody: asked after each read.
        So it is for a peer that acknowledges few messages at a time, has not published lately, and
        holds back no full class."""
        acknowledged, session.acknowledged = session.acknowledged, 0
        return (
            0 < acknowledged <= ACK_REST_MESSAGES_MAX
            and self.clock.tick - session.published_tick >= PUBLISHER_TICKS
            and not self.holds_back(session)
        )

    def holds_back(self, session: Session) -> bool:
        """Whether somebody waits for this session's acknowledgements."""
        room = self.store.room
        return bool(room.awaited) and self._holds_back(session, room.is_short_of_memory())

    def _holds_back(self, session: Session, short_of_memory: bool) -> bool:
        return any(
            window.floor == cls.floor() < cls.ring.head
            and cls.spill is None
            and (cls.blocked or short_of_memory)
            for held in session.subscriptions.values()
            if (cls := self.classes[held.class_id]) and (window := held.window)
        )

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        self.store.release_loose()
        memory = 0
        for cls in self.classes.values():
            cls.ring.check()
            cls.channels.check()
            memory += cls.ring.statistics().memory_bytes + cls.channels.memory_bytes
            cls.check()
            keeps = bool(cls.keep) or cls.holds_values
            assert cls.first == cls.floor() or (keeps and cls.first < cls.floor())
            assert cls.first <= cls.ring.floor
            for subscription in cls.subscriptions:
                subscription.check()
            for session in cls.blocked:
                assert session.parked
                assert session.parked[0][0] == cls.class_id
        kept = self.store.room.kept_bytes()
        assert set(self.store.room.awaited) == {c for c in self.classes.values() if c.blocked}
        assert memory + kept == self.budget.used
        exceeds = any(cls.ring.exceeds for cls in self.classes.values())
        assert exceeds or self.budget.used <= self.budget.limit

    def statistics(self) -> BrokerStatistics:
        return BrokerStatistics(
            sessions=len(self.sessions),
            memory_bytes=self.budget.used,
            parked_bytes=sum(s.parked_bytes for s in self.store.room.blocked_sessions()),
            refused=dict(self.refused),
            classes=tuple(cls.statistics(self.clock.now) for cls in self.classes.values()),
        )
