"""How much lies in the stream of a class, and whom it is for, as `explain` tells (trio).

Rule 1: to count changes nothing, and waits for nothing that is asked of the class besides: who asks
may want to know why that stands still.
Rule 2: what is not known within some seconds is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import trio

from simplebus.core.errors import BusConnectionError
from simplebus.core.message_class.remote_storage import RemoteCountOutcome, RemoteInventory
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.jetstream import api
from simplebus.jetstream.cluster.peers import Others
from simplebus.jetstream.consume.consumers import Positions
from simplebus.jetstream.consume.inboxes import Listening
from simplebus.jetstream.names import JetStreamNames, describe_consumer
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

PATIENCE_SECONDS = 6.0
_NOTHING = RemoteInventory(0, 0, 0, 0, 0, 0, 0, False, "")


class Counting:
    """Of one door."""

    def __init__(
        self, link: NatsConnection, names: JetStreamNames, positions: Positions, listening: Listening
    ) -> None:
        self._link = link
        self._names = names
        self._positions = positions
        self._listening = listening
        self._others = Others(link, names)

    async def count(self, class_id: int, *tell: Callable[[RemoteCountOutcome], object]) -> None:
        """Call each of `tell` with what is found, or why it is not known."""
        counted: RemoteCountOutcome = f"the cluster has not answered within {PATIENCE_SECONDS:g} s"
        with trio.move_on_after(PATIENCE_SECONDS):
            try:
                counted = await self._counted(class_id)
            except (BusConnectionError, JetStreamError) as error:
                counted = str(error)
            except Exception:
                log.exception("class %d: what lies in its stream could not be counted", class_id)
                counted = "a fault of the door's own: its log says which"
        for each in tell:
            each(counted)

    async def _counted(self, class_id: int) -> RemoteInventory:
        try:
            info = await self._link.api_request(f"STREAM.INFO.{self._names.stream_name(class_id)}")
        except JetStreamError as error:
            if error.code not in jetstream_codec.NOT_FOUND:
                raise
            return _NOTHING
        left = {str(each["name"]): each for each in await self._positions.left(class_id)}
        there = [each for each in await self._positions.all(class_id) if api.kind_of(each)]
        found, first = inventory(info, left.values()), _furthest_behind(info, there)
        if first is None:
            return found
        if str(first["name"]) in left:
            return replace(found, is_oldest_in_backlog=True)
        return replace(found, floor_holder=await self._holder(class_id, first))

    async def _holder(self, class_id: int, info: dict[str, Any]) -> BrokerSubscription | str:
        """Whose a consumer is."""
        name = str(info["name"])
        for position, own in self._listening.consumers.items():
            if own == name and position.class_id == class_id:
                return position
        waits = f"{api.backlog_count(info):,} messages wait for it"
        if api.kind_of(info) == "durable" and name[:2] == "d-":
            is_held = await self._others.is_held(class_id, name)
            where = "which another door has" if is_held else "which no door has"
        else:
            where = "which this door has not"
        return f"{describe_consumer(name)}, {where}; {waits}"


def inventory(info: dict[str, Any], left: Iterable[dict[str, Any]]) -> RemoteInventory:
    """What a stream says of itself, and consumers that no door holds of what waits for somebody."""
    state, config = info["state"], info["config"]
    last = int(state["last_seq"])
    return RemoteInventory(
        message_count=int(state.get("messages", 0)),
        stored_bytes=int(state.get("bytes", 0)),
        floor=max(0, min(int(state["first_seq"]) - 1, last)),
        head=last,
        messages_max=max(0, int(config.get("max_msgs", 0))),
        bytes_max=max(0, int(config.get("max_bytes", 0))),
        backlog_count=max(map(api.backlog_count, left), default=0),
        is_oldest_in_backlog=False,
        floor_holder="",
    )


def _furthest_behind(info: dict[str, Any], there: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The consumer that has acknowledged least; None if all have acknowledged all."""
    last = int(info["state"]["last_seq"])
    behind = [each for each in there if api.ack_floor(each) <= last]
    return min(behind, key=api.ack_floor, default=None)
