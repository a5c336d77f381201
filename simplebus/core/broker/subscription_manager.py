"""What a bus does for those who ask: sessions begin and end, so do subscriptions, messages are
looked up.

Rule 1: a question that cannot be granted changes nothing. It raises RemoteProtocolError; whether
that ends the session is its version's business.
Rule 2: a named position (durable, group) is found by its names; whoever asks for it with other
terms about what it is for is refused, not answered wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from simplebus.core.authorization import visibility
from simplebus.core.authorization.durable_owners import Owners
from simplebus.core.authorization.session_permissions import check_names, seen_by
from simplebus.core.broker import subscribe_options
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.group.group import Group, Member
from simplebus.core.message_class.class_registry import ClassTable
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.purge import purge_again
from simplebus.core.message_class.remote_storage import Coming, Elsewhere
from simplebus.core.producer_state import Claim, Publisher, Publishers
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import Greeted, SubscriptionAsked, UnsubscriptionAsked
from simplebus.core.protocol.requests import (
    ConnectReply,
    ConnectRequest,
    SubscribeReply,
    SubscribeRequest,
)
from simplebus.core.redelivery.ack_timer import Span
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import Terms
from simplebus.core.session.outbox import Feed, Outbox
from simplebus.core.session.session import Session
from simplebus.core.session.version2 import Version2, publisher_of
from simplebus.core.settings import Settings
from simplebus.core.snapshot import KeptPosition
from simplebus.core.store.quotas import Shares
from simplebus.core.store.store import Store
from simplebus.core.subscription.channel_filter import Wanted
from simplebus.core.subscription.subscription import Subscription
from simplebus.core.users.permissions import Scope


def check_numbers(asked: ConnectRequest, table: ClassTable) -> None:
    """Raises RemoteProtocolError (bad_connect) where nobody would know a message by its number."""
    if asked.first is None:
        return
    if not table.is_remote:
        why = "this bus keeps its messages itself: only a door before a cluster takes such numbers"
    elif asked.name is None:
        why = "expected a name, too: it is part of what a message is known by"
    else:
        return
    raise RemoteProtocolError(Reason.BAD_CONNECT, f"first is {asked.first}; {why}")


def arrive(
    publishers: Publishers,
    claim: Claim,
    asked: ConnectRequest,
    table: ClassTable,
    now: float,
    identity: str,
) -> tuple[int, bool]:
    """Say where the program goes on. Returns how many confirmed messages are not stored, as far as
    that is known, and whether the journal is to know of it."""
    publisher = claim.publisher
    before = publisher.next, publisher.is_doubted
    is_elsewheres = bool(asked.bus) and asked.bus != identity
    lost = publishers.begin(claim, asked.unconfirmed, is_elsewheres=is_elsewheres)
    if table.first_number is not None and (asked.unconfirmed is None or is_elsewheres):
        publishers.begin_at(publisher, table.first_number(now))
    is_new_here = claim.is_another or not claim.is_known
    is_on_its_way = asked.unconfirmed is not None and not is_elsewheres
    if table.is_remote and is_new_here and is_on_its_way:
        # That nothing is known of it here is no reason to have it begin anew.
        publishers.begin_at(publisher, asked.unconfirmed or 0)
    if asked.first is not None:
        publishers.begin_at(publisher, asked.first)
    return lost, is_new_here or before != (publisher.next, publisher.is_doubted)


class Answers:
    """Of one broker."""

    def __init__(
        self,
        store: Store,
        *,
        identity: str,
        run: str,
        ready: Callable[[Outbox], None],
        put_off: Callable[[float, Subscription], None],
        end_session: Callable[[int, RemoteProtocolError], None],
        owners: Owners,
        answer: Callable[[Session, bytes, int, Feed | None], None],
    ) -> None:
        self.identity = identity
        self.run = run
        self.publishers = Publishers()
        self._store = store
        store.table.opened = self._begin_early
        store.table.named = owners.judge_again
        self._ready = ready
        self._put_off = put_off
        """Called with a time, and who is to be woken then."""
        self._end_session = end_session
        """Called with the id of a session that has to go, and why."""
        self._answer = answer
        """Called with an answer that waits for a mark in the ledger, and with whom it lets begin:
        see `Confirming`."""
        self.owners = owners
        self.shares = Shares(owners.users, store)
        self._early: dict[int, dict[Session, None]] = {}
        """Version 1: who subscribed to classes that nobody has named yet."""
        self._idle: dict[Subscription, float] = {}
        """Since when nobody is connected to durables that are not kept for ever."""
        self._held_back: dict[Subscription, None] = {}
        """Version 1: positions that begin when a pause is over."""

    @property
    def _settings(self) -> Settings:
        return self._store.settings

    # Connect -------------------------------------------------------------------------------------

    def connect(self, session: Session, class_ids: tuple[int, ...]) -> None:
        """Version 1: name classes, answer with the session's id."""
        class_ids = tuple(self._store.table.distinct(class_ids))
        check_names(session, class_ids, self._store.table)
        found = [(class_id, "") for class_id in class_ids]
        self.shares.check_classes(session, found)
        self._store.table.open_classes(found, maker=session.user)
        content = session.session_id.to_bytes(4, "little")
        self._reply(session, frames.encode(frames.CONNECT, content=content))

    def _begin_early(self, class_id: int) -> None:
        """A class is new: those begin who have subscribed to it in version 1."""
        for early in self._early.pop(class_id, {}):
            early.early.discard(class_id)
            try:
                self.subscribe(early, class_id)
            except RemoteProtocolError:  # By its name it is not for this one, who cannot be told.
                self._store.classes[class_id].dropped[Reason.UNAUTHORIZED] += 1

    def greet(self, session: Session, greeted: Greeted) -> None:
        """Version 2: the same, and who publishes, how far it is stored, what is granted."""
        dialect, asked = session.dialect, greeted.asked
        assert isinstance(dialect, Version2)
        store = self._store
        check_numbers(asked, store.table)
        classes = store.table.distinct(asked.classes)
        named, _ = store.table.check_classes(classes)
        check_names(session, classes, store.table)
        self.shares.check_classes(session, named)
        lost, is_first = 0, not dialect.is_greeted
        if is_first:
            publisher = dialect.publisher
            if asked.name is not None:
                claim = self.publishers.claim(
                    asked.name, asked.instance or "", session.session_id, user=session.user
                )
                publisher = claim.publisher
                if claim.former is not None:
                    why = "this program has connected again under the same name"
                    # From here on, what it has stored is known.
                    self._end_session(claim.former, RemoteProtocolError(Reason.TAKEN_OVER, why))
                lost, is_news = arrive(
                    self.publishers, claim, asked, store.table, store.clock.now, self.identity
                )
                if is_news:
                    self._note_publisher(publisher)
                if store.ledger is not None and publisher.ahead is not None:
                    # Its former connection ended before these were safe: they come again.
                    session.kept_mark = store.ledger.mark
            dialect.begin(publisher, leaves_out=asked.first is not None)
            session.confirmed = session.claimed = publisher.next
            session.heartbeat_seconds = self._heartbeat(asked.heartbeat)
            if asked.client:
                session.peer = f"{session.peer} ({asked.client!r})"
        found = store.table.name_classes(classes, maker=session.user)
        settings = self._settings
        reply = ConnectReply(
            session=session.session_id,
            server="simplebus",
            bus=self.identity,
            run=self.run,
            classes={name: class_id for class_id, name in found if name},
            next=dialect.next,
            credit=settings.limits.credit_granted,
            heartbeat=session.heartbeat_seconds,
            frame_bytes=settings.limits.frame_bytes,
            ack_seconds=settings.ack_timeout * settings.tick_seconds,
            level=store.ledger.level if store.ledger is not None else 0,
            lost=0 if store.table.is_remote else lost,  # Another door may have confirmed them.
            duplicates=store.table.duplicate_seconds,
        )
        frame = frames.encode(frames.CONNECT, message_id=greeted.request, content=reply.encode())
        if store.table.is_remote and not (is_first or asked.classes):
            self._reply_when_all_has_come(session, frame)
        else:
            self._reply(session, frame)

    def _reply_when_all_has_come(self, session: Session, frame: bytes) -> None:
        """Who asks no more than to be answered is told behind all that waits for it elsewhere."""
        held = partial(self._held_elsewhere, session)
        coming = Coming(session, held, partial(self._reply, session, frame), self._ready)
        session.outbox.owe(coming.answer)
        self._ready(session.outbox)

    def _held_elsewhere(self, session: Session) -> list[tuple[Elsewhere, Subscription]]:
        """A session's positions in classes that keep their messages elsewhere."""
        found: list[tuple[Elsewhere, Subscription]] = []
        for held in session.subscriptions.values():
            cls = self._store.classes[held.class_id].elsewhere
            if cls is not None:
                found.append((cls, held.group if isinstance(held, Member) else held))
        return found

    def _note_publisher(self, publisher: Publisher) -> None:
        """Have the journal know whose numbers these are now, and where they go on. What is ahead
        may not be safe yet: the records say it."""
        ledger = self._store.ledger
        if ledger is not None and publisher.ahead is None:
            ledger.begin(publisher.key, publisher.next, publisher.instance)

    def _heartbeat(self, asked: float) -> float:
        """The shorter one of what both sides allow, in whole ticks."""
        seconds = min((s for s in (asked, self._settings.heartbeat_seconds) if s), default=0.0)
        return max(seconds, self._settings.tick_seconds) if seconds else 0.0

    # Subscribe -----------------------------------------------------------------------------------

    def subscribe(self, session: Session, class_id: int) -> None:
        """Version 1."""
        if class_id in session.subscriptions:
            return
        cls = self._store.classes.get(class_id)
        if cls is None:
            most = self._settings.limits.classes
            session.early.add(class_id)
            if len(session.early) > most:
                raise RemoteProtocolError(
                    Reason.TOO_MANY_CLASSES,
                    f"the peer subscribed to {len(session.early)} classes that nobody has named; "
                    f"{most} classes may exist",
                )
            self._early.setdefault(class_id, {})[session] = None
            return
        wanted = visibility.wanted(cls, (), seen_by(session, cls, ()))
        window, left = cls.start("waiting", wanted, self._store.clock.now)
        terms = subscribe_options.terms(None, cls, self._settings)
        position: Subscription = Subscription(
            ring=cls.new_ring(),
            window=window,
            terms=terms,
            timer_ticks=self._settings.ack_timeout,
            number=class_id,
            clock=self._store.clock,
            wanted=wanted,
            released=lambda: self._store.loosen(cls),
            bury=lambda *given_up: self._store.bury(cls, position, *given_up),
            put_off=lambda due: self._put_off(due, position),
            errors=self._store.errors,
            spans=left.spans(window),
        )
        cls.add(position)
        cls.listening[position] = None
        session.subscriptions[class_id] = position
        position.put_off(left.times)
        position.held_back = left.held_back(window, self._store.clock.tick, terms)
        position.promised = session.outbox
        self._held_back[position] = None
        self._let_begin(position)

    def _let_begin(self, position: Subscription) -> None:
        """Send what there is, as soon as no pause of what was left is under way. Version 1 has no
        word for a redelivery, and what comes to it comes in order: so all of it waits, where in
        version 2 each message does."""
        if all(due <= self._store.clock.tick for _, _, due in position.held_back):
            assert position.promised is not None
            position.outbox, position.promised, position.held_back = position.promised, None, []
            del self._held_back[position]
            self.wake(position)

    def grant(self, session: Session, asked: SubscriptionAsked) -> None:
        """Version 2."""
        cls = self._store.class_of(asked.class_id)
        number, wish = asked.number, asked.asked
        most = self._settings.limits.subscriptions
        if number in session.subscriptions:
            raise RemoteProtocolError(
                Reason.SUBSCRIPTION_IN_USE, f"this session has a subscription {number} already"
            )
        if len(session.subscriptions) >= most:
            raise RemoteProtocolError(
                Reason.TOO_MANY_SUBSCRIPTIONS, f"a session may have {most} subscriptions"
            )
        subscribe_options.check(wish)
        cls.check_wish(wish)
        scope = seen_by(session, cls, wish.channels)
        position = self._named(session, cls, wish)
        resumed = position is not None
        if position is None:
            position = self._open(cls, wish, scope)
        elif wish.seek:
            self.owners.check_change(session, cls, position)
            position = self._moved(cls, position, wish, scope)
        else:
            self.owners.check(session, cls, position, scope)
            visibility.show(cls, position, scope)
        position.request = asked.request
        self.shares.give(position, session.user)
        if self.owners.may_change(session, cls, position):
            if resumed and not position.is_served:
                self._set_terms(cls, position, subscribe_options.terms(wish, cls, self._settings))
            if wish.idle_seconds is not None:
                position.idle_seconds = wish.idle_seconds
        self._idle.pop(position, None)
        if isinstance(position, Group):
            name = publisher_of(session)
            member = position.join(session.outbox, number, wish.max_in_flight, name)
            session.subscriptions[number] = member
        else:
            position.attach(session.outbox, number)
            session.subscriptions[number] = position
            cls.listening[position] = None
        say = partial(self._say_granted, session, asked, cls, position, resumed)
        if cls.is_remote:
            session.outbox.owe(say)
            self._ready(session.outbox)
        else:
            say()
        self.wake(position)

    def _say_granted(
        self,
        session: Session,
        asked: SubscriptionAsked,
        cls: MessageClass,
        position: Subscription,
        resumed: bool,
    ) -> bool:
        """Returns False while it is not known whether a position is there elsewhere."""
        was_there = cls.has_begun(position)
        if was_there is None:
            return position not in cls.subscriptions  # Then why was said.
        window, wish = position.window, asked.asked
        held = session.subscriptions[asked.number]
        is_new = wish.seek or not resumed
        reply = SubscribeReply(
            cursor=window.floor if is_new and wish.start == "last_values" else window.cursor,
            floor=window.floor,
            resumed=resumed or was_there,
        )
        frame = frames.encode(
            frames.SUBSCRIBE,
            class_id=cls.class_id,
            message_id=asked.request,
            timer_index=asked.number,
            content=reply.encode(),
        )
        self._answer(session, frame, position.kept_mark, held)
        return True

    def _named(
        self, session: Session, cls: MessageClass, asked: SubscribeRequest
    ) -> Subscription | None:
        """The durable or group that is asked for, if it is there."""
        durable, group = asked.durable or "", asked.group or ""
        if not (durable or group):
            return None
        position = cls.named.get(cls.key(durable, group))
        if position is None:
            self.shares.check_named(session, cls, is_durable=bool(durable))
            return None
        if position.group != group:
            raise RemoteProtocolError(
                Reason.SUBSCRIPTION_MISMATCH,
                f"the durable {durable!r} exists with the group {position.group!r}, and was "
                f"asked for with the group {group!r}",
            )
        there = position.wanted.patterns if position.wanted else ()
        if set(there) != set(asked.channels):
            raise RemoteProtocolError(
                Reason.SUBSCRIPTION_MISMATCH,
                f"{durable or group!r} exists for the channels {list(there)}, and was asked for "
                f"with {list(asked.channels)}",
            )
        if position.by_key != asked.by_key:
            is_by_key = {True: "by key", False: "not by key"}
            raise RemoteProtocolError(
                Reason.SUBSCRIPTION_MISMATCH,
                f"the group {group!r} exists {is_by_key[position.by_key]}, and was asked for "
                f"{is_by_key[asked.by_key]}",
            )
        if position.is_connected:
            raise RemoteProtocolError(
                Reason.DURABLE_IN_USE,
                f"the durable {durable!r} is held by session {position.outbox.session_id}",
            )
        return position

    def _open(
        self, cls: MessageClass, asked: SubscribeRequest, scope: Scope | None
    ) -> Subscription:
        """A new position."""
        store = self._store
        wanted = visibility.wanted(cls, asked.channels, scope)
        try:
            window, left = cls.start(asked.start, wanted, store.clock.now)
        except ValueError as error:
            if wanted is not None:
                cls.channels.remove(wanted)
            raise RemoteProtocolError(Reason.BAD_REQUEST, str(error)) from None
        names = (asked.durable or "", asked.group or "")
        kind = subscribe_options.kind_of(asked.group, by_key=asked.by_key)
        terms, spans = subscribe_options.terms(asked, cls, self._settings), left.spans(window)
        position = self._make(kind, cls, names, wanted, terms, window, spans)
        position.take_over(left, self._settings.tick_seconds)
        if cls.purged:
            purge_again(cls, position)
        return position

    def restore(
        self,
        cls: MessageClass,
        kept: KeptPosition,
        terms: Terms,
        window: AckWindow,
        spans: list[Span],
    ) -> Subscription | None:
        """A durable that is known from before: nobody is connected to it. None when there is no
        memory for its patterns."""
        wanted = cls.channels.add(kept.channels) if kept.channels else None
        if kept.channels and wanted is None:
            return None
        names = (kept.durable, kept.group)
        kind = subscribe_options.kind_of(kept.group, by_key=kept.by_key)
        position = self._make(kind, cls, names, wanted, terms, window, spans)
        position.idle_seconds = kept.idle_seconds
        self.shares.give(position, kept.owner)
        # Should the clock have been set back, nothing waits longer for that.
        told = min(kept.told, self._store.clock.now)
        position.put_off((first, last, told + pause) for first, last, pause in kept.pauses)
        if kept.given_up:
            position.give_up_again(kept.given_up)
            self._store.wait_for_room(cls, position)
        self._leave_alone(position)
        return position

    def _make(
        self,
        kind: type[Subscription],
        cls: MessageClass,
        names: tuple[str, str],
        wanted: Wanted | None,
        terms: Terms,
        window: AckWindow,
        spans: list[Span],
    ) -> Subscription:
        """A position of this kind. It is called `names`: its durable and its group, empty for
        none."""
        store, (durable, group) = self._store, names
        position: Subscription = kind(
            ring=cls.new_ring(),
            window=window,
            terms=terms,
            timer_ticks=self._settings.ack_timeout,
            clock=store.clock,
            wanted=wanted,
            released=lambda: store.loosen(cls),
            bury=lambda *given_up: store.bury(cls, position, *given_up),
            put_off=lambda due: self._put_off(due, position),
            errors=store.errors,
            spans=spans,
        )
        position.durable, position.group = durable, group
        self.shares.begin(position)
        cls.add(position)
        self._set_terms(cls, position, terms)
        self._changed(position)
        return position

    def _changed(self, position: Subscription) -> None:
        """A position has come or goes for good."""
        if position.durable and self._store.ledger is not None:
            position.kept_mark = self._store.ledger.change(
                position.class_id, position.durable, position.group
            )

    def _moved(
        self,
        cls: MessageClass,
        former: Subscription,
        asked: SubscribeRequest,
        scope: Scope | None,
    ) -> Subscription:
        """A durable's new position. The former one ends when that is there: what both need is
        stored throughout."""
        position = self._open(cls, asked, scope)
        position.idle_seconds = former.idle_seconds
        self.shares.give(position, former.owner)
        self.end(former)
        return position

    def _set_terms(self, cls: MessageClass, position: Subscription, terms: Terms) -> None:
        """Serve a position like this from now on."""
        position.terms = terms
        cls.policed.pop(position, None)
        if terms.pending_max is not None:
            cls.policed[position] = None

    # Going ---------------------------------------------------------------------------------------

    def leave(self, session: Session) -> None:
        """A session is gone."""
        for class_id in session.early:
            waiting = self._early.get(class_id, {})
            waiting.pop(session, None)
            if not waiting:
                self._early.pop(class_id, None)
        groups: dict[Group, None] = {}
        for held in session.subscriptions.values():
            if isinstance(held, Member):
                held.group.leave(held)
                groups[held.group] = None
            else:
                self._let_go(held, forget=False)
        session.subscriptions.clear()
        for group in groups:  # What came back is handed out when all are gone that it came from.
            self._has_fewer(group, forget=False)

    def drop(self, session: Session, number: int) -> None:
        """A subscription of this session is no more; its position is about to end."""
        held = session.subscriptions.pop(number)
        held.outbox.forget(held)
        if isinstance(held, Subscription):
            del self._store.classes[held.class_id].listening[held]

    def unsubscribe(self, session: Session, asked: UnsubscriptionAsked) -> None:
        held = session.subscriptions.get(asked.number)
        if held is None:
            raise RemoteProtocolError(
                Reason.UNKNOWN_SUBSCRIPTION, f"this session has no subscription {asked.number}"
            )
        forget = asked.asked.forget
        position = held.group if isinstance(held, Member) else held
        if forget:
            self.owners.check_change(session, self._store.classes[held.class_id], position)
        del session.subscriptions[asked.number]
        if isinstance(held, Member):
            held.group.leave(held)
            self._has_fewer(held.group, forget=forget)
        else:
            self._let_go(held, forget=forget)
        answer = frames.encode(frames.UNSUBSCRIBE, class_id=asked.number, message_id=asked.request)
        self._answer(session, answer, position.kept_mark if forget else 0, None)

    def _has_fewer(self, group: Group, *, forget: bool) -> None:
        """Members of a group are gone. One without a name, or whose name is to be forgotten, ends
        with its last member."""
        cls = self._store.classes[group.class_id]
        if not group.members and (forget or not group.durable or cls.is_remote):
            if forget:
                cls.forget(group)
            self.end(group)
        else:
            self._leave_alone(group)
            self.wake(group)

    def _let_go(self, held: Subscription, *, forget: bool) -> None:
        """The same for a position that a session had alone."""
        cls = self._store.classes[held.class_id]
        held.outbox.forget(held)
        del cls.listening[held]
        if held.durable and not (forget or cls.is_remote):
            held.detach()
            self._leave_alone(held)
        else:
            if forget:
                cls.forget(held)
            self.end(held)

    def _leave_alone(self, position: Subscription) -> None:
        """It may be that nobody is connected to a durable any more."""
        if not position.is_served:
            position.alone_since = self._store.clock.now
            if position.idle_seconds is not None:
                self._idle[position] = position.alone_since

    def tick(self) -> None:
        """Once per tick: forget publishers and durables that nobody has used for long enough; have
        those begin that wait for it."""
        for position in list(self._held_back):
            self._let_begin(position)
        now = self._store.clock.now
        self.publishers.forget(now)
        for position, since in list(self._idle.items()):
            if position.idle_seconds is not None and now - since >= position.idle_seconds:
                position.let_go(Reason.IDLE_DURABLE)
                self.end(position)

    def end_slow(self, position: Subscription) -> None:
        """A position is gone because what waits for it is too much. That is dropped, unless nobody
        else is there: then it waits for whoever comes."""
        if len(self._store.classes[position.class_id].subscriptions) > 1:
            position.undelivered[Reason.SLOW_CONSUMER] += position.pending()
        self.end(position)

    def end(self, position: Subscription) -> None:
        """A position is gone for good."""
        cls = self._store.classes[position.class_id]
        self._idle.pop(position, None)
        self._held_back.pop(position, None)
        self._changed(position)
        self.shares.end(position)
        position.give_up_waiting()
        cls.remove(position)
        self._store.release(cls)

    def wake(self, position: Subscription) -> None:
        """It may have something to send."""
        if isinstance(position, Group):
            for member in position.share():
                self._ready(member.outbox)
        elif position.is_connected:
            position.outbox.wake(position)
            self._ready(position.outbox)

    def _reply(self, session: Session, frame: bytes) -> None:
        session.outbox.reply(frame)
        self._ready(session.outbox)
