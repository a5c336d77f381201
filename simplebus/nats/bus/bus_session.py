"""Where the subjects of NATS clients and the broker's classes meet.

Rule 1: what a client has to do with classes it does as a guest of the broker; who has nothing to do
with them is none.
Rule 2: nothing is kept or decided here. What is published goes through bindings, what is stored is
seen through the tap, what is acknowledged is the broker's.

    PUB ─► routes ─► Binding ─► Broker ─► tap ─► routes ─► MSG       what the other door publishes
                                  └─────► guest's outbox ─► MSG      with acknowledgements
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simplebus.core.authorization.session_permissions import check_subscribe
from simplebus.core.broker.broker import Broker
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.group.group import GroupMember
from simplebus.core.limits import MESSAGE_ID_MASK
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.events import (
    AckedOne,
    Nacked,
    Published,
    PublishedOne,
    StillWorking,
    SubscriptionAsked,
    Terminated,
    UnsubscriptionAsked,
)
from simplebus.core.protocol.requests import UnsubscribeRequest
from simplebus.core.session.session import Session
from simplebus.core.store.store import OnStored as StoreTap
from simplebus.nats.bus.acked import (
    ACKS,
    AckedSubscription,
    Deliveries,
    Receipt,
    Verdict,
    Wish,
    receipt,
    verdict,
    wish,
)
from simplebus.nats.bus.bindings import Binding, Bindings
from simplebus.nats.bus.bus_to_nats import Deliver, Tap
from simplebus.nats.bus.convert import Parcel
from simplebus.nats.bus.subjects import ASKS, CLASSES
from simplebus.nats.errors import NatsError, error_line
from simplebus.nats.limits import ACK_BYTES
from simplebus.nats.protocol.events import MixedBatch, Indexes, Pub, UniformBatch, Sub, iter_messages
from simplebus.nats.server.class_permissions import BoundClasses, asked_for
from simplebus.nats.server.routes import Listening, Routes
from simplebus.nats.server.session import NatsSession
from simplebus.nats.server.subscription import Subscription
from simplebus.nats.subjects import quote


class Classes:
    """Of one front and one broker."""

    def __init__(
        self,
        broker: Broker,
        routes: Routes,
        *,
        deliver: Deliver,
        weigh: Callable[[int], None],
        cut: Callable[[NatsSession, NatsError], None],
        fault: Callable[[Exception], None],
        bound: BoundClasses,
    ) -> None:
        self.broker = broker
        bound.of, bound.epoch, bound.called = self._bound_to, self._epoch, self._called
        bound.keep_letters_of = broker.store.class_registry.find_dead_letter_sources
        self.guests: dict[int, NatsSession] = {}
        """Whose a guest of the broker is, by its id there."""
        self._routes = routes
        self._refused = broker.refusal_counts
        self._deliver = deliver
        """Sends a message to whoever has subscribed to its subject."""
        self._weigh = weigh
        """Called with work that was done, as bytes of output: who makes much is read less of."""
        self._cut = cut
        """Has a session closed."""
        self._fault = fault
        """Called with what went wrong, through a fault of ours, in showing what is stored."""
        self._acks = _Acks(self, routes.table.names)
        routes.add(ACKS, self._acks)
        self.bindings = Bindings(
            routes,
            broker.store.subject_bindings,
            store=self._publish,
            frame_bytes_max=broker.settings.limits.frame_bytes,
        )
        self._tap = Tap(
            broker.store,
            broker.delayed_wakeups,
            routes,
            wanted=self._is_wanted,
            deliver=deliver,
            bound=bound,
        )
        broker.store.on_timed_stored = self._fenced(self._tap.note)
        self._see = self._fenced(self._tap.see)
        routes.heard = self._hear
        broker.inquiry_handler.listener_sources.append(Listening(routes))

    def _hear(self, is_heard: bool) -> None:
        """The first client has subscribed to something, or the last one does no longer."""
        self.broker.store.on_stored = self._see if is_heard else None

    def _fenced(self, look: StoreTap) -> StoreTap:
        """What is stored is stored: whatever goes wrong in looking at it costs its publisher, who
        may be of another door, nothing."""

        def look_safely(*stored: Any) -> None:
            try:
                look(*stored)
            except Exception as error:
                self._fault(error)

        return look_safely

    def _bound_to(self, subject: bytes) -> list[MessageClass]:
        """The classes that a subject is bound to."""
        sinks = self._routes.of(subject)
        found = [sink.class_id for sink in sinks if isinstance(sink, Binding)]
        return [self.broker.classes[id_] for id_ in found if id_ in self.broker.classes]

    def _called(self, channel: str) -> tuple[int, str]:
        """Id and name of the class whose messages without a channel are on this one."""
        name = channel.removeprefix("class.")
        class_id = (
            int(name) if name.isdecimal() else self.broker.store.class_id_by_name.get(name, -1)
        )
        cls = self.broker.classes.get(class_id)
        return (class_id, "" if class_id >= 0 else name) if cls is None else (class_id, cls.name)

    def _epoch(self) -> int:
        """Changes with what is bound, and with classes' names."""
        return self.bindings.changes + len(self.broker.store.class_id_by_name)

    def _is_wanted(self, subject: bytes) -> bool:
        """Whether a client has subscribed to what matches this subject."""
        return any(not isinstance(sink, Binding | _Acks) for sink in self._routes.of(subject))

    # Guests --------------------------------------------------------------------------------------

    def _enter(self, session: NatsSession) -> Deliveries:
        """A client's guest, and what it is sent."""
        deliveries = session.deliveries
        if deliveries is None:
            guest = self.broker.open_foreign_session(
                session.peer,
                user=(session.user.name or session.user.nkey) if session.user is not None else "",
                grants=session.rights,
            )
            self.guests[guest.session_id] = session
            deliveries = session.deliveries = Deliveries(session, guest, self.broker)
            session.outbox.more = deliveries
        return deliveries

    def leave(self, session: NatsSession) -> None:
        """A client is gone; what it held is given back."""
        if session.deliveries is not None:
            guest = session.deliveries.guest
            del self.guests[guest.session_id]
            self.broker.close_session(guest)
            session.deliveries = session.outbox.more = None

    def holds_back(self, session: NatsSession) -> bool:
        """Whether somebody waits for this client's acknowledgements."""
        deliveries = session.deliveries
        return deliveries is not None and self.broker.is_blocking_publishers(deliveries.guest)

    def keeps_little(self, session: NatsSession) -> bool:
        """Whether what waits of this client's messages is far from what may."""
        deliveries, most = session.deliveries, self.broker.settings.limits.pending_bytes
        return deliveries is None or 4 * deliveries.guest.parked_bytes <= most

    # Publishing ----------------------------------------------------------------------------------

    def _publish(self, session: NatsSession, class_id: int, parcel: Parcel) -> bool:
        """See `bindings.Store`."""
        self._weigh(parcel.weight)
        for refused in parcel.refused:
            self._refused[refused.reason] += refused.count
            self._tell(session, "Publish", refused.subject, refused.sentence)
        batch = parcel.batch
        if batch is None:
            return False
        published: PublishedOne | Published = Published(class_id, batch)
        if batch.count == 1:
            published = PublishedOne(class_id, batch.data.data)
        try:
            self.broker.apply_event(self._enter(session).guest, published)
        except RemoteProtocolError as error:
            self._cut(session, NatsError(error.reason, error.sentence))
        return True

    @staticmethod
    def _tell(session: NatsSession, what: str, subject: bytes, why: str) -> None:
        """Tell a client what is refused. Clients stay connected after no other error than this."""
        why = why.replace("'", "`").replace("\r", " ").replace("\n", " ")
        session.send(error_line(f"Permissions Violation for {what} to {quote(subject)} ({why})"))

    # Subscribing ---------------------------------------------------------------------------------

    @staticmethod
    def are_asked_for(subject: bytes) -> bool:
        """Whether who subscribes to this wants a class's messages, with acknowledgements."""
        return subject.startswith(ASKS)

    def subscribe(self, session: NatsSession, event: Sub) -> AckedSubscription | None:
        """What this asks for; None when it is refused, of which the client is told."""
        broker, store = self.broker, self.broker.store
        try:
            wanted = wish(event.subject, event.queue)
            self._check_asked(session, event.queue, wanted)
            _check_grants(session, event.queue, wanted)
            deliveries = self._enter(session)
            check_subscribe(deliveries.guest, wanted.class_, store.class_registry)
            found = store.class_registry.resolve_ids([wanted.class_])
            broker.connection_requests.quotas.check_class_quota(deliveries.guest, found)
            [(class_id, _)] = store.class_registry.declare_classes(
                [wanted.class_], creator=deliveries.guest.user
            )
            number = deliveries.number()
            subscription = AckedSubscription(
                session,
                event.subject,
                event.queue,
                event.sid,
                number=number,
                cls=broker.classes[class_id],
                asked=wanted.asked,
            )
            asked = SubscriptionAsked(0, class_id, number, wanted.asked)
            broker.connection_requests.subscribe_v2(deliveries.guest, asked)
        except RemoteProtocolError as error:
            self._refused[error.reason] += 1
            self._tell(session, "Subscription", event.subject, error.sentence)
            return None
        deliveries.add(subscription)
        return subscription

    def _check_asked(self, session: NatsSession, queue: bytes, wanted: Wish) -> None:
        """Raise RemoteProtocolError (unauthorized) where a client may not ask for this class."""
        grants, table = session.grants, self.broker.store.class_registry
        if grants is None:
            return
        [(class_id, name)] = table.resolve_ids([wanted.class_])
        cls = table.classes.get(class_id)
        asked = asked_for(
            class_id,
            name if cls is None else cls.name,
            classes=table.find_dead_letter_sources,
            behind=wanted.behind,
            is_new=cls is None,
        )
        if not grants.may_ask(asked, queue):
            raise RemoteProtocolError(
                Reason.UNAUTHORIZED, f"it may not ask for class {wanted.class_!r} so"
            )

    def unsubscribe(self, subscription: AckedSubscription) -> None:
        """No longer. What is not acknowledged is given back; a durable stays."""
        deliveries = subscription.session.deliveries
        if deliveries is not None and deliveries.remove(subscription):
            asked = UnsubscriptionAsked(0, subscription.number, UnsubscribeRequest())
            self.broker.apply_event(deliveries.guest, asked)

    # Acknowledgements ----------------------------------------------------------------------------

    def acknowledge(self, session: NatsSession, message: Pub) -> bool:
        """A client says something about a message. Returns whether it counts: who waits for an
        answer is told by that that there will be none."""
        self._weigh(ACK_BYTES)
        session.said_messages += 1
        session.said_bytes += len(message.body)
        deliveries, about = session.deliveries, receipt(message.subject)
        says = verdict(bytes(message.body[message.header_bytes :]))
        if about is None or says is None:
            self._refused[Reason.BAD_ACK] += 1
            return False
        if deliveries is None:
            self._refused[Reason.ACK_UNSUBSCRIBED] += 1
            return False
        guest, sequence, known = deliveries.guest, about.sequence, False
        for subscription in deliveries.named(about):
            number = subscription.number
            if self._is_held(guest, number, about, says):
                known = True
                first = sequence & MESSAGE_ID_MASK
                match says.kind:
                    case "ack":
                        self.broker.apply_event(guest, AckedOne(number, first, first + 1))
                    case "nack":
                        attempt = about.attempt
                        nack = Nacked(number, first, first + 1, says.delay, attempt=attempt)
                        self.broker.apply_event(guest, nack)
                    case "working":
                        working = StillWorking(number, first, first + 1, about.attempt)
                        self.broker.apply_event(guest, working)
                    case "terminate":
                        end = Terminated(number, first, first + 1, says.error, about.attempt)
                        self.broker.apply_event(guest, end)
        if not known and says.kind != "working" and (position := deliveries.left(about)):
            known = True  # To come again is what a nack asks for, and what it will do.
            if says.kind == "ack":
                position.ack(sequence, sequence + 1)
            elif says.kind == "terminate":
                position.terminate(sequence, sequence + 1, error=says.error)
            self.broker.store.trim_class(self.broker.classes[position.class_id])
        if not known:
            self._refused[Reason.ACK_UNSUBSCRIBED] += 1
        elif message.reply:
            self._answer(session, message.reply)
        return known

    def _answer(self, session: NatsSession, reply: bytes) -> None:
        """Say that what a client has said counts: where it may publish, or to itself alone."""
        answer = Pub(reply, b"", b"0", b"", 0, memoryview(b""))
        if session.grants is None or session.grants.publishing.one(reply):
            self._deliver(answer)
            return
        for sink in self._routes.of(reply):
            if isinstance(sink, Subscription) and sink.session is session and not sink.is_over:
                sink.one(answer, None)

    @staticmethod
    def _is_held(guest: Session, number: int, about: Receipt, says: Verdict) -> bool:
        """Whether what this subscription says of a message may count, or has counted already. Done
        is done, whichever sending it was of."""
        held, sequence = guest.subscriptions[number], about.sequence
        if sequence < held.window.floor:
            return True
        if says.kind == "ack":
            if isinstance(held, GroupMember):
                return held.has_in_flight(sequence, sequence + 1, 0)
            return sequence < held.window.cursor
        is_end = says.kind == "terminate"
        return held.has_in_flight(sequence, sequence + 1, about.attempt, include_waiting=is_end)


