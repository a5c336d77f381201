"""Publishing half of `Bus`, under trio and asyncio.

If a publishing call raises, it has published nothing, except for RefusedError and
BusConnectionError. A call that is cancelled while it waits for its confirm has published; a call
that is cancelled while it waits for room has not. A message that is published after `handle`
reaches that handler, because its subscription is sent first.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import groupby
from typing import Any, Unpack

import anyio.lowlevel

from simplebus.client.aio.connection import ClientConnection
from simplebus.client.core.client import ClientStatistics
from simplebus.client.core.publish_buffer import as_bytes
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


class Publisher:
    """Publishing methods of a bus."""

    tracing: Tracing | None = None
    """Internal."""

    def __init__(self, connection: ClientConnection, registry: Registry) -> None:
        self.connection = connection
        """Internal."""
        self._core = connection.core
        self._publish_buffer = connection.core.publish_buffer
        self._writer = connection.writer
        self._registry = registry
        self._outbound = MessageBuilder(connection.core, registry)
        self._routes, self._envelope = self._outbound.route_by_type, self._outbound.build_envelope
        self._append = connection.core.publish

    @property
    def durability(self) -> DurabilityName:
        """Durability of confirmed messages at the connected bus: "memory", "os" or "disk"."""
        return DURABILITY_NAMES[self._core.durability]

    async def publish(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        confirm: bool = True,
        **about: Unpack[PublishOptions],
    ) -> None:
        """Publish a message and wait until the bus has confirmed it.

            await bus.publish(ShopCreated("Ada's Books"), channel="shops.eu", expires=60)
            await bus.publish(b"hello", class_id=1)

        Args:
            message: Value of a type that is bound to a class, or bytes if `class_id` is given.
            class_id: Id or name of the class, for bytes.
            confirm: Wait for the confirm. If False, the call waits only while too many bytes are
                queued; `flush` waits for all confirms.
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
        if class_id is None:
            encode, id_ = self._routes.get(type(message)) or await self._new_route(type(message))
            payload = encode(message)
        else:
            payload = message  # type: ignore[assignment]
            id_ = class_id if type(class_id) is int else await self._class_id(class_id)
        envelope = self._envelope(**about) if about else None
        if confirm:
            self.connection.check_open()
            position = self._core.publish(payload, id_, envelope)
            if refused := await self.connection.wait_confirmed(position, position):
                raise refused[0]
            return
        if self._publish_buffer.published_bytes >= self._writer.free_until_bytes:
            await self._writer.wait_for_room()
        self._append(payload, id_, envelope)

    def _encode_now(self, message: object, class_id: int | str | None) -> tuple[int, bytes]:
        """Return class id and payload of a message. The id of its class must be known.

        Raises TypeError.
        """
        if class_id is None:
            encode, id_ = self._routes[type(message)]
            return id_, encode(message)
        resolved_id = self._outbound.find_class_id(class_id)
        assert resolved_id is not None
        return resolved_id, message if type(message) is bytes else as_bytes(message)

    def publish_nowait(
        self, message: object, *, class_id: int | str | None = None, **about: Unpack[PublishOptions]
    ) -> int:
        """Publish a message without waiting.

        Args:
            message: Value of a type that is bound to a class, or bytes if `class_id` is given.
            class_id: Id or name of the class, for bytes.
            about: Metadata of the message, as for `publish`.

        Returns:
            The position of the message: the number of messages that this client published before.

        Raises:
            BusFullError: The call would have to wait: too many bytes are unconfirmed, or the bus
                has not sent the id of the class yet.
            Exception: The errors of `publish`.
        """
        if class_id is None:
            encode, id_ = self._routes.get(type(message)) or self._new_route_nowait(type(message))
            payload = encode(message)
        else:
            payload = message  # type: ignore[assignment]
            id_ = class_id if type(class_id) is int else self._class_id_nowait(class_id)
        envelope = self._envelope(**about) if about else None
        if (
            self._publish_buffer.published_bytes >= self._writer.free_until_bytes
            and not self._writer.check_room()
        ):
            raise BusFullError("nothing was published: too many bytes wait to be confirmed")
        return self._append(payload, id_, envelope)

    async def publish_many(
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
            confirm: Wait until the bus has confirmed all of them.
            about: Metadata of all messages, as for `publish`.

        Raises:
            ExceptionGroup: Contains a RefusedError for each message that the bus refuses.
            Exception: The errors of `publish`. Nothing is published then.
        """
        runs: list[tuple[int, list[Any]]] = []
        if class_id is None:
            for type_, run in groupby(messages, type):
                encode, id_ = self._routes.get(type_) or await self._new_route(type_)
                runs.append((id_, list(map(encode, run))))
        else:
            runs.append((await self._class_id(class_id), list(messages)))
        envelope = self._envelope(**about) if about else None
        await anyio.lowlevel.checkpoint()
        if confirm:
            self.connection.check_open()
        else:
            await self._writer.wait_for_room()
        first = self._core.published_position
        self._core.publish_runs(runs, envelope)
        self._writer.write_now()
        if not confirm or self._core.published_position == first:
            return
        if refused := await self.connection.wait_confirmed(
            first, self._core.published_position - 1
        ):
            raise group_refusals(refused)

    async def flush(self) -> None:
        """Wait until everything published so far is confirmed, and every ack so far is written.

        Raises:
            ExceptionGroup: Contains the refusals that no call has raised yet.
            BusConnectionError: The connection is lost for good.
        """
        await self.connection.flush()
        if refused := self.connection.confirms.pop_unclaimed():
            raise refused

    def statistics(self) -> ClientStatistics:
        """Return a snapshot of the counters of this client."""
        return self._core.statistics()

    # Classes -------------------------------------------------------------------------------------

    async def resolve_class_id(self, class_reference: Binding[Any] | int | str) -> int:
        """Return the id of a class; ask the bus if only the name is known. Internal."""
        class_id = self._outbound.find_class_id(class_reference)
        if class_id is None:
            assert not isinstance(class_reference, int)
            await self.connection.request(partial(self._outbound.name_class, class_reference))
            class_id = self._outbound.store_class_id(class_reference)
        return class_id

    async def _class_id(self, class_id: int | str) -> int:
        """Return the id of a class after all handlers have subscribed."""
        resolved_id = self._outbound.find_class_id(class_id)
        if resolved_id is None:
            await self._wait_for_handlers()
            resolved_id = await self.resolve_class_id(class_id)
        return resolved_id

    async def _new_route(self, type_: type) -> PublishRoute:
        """Find encoder and class id of a type that is published for the first time."""
        binding = self._registry.bindings[type_]
        await self._wait_for_handlers()
        return self._outbound.add_route(binding, await self.resolve_class_id(binding))

    async def _wait_for_handlers(self) -> None:
        """Wait until all handlers have subscribed. A publisher alone has no handlers."""

    def _new_route_nowait(self, type_: type) -> PublishRoute:
        binding = self._registry.bindings[type_]
        return self._outbound.add_route(binding, self._class_id_nowait(binding))

    def _class_id_nowait(self, class_reference: Binding[Any] | int | str) -> int:
        """Return the id of a class. If it is unknown, ask the bus for the next call and raise
        BusFullError.
        """
        class_id = self._outbound.find_class_id(class_reference)
        if class_id is None:
            self.connection.check_open()
            class_id = self._outbound.poll_class_id(class_reference)
            self._writer.write_soon()
        if class_id is None:
            raise BusFullError("nothing was published: the bus has not sent the class id yet")
        return class_id
