"""Message and backlog counts of streams for inquiries.

Counting changes nothing and does not wait for the class's other requests, because an inquiry may
ask why those are stuck. It times out after a few seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import trio

from simplebus.core.broker.wait_reasons import format_waiting_count
from simplebus.core.errors import BusConnectionError
from simplebus.core.message_class.message_class import MessageClass, class_label
from simplebus.core.message_class.remote_storage import RemoteCountOutcome, RemoteInventory
from simplebus.core.subscription.position import Position
from simplebus.jetstream import api
from simplebus.jetstream.cluster.peers import Peers
from simplebus.jetstream.consume.consumers import ConsumerManager
from simplebus.jetstream.consume.inboxes import ConsumerInboxes
from simplebus.jetstream.names import JetStreamNames, describe_consumer
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = EventLogger("simplebus.engine")

COUNT_SECONDS = 6.0
_NOTHING = RemoteInventory(0, 0, 0, 0, 0, 0, 0, False, "")


class StreamBacklog:
    """Counts the stored messages of classes and finds the consumer that holds the oldest one."""

    def __init__(
        self,
        link: NatsConnection,
        names: JetStreamNames,
        classes: Mapping[int, MessageClass],
        consumers: ConsumerManager,
        inboxes: ConsumerInboxes,
    ) -> None:
        self._link = link
        self._names = names
        self._classes = classes
        self._consumers = consumers
        self._inboxes = inboxes
        self._peers = Peers(link, names)

    async def count(
        self, class_id: int, *on_counted: Callable[[RemoteCountOutcome], object]
    ) -> None:
        """Call each of `on_counted` with the inventory, or with the reason why it is unknown."""
        counted: RemoteCountOutcome = f"the cluster has not answered within {COUNT_SECONDS:g} s"
        with trio.move_on_after(COUNT_SECONDS):
            try:
                counted = await self._take_inventory(class_id)
            except (BusConnectionError, JetStreamError) as error:
                counted = str(error)
            except Exception:
                log.exception(
                    "backlog.count_failed",
                    "class {class_name}: unexpected error while counting its stream",
                    class_name=class_label(self._classes, class_id),
                )
                counted = "internal error of the server; see its log"
        for callback in on_counted:
            callback(counted)

    async def _take_inventory(self, class_id: int) -> RemoteInventory:
        try:
            info = await self._link.api_request(f"STREAM.INFO.{self._names.stream_name(class_id)}")
        except JetStreamError as error:
            if error.code not in jetstream_codec.NOT_FOUND:
                raise
            return _NOTHING
        unheld = {str(info["name"]): info for info in await self._consumers.list_unheld(class_id)}
        consumers = [info for info in await self._consumers.list_all(class_id) if api.kind_of(info)]
        found, first = build_inventory(info, unheld.values()), _find_oldest_floor(info, consumers)
        if first is None:
            return found
        if str(first["name"]) in unheld:
            return replace(found, is_oldest_in_backlog=True)
        return replace(found, floor_holder=await self._describe_holder(class_id, first))

    async def _describe_holder(self, class_id: int, info: dict[str, Any]) -> Position | str:
        """Return the position of a consumer, or a description if the position is elsewhere."""
        name = str(info["name"])
        for position, consumer_name in self._inboxes.consumer_names.items():
            if consumer_name == name and position.class_id == class_id:
                return position
        waits = f"{format_waiting_count(api.backlog_count(info))} for it"
        if api.kind_of(info) == "durable" and name[:2] == "d-":
            is_held = await self._peers.is_consumer_held(class_id, name)
            holder = "held by another server" if is_held else "held by no server"
        else:
            holder = "not held by this server"
        return f"{describe_consumer(name)}, {holder}; {waits}"


def build_inventory(info: dict[str, Any], unheld: Iterable[dict[str, Any]]) -> RemoteInventory:
    """Build the inventory from a stream info and the plain consumers that no server holds."""
    state, config = info["state"], info["config"]
    last = int(state["last_seq"])
    return RemoteInventory(
        message_count=int(state.get("messages", 0)),
        stored_bytes=int(state.get("bytes", 0)),
        floor=max(0, min(int(state["first_seq"]) - 1, last)),
        head=last,
        messages_max=max(0, int(config.get("max_msgs", 0))),
        bytes_max=max(0, int(config.get("max_bytes", 0))),
        backlog_count=max(map(api.backlog_count, unheld), default=0),
        is_oldest_in_backlog=False,
        floor_holder="",
    )


def _find_oldest_floor(
    info: dict[str, Any], consumers: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the consumer with the lowest ack floor; None if all messages are acknowledged."""
    last = int(info["state"]["last_seq"])
    unfinished = [consumer for consumer in consumers if api.ack_floor(consumer) <= last]
    return min(unfinished, key=api.ack_floor, default=None)
