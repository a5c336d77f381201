"""Adapter between NATS sessions and the classes of the broker.

A NATS client that uses classes has a local session at the broker. The adapter only connects the
parts: bindings store messages, `BusToNats` observes stored messages, and the broker handles acks.

    PUB ─► routes ─► SubjectBinding ─► Broker ─► BusToNats ─► routes ─► MSG
                                         └─────► local session's outbox ─► MSG, acked
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from simplebus.core.authorization.session_permissions import check_subscribe
from simplebus.core.broker.broker import Broker, PublishResult
from simplebus.core.broker.inquire_positions import truncate_text
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.group.group import GroupMember
from simplebus.core.limits import MESSAGE_ID_MASK
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.events import (
    AckedRange,
    NackReceived,
    SubscribeRequested,
    TerminateReceived,
    UnsubscribeRequested,
    WorkingReceived,
)
from simplebus.core.protocol.requests import UnsubscribeRequest
from simplebus.core.session.session import Session
from simplebus.core.store.store import OnStored
from simplebus.nats.bus.acked import (
    ACK_SUBJECT_PATTERN,
    AckCommand,
    AckedDeliveries,
    AckedSubscribeRequest,
    AckedSubscription,
    AckSubject,
    parse_ack_payload,
    parse_ack_subject,
    parse_subscribe,
)
from simplebus.nats.bus.bindings import SubjectBinding, SubjectBindings
from simplebus.nats.bus.bus_to_nats import BusToNats
from simplebus.nats.bus.convert import RefusedMessages
from simplebus.nats.bus.durable_replies import DurableReplies, PongReply, SubjectReply
from simplebus.nats.bus.publish_acks import (
    PublishError,
    encode_pub_ack,
    encode_publish_error,
)
from simplebus.nats.class_requests import REQUEST_PREFIX, SUBSCRIBE_PREFIX
from simplebus.nats.errors import NatsError, refusal_line
from simplebus.nats.limits import (
    ACK_COST_BYTES,
    ENCODED_MESSAGES_MAX,
    NACK_EXTRA_COST_BYTES,
    SPAN_SEARCH_COST_BYTES,
    TERMINATE_EXTRA_COST_BYTES,
)
from simplebus.nats.protocol import encode
from simplebus.nats.protocol.events import (
    Indexes,
    LazyMessages,
    MixedBatch,
    Pub,
    Sub,
    UniformBatch,
    iter_messages,
)
from simplebus.nats.server.class_permissions import SubjectClasses, class_request
from simplebus.nats.server.routes import ChannelListeners, SubjectRoutes
from simplebus.nats.server.session import NatsSession


class NatsClients(Protocol):
    """Part of the NATS server that the adapter uses."""

    def deliver(self, messages: Pub | UniformBatch | MixedBatch | LazyMessages) -> None:
        """Deliver stored messages to the subscriptions of their subjects. The messages must stay
        valid.
        """

    def deliver_reply(self, message: Pub, *, receiver: NatsSession | None) -> None:
        """Deliver a reply of the bus to the subscriptions of its subject: those of `receiver`, or
        all if it is None.
        """

    def add_read_cost(self, output_bytes: int) -> None:
        """Add the cost of work, as bytes of output; expensive clients are read less."""

    def disconnect(self, session: NatsSession, error: NatsError) -> None:
        """Schedule a session for closing."""

    def report_error(self, error: Exception) -> None:
        """Record an internal error in the delivery of stored messages."""


class BusAdapter:
    """Adapter of one NATS server to one broker."""

    def __init__(
        self,
        broker: Broker,
        routes: SubjectRoutes,
        *,
        clients: NatsClients,
        subject_classes: SubjectClasses,
    ) -> None:
        self.broker = broker
        (
            subject_classes.find_classes,
            subject_classes.get_change_count,
            subject_classes.resolve_class_subject,
        ) = self._find_classes, self._get_change_count, self._resolve_class_subject
        subject_classes.find_dead_letter_sources = (
            broker.store.class_registry.find_dead_letter_sources
        )
        self.nats_sessions: dict[int, NatsSession] = {}
        """NATS sessions by the id of their local session."""
        self._deliveries: dict[NatsSession, AckedDeliveries] = {}
        """Acked deliveries of the clients that use classes."""
        self._routes = routes
        self._refusal_counts = broker.refusal_counts
        self._clients = clients
        self._durable_replies = DurableReplies(broker)
        self._ack_sink = _AckSink(self, routes.table.names)
        routes.add(ACK_SUBJECT_PATTERN, self._ack_sink)
        self.bindings = SubjectBindings(routes, broker, self)
        self._bus_to_nats = BusToNats(
            broker.store,
            broker.delayed_wakeups,
            routes,
            has_subscriber=self._has_subscriber,
            deliver=clients.deliver,
            subject_classes=subject_classes,
        )
        broker.store.on_timed_stored = self._report_errors(self._bus_to_nats.on_delayed_stored)
        self._on_stored = self._report_errors(self._bus_to_nats.on_stored)
        routes.on_has_subscriptions = self._on_has_subscriptions
        broker.inquiry_handler.listener_sources.append(ChannelListeners(routes))

    def _on_has_subscriptions(self, has_subscriptions: bool) -> None:
        """Observe stored messages only while a NATS client has subscriptions."""
        self.broker.store.on_stored = self._on_stored if has_subscriptions else None

    def _report_errors(self, observer: OnStored) -> OnStored:
        """Wrap an observer of the store: its errors must not affect the publisher of a stored
        message.
        """

        def observe(*stored: Any) -> None:
            try:
                observer(*stored)
            except Exception as error:
                self._clients.report_error(error)

        return observe

    def _find_classes(self, subject: bytes) -> list[MessageClass]:
        """Return the classes that a subject is bound to."""
        class_ids = self.bindings.find_class_ids(subject)
        return [self.broker.classes[id_] for id_ in class_ids if id_ in self.broker.classes]

    def _resolve_class_subject(self, channel: str) -> tuple[int, str]:
        """Return id and name of the class that has this subject for messages without a channel."""
        name = channel.removeprefix("class.")
        class_id = (
            int(name) if name.isdecimal() else self.broker.store.class_id_by_name.get(name, -1)
        )
        cls = self.broker.classes.get(class_id)
        return (class_id, "" if class_id >= 0 else name) if cls is None else (class_id, cls.name)

    def _get_change_count(self) -> int:
        """Return a number that grows with changes of bindings and class names."""
        return self.bindings.change_count + self.broker.store.class_registry.name_change_count

    def _has_subscriber(self, subject: bytes) -> bool:
        """Return True if a client has a subscription that matches the subject."""
        return any(
            not isinstance(sink, SubjectBinding | _AckSink)
            for sink in self._routes.iter_sinks(subject)
        )

    # Local sessions ------------------------------------------------------------------------------

    def _open_deliveries(self, session: NatsSession) -> AckedDeliveries:
        """Return the acked deliveries of a client; opens its local session the first time."""
        deliveries = self._deliveries.get(session)
        if deliveries is None:
            local_session = self.broker.open_local_session(
                session.peer,
                user=session.user.name if session.user is not None else "",
                grants=session.class_grants,
                address=session.address,
                piece_messages_max=ENCODED_MESSAGES_MAX,
            )
            self.nats_sessions[local_session.session_id] = session
            deliveries = AckedDeliveries(session, local_session, self.broker)
            self._deliveries[session] = deliveries
            session.local_session, session.outbox.source = local_session, deliveries
        return deliveries

    def close_local_session(self, session: NatsSession) -> None:
        """Close the local session of a client; its unacked messages are redelivered."""
        local_session = session.local_session
        if local_session is not None:
            del self.nats_sessions[local_session.session_id]
            del self._deliveries[session]
            self.broker.close_session(local_session)
            session.local_session = session.outbox.source = None

    def is_blocking_publishers(self, session: NatsSession) -> bool:
        """Return True if publishers wait for acks of this client."""
        local_session = session.local_session
        return local_session is not None and self.broker.is_blocking_publishers(local_session)

    def has_few_parked_bytes(self, session: NatsSession) -> bool:
        """Return True if the client's blocked messages use at most a quarter of the limit."""
        local_session, limit_bytes = (
            session.local_session,
            self.broker.settings.limits.pending_bytes,
        )
        return local_session is None or 4 * local_session.parked_bytes <= limit_bytes

    # Publishing ----------------------------------------------------------------------------------

    def open_local_session(self, session: NatsSession) -> Session:
        """Return the local session of a client; opens it the first time."""
        return self._open_deliveries(session).local_session

    def refuse(self, session: NatsSession, refused: RefusedMessages) -> None:
        """Count messages that cannot be stored, and send the client an error."""
        self._refusal_counts[refused.reason] += refused.count
        session.send(refusal_line("Publish", refused.subject, refused.sentence))

    def disconnect(self, session: NatsSession, error: RemoteProtocolError) -> None:
        """Disconnect a client with too many blocked messages."""
        self._clients.disconnect(session, NatsError(error.reason, error.sentence))

    def add_read_cost(self, cost_bytes: int) -> None:
        """Add the cost of work for the current read, as bytes of output."""
        self._clients.add_read_cost(cost_bytes)

    def has_too_many_waiting(self, session: NatsSession) -> bool:
        """Return True if too many PubAcks of the client wait."""
        return self._durable_replies.has_too_many(session)

    def confirm(
        self, session: NatsSession, reply: bytes, cls: MessageClass, stored: PublishResult
    ) -> None:
        """Send a PubAck when the message is durable."""
        payload = encode_pub_ack(cls, stored)
        waiting = SubjectReply(session, reply, payload, stored.log_position)
        if not self._durable_replies.add_pub_ack(cls.class_id, waiting):
            self._send_reply(session, reply, payload)
        self._observe_journal()

    def refuse_confirmed(
        self, session: NatsSession, reply: bytes, cls: MessageClass, error: PublishError
    ) -> None:
        """Count a message that is not stored, and send its PubAck."""
        self._refusal_counts[error.reason] += 1
        self._send_reply(session, reply, encode_publish_error(cls, error))

    def defers_pong(self, session: NatsSession) -> bool:
        """Defer a PONG until the messages that the client has published are durable.

        Returns False if they are durable already, so that the caller must send the PONG.
        """
        local_session = session.local_session
        is_deferred = local_session is not None and self._durable_replies.add_pong(
            session, local_session.last_log_position
        )
        self._observe_journal()
        return is_deferred

    def _observe_journal(self) -> None:
        """Observe the journal only while replies wait."""
        observer = None if self._durable_replies.is_empty else self._send_durable_replies
        self.broker.on_journal_advanced = observer

    def _send_durable_replies(self) -> None:
        """Send the replies whose messages have become durable."""
        for reply in self._durable_replies.pop_durable():
            if isinstance(reply, PongReply):
                reply.session.send(encode.PONG * reply.count)
            elif not reply.session.is_closed:
                self._send_reply(reply.session, reply.subject, reply.payload)
        self._observe_journal()

    # Subscribing ---------------------------------------------------------------------------------

    @staticmethod
    def is_class_request(subject: bytes) -> bool:
        """Return True if the subject requests an acked subscription to a class."""
        return subject.startswith(SUBSCRIBE_PREFIX)

    def subscribe(self, session: NatsSession, event: Sub) -> AckedSubscription | None:
        """Create an acked subscription; None if it is refused with an error."""
        broker, store = self.broker, self.broker.store
        try:
            request = parse_subscribe(event.subject, event.queue)
            self._check_class_permission(session, event.queue, request)
            _check_denied_patterns(session, event.queue, request)
            deliveries = self._open_deliveries(session)
            check_subscribe(deliveries.local_session, request.class_ref, store.class_registry)
            declaration = store.class_registry.check_declaration([request.class_ref])
            broker.subscription_manager.quotas.check_new_classes(
                deliveries.local_session, declaration.ids_and_names, declaration.new_ids
            )
            [(class_id, _)] = broker.subscription_manager.declare_classes(
                deliveries.local_session,
                [request.class_ref],
                _describe_client(session),
            )
            number = deliveries.next_number()
            subscription = AckedSubscription(
                session,
                event.subject,
                event.queue,
                event.sid,
                number=number,
                cls=broker.classes[class_id],
                request=request.request,
            )
            subscribe_event = SubscribeRequested(0, class_id, number, request.request)
            broker.subscription_manager.subscribe_v2(deliveries.local_session, subscribe_event)
        except RemoteProtocolError as error:
            self._refusal_counts[error.reason] += 1
            session.send(refusal_line("Subscription", event.subject, error.sentence))
            return None
        deliveries.add(subscription)
        return subscription

    def _check_class_permission(
        self, session: NatsSession, queue: bytes, request: AckedSubscribeRequest
    ) -> None:
        """Raise RemoteProtocolError (unauthorized) if the client may not request this class."""
        grants, registry = session.subject_grants, self.broker.store.class_registry
        if grants is None:
            return
        [(class_id, name)] = registry.resolve_ids([request.class_ref])
        cls = registry.classes.get(class_id)
        requested = class_request(
            class_id,
            name if cls is None else cls.name,
            find_dead_letter_sources=registry.find_dead_letter_sources,
            option_tokens=request.option_tokens,
            is_new=cls is None,
        )
        if not grants.can_request_class(requested, queue):
            raise RemoteProtocolError(
                Reason.UNAUTHORIZED, f"no permission to subscribe to class {request.class_ref!r}"
            )

    def acked_subscriptions(self, session: NatsSession) -> list[AckedSubscription]:
        """Return the acked subscriptions of a client."""
        deliveries = self._deliveries.get(session)
        return [] if deliveries is None else list(deliveries.by_number.values())

    def end_some_acked_subscriptions(self, session: NatsSession) -> bool:
        """End the next acked subscriptions of a client that disconnects. Nothing more is delivered
        to the others.

        Returns:
            True if the client has more acked subscriptions.
        """
        deliveries = self._deliveries.get(session)
        if deliveries is None or not deliveries.by_number:
            return False
        session.outbox.source = None
        has_more = self.broker.end_some_subscriptions(deliveries.local_session)
        for subscription in deliveries.remove_ended():
            subscription.remove_from_session()
        return has_more

    def has_last_dead_letters(self, subscription: AckedSubscription) -> bool:
        """Return True if `append_some_last_dead_letters` has work to do."""
        deliveries = self._deliveries.get(subscription.session)
        return deliveries is not None and self.broker.has_last_dead_letters(
            deliveries.local_session, subscription.number
        )

    def append_some_last_dead_letters(self, subscription: AckedSubscription) -> bool:
        """Append some dead letters of a subscription that will end. Returns True if more are left,
        and there is space for them.
        """
        deliveries = self._deliveries.get(subscription.session)
        return deliveries is not None and self.broker.append_some_last_dead_letters(
            deliveries.local_session, subscription.number
        )

    def limit_messages(self, subscription: AckedSubscription) -> None:
        """Send no messages beyond the `max_messages` of an acked subscription."""
        deliveries = self._deliveries.get(subscription.session)
        if deliveries is not None:
            deliveries.limit_messages(subscription)

    def unsubscribe(self, subscription: AckedSubscription) -> None:
        """End an acked subscription. Unacked messages are redelivered; a durable stays."""
        deliveries = self._deliveries.get(subscription.session)
        if deliveries is not None and deliveries.remove(subscription):
            event = UnsubscribeRequested(0, subscription.number, UnsubscribeRequest())
            self.broker.apply_event(deliveries.local_session, event)

    # Acknowledgements ----------------------------------------------------------------------------

    def handle_ack(self, session: NatsSession, message: Pub) -> bool:
        """Handle an ack. Returns True if it is valid; otherwise a requester gets the status "no
        responders".
        """
        self._clients.add_read_cost(ACK_COST_BYTES)
        session.ack_count += 1
        session.ack_bytes += len(message.body)
        deliveries, ack = self._deliveries.get(session), parse_ack_subject(message.subject)
        command = parse_ack_payload(bytes(message.body[message.header_bytes :]))
        if ack is None or command is None:
            self._refusal_counts[Reason.BAD_ACK] += 1
            return False
        if deliveries is None:
            self._refusal_counts[Reason.ACK_UNSUBSCRIBED] += 1
            return False
        local_session, sequence, is_valid = deliveries.local_session, ack.sequence, False
        subscription = deliveries.find_subscription(ack)
        if subscription is not None:
            number = subscription.number
            self._clients.add_read_cost(_extra_ack_cost(subscription, command))
            is_valid = self._is_ack_valid(local_session, number, ack, command)
            if is_valid:
                self.broker.apply_event(local_session, _ack_event(number, ack, command))
        if (
            not is_valid
            and command.kind != "working"
            and (position := deliveries.find_released_position(ack))
        ):
            is_valid = True  # A nack needs no action: the message will be redelivered anyway.
            self._clients.add_read_cost(SPAN_SEARCH_COST_BYTES)
            if command.kind == "ack":
                is_valid = position.unacked.ack_released(sequence)
                self.broker.store.position_changes.record_progress(position)
            elif command.kind == "terminate":
                is_valid = position.terminate_released(sequence, command.error)
            self.broker.store.trim_class(self.broker.classes[position.class_id])
        if not is_valid:
            self._refusal_counts[Reason.ACK_UNSUBSCRIBED] += 1
        elif message.reply:
            self._reply_when_stored(session, message.reply)
        return is_valid

    def _reply_when_stored(self, session: NatsSession, reply: bytes) -> None:
        """Send an empty reply when the effect of an ack is stored."""
        waiting = SubjectReply(session, reply, b"", self.broker.request_progress())
        if not self._durable_replies.add_ack_reply(waiting):
            self._send_reply(session, reply, b"")
        self._observe_journal()

    def _send_reply(self, session: NatsSession, reply: bytes, payload: bytes) -> None:
        """Send a reply of the bus on a reply subject. If the client may not publish there, only the
        client receives it.
        """
        message = Pub(reply, b"", b"%d" % len(payload), b"", 0, memoryview(payload))
        grants = session.subject_grants
        is_allowed = grants is None or grants.publish_cache.get(reply)
        self._clients.deliver_reply(message, receiver=None if is_allowed else session)

    @staticmethod
    def _is_ack_valid(
        local_session: Session, number: int, ack: AckSubject, command: AckCommand
    ) -> bool:
        """Return True if the message is in flight to this subscription or was already acked.

        An ack is valid for any attempt. Other commands must name the current attempt.
        """
        subscription, sequence = local_session.subscriptions[number], ack.sequence
        if sequence < subscription.window.floor:
            return True
        if command.kind == "ack":
            if isinstance(subscription, GroupMember):
                return subscription.has_in_flight(sequence, sequence + 1, 0)
            return sequence < subscription.window.cursor
        return subscription.has_in_flight(
            sequence, sequence + 1, ack.attempt, include_waiting=command.kind == "terminate"
        )


