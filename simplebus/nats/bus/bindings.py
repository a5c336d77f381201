"""Storing of messages on bound subjects in classes.

A class is one sink for all its subjects and stores a message once. Messages that cannot be stored
are counted by reason and the publisher gets an error. Only messages of NATS clients are stored: a
message that came from a class is not stored in a class again.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from simplebus.core.message_class.subject_bindings import (
    RESERVED_SUBJECT_PREFIXES,
    ClassSubjectBindings,
)
from simplebus.nats.bus.convert import MessageBatch, MessageConverter
from simplebus.nats.protocol.events import Indexes, MixedBatch, Pub, UniformBatch
from simplebus.nats.server.routes import SubjectRoutes
from simplebus.nats.server.session import NatsSession

_RESERVED = tuple(start.encode() for start in RESERVED_SUBJECT_PREFIXES)


class MessageStore(Protocol):
    """Stores converted messages of NATS clients in classes."""

    def store_message(
        self, session: NatsSession, class_id: int, message: Pub, converter: MessageConverter
    ) -> bool:
        """Store a message. Returns False if it was refused."""

    def store_batch(self, session: NatsSession, class_id: int, messages: MessageBatch) -> None:
        """Store a batch, and tell the publisher which messages were refused."""


class SubjectBinding:
    """Sink of one class."""

    def __init__(
        self,
        class_id: int,
        subject_names: list[bytes],
        store: MessageStore,
        converter: MessageConverter,
    ) -> None:
        """`subject_names` are the subjects by number."""
        self.class_id = class_id
        self.subjects: dict[bytes, None] = {}
        """Subjects bound to the class."""
        self._subject_names = subject_names
        self._store = store
        self._converter = converter

    @property
    def is_ordered(self) -> bool:
        """True: a class keeps the order of a publisher's messages."""
        return True

    def deliver(self, message: Pub, origin: NatsSession | None) -> bool:
        if origin is None or message.subject.startswith(_RESERVED):
            return False
        return self._store.store_message(origin, self.class_id, message, self._converter)

    def deliver_batch(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> None:
        if origin is None:
            return
        if isinstance(messages, UniformBatch):
            if messages.first_message.subject.startswith(_RESERVED):
                return
        elif any(subject.startswith((b"*", b">")) for subject in self.subjects):
            rows = self._without_reserved(messages, rows)
            if not rows.size:
                return
        batch = self._converter.convert_batch(messages, rows, self._subject_names)
        self._store.store_batch(origin, self.class_id, batch)

    def _without_reserved(self, messages: MixedBatch, rows: Indexes | None) -> Indexes:
        numbers = messages.subject_numbers if rows is None else messages.subject_numbers[rows]
        reserved = [
            n for n in set(numbers.tolist()) if self._subject_names[n].startswith(_RESERVED)
        ]
        kept = np.flatnonzero(~np.isin(numbers, reserved))
        return kept if rows is None else rows[kept]


class SubjectBindings:
    """Bindings of all classes, kept in step with the broker."""

    def __init__(
        self,
        routes: SubjectRoutes,
        bound: ClassSubjectBindings,
        *,
        store: MessageStore,
        frame_bytes_max: int,
    ) -> None:
        self._routes = routes
        self._store = store
        self._frame_bytes_max = frame_bytes_max
        self._by_class_id: dict[int, SubjectBinding] = {}
        """Bindings by class id."""
        self.change_count = 0
        """Number of changes of the bindings."""
        bound.add_observer(self._on_change)

    def __len__(self) -> int:
        """Return the number of pairs of class and subject."""
        return sum(len(binding.subjects) for binding in self._by_class_id.values())

    def _on_change(self, class_id: int, subject: str, is_bound: bool) -> None:
        binding = self._by_class_id.get(class_id)
        if binding is None:
            converter = MessageConverter(class_id, frame_bytes_max=self._frame_bytes_max)
            binding = SubjectBinding(class_id, self._routes.table.names, self._store, converter)
            self._by_class_id[class_id] = binding
        name = subject.encode()
        self.change_count += 1
        if is_bound:
            binding.subjects[name] = None
            self._routes.add(name, binding)
        else:
            del binding.subjects[name]
            self._routes.remove(name, binding)
        self._routes.has_repeated_sinks = any(
            len(each.subjects) > 1 for each in self._by_class_id.values()
        )
