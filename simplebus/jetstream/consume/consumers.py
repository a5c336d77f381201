"""Streams and consumers of classes and positions.

Creation is idempotent: an existing stream or consumer is used. A message stays in its stream until
every consumer has acknowledged it, so a successor is created before its predecessor is deleted.

A plain subscription has a separate consumer with ack policy `all`. When it closes, its
unacknowledged messages move to a consumer with explicit acks.

Messages for the first subscription of a class are kept by the consumer `waiting`, or by a plain
consumer whose server is gone. A plain subscription claims such a consumer if it is the only one and
has explicit acks. Otherwise a new consumer starts at the lowest ack floor and the old ones are
deleted; if two servers claim at once, only the server that deleted a consumer succeeds. Consumers
that a server is about to release count as unheld.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.requests import Start
from simplebus.core.subscription.position import Position
from simplebus.jetstream import api
from simplebus.jetstream.api import list_consumers, list_streams
from simplebus.jetstream.cluster.peers import Peers
from simplebus.jetstream.cluster.stream_update import check_and_upgrade_stream
from simplebus.jetstream.consume.durable_check import DurableCheck, check_same_channels
from simplebus.jetstream.consume.feed import ConsumerFeed, OpenedConsumer
from simplebus.jetstream.consume.handover import ReleasingConsumers
from simplebus.jetstream.consume.returned_messages import (
    ReturnedMessages,
    UnackedOnExit,
    return_again,
    return_messages,
    transfer_messages,
    with_return_note,
)
from simplebus.jetstream.names import (
    BACKLOG_CONSUMER,
    belongs_to_durable,
    consumer_name,
    describe_consumer,
)
from simplebus.jetstream.remote_class import RemoteClass
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = EventLogger("simplebus.engine")

_STREAM_SECONDS = 10.0


class ConsumerRefusedError(JetStreamError):
    """The cluster permanently refuses to create the consumer."""


class ConsumerManager:
    """Creates, resumes, replaces and removes the consumers of one server's positions."""

    def __init__(
        self,
        link: NatsConnection,
        options: JetStreamOptions,
        server_id: str,
        durable_check: DurableCheck,
    ) -> None:
        self._link = link
        self._durable_check = durable_check
        self._options = options
        self._server_id = server_id
        self._count = 0
        self.on_description: Callable[[int, str], None] = lambda class_id, description: None
        """Called with a class id and the description of its stream, whenever it was read."""
        self._unconfirmed: dict[Position, str] = {}
        """Names of consumers whose creation or take-over was not confirmed, by position."""
        self._return_consumers: dict[Position, str] = {}
        """Names of the consumers that continue the messages of closing positions."""
        self._peers = Peers(link, options.names)
        self.releasing = ReleasingConsumers(
            lambda position: self._return_consumers.get(position, "")
        )
        """Plain consumers that this server is about to release."""
        self._streams: set[int] = set()
        self._stream_created: dict[int, str] = {}
        """Creation time of each class's stream."""
        self._last_sequence: dict[int, int] = {}
        """Last stream sequence of each class when its stream was last read."""
        self._trimmed_floor: dict[int, int] = {}
        """First stream sequence of each class after its last trim."""
        self._fast_batch_classes: set[int] = set()
        """Classes whose streams accept fast batches."""

    async def list_classes(self) -> tuple[list[tuple[int, str]], list[str]]:
        """Return the class id and name of each class stream, and the class streams without a
        leader.
        """
        class_of = self._options.names.parse_stream_name
        found: list[tuple[int, str]] = []
        configs, leaderless = await list_streams(self._link)
        for config in configs:
            class_id = class_of(str(config.get("name", "")))
            if class_id is not None:
                found.append((class_id, str(config.get("description") or "")))
        return found, [stream for stream in leaderless if class_of(stream) is not None]

    async def open_stream(self, class_id: int, name: str) -> None:
        """Find or create the stream of a class."""
        if class_id in self._streams:
            return
        stream = self._options.names.stream_name(class_id)
        try:
            info = await self._link.api_request(f"STREAM.INFO.{stream}")
        except JetStreamError as error:
            if error.code not in jetstream_codec.NOT_FOUND:
                raise
            info = {}
        if info:
            await check_and_upgrade_stream(self._link, info["config"], self._options)
        else:
            body = api.stream_config(self._options, class_id, name)
            try:
                info = await self._create_stream(stream, body)
            except JetStreamError as error:  # Another server was first.
                if error.code != api.NAME_IN_USE:
                    raise
                info = await self._link.api_request(f"STREAM.INFO.{stream}")
                await check_and_upgrade_stream(self._link, info["config"], self._options)
        self._fast_batch_classes.discard(class_id)
        if info.get("config", {}).get("allow_batched") is True:
            self._fast_batch_classes.add(class_id)
        state = info.get("state", {})
        self._last_sequence[class_id] = int(state.get("last_seq", 0))
        if not state.get("consumer_count") and not state.get("last_seq"):
            await self._create_consumer(
                class_id, BACKLOG_CONSUMER, "plain", {"deliver_policy": "all"}, server_id=""
            )
        self._streams.add(class_id)
        self.on_description(class_id, str(info.get("config", {}).get("description") or ""))
        created = str(info.get("created", ""))
        if self._stream_created.setdefault(class_id, created) != created:
            log.warning(
                "stream.recreated",
                "the stream of class {class_name} was recreated; its messages are lost",
                class_name=name or str(class_id),
            )
            self._stream_created[class_id] = created
            self._trimmed_floor.pop(class_id, None)

    async def _create_stream(self, stream: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create a stream, without fast batches if the server is too old for them."""
        request_body = {**body, "allow_batched": True}
        try:
            return await self._link.api_request(
                f"STREAM.CREATE.{stream}", request_body, seconds=_STREAM_SECONDS
            )
        except JetStreamError as error:
            if error.code != jetstream_codec.UNKNOWN_FIELD:
                raise
        return await self._link.api_request(
            f"STREAM.CREATE.{stream}", body, seconds=_STREAM_SECONDS
        )

    def has_fast_batches(self, class_id: int) -> bool:
        """Return True if the stream of a class accepts fast batches, as far as known."""
        return class_id in self._fast_batch_classes

    def stream_created(self, class_id: int) -> str:
        """Return the creation time of a class's stream; empty if unknown."""
        return self._stream_created.get(class_id, "")

    def forget_stream(self, class_id: int) -> None:
        """Read the stream of a class again before its next use, because it may be gone."""
        self._streams.discard(class_id)

    async def open(
        self,
        cls: RemoteClass,
        position: Position,
        start: str | Start,
        *,
        is_seek: bool = False,
    ) -> OpenedConsumer:
        """Open the consumer of a position.

        Args:
            start: Start of a new consumer.
            is_seek: Start at `start` even if the consumer exists.

        Raises:
            RemoteProtocolError: (subscription_mismatch) the name is used for something else;
                (unauthorized) the user may not use it; (durable_in_use) the durable is to be moved
                and another server uses it.
            JetStreamError, BusConnectionError: A request failed.
        """
        class_id = cls.class_id
        await self.open_stream(class_id, cls.name)
        name = consumer_name(position.durable, position.group)
        patterns = tuple(position.channel_filter.patterns) if position.channel_filter else ()
        if name:
            info = await self._info(class_id, name)
            if info is not None:
                check_same_channels(position, patterns, info)
                owner = api.owner_of(info)
                may_change = self._durable_check.check_access(cls, position, owner, is_seek=is_seek)
                await self._update_settings(class_id, position, info, may_change=may_change)
                if is_seek:
                    return await self._recreate_at(class_id, info, patterns, start)
                return await self._resume(
                    class_id, info, existed_before=True, can_be_unheld=not position.group
                )
            kind = "durable" if position.durable else "group"
            await self._check_single_group(class_id, position, name)
        else:
            if (info := await self._find_taken_over(class_id, position)) is not None:
                self._unconfirmed.pop(position)
                return await self._resume(class_id, info, existed_before=False)
            name, kind = self._reserve_name(position), "plain"
        make = partial(
            self._create_consumer,
            class_id,
            name,
            kind,
            channels=patterns,
            **self._durable_settings(position),
        )
        found = await self._create_or_take_over(class_id, position, name, make, start)
        self._unconfirmed.pop(position, None)
        if kind != "plain" and (info := await self._info(class_id, name)) is not None:
            check_same_channels(position, patterns, info)  # Another server may have been first.
        return found

    def _durable_settings(self, position: Position) -> dict[str, Any]:
        """Return the settings of a new durable or group; empty for a plain position."""
        if not (position.durable or position.group):
            return {}
        return {
            "owner": position.owner,
            "delivery_policy": self._durable_check.encode_policy(position),
            "idle_seconds": position.idle_seconds,
        }

    async def _check_single_group(self, class_id: int, position: Position, own_name: str) -> None:
        """Raise RemoteProtocolError if the durable exists in another group."""
        for info in await self.list_all(class_id) if position.durable else ():
            name = str(info["name"])
            is_other = name != own_name and api.kind_of(info) == "durable"
            if is_other and belongs_to_durable(name, position.durable):
                raise RemoteProtocolError(
                    Reason.SUBSCRIPTION_MISMATCH,
                    f"{describe_consumer(name)} exists, but the durable {position.durable!r} was "
                    f"requested with the group {position.group!r}",
                )

    async def _find_taken_over(self, class_id: int, position: Position) -> dict[str, Any] | None:
        """Return the consumer that an earlier, unconfirmed attempt took over."""
        name = self._unconfirmed.get(position)
        info = await self._info(class_id, name) if name is not None else None
        if info is None or api.is_ack_all(info):  # Not taken over, but created by this server.
            return None
        if api.server_id_of(info) == self._server_id:
            return info
        del self._unconfirmed[position]
        return None

    async def _update_settings(
        self, class_id: int, position: Position, info: dict[str, Any], *, may_change: bool
    ) -> None:
        """Update the idle time and delivery policy of an existing durable or group.

        The delivery policy of the consumer applies to the position instead if another server uses
        the consumer or the user may not change it.
        """
        name, config = str(info["name"]), info["config"]
        if api.owner_of(info) in ("", position.owner):
            config = api.with_idle_seconds(config, position.idle_seconds)
        stored_policy = api.delivery_policy_of(info)
        requested_policy = self._durable_check.encode_policy(position)
        if stored_policy != requested_policy:
            if stored_policy and not (
                may_change and not await self._peers.is_consumer_held(class_id, name)
            ):
                self._durable_check.apply_policy(position, stored_policy)
            else:
                config = api.with_delivery_policy(config, requested_policy)
        if config != info["config"]:
            info["config"] = config
            await self._update(class_id, name, config)

    async def _resume(
        self,
        class_id: int,
        info: dict[str, Any],
        *,
        existed_before: bool,
        can_be_unheld: bool = False,
    ) -> OpenedConsumer:
        """Resume an existing consumer. If no server holds it, its unacknowledged messages are
        returned first.
        """
        expected_redeliveries, is_unheld = dict[int, bytes](), False
        if info.get("num_ack_pending"):
            stream, name = self._options.names.stream_name(class_id), str(info["name"])
            is_unheld = can_be_unheld and not await self._peers.is_consumer_held(class_id, name)
            expected_redeliveries = await return_again(
                self._link, stream, info, is_unheld=is_unheld
            )
        return OpenedConsumer(
            str(info["name"]),
            existed_before,
            predecessor_delivered=api.last_delivered_with_predecessors(info),
            last_delivered=api.last_delivered(info),
            delivery_count=api.delivery_count(info),
            floor=api.ack_floor(info),
            expected_redeliveries=expected_redeliveries
            if is_unheld or not existed_before
            else {},  # Other servers may receive these messages.
        )

    async def _recreate_at(
        self, class_id: int, info: dict[str, Any], patterns: tuple[str, ...], start: str | Start
    ) -> OpenedConsumer:
        """Recreate a durable at `start`, because JetStream consumers cannot be moved.

        A temporary consumer keeps the stored messages in the meantime.
        """
        name = str(info["name"])
        if await self._peers.is_consumer_held(class_id, name):
            raise RemoteProtocolError(
                Reason.DURABLE_IN_USE, f"cannot seek {name!r}: another server uses it"
            )
        hold = f"hold-{name}"
        at = api.start_at_sequence(api.ack_floor(info))
        await self._create_consumer(class_id, hold, "hold", at, channels=patterns)
        await self._delete(class_id, name)
        begin, owner = await self._starting(class_id, start), api.owner_of(info)
        seconds, delivery_policy = api.idle_seconds_of(info), api.delivery_policy_of(info)
        await self._create_consumer(
            class_id,
            name,
            "durable",
            begin,
            channels=patterns,
            owner=owner,
            delivery_policy=delivery_policy,
            idle_seconds=seconds,
        )
        await self._delete(class_id, hold)
        return OpenedConsumer(name, True)

    async def _starting(self, class_id: int, start: str | Start) -> dict[str, Any]:
        """Return the start options of a consumer, for the current state of the stream."""
        if not (isinstance(start, Start) and start.sequence is not None):
            return api.start_config(start)
        info = await self._link.api_request(
            f"STREAM.INFO.{self._options.names.stream_name(class_id)}"
        )
        return api.start_config(start, int(info["state"]["last_seq"]))

    def _new_name(self) -> str:
        self._count += 1
        return f"p-{self._server_id}-{self._count}"

    def _reserve_name(self, position: Position) -> str:
        """Return the name for a position's new consumer.

        The name stays the same until confirmed, because an unanswered attempt may have succeeded.
        """
        return self._unconfirmed.setdefault(position, self._new_name())

    def pop_unconfirmed(self, position: Position) -> str:
        """Return the name of a position's unconfirmed consumer, which may exist; empty for none."""
        return self._unconfirmed.pop(position, "")

    async def replace(
        self, cls: RemoteClass, position: Position, name: str, feed: ConsumerFeed
    ) -> OpenedConsumer | None:
        """Replace a consumer that lost messages or may be gone.

        Returns:
            The consumer that continues with the unacknowledged messages; None if the old one is
            intact.
        """
        class_id = cls.class_id
        self.forget_stream(class_id)
        await self.open_stream(class_id, cls.name)
        info = await self._info(class_id, name)
        highest = feed.acked_sequences.highest
        is_rolled_back = feed.is_rolled_back or (
            info is None and self._last_sequence[class_id] < highest
        )
        is_new = feed.stream_created != self.stream_created(class_id)
        if info is not None and not (is_new or feed.is_broken):
            return None
        if is_rolled_back and not is_new:
            log.warning(
                "stream.rolled_back",
                "the stream of class {class_name} lost messages; its messages may be "
                "delivered again",
                class_name=cls.label,
            )
            self._trimmed_floor.pop(class_id, None)
            is_new = True
        if info is None:
            log.warning(
                "consumer.recreated",
                "recreating the consumer {consumer} of class {class_name}, which is gone",
                consumer=name,
                class_name=cls.label,
            )
        patterns = tuple(position.channel_filter.patterns) if position.channel_filter else ()
        needed = 0 if is_new else feed.restart_sequence
        kind = "durable" if position.durable else "group" if position.group else "plain"
        start = api.start_config("earliest" if is_new or kind != "plain" else "new")
        floor = 0
        if feed.ack_all is not None:
            if info is not None and not is_new:
                at = api.ack_floor(info)
                needed = min(at, needed) if needed else at
            old_name, name = name, self._reserve_name(position)
            start = api.start_at_sequence(needed) if needed else start
            arguments: dict[str, Any] = {
                "channels": patterns,
                "delivered_before": feed.ack_all.delivered_before,
            }
            floor = await self._create_consumer(
                class_id, name, kind, start, is_ack_all=True, **arguments
            )
            await self._delete(class_id, old_name)
        elif info is None:
            # The acks of other servers' group members are unknown: redeliver everything stored.
            start = api.start_at_sequence(needed) if needed and not position.group else start
            settings = self._durable_settings(position)
            floor = await self._create_consumer(
                class_id, name, kind, start, channels=patterns, **settings
            )
        if is_new:  # The new stream keeps nothing for a first subscription.
            await self._delete(class_id, BACKLOG_CONSUMER)
        self._unconfirmed.pop(position, None)
        feed.stream_created = self.stream_created(class_id)
        sent_to = highest if is_rolled_back else 0
        is_ack_all = feed.ack_all is not None
        return OpenedConsumer(name, True, is_ack_all, sent_to, floor=floor, is_new_stream=is_new)

    async def _create_or_take_over(
        self,
        class_id: int,
        position: Position,
        name: str,
        make: Callable[..., Awaitable[int]],
        start: str | Start,
    ) -> OpenedConsumer:
        """Create a position's consumer; with start "waiting", take over the class's backlog."""
        is_ack_all = not (position.durable or position.group)
        unheld = (
            await self.list_unheld(class_id, include_releasing=True) if start == "waiting" else []
        )
        make = partial(make, is_ack_all=is_ack_all)
        if not unheld:
            floor = await make(await self._starting(class_id, start))
            return OpenedConsumer(name, False, is_ack_all, floor=floor)
        if len(unheld) == 1 and is_ack_all and await self._can_take_over(unheld[0]):
            found = str(unheld[0]["name"])
            if not await self._claim(class_id, found):
                raise JetStreamError(0, "another server is taking over the backlog")
            await self._delete(class_id, name)  # An earlier attempt may have created it.
            self._unconfirmed[position] = found
            await self._update(
                class_id, found, api.taken_over_config(unheld[0]["config"], self._server_id)
            )
            return await self._resume(class_id, unheld[0], existed_before=False)
        at = min(api.ack_floor(info) for info in unheld)
        sent = max(api.last_delivered_with_predecessors(info) for info in unheld)
        floor = await make(api.start_at_sequence(at), delivered_before=sent)
        deleted = [await self._delete(class_id, str(info["name"])) for info in unheld]
        if not any(deleted):  # Another server took the backlog over.
            await self._delete(class_id, name)
            return await self._create_or_take_over(class_id, position, name, make, start)
        return OpenedConsumer(name, False, is_ack_all, sent, floor=floor)

    async def _can_take_over(self, info: dict[str, Any]) -> bool:
        """Return True if a plain subscription can continue with this unheld consumer.

        A consumer that its server is about to release is excluded: that server still sends acks
        to it.
        """
        if api.is_ack_all(info) or info["name"] == BACKLOG_CONSUMER:
            return False
        server_id = api.server_id_of(info)
        return not server_id or (
            server_id != self._server_id and not await self._peers.is_alive(server_id)
        )

    async def _claim(self, class_id: int, name: str) -> bool:
        """Return True if this server may take over an unheld consumer.

        Only one server can create the claim, which is a short-lived consumer.
        """
        stream = self._options.names.stream_name(class_id)
        config = api.claim_config(name, self._server_id)
        body = {"stream_name": stream, "config": config, "action": "create"}
        try:
            await self._link.api_request(f"CONSUMER.CREATE.{stream}.{config['name']}", body)
        except JetStreamError as error:
            if error.code not in api.CONSUMER_EXISTS:
                raise
            return False
        info = await self._info(class_id, name)
        server_id = api.server_id_of(info) if info is not None else ""
        return info is not None and not (server_id and await self._peers.is_alive(server_id))

    async def list_all(self, class_id: int) -> list[dict[str, Any]]:
        """Return the info of all consumers of a class. Raises BusConnectionError and
        JetStreamError.
        """
        return await list_consumers(self._link, self._options.names.stream_name(class_id))

    async def list_unheld(
        self, class_id: int, *, include_releasing: bool = False
    ) -> list[dict[str, Any]]:
        """Return the plain consumers that no server holds.

        With `include_releasing`, consumers that servers are about to release are included if the
        class has no other consumer.

        Raises:
            BusConnectionError, JetStreamError: A request failed.
        """
        plain = [i for i in await self.list_all(class_id) if api.kind_of(i) == "plain"]
        server_ids = {api.server_id_of(info) for info in plain} - {self._server_id, ""}
        alive, names = await self._peers.find_alive(
            server_ids, class_id if include_releasing else None
        )
        if include_releasing:
            names |= self.releasing.offer_names(class_id, trio.current_time())
        gone_ids = server_ids - alive | {""}
        # List again: consumers released before the answers are unheld now.
        consumers = [info for info in await self.list_all(class_id) if api.kind_of(info)]
        plain = [info for info in consumers if api.kind_of(info) == "plain"]
        unheld = [info for info in plain if api.server_id_of(info) in gone_ids]
        names |= {str(info["name"]) for info in unheld}
        other_names = (
            {str(info["name"]) for info in consumers} - names - set(self._unconfirmed.values())
        )
        return unheld if other_names else [info for info in plain if info["name"] in names]

    async def close(
        self,
        cls: RemoteClass,
        position: Position,
        name: str,
        *,
        forget: bool,
        returned: ReturnedMessages | None = None,
        unacked: UnackedOnExit | None = None,
    ) -> None:
        """Close a position that has no subscription on this server. May be repeated after a
        failure.

        The consumer is deleted if it is to be forgotten or cannot be resumed. The last consumer of
        a class stays for the next subscription, with the `returned` or `unacked` messages.
        """
        await self._close(cls, position, name, forget=forget, returned=returned, unacked=unacked)
        self._return_consumers.pop(position, None)

    async def _close(
        self,
        cls: RemoteClass,
        position: Position,
        name: str,
        *,
        forget: bool,
        returned: ReturnedMessages | None,
        unacked: UnackedOnExit | None,
    ) -> None:
        class_id = cls.class_id
        is_plain = not (position.durable or position.group)
        if is_plain and not await self._is_own(class_id, position, name):
            return
        if returned is not None and not forget:
            stream = self._options.names.stream_name(class_id)
            config = await return_messages(self._link, stream, name, returned)
            if config is not None:
                await self._update(class_id, name, config)
        if unacked is not None:
            # After a refusal, everything after the floor stays.
            with contextlib.suppress(ConsumerRefusedError):
                name = await self._move_unacked(cls, position, name, unacked)
        if not is_plain:
            info = await self._info(class_id, name) if forget else None
            if info is None:
                return
            consumers = [i for i in await self.list_all(class_id) if api.kind_of(i)]
            if len(consumers) == 1:
                start = api.start_at_sequence(api.ack_floor(info))
                await self._create_consumer(
                    class_id, BACKLOG_CONSUMER, "plain", start, server_id=""
                )
            await self._delete(class_id, name)
            return
        # Release the consumer before looking for others: of two servers that close at once, neither
        # may count on the other one's consumer.
        info = await self._info(class_id, name)
        if info is None or api.server_id_of(info) not in ("", self._server_id):
            return
        config = info["config"]
        if unacked is not None:
            config = with_return_note(info, unacked.sequences[unacked.delays == 0.0])
        await self._update(class_id, name, api.released_config(config))
        if not api.is_ack_all(info):  # The next subscription may claim it at once.
            await self._delete(class_id, api.claim_config(name, self._server_id)["name"])
        unheld = {str(entry["name"]) for entry in await self.list_unheld(class_id)}
        remaining = [i for i in await self.list_all(class_id) if api.kind_of(i)]
        if any(entry["name"] not in unheld for entry in remaining):
            await self._delete(class_id, name)

    async def _is_own(self, class_id: int, position: Position, name: str) -> bool:
        """Return True if no other server has taken over the consumer or its successor."""
        names = {name, self._return_consumers.get(position, name)}
        infos = [await self._info(class_id, each) for each in names]
        return any(info and api.server_id_of(info) in ("", self._server_id) for info in infos)

    async def _move_unacked(
        self, cls: RemoteClass, position: Position, name: str, unacked: UnackedOnExit
    ) -> str:
        """Move unacknowledged messages from an ack-all consumer to one with explicit acks.

        Returns:
            The name of the new consumer.
        """
        class_id = cls.class_id
        stream = self._options.names.stream_name(class_id)
        new_name = self._return_consumers.setdefault(position, self._new_name())
        patterns = tuple(position.channel_filter.patterns) if position.channel_filter else ()
        first = int(unacked.sequences[unacked.delays >= 0.0][0])
        begin = api.start_at_sequence(first)
        await self._create_consumer(
            class_id, new_name, "plain", begin, channels=patterns, delivered_before=unacked.sent_to
        )
        await self._delete(class_id, name)
        await transfer_messages(self._link, stream, new_name, unacked)
        return new_name

    async def trim(self, class_id: int) -> dict[str, int]:
        """Remove the messages that all consumers have acknowledged. A stream without consumers
        keeps all.

        Returns:
            The ack floor of each consumer, by name.
        """
        found = [i for i in await self.list_all(class_id) if api.kind_of(i)]
        floors = {str(info["name"]): api.ack_floor(info) for info in found}
        floor = min(floors.values(), default=0)
        if floor > self._trimmed_floor.get(class_id, 1):
            stream = self._options.names.stream_name(class_id)
            state = (await self._link.api_request(f"STREAM.INFO.{stream}"))["state"]
            if floor > int(state["first_seq"]):  # An empty purge would still cost all replicas.
                await self._link.api_request(f"STREAM.PURGE.{stream}", {"seq": floor})
            self._trimmed_floor[class_id] = floor
        return floors

    # Requests ------------------------------------------------------------------------------------

    async def _create_consumer(
        self,
        class_id: int,
        name: str,
        kind: str,
        start: dict[str, Any],
        *,
        server_id: str | None = None,
        **arguments: Any,
    ) -> int:
        """Create a consumer. Returns its ack floor; 0 if it existed."""
        stream = self._options.names.stream_name(class_id)
        owner_id = self._server_id if server_id is None else server_id
        config = api.consumer_config(
            self._options, name, kind=kind, server_id=owner_id, start=start, **arguments
        )
        body = {"stream_name": stream, "config": config, "action": "create"}
        subject, info = f"CONSUMER.CREATE.{stream}.{name}", None
        try:
            info = await self._link.api_request(subject, body, seconds=_STREAM_SECONDS)
        except JetStreamError as error:  # Another server was first, or the answer was lost.
            if error.is_final and error.code not in api.CONSUMER_EXISTS:
                raise ConsumerRefusedError(error.code, error.sentence) from None
            if error.code not in api.CONSUMER_EXISTS:
                raise
        return api.ack_floor(info) if info is not None else 0

    async def _update(self, class_id: int, name: str, config: dict[str, Any]) -> None:
        stream = self._options.names.stream_name(class_id)
        body = {"stream_name": stream, "config": config, "action": "update"}
        await self._link.api_request(
            f"CONSUMER.CREATE.{stream}.{name}", body, seconds=_STREAM_SECONDS
        )

    async def _info(self, class_id: int, name: str) -> dict[str, Any] | None:
        stream = self._options.names.stream_name(class_id)
        try:
            return await self._link.api_request(f"CONSUMER.INFO.{stream}.{name}")
        except JetStreamError as error:
            if error.code in jetstream_codec.NOT_FOUND:
                return None
            raise

    async def _delete(self, class_id: int, name: str) -> bool:
        """Delete a consumer. Returns True if it existed."""
        try:
            await self._link.api_request(
                f"CONSUMER.DELETE.{self._options.names.stream_name(class_id)}.{name}"
            )
        except JetStreamError as error:
            if error.code in jetstream_codec.NOT_FOUND:
                return False
            raise
        return True