def _extra_ack_cost(subscription: AckedSubscription, command: AckCommand) -> int:
    """Return what an ack costs besides ACK_COST_BYTES. Each ack in a group may assign messages."""
    match command.kind:
        case "terminate":
            return TERMINATE_EXTRA_COST_BYTES
        case "ack" if not subscription.queue:
            return 0
        case _:
            return NACK_EXTRA_COST_BYTES


def _ack_event(
    number: int, ack: AckSubject, command: AckCommand
) -> AckedRange | NackReceived | WorkingReceived | TerminateReceived:
    """Return the event of an ack for the subscription with this number."""
    first = ack.sequence & MESSAGE_ID_MASK
    match command.kind:
        case "nack":
            return NackReceived(
                number, first, first + 1, command.delay_seconds, attempt=ack.attempt
            )
        case "working":
            return WorkingReceived(number, first, first + 1, ack.attempt)
        case "terminate":
            return TerminateReceived(number, first, first + 1, command.error, ack.attempt)
        case _:
            return AckedRange(number, first, first + 1)


def _describe_client(session: NatsSession) -> str:
    owner = f" of user {truncate_text(session.user.name)!r}" if session.user is not None else ""
    return f"NATS client {session.client_id}{owner} ({session.peer})"


def _check_denied_patterns(
    session: NatsSession, queue: bytes, request: AckedSubscribeRequest
) -> None:
    """Raise RemoteProtocolError (unauthorized) if the class may contain denied channels.

    An acked subscription cannot skip messages: no other subscription would receive them.
    """
    if session.subject_grants is None:
        return
    channels = request.request.channels
    for channel in channels or [">"]:
        for pattern in session.subject_grants.denied_patterns(channel.encode(), queue):
            if not pattern.startswith(REQUEST_PREFIX):
                raise RemoteProtocolError(
                    Reason.UNAUTHORIZED,
                    f"{pattern} is denied, and the filter {channel} overlaps it"
                    if channels
                    else f"{pattern} is denied, expected a filter that excludes it",
                )