def _check_grants(session: NatsSession, queue: bytes, wanted: Wish) -> None:
    """Raise RemoteProtocolError (unauthorized) where a class may hold what a client is not to be
    sent: what one subscription passes over is nobody else's, so nothing is left out in silence."""
    if session.grants is None:
        return
    channels = wanted.asked.channels
    for channel in channels or [">"]:
        for pattern in session.grants.denied(channel.encode(), queue):
            if not pattern.startswith(CLASSES):
                raise RemoteProtocolError(
                    Reason.UNAUTHORIZED,
                    f"{pattern} is denied, and the filter {channel} lets some of it through"
                    if channels
                    else f"{pattern} is denied, expected a filter that keeps it out",
                )


class _Acks:
    """The sink of all acknowledgements."""

    def __init__(self, classes: Classes, names: list[bytes]) -> None:
        self._classes = classes
        self._names = names

    @property
    def is_ordered(self) -> bool:
        """Which acknowledgement comes first does not matter."""
        return False

    def one(self, message: Pub, origin: NatsSession | None) -> bool:
        return origin is not None and self._classes.acknowledge(origin, message)

    def many(self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None) -> None:
        if origin is None:
            return
        chosen = None if rows is None else set(rows.tolist())
        for at, message in enumerate(iter_messages(messages, self._names)):
            if chosen is None or at in chosen:
                self._classes.acknowledge(origin, message)
