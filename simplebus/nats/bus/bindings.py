"""Storing of messages on bound subjects in classes.

A class is one sink for all its subjects and stores a message once. Messages that cannot be stored
are counted by reason and the publisher gets an error. Only messages of NATS clients are stored: a
message that came from a class is not stored in a class again.

A message with a reply subject gets a PubAck, as from a stream of JetStream. Such a message does not
wait for space: if the class is full, its publisher gets an error at once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Protocol

import numpy as np

from simplebus.core.broker.broker import Broker, PublishResult
from simplebus.core.channel.subscription_index import SubscriptionIndex
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.subject_bindings import RESERVED_SUBJECT_PREFIXES
from simplebus.core.protocol.events import PublishedBatch
from simplebus.core.session.session import Session
from simplebus.nats.bus.convert import MessageBatch, MessageConverter, RefusedMessages
from simplebus.nats.bus.publish_acks import (
    MESSAGE_ID_LINE,
    PublishError,
    check_publish_headers,
    make_publish_error,
    parse_publish_headers,
    too_many_waiting,
)
from simplebus.nats.limits import HEADER_COST_FACTOR, SINGLE_STORE_COST_BYTES
from simplebus.nats.protocol.events import (
    Indexes,
    MixedBatch,
    Pub,
    UniformBatch,
    iter_messages,
)
from simplebus.nats.server.routes import SubjectRoutes
from simplebus.nats.server.session import NatsSession
from simplebus.nats.subjects import index_key

_RESERVED = tuple(start.encode() for start in RESERVED_SUBJECT_PREFIXES)


class Publishers(Protocol):
    """NATS clients that publish to classes."""

    def open_local_session(self, session: NatsSession) -> Session:
        """Return the session of a client at the broker; opens it the first time."""

    def refuse(self, session: NatsSession, refused: RefusedMessages) -> None:
        """Count messages that cannot be stored, and send the client an error."""

    def disconnect(self, session: NatsSession, error: RemoteProtocolError) -> None:
        """Disconnect a client with too many blocked messages."""

    def add_read_cost(self, cost_bytes: int) -> None:
        """Add the cost of work for the current read, as bytes of output."""

    def confirm(
        self, session: NatsSession, reply: bytes, cls: MessageClass, stored: PublishResult
    ) -> None:
        """Send a PubAck when the message is durable."""

    def refuse_confirmed(
        self, session: NatsSession, reply: bytes, cls: MessageClass, error: PublishError
    ) -> None:
        """Count a message that is not stored, and send its PubAck."""

    def has_too_many_waiting(self, session: NatsSession) -> bool:
        """Return True if too many PubAcks of the client wait."""


class SubjectBinding:
    """Sink of one class."""

    delivery_filters: tuple[()] = ()  # No client receives the messages.

    def __init__(
        self,
        class_id: int,
        subject_names: list[bytes],
        broker: Broker,
        publishers: Publishers,
    ) -> None:
        """`subject_names` are the subjects by number."""
        self.class_id = class_id
        self.subjects: dict[bytes, None] = {}
        """Subjects bound to the class."""
        self._subject_names = subject_names
        self._broker = broker
        self._publishers = publishers
        self._converter = MessageConverter(
            class_id, frame_bytes_max=broker.settings.limits.frame_bytes
        )

    @property
    def is_ordered(self) -> bool:
        """True: a class keeps the order of a publisher's messages."""
        return True

    @property
    def order_key(self) -> SubjectBinding:
        """The binding itself: a class has one."""
        return self

    def further_cost_bytes(self, count: int) -> int:
        """Return 0: no client receives the messages."""
        return 0

    def receiving_sessions(self) -> list[NatsSession]:
        """Return no session."""
        return []

    def deliver(self, message: Pub, origin: NatsSession | None) -> bool:
        if origin is None or not self.subjects or message.subject.startswith(_RESERVED):
            return False
        if message.reply or message.header_bytes:
            self._publishers.add_read_cost(HEADER_COST_FACTOR * message.header_bytes)
            if message.reply and self._sends_pub_acks():
                self._publish_confirmed(message, origin)
                return True
            if MESSAGE_ID_LINE in bytes(message.body[: message.header_bytes]) and (
                self._publish_with_id(message, origin)
            ):
                return True
        try:
            channel, frame = self._converter.convert_message(message)
        except RemoteProtocolError as error:
            refused = RefusedMessages(error.reason, error.sentence, message.subject, 1)
            self._publishers.refuse(origin, refused)
            return False
        local_session = origin.local_session or self._publishers.open_local_session(origin)
        try:
            self._broker.publish_encoded(local_session, self.class_id, channel, memoryview(frame))
        except RemoteProtocolError as error:
            self._publishers.disconnect(origin, error)
        return True

    def _sends_pub_acks(self) -> bool:
        cls, settings = self._broker.classes[self.class_id], self._broker.settings
        return settings.settings_for_class(self.class_id, cls.name).pub_ack is not False

    def _publish_confirmed(self, message: Pub, origin: NatsSession) -> None:
        """Store a message and send its PubAck."""
        cls = self._broker.classes[self.class_id]
        self._publishers.add_read_cost(SINGLE_STORE_COST_BYTES)
        try:
            headers = parse_publish_headers(bytes(message.body[: message.header_bytes]))
            check_publish_headers(headers, cls)
            if self._publishers.has_too_many_waiting(origin):
                raise too_many_waiting()
            try:
                stored = self._store_or_raise(message, origin, headers.message_id)
            except RemoteProtocolError as error:
                raise make_publish_error(error) from None
        except PublishError as error:
            self._publishers.refuse_confirmed(origin, message.reply, cls, error)
        else:
            self._publishers.confirm(origin, message.reply, cls, stored)

    def _publish_with_id(self, message: Pub, origin: NatsSession) -> bool:
        """Store a message with an id that gets no PubAck. Returns False if that is not possible
        now, for example because it must wait for space.
        """
        headers = parse_publish_headers(bytes(message.body[: message.header_bytes]))
        try:
            self._store_or_raise(message, origin, headers.message_id)
        except RemoteProtocolError:
            return False
        return True

    def _store_or_raise(
        self, message: Pub, origin: NatsSession, message_id: bytes
    ) -> PublishResult:
        channel, frame = self._converter.convert_message(message)
        local_session = origin.local_session or self._publishers.open_local_session(origin)
        return self._broker.publish_or_refuse(
            local_session, self.class_id, channel, memoryview(frame), message_id
        )

    def deliver_in_steps(
        self, message: Pub, origin: NatsSession | None
    ) -> Generator[None, None, bool]:
        yield from ()
        return self.deliver(message, origin)

    def deliver_batch(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> None:
        if origin is None or not self.subjects:
            return
        if isinstance(messages, UniformBatch):
            if messages.first_message.subject.startswith(_RESERVED):
                return
            if self._must_publish_singly(messages):
                for message in iter_messages(messages):
                    self.deliver(message, origin)
                return
        elif any(subject.startswith((b"*", b">")) for subject in self.subjects):
            rows = self._without_reserved(messages, rows)
            if not rows.size:
                return
        batch = self._converter.convert_batch(messages, rows, self._names_for(messages))
        self._store_batch(origin, batch)

    def _must_publish_singly(self, messages: UniformBatch) -> bool:
        """Return True if a message needs a PubAck or deduplication."""
        head = messages.first_message
        if head.reply and self._sends_pub_acks():
            return True
        begin = messages.body_column
        headers = messages.rows[:, begin : begin + head.header_bytes]
        return bool(head.header_bytes) and MESSAGE_ID_LINE in headers.tobytes()

    def _store_batch(self, origin: NatsSession, messages: MessageBatch) -> None:
        """Store a batch, and send the publisher errors for the refused messages."""
        self._publishers.add_read_cost(messages.cost_bytes)
        for refused in messages.refused:
            self._publishers.refuse(origin, refused)
        if messages.frames is None:
            return
        published = PublishedBatch(self.class_id, messages.frames, messages.columns)
        try:
            self._broker.apply_event(self._publishers.open_local_session(origin), published)
        except RemoteProtocolError as error:
            self._publishers.disconnect(origin, error)

    def _names_for(self, messages: UniformBatch | MixedBatch) -> Sequence[bytes]:
        """Return the subjects of a batch by number."""
        names = messages.subject_names if isinstance(messages, MixedBatch) else None
        return self._subject_names if names is None else names

    def _without_reserved(self, messages: MixedBatch, rows: Indexes | None) -> Indexes:
        numbers = messages.subject_numbers if rows is None else messages.subject_numbers[rows]
        names = self._names_for(messages)
        reserved = [n for n in set(numbers.tolist()) if names[n].startswith(_RESERVED)]
        allowed_indexes = np.flatnonzero(~np.isin(numbers, reserved))
        return allowed_indexes if rows is None else rows[allowed_indexes]


class SubjectBindings:
    """Bindings of all classes, kept in step with the broker."""

    def __init__(self, routes: SubjectRoutes, broker: Broker, publishers: Publishers) -> None:
        self._routes = routes
        self._broker = broker
        self._publishers = publishers
        self._by_class_id: dict[int, SubjectBinding] = {}
        """Bindings by class id."""
        self._class_id_index = SubscriptionIndex[int](check=lambda pattern: pattern)
        """Class ids by subject: the routes of a subject may have very many subscriptions."""
        self.change_count = 0
        """Number of changes of the bindings."""
        broker.store.subject_bindings.add_observer(self._on_change)

    def __len__(self) -> int:
        """Return the number of pairs of class and subject."""
        return sum(len(binding.subjects) for binding in self._by_class_id.values())

    def find_class_ids(self, subject: bytes) -> Iterable[int]:
        """Return the ids of the classes that a subject is bound to, each once."""
        return dict.fromkeys(self._class_id_index.match(index_key(subject)))

    def _on_change(self, class_id: int, subject: str, is_bound: bool) -> None:
        binding = self._by_class_id.get(class_id)
        if binding is None:
            binding = SubjectBinding(
                class_id, self._routes.table.names, self._broker, self._publishers
            )
            self._by_class_id[class_id] = binding
        name = subject.encode()
        self.change_count += 1
        if is_bound:
            binding.subjects[name] = None
            self._routes.add(name, binding)
            self._class_id_index.insert(index_key(name), class_id)
        else:
            del binding.subjects[name]
            self._routes.remove(name, binding)
            self._class_id_index.remove(index_key(name), class_id)
        self._routes.has_repeated_sinks = any(
            len(binding.subjects) > 1 for binding in self._by_class_id.values()
        )