class _AckSink:
    """Sink of all acks."""

    delivery_filters: tuple[()] = ()  # No client receives the messages.

    def __init__(self, bus_adapter: BusAdapter, subject_names: list[bytes]) -> None:
        self._bus_adapter = bus_adapter
        self._subject_names = subject_names

    @property
    def is_ordered(self) -> bool:
        """False: the order of acks does not matter."""
        return False

    @property
    def order_key(self) -> _AckSink:
        """The sink itself: acks have no other sink."""
        return self

    def further_cost_bytes(self, count: int) -> int:
        """Return 0: no client receives the messages."""
        return 0

    def receiving_sessions(self) -> list[NatsSession]:
        """Return no session."""
        return []

    def deliver(self, message: Pub, origin: NatsSession | None) -> bool:
        return origin is not None and self._bus_adapter.handle_ack(origin, message)

    def deliver_in_steps(
        self, message: Pub, origin: NatsSession | None
    ) -> Generator[None, None, bool]:
        yield from ()
        return self.deliver(message, origin)

    def deliver_batch(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> None:
        if origin is None:
            return
        chosen_rows = None if rows is None else set(rows.tolist())
        for row, message in enumerate(iter_messages(messages, self._subject_names)):
            if chosen_rows is None or row in chosen_rows:
                self._bus_adapter.handle_ack(origin, message)
