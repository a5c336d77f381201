"""What a broker says when it is asked what waits for what.

Rule 1: nothing changes. No message is looked at; of everything else so much, and no more, and what
was left out is counted.
Rule 2: figures are those of `statistics`, found the same way; sentences are `waiting`'s.
Rule 3: what lies elsewhere is counted there. Where that is not known, it is said so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from heapq import nsmallest
from itertools import islice

import msgspec

from simplebus.core import dead_letters
from simplebus.core.broker.inquire_channels import Hearers, explain_channel
from simplebus.core.broker.inquire_positions import ExplainingPositions, name_of, short, words
from simplebus.core.broker.wait_reasons import messages, size, span, whole
from simplebus.core.commit_log import Level
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.group.group import Member
from simplebus.core.limits import (
    EXPLAINED_CLASSES,
    EXPLAINED_MEMBERS,
    EXPLAINED_PATTERNS,
    EXPLAINED_POSITIONS,
    EXPLAINED_SESSIONS,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.remote_storage import Counted, Elsewhere, Inquiry, Inventory
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import InquiryAsked
from simplebus.core.protocol.inquiry import (
    BusQuestion,
    BusSaid,
    ChannelQuestion,
    ClassLine,
    ClassQuestion,
    ClassSaid,
    Explained,
    Position,
    Publisher,
    Question,
    SessionLine,
    SessionSaid,
)
from simplebus.core.session.outbox import Outbox
from simplebus.core.session.session import Session
from simplebus.core.session.version2 import Version2
from simplebus.core.settings import Keep
from simplebus.core.store.store import Store
from simplebus.core.subscription.subscription import Subscription


class Explaining:
    """Of one broker."""

    def __init__(
        self,
        store: Store,
        sessions: Mapping[int, Session],
        refused: Counter[Reason],
        *,
        identity: str,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._refused = refused
        self.identity = identity
        """Of the bus."""
        self._positions = ExplainingPositions(store, sessions)
        self.hearers: list[Hearers] = []
        """Other doors, who tell who hears what there."""

    def inquire(
        self,
        session: Session,
        asked: InquiryAsked,
        refuse: Callable[[RemoteProtocolError], None],
        ready: Callable[[Outbox], None],
    ) -> None:
        """Have a session told what it has asked, in its turn and when it is known; or `refuse`
        it."""

        def say(counted: dict[int, Counted]) -> None:
            try:
                said = self.explain(asked.asked, counted)
            except RemoteProtocolError as error:
                refuse(error)
                return
            content = msgspec.json.encode(said)
            session.outbox.reply(
                frames.encode(frames.INQUIRE, message_id=asked.request, content=content)
            )

        elsewhere = partial(self._elsewhere, asked.asked)
        session.outbox.owe(Inquiry(session, elsewhere, say, ready).answer)
        ready(session.outbox)

    def explain(
        self, question: Question, counted: Mapping[int, Counted] | None = None
    ) -> Explained:
        """What lies elsewhere was `counted`. Raises RemoteProtocolError (unknown_class,
        unknown_session)."""
        match question:
            case BusQuestion():
                return self._bus()
            case ClassQuestion(class_=asked):
                return self._class(self._named(asked), counted or {})
            case ChannelQuestion(channel=channel, class_=asked):
                classes = self._store.classes.values() if asked is None else [self._named(asked)]
                return explain_channel(
                    channel,
                    classes,
                    bound=self._store.bound,
                    now=self._now,
                    who=self._positions.who,
                    hearers=self.hearers,
                )
        session = self._sessions.get(question.session)
        if session is None:
            raise RemoteProtocolError(
                Reason.UNKNOWN_SESSION,
                f"no session {question.session} is open; {len(self._sessions)} are",
            )
        return self._session(session)

    @property
    def _now(self) -> float:
        return self._store.clock.now

    @property
    def _level(self) -> str:
        ledger = self._store.ledger
        return (Level.MEMORY if ledger is None else ledger.level).name.lower()

    def _elsewhere(self, question: Question) -> list[Elsewhere]:
        """What is to be counted elsewhere for an answer."""
        if not isinstance(question, ClassQuestion):
            return []
        store, asked = self._store, question.class_
        class_id = store.names.get(asked) if isinstance(asked, str) else asked
        cls = store.classes.get(class_id) if class_id is not None else None
        if cls is None or cls.elsewhere is None:
            return []
        dead = self._dead_class(cls)
        found = [cls.elsewhere, *([store.classes[dead].elsewhere] if dead is not None else [])]
        return [each for each in found if each is not None]

    def _dead_class(self, cls: MessageClass) -> int | None:
        return self._store.names.get(dead_letters.class_name(cls.name or str(cls.class_id)))

    def _named(self, asked: int | str) -> MessageClass:
        store = self._store
        class_id = store.names.get(asked) if isinstance(asked, str) else asked
        cls = None if class_id is None else store.classes.get(class_id)
        if cls is None:
            raise RemoteProtocolError(Reason.UNKNOWN_CLASS, f"there is no class {asked!r}")
        return cls

    # The bus -------------------------------------------------------------------------------------

    def _bus(self) -> BusSaid:
        store, sessions = self._store, self._sessions
        failure = store.ledger.failure if store.ledger is not None else None
        classes = nsmallest(
            EXPLAINED_CLASSES,
            store.classes.values(),
            key=lambda cls: (not cls.blocked, -len(cls.ring), cls.class_id),
        )
        lines = [
            SessionLine(
                session.session_id,
                name_of(session),
                short(session.peer),
                version(session),
                session.user,
            )
            for session in islice(sessions.values(), EXPLAINED_SESSIONS)
        ]
        return BusSaid(
            bus=self.identity,
            now=self._now,
            memory_bytes=store.budget.used,
            memory_max=store.budget.limit,
            level=self._level,
            failure="" if failure is None else f"{failure[0]}: {failure[1]}",
            refused=words(self._refused),
            classes=[
                ClassLine(
                    class_id=cls.class_id,
                    name=cls.name,
                    stored=cls.ring.head - cls.first,
                    positions=len(cls.subscriptions),
                    publishers=len(cls.blocked),
                    dropped=sum(cls.dropped.values()),
                    is_elsewhere=cls.is_remote,
                )
                for cls in classes
            ],
            classes_left_out=len(store.classes) - len(classes),
            sessions=lines,
            sessions_left_out=len(sessions) - len(lines),
        )

    # A class -------------------------------------------------------------------------------------

    def _class(self, cls: MessageClass, counted: Mapping[int, Counted]) -> ClassSaid:
        store, ring = self._store, cls.ring
        figures, ledger = ring.statistics(), store.ledger
        there = nsmallest(EXPLAINED_POSITIONS, cls.subscriptions, key=_floor)
        positions = [self._positions.position(cls, position) for position in there]
        blocked = list(islice(cls.blocked, EXPLAINED_MEMBERS))
        dead = self._dead_class(cls)
        stored, spill = ring.head - cls.first, cls.spill
        said = ClassSaid(
            class_id=cls.class_id,
            name=cls.name,
            now=self._now,
            floor=cls.first,
            head=ring.head,
            stored=stored,
            stored_max=ring.messages_max,
            stored_bytes=figures.frame_bytes + (spill.frame_bytes if spill is not None else 0),
            memory_bytes=figures.memory_bytes,
            memory_max=ring.bytes_max,
            newest_seconds=self._positions.age(cls, ring.head - 1) if stored else None,
            oldest_seconds=self._positions.age(cls, cls.first) if stored else None,
            policy=cls.policy.value,
            keeps=_keeps(cls.keep),
            subjects=[short(each) for each in store.bound.subjects(cls.class_id)][
                :EXPLAINED_PATTERNS
            ],
            level=self._level,
            safe=ring.head if ledger is None else ledger.safe(cls.class_id, ring.head),
            backlog=_backlog(cls),
            purged=stored - _wanted(cls),
            channels=len(cls.channels),
            delivered=cls.delivered + sum(p.delivered for p in cls.subscriptions),
            redelivered=cls.redelivered + sum(p.redelivered for p in cls.subscriptions),
            acknowledged=cls.acknowledged + sum(p.acknowledged for p in cls.subscriptions),
            dropped=words(cls.lost()),
            dead_class=dead,
            dead_letters=0 if dead is None else _wanted(store.classes[dead]),
            positions=positions,
            positions_left_out=len(cls.subscriptions) - len(positions),
            publishers=[self._publisher(session) for session in blocked],
            publishers_left_out=len(cls.blocked) - len(blocked),
            waits_for="" if cls.is_remote else self._class_waits_for(cls, positions),
        )
        return self._counted_elsewhere(cls, said, counted) if cls.is_remote else said

    def _counted_elsewhere(
        self, cls: MessageClass, said: ClassSaid, counted: Mapping[int, Counted]
    ) -> ClassSaid:
        """The same of a class that is elsewhere: what is stored of it is what lies there."""
        found = counted.get(cls.class_id, "it was not counted for this")
        dead = counted.get(said.dead_class) if said.dead_class is not None else None
        there = dict.fromkeys(("floor", "head", "safe", "stored", "stored_max", "stored_bytes"), 0)
        there |= dict.fromkeys(("memory_max", "backlog", "purged"), 0)
        if isinstance(found, Inventory):
            unknown, waits_for = "", self._held_elsewhere(cls, found)
            there |= {
                "floor": found.floor,
                "head": found.head,
                "safe": found.head,
                "stored": found.messages,
                "stored_max": found.messages_max,
                "stored_bytes": found.bytes,
                "memory_max": found.bytes_max,
                "backlog": found.backlog,
            }
        else:
            unknown = found
            waits_for = f"what is stored in the cluster is not known: {found}"
        return msgspec.structs.replace(
            said,
            **there,
            unknown=unknown,
            on_way=cls.ring.head - said.safe,
            newest_seconds=None,
            oldest_seconds=None,
            dead_letters=dead.messages if isinstance(dead, Inventory) else 0,
            waits_for=self._and_publishers(cls, waits_for),
        )

    def _held_elsewhere(self, cls: MessageClass, found: Inventory) -> str:
        """What holds the first message of a class that is elsewhere."""
        if not found.messages:
            return "nothing is stored"
        if found.is_backlog_first:
            return f"{messages(found.backlog)} wait for a first subscription"
        holder = found.held_by
        if not holder:
            return "what is stored is kept though nobody needs it"
        held = "the oldest stored message is held by"
        if isinstance(holder, str):
            return f"{held} {holder}"
        position = self._positions.position(cls, holder)
        return f"{held} {_name(position)}; {whole(position.waits, position.waits_for)}"

    def _publisher(self, session: Session) -> Publisher:
        return Publisher(
            session=session.session_id,
            name=name_of(session),
            peer=short(session.peer),
            messages=sum(batch.count for _, batch in session.parked),
            bytes=session.parked_bytes,
            seconds=self._positions.seconds(session.parked_ticks),
            is_gone=session.closed,
        )

    def _class_waits_for(self, cls: MessageClass, positions: list[Position]) -> str:
        """What holds the floor; and if somebody waits for room, what is full."""
        if cls.first == cls.ring.head:
            held = "nothing is stored"
        elif not cls.subscriptions:
            held = f"{messages(_backlog(cls))} wait for a first subscription"
        else:
            holders = [each for each in positions if each.floor == cls.first]
            if holders:
                first = holders[0]
                held = f"the oldest stored message is held by {_name(first)}"
                if len(holders) > 1:
                    held += f" and {len(holders) - 1} more"
                held += f"; {whole(first.waits, first.waits_for)}"
            elif cls.waiting.floor == cls.first < cls.waiting.cursor:
                held = f"{messages(cls.waiting.in_flight)} wait for who asks for what waits"
            else:
                held = "what is stored is kept though nobody needs it"
        return self._and_publishers(cls, held)

    def _and_publishers(self, cls: MessageClass, held: str) -> str:
        """What holds the floor of a class, behind who waits for room in it."""
        if not cls.blocked and cls.refused:
            return f"what is published waits: {self._full(cls)}; {held}"
        if not cls.blocked:
            return held
        count = len(cls.blocked)
        publishers = f"{count} publisher{'' if count == 1 else 's'} wait{'s' * (count == 1)}"
        return f"{publishers} for room: {self._full(cls)}; {held}"

    def _full(self, cls: MessageClass) -> str:
        ring, budget, spill = cls.ring, cls.ring.budget, cls.spill
        if spill is not None and spill.bytes_max and spill.frame_bytes >= spill.bytes_max:
            return f"{size(spill.frame_bytes)} of {size(spill.bytes_max)} are on disk only"
        if spill is not None and len(ring):
            return "what is in memory is not written yet"
        if cls.refused:
            return f"its stream takes nothing: {cls.refused}"
        if cls.is_remote:
            return "what was accepted before is not in the cluster yet"
        if len(ring) >= ring.messages_max:
            return f"{len(ring):,} of {ring.messages_max:,} messages are stored"
        memory = ring.statistics().memory_bytes
        if 2 * memory > ring.bytes_max:
            return f"{size(memory)} of {size(ring.bytes_max)} are taken"
        return f"all classes together take {size(budget.used)} of {size(budget.limit)}"

    # A session -----------------------------------------------------------------------------------

    def _session(self, session: Session) -> SessionSaid:
        dialect, subscriptions = session.dialect, session.subscriptions
        groups_seen: dict[Subscription, None] = {}
        for held in islice(subscriptions.values(), EXPLAINED_POSITIONS):
            groups_seen[held.group if isinstance(held, Member) else held] = None
        classes = self._store.classes
        positions = [self._positions.position(classes[each.class_id], each) for each in groups_seen]
        parked = sum(batch.count for _, batch in session.parked)
        unconfirmed = 0
        if isinstance(dialect, Version2):
            unconfirmed = max(0, dialect.ahead_of(session.confirmed))
        parked_class = session.parked[0][0] if session.parked else None
        return SessionSaid(
            session=session.session_id,
            now=self._now,
            version=version(session),
            name=name_of(session),
            peer=short(session.peer),
            user=session.user,
            level=self._level,
            unconfirmed=unconfirmed,
            leaves_out=isinstance(dialect, Version2) and dialect.leaves_out,
            parked=parked,
            parked_bytes=session.parked_bytes,
            parked_class=parked_class,
            parked_seconds=self._positions.seconds(session.parked_ticks),
            pending_bytes=session.pending_bytes,
            full_seconds=self._positions.seconds(session.full_ticks),
            heartbeat=session.heartbeat_seconds,
            refused=words(session.refused),
            positions=positions,
            positions_left_out=max(0, len(subscriptions) - EXPLAINED_POSITIONS),
            is_read=not session.must_wait,
            waits_for=self._session_waits_for(session, parked, parked_class),
        )

    def _session_waits_for(self, session: Session, parked: int, class_id: int | None) -> str:
        reasons = []
        ledger = self._store.ledger
        if class_id is not None:
            cls = self._store.classes[class_id]
            name = repr(cls.name) if cls.name else str(class_id)
            since = span(self._positions.seconds(session.parked_ticks))
            if session in self._store.room.pacing.waiting:
                reasons.append(
                    f"{messages(parked)} wait since {since}: its user or its address publishes "
                    "faster than it may"
                )
            else:
                reasons.append(
                    f"{messages(parked)} wait for room in class {name} since {since}: "
                    f"{self._full(cls)}"
                )
        if session.lags and ledger is not None:
            why = (
                ledger.failure[1] if ledger.failure else f"{size(ledger.held_bytes)} are unwritten"
            )
            reasons.append(f"the journal is behind: {why}")
        if session.full_ticks:
            reasons.append(
                f"it has taken none of the bytes that wait for it since "
                f"{span(self._positions.seconds(session.full_ticks))}"
            )
        if session.unsaid:
            where = "in the cluster" if self._store.table.is_remote else "written"
            reasons.append(f"what it published is not {where} yet")
        if session.must_wait:
            reasons.append("it is not read from until then")
        return "; ".join(reasons)


def version(session: Session) -> int:
    """Which one is spoken: 0 while that is not known, -1 at another door."""
    if session.is_inside:
        return -1
    if session.dialect is None:
        return 0
    return 2 if isinstance(session.dialect, Version2) else 1


def _wanted(cls: MessageClass) -> int:
    """Stored messages that are not purged."""
    first, head = cls.first, cls.ring.head
    return head - first - sum(b - a for a, b in cls.purged.within(first, head))


def _floor(position: Subscription) -> int:
    return position.window.floor


def _name(position: Position) -> str:
    if position.durable:
        return f"the durable {position.durable!r}"
    if position.group:
        return f"the group {position.group!r}"
    return f"session {position.session} ({position.peer})"


def _backlog(cls: MessageClass) -> int:
    """Messages that wait for a first subscription."""
    window = cls.waiting
    later = 0 if cls.subscriptions else cls.ring.head - window.cursor
    return window.in_flight + later


def _keeps(keep: Keep) -> str:
    kinds = (
        messages(keep.messages) if keep.messages else "",
        size(keep.bytes) if keep.bytes else "",
        span(keep.seconds) if keep.seconds else "",
    )
    return ", ".join(filter(None, kinds))
