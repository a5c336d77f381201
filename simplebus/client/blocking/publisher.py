"""Publishing without an event loop: what a program calls.

Rule 1: when a call that publishes raises, nothing of it was published; only RefusedError and
BusConnectionError say otherwise.
Rule 2: what is published is written before the call returns: nobody else would do it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import groupby
from typing import Any, Unpack

from simplebus.client.blocking.connection import BlockingClientConnection
from simplebus.client.core.client import ClientStatistics
from simplebus.client.message_builder import (
    DURABILITY_NAMES,
    BusFullError,
    DurabilityName,
    MessageBuilder,
    PublishOptions,
    PublishRoute,
)
from simplebus.client.message_types import Binding, Registry
from simplebus.client.pending_confirms import group_refusals
from simplebus.core.protocol.envelope_batch import Envelope


class BlockingPublisher:
    """The half of a bus that publishes."""

    def __init__(self, connection: BlockingClientConnection, registry: Registry) -> None:
        self.connection = connection
        """For this package."""
        self._core = connection.core
        self._outgoing = connection.core.send_queue
        self._registry = registry
        self._outbound = MessageBuilder(connection.core, registry)
        self._routes = self._outbound.route_by_type

    @property
    def durability(self) -> DurabilityName:
        """Where a message is when it is confirmed, by the bus that was connected to last."""
        return DURABILITY_NAMES[self._core.durability]

    def publish(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        confirm: bool = True,
        **about: Unpack[PublishOptions],
    ) -> None:
        """Publish a message, and return when the bus has confirmed it.

        Arguments and errors are those of `simplebus.Bus.publish`. Without confirm it returns when
        the message is written.
        """
        payload, id_, envelope = self._prepare(message, class_id, about)
        self.connection.check_open()
        self._publish(payload, id_, envelope, confirm=confirm)

    def _publish(
        self, payload: bytes, class_id: int, envelope: Envelope | None, *, confirm: bool
    ) -> None:
        with self.connection.thread_guard:
            position = self._core.publish(payload, class_id, envelope)
            if not confirm:
                self.connection.write_all()
            elif refused := self.connection.wait_confirmed(position, position):
                raise refused[0]

    def publish_nowait(
        self, message: object, *, class_id: int | str | None = None, **about: Unpack[PublishOptions]
    ) -> int:
        """Publish a message without waiting, but for the id of a class that is used for the first
        time. Returns its position: how many were published before.

        Raises BusFullError when it would have to wait, and what `publish` does.
        """
        payload, id_, envelope = self._prepare(message, class_id, about)
        self.connection.check_open()
        with self.connection.thread_guard:
            is_full = self._outgoing.queued_bytes and not self._core.has_credit
            if is_full or self.connection.is_disconnected:
                self.connection.poll()
                if self._outgoing.queued_bytes and not self._core.has_credit:
                    raise BusFullError("nothing was published: too much waits to be confirmed")
            position = self._core.publish(payload, id_, envelope)
            self.connection.write_now()
            return position

    def publish_many(
        self,
        messages: Iterable[object],
        *,
        class_id: int | str | None = None,
        confirm: bool = True,
        **about: Unpack[PublishOptions],
    ) -> None:
        """Publish many messages at once, as `publish` does each.

        Raises an ExceptionGroup of RefusedError for those that the bus refuses.
        """
        runs: list[tuple[int, list[Any]]] = []
        if class_id is None:
            for type_, run in groupby(messages, type):
                encode, id_ = self._routes.get(type_) or self._new_route(type_)
                runs.append((id_, list(map(encode, run))))
        else:
            runs.append((self.resolve_class_id(class_id), list(messages)))
        envelope = self._outbound.build_envelope(**about) if about else None
        self.connection.check_open()
        with self.connection.thread_guard:
            first = self._core.published_position
            self._core.publish_runs(runs, envelope)
            if not confirm or self._core.published_position == first:
                self.connection.write_all()
            elif refused := self.connection.wait_confirmed(
                first, self._core.published_position - 1
            ):
                raise group_refusals(refused)

    def flush(self) -> None:
        """Wait until the bus has confirmed everything published so far, and acknowledgements so
        far are written. Raises an ExceptionGroup of what was refused and not told yet."""
        self.connection.flush()
        if refused := self.connection.confirms.pop_unclaimed():
            raise refused

    def statistics(self) -> ClientStatistics:
        """A snapshot of this client."""
        return self._core.statistics()

    # Classes -------------------------------------------------------------------------------------

    def resolve_class_id(self, what: Binding[Any] | int | str) -> int:
        """The id of a class, which the bus is asked for if it has a name. For this package."""
        known = self._outbound.find_class_id(what)
        if known is None:
            assert not isinstance(what, int)
            self.connection.request(partial(self._outbound.name_class, what))
            known = self._outbound.store_class_id(what)
        return known

    def _new_route(self, type_: type) -> PublishRoute:
        """The way of a type's values, found for the first time."""
        binding = self._registry.bindings[type_]
        return self._outbound.add_route(binding, self.resolve_class_id(binding))

    def _prepare(
        self, message: Any, class_id: int | str | None, about: PublishOptions
    ) -> tuple[bytes, int, Envelope | None]:
        """What the core is given."""
        if class_id is None:
            encode, id_ = self._routes.get(type(message)) or self._new_route(type(message))
            message = encode(message)
        else:
            id_ = class_id if type(class_id) is int else self.resolve_class_id(class_id)
        return message, id_, self._outbound.build_envelope(**about) if about else None
