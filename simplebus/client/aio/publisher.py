"""Publishing under trio and asyncio: what a program calls.

Rule 1: when a call that publishes raises, nothing of it was published; only RefusedError and
BusConnectionError say otherwise. One that is cancelled while it waits for its confirm has published
all the same; one that is cancelled while it waits for room has not.
Rule 2: no decisions here. What is published is made by `outbound`; the wire waits.
Rule 3: what is published after `handle` reaches that handler: its subscription comes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Unpack

import anyio.lowlevel

from simplebus.client.aio.connection import ClientConnection
from simplebus.client.core.client import ClientStatistics
from simplebus.client.message_builder import (
    DURABILITY_NAMES,
    PublishOptions,
    BusFullError,
    DurabilityName,
    MessageBuilder,
    PublishRoute,
)
from simplebus.client.message_types import Binding, Registry
from simplebus.client.pending_confirms import group_refusals

if TYPE_CHECKING:
    from simplebus.client.aio.handlers import HandlerRunner


class Publisher:
    """The half of a bus that publishes."""

    def __init__(self, wire: ClientConnection, registry: Registry) -> None:
        self.connection = wire
        """For this package."""
        self._core = wire.core
        self._publish_buffer = wire.core.publish_buffer
        self._writer = wire.writer
        self._registry = registry
        self._outbound = MessageBuilder(wire.core, registry)
        self._routes, self._envelope = self._outbound.route_by_type, self._outbound.build_envelope
        self._append = wire.core.publish
        self._handler_runners: list[HandlerRunner] = []

    @property
    def durability(self) -> DurabilityName:
        """Where a message is when it is confirmed, by the bus that was connected to last."""
        return DURABILITY_NAMES[self._core.durability]

    async def publish(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        confirm: bool = True,
        **about: Unpack[PublishOptions],
    ) -> None:
        """Publish a message, and return when the bus has confirmed it.

        Args: a value whose type is bound to a class, or bytes and the class's id or name; whether
        to wait for the confirm: without, it only waits while the bus is slower than its publishers,
        and `flush` waits for all confirms at once; what is to be said about it.
        Raises RefusedError when the bus refuses it, LocalProtocolError for what the protocol cannot
        carry, UnboundTypeError for a value that is bound to no class, ValueError and TypeError for
        what is none, BusConnectionError when the bus is gone.
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

    def publish_nowait(
        self, message: object, *, class_id: int | str | None = None, **about: Unpack[PublishOptions]
    ) -> int:
        """Publish a message without waiting. Returns its position: how many were published before.

        Raises BusFullError when it would have to wait, and what `publish` does.
        """
        if class_id is None:
            encode, id_ = self._routes.get(type(message)) or self._new_route_nowait(type(message))
            payload = encode(message)
        else:
            payload = message  # type: ignore[assignment]
            id_ = class_id if type(class_id) is int else self._class_id_nowait(class_id)
        envelope = self._envelope(**about) if about else None
        if self._publish_buffer.published_bytes >= self._writer.free_until_bytes and not self._writer.check_room():
            raise BusFullError("nothing was published: too much waits to be confirmed by the bus")
        return self._append(payload, id_, envelope)

    async def publish_many(
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
        if refused := await self.connection.wait_confirmed(first, self._core.published_position - 1):
            raise group_refusals(refused)

    async def flush(self) -> None:
        """Wait until the bus has confirmed everything published so far, and acknowledgements so
        far are written. Raises an ExceptionGroup of what was refused and not told yet."""
        await self.connection.flush()
        if refused := self.connection.confirms.pop_unclaimed():
            raise refused

    def statistics(self) -> ClientStatistics:
        """A snapshot of this client."""
        return self._core.statistics()

    # Classes -------------------------------------------------------------------------------------

    async def resolve_class_id(self, what: Binding[Any] | int | str) -> int:
        """The id of a class, which the bus is asked for if it has a name. For this package."""
        known = self._outbound.find_class_id(what)
        if known is None:
            assert not isinstance(what, int)
            await self.connection.request(partial(self._outbound.name_class, what))
            known = self._outbound.store_class_id(what)
        return known

    async def _class_id(self, class_id: int | str) -> int:
        """The class id that belongs to what the user has given."""
        known = self._outbound.find_class_id(class_id)
        if known is None:
            await self._wait_for_handlers()
            known = await self.resolve_class_id(class_id)
        return known

    async def _new_route(self, type_: type) -> PublishRoute:
        """The way of a type's values, found for the first time."""
        binding = self._registry.bindings[type_]
        await self._wait_for_handlers()
        return self._outbound.add_route(binding, await self.resolve_class_id(binding))

    async def _wait_for_handlers(self) -> None:
        while any(handling.is_opening for handling in self._handler_runners):
            await self.connection.changed.wait()

    def _new_route_nowait(self, type_: type) -> PublishRoute:
        binding = self._registry.bindings[type_]
        return self._outbound.add_route(binding, self._class_id_nowait(binding))

    def _class_id_nowait(self, what: Binding[Any] | int | str) -> int:
        """The same without waiting; the bus is asked, for the next time."""
        known = self._outbound.find_class_id(what)
        if known is None:
            self.connection.check_open()
            known = self._outbound.poll_class_id(what)
            self._writer.write_soon()
        if known is None:
            raise BusFullError("nothing was published: the bus is yet to say the id of the class")
        return known
