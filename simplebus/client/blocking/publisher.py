"""Publishing half of `BlockingBus`.

If a publishing call raises, it has published nothing, except for RefusedError and
BusConnectionError. Messages are written before the call returns, because no other task would write
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import groupby
from time import monotonic
from typing import Any, Unpack

from simplebus.client.blocking.connection import BlockingClientConnection
from simplebus.client.core import arguments
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
from simplebus.client.tracing.interface import Tracing
from simplebus.core.protocol.envelope_batch import Envelope


class BlockingPublisher:
    """Publishing methods of a blocking bus."""

    tracing: Tracing | None = None
    """Internal."""

    def __init__(self, connection: BlockingClientConnection, registry: Registry) -> None:
        self.connection = connection
        """Internal."""
        self._core = connection.core
        self._outgoing = connection.core.send_queue
        self._registry = registry
        self._outbound = MessageBuilder(connection.core, registry)
        self._routes = self._outbound.route_by_type

    @property
    def durability(self) -> DurabilityName:
        """Durability of confirmed messages at the connected bus: "memory", "os" or "disk"."""
        return DURABILITY_NAMES[self._core.durability]

    def publish(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        confirm: bool = True,
        **about: Unpack[PublishOptions],
    ) -> None:
        """Publish a message and wait until the bus has confirmed it.

        Args:
            message: Value of a type that is bound to a class, or bytes if `class_id` is given.
            class_id: Id or name of the class, for bytes.
            confirm: Wait for the confirm. If False, the call returns when the message is written.
            about: Metadata of the message: `channel`, `key`, `headers`, `expires` and `delay`
                in seconds.

        Raises:
            RefusedError: The bus refuses the message.
            UnboundTypeError: The type is bound to no class.
            LocalProtocolError: The protocol cannot carry the message, for example because it is
                too long.
            ValueError: The metadata or the class id is invalid.
            TypeError: The payload or the metadata has the wrong type.
            BusConnectionError: The connection is lost for good.
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
        """Publish a message without waiting, except for the id of a class that is used for the
        first time.

        Args:
            message: Value of a type that is bound to a class, or bytes if `class_id` is given.
            class_id: Id or name of the class, for bytes.
            about: Metadata of the message, as for `publish`.

        Returns:
            The position of the message: the number of messages that this client published before.

        Raises:
            BusFullError: The call would have to wait: too many bytes are unconfirmed.
            Exception: The errors of `publish`.
        """
        payload, id_, envelope = self._prepare(message, class_id, about)
        self.connection.check_open()
        with self.connection.thread_guard:
            is_full = self._outgoing.queued_bytes and not self._core.has_credit
            if is_full or self.connection.is_disconnected:
                self.connection.poll()
                if self._outgoing.queued_bytes and not self._core.has_credit:
                    raise BusFullError("nothing was published: too many bytes wait to be confirmed")
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
        """Publish many messages at once.

        Args:
            messages: Values of bound types, or bytes if `class_id` is given.
            class_id: Id or name of the class, for bytes.
            confirm: Wait until the bus has confirmed all of them. If False, the call returns
                when they are written.
            about: Metadata of all messages, as for `publish`.

        Raises:
            ExceptionGroup: Contains a RefusedError for each message that the bus refuses.
            Exception: The errors of `publish`. Nothing is published then.
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

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published so far is confirmed, and every ack so far is written.

        Args:
            timeout: Seconds to wait. None waits forever.

        Raises:
            TimeoutError: The time is over. Later calls still send the unconfirmed messages.
            ExceptionGroup: Contains the refusals that no call has raised yet.
            BusConnectionError: The connection is lost for good.
        """
        seconds = arguments.timeout_or_infinity("timeout", timeout)
        if not self.connection.flush(monotonic() + seconds):
            count = self._core.published_position - self._core.confirmed_position
            raise TimeoutError(
                f"flush did not end within {seconds:g} s: {count:,} messages are not confirmed"
            )
        if refused := self.connection.confirms.pop_unclaimed():
            raise refused

    def statistics(self) -> ClientStatistics:
        """Return a snapshot of the counters of this client."""
        return self._core.statistics()

    # Classes -------------------------------------------------------------------------------------

    def resolve_class_id(self, class_reference: Binding[Any] | int | str) -> int:
        """Return the id of a class; ask the bus if only the name is known. Internal."""
        class_id = self._outbound.find_class_id(class_reference)
        if class_id is None:
            assert not isinstance(class_reference, int)
            self.connection.request(partial(self._outbound.name_class, class_reference))
            class_id = self._outbound.store_class_id(class_reference)
        return class_id

    def _new_route(self, type_: type) -> PublishRoute:
        """Find encoder and class id of a type that is published for the first time."""
        binding = self._registry.bindings[type_]
        return self._outbound.add_route(binding, self.resolve_class_id(binding))

    def _prepare(
        self, message: Any, class_id: int | str | None, about: PublishOptions
    ) -> tuple[bytes, int, Envelope | None]:
        """Return payload, class id and envelope of a message."""
        if class_id is None:
            encode, id_ = self._routes.get(type(message)) or self._new_route(type(message))
            message = encode(message)
        else:
            id_ = class_id if type(class_id) is int else self.resolve_class_id(class_id)
        return message, id_, self._outbound.build_envelope(**about) if about else None
