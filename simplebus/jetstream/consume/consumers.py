"""Streams and consumers, asked of JetStream as classes and positions need them (trio).

Rule 1: what is asked twice is there once: a stream or a consumer that is there is used. Of one
class one thing is asked at a time.
Rule 2: a message stays as long as a consumer has not acknowledged it. A consumer that takes over is
there before the one that it takes over from is removed.
Rule 3: a plain subscription's consumer is its door's alone, and acknowledges all up to a message
at once. What was acknowledged out of order is said when it ends: what is not then goes on in a
consumer that has a word for each message.
Rule 4: what waits for the first subscription of a class is held by a consumer that nobody asks for
messages: `waiting`, or a plain one owner_id door is gone. A plain subscription goes on with that one,
after it has claimed it, if it has a word for each message. Else, and others, and where there are
several, a consumer is made from there on, and then they are removed; of two server_ids one removes them,
and the other one looks again. What a door is about to leave counts as unheld (`include_releasing`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.requests import Start
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.jetstream import api
from simplebus.jetstream.api import list_consumers, list_streams
from simplebus.jetstream.cluster.peers import Peers
from simplebus.jetstream.cluster.stream_update import check_and_upgrade_stream
from simplebus.jetstream.consume.durable_check import DurableCheck, check_same_channels
from simplebus.jetstream.consume.feed import ConsumerFeed, OpenedConsumer
from simplebus.jetstream.consume.give_back import (
    ReturnedMessages,
    UnackedOnExit,
    return_again,
    return_messages,
    transfer_messages,
    with_return_note,
)
from simplebus.jetstream.consume.handover import ReleasingConsumers
from simplebus.jetstream.names import (
    BACKLOG_CONSUMER,
    belongs_to_durable,
    consumer_name,
    describe_consumer,
)
from simplebus.jetstream.remote_class import RemoteClass
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

_STREAM_SECONDS = 10.0


class ConsumerRefusedError(JetStreamError):
    """The cluster makes no such consumer, however often it is asked."""


class ConsumerManager:
    """Of one door."""

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
        """Called with what a class's stream says that it is called, when that was looked at."""
        self._unconfirmed: dict[BrokerSubscription, str] = {}
        """What consumers are called that were asked for and may be there, by their positions."""
        self._return_consumers: dict[BrokerSubscription, str] = {}
        """And in what goes on what such ones leave, until that is done."""
        self._peers = Peers(link, options.names)
        self.releasing = ReleasingConsumers(
            lambda position: self._return_consumers.get(position, "")
        )
        """What this door is about to leave."""
        self._streams: set[int] = set()
        self._stream_created: dict[int, str] = {}
        """When each class's stream was made."""
        self._last_sequence: dict[int, int] = {}
        """Of each class, the last message of its stream when that was looked at."""
        self._trimmed_floor: dict[int, int] = {}
        """Of each class, the first message of its stream that may be needed, as it was last."""
        self._fast_batch_classes: set[int] = set()
        """Classes owner_id streams take chains of messages."""

    async def list_classes(self) -> tuple[list[tuple[int, str]], list[str]]:
        """Id and name of each class that has a stream; and the streams of classes that did not say
        their names."""
        class_of = self._options.names.parse_stream_name
        found: list[tuple[int, str]] = []
        configs, untold = await list_streams(self._link)
        for config in configs:
            class_id = class_of(str(config.get("name", "")))
            if class_id is not None:
                found.append((class_id, str(config.get("description") or "")))
        return found, [stream for stream in untold if class_of(stream) is not None]

    async def open_stream(self, class_id: int, name: str) -> None:
        """Have a class's stream."""
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
            except JetStreamError as error:  # Another door was first.
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
            log.warning("the stream of class %d is a new one; what was in it is gone", class_id)
            self._stream_created[class_id] = created
            self._trimmed_floor.pop(class_id, None)

    async def _create_stream(self, stream: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make a stream; on an older server one that takes no chains."""
        wish = {**body, "allow_batched": True}
        try:
            return await self._link.api_request(
                f"STREAM.CREATE.{stream}", wish, seconds=_STREAM_SECONDS
            )
        except JetStreamError as error:
            if error.code != jetstream_codec.UNKNOWN_FIELD:
                raise
        return await self._link.api_request(
            f"STREAM.CREATE.{stream}", body, seconds=_STREAM_SECONDS
        )

    def has_fast_batches(self, class_id: int) -> bool:
        """Whether its stream does, as it was last."""
        return class_id in self._fast_batch_classes

    def stream_created(self, class_id: int) -> str:
        """When its stream was made, as far as that is known: another one has other messages."""
        return self._stream_created.get(class_id, "")

    def forget_stream(self, class_id: int) -> None:
        """A class's stream may be gone: it is looked for before it is used again."""
        self._streams.discard(class_id)

    async def open(
        self,
        cls: RemoteClass,
        position: BrokerSubscription,
        start: str | Start,
        *,
        is_seek: bool = False,
    ) -> OpenedConsumer:
        """Have a position's consumer; where it `is_seek`, at `start` in any case.

        Raises RemoteProtocolError (subscription_mismatch) for a name that is there for something
        else, (unauthorized) for one of a user owner_id it is not to have, and (durable_in_use) for one
        that is to be moved and is another door's now; JetStreamError and BusConnectionError.
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
            check_same_channels(position, patterns, info)  # Another door may have been first.
        return found

    def _durable_settings(self, position: BrokerSubscription) -> dict[str, Any]:
        """What is said of a durable or a group when it is made."""
        if not (position.durable or position.group):
            return {}
        return {
            "owner": position.owner,
            "terms": self._durable_check.encode_policy(position),
            "idle_seconds": position.idle_seconds,
        }

    async def _check_single_group(
        self, class_id: int, position: BrokerSubscription, own: str
    ) -> None:
        """Raise RemoteProtocolError (subscription_mismatch) for a durable that is there with
        another group, or with none."""
        for info in await self.list_all(class_id) if position.durable else ():
            name = str(info["name"])
            is_other = name != own and api.kind_of(info) == "durable"
            if is_other and belongs_to_durable(name, position.durable):
                raise RemoteProtocolError(
                    Reason.SUBSCRIPTION_MISMATCH,
                    f"there is {describe_consumer(name)}, and the durable {position.durable!r} was asked for "
                    f"with the group {position.group!r}",
                )

    async def _find_taken_over(
        self, class_id: int, position: BrokerSubscription
    ) -> dict[str, Any] | None:
        """What a position has taken up before, if that was not answered."""
        name = self._unconfirmed.get(position)
        info = await self._info(class_id, name) if name is not None else None
        if info is None or api.is_ack_all(info):  # One that it makes for itself is.
            return None
        if api.server_id_of(info) == self._server_id:
            return info
        del self._unconfirmed[position]
        return None

    async def _update_settings(
        self, class_id: int, position: BrokerSubscription, info: dict[str, Any], *, may_change: bool
    ) -> None:
        """Have one that is there kept for as long as who may change it says now; and served as he
        says if nobody else has it, or else as it was."""
        name, config = str(info["name"]), info["config"]
        if api.owner_of(info) in ("", position.owner):
            config = api.with_idle_seconds(config, position.idle_seconds)
        there, terms = api.delivery_policy_of(info), self._durable_check.encode_policy(position)
        if there != terms:
            if there and not (
                may_change and not await self._peers.is_consumer_held(class_id, name)
            ):
                self._durable_check.apply_policy(position, there)
            else:
                config = api.with_delivery_policy(config, terms)
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
        """Go on with a consumer that others had; if they are gone, with what they had first."""
        again, is_unheld = dict[int, bytes](), False
        if info.get("num_ack_pending"):
            stream, name = self._options.names.stream_name(class_id), str(info["name"])
            is_unheld = can_be_unheld and not await self._peers.is_consumer_held(class_id, name)
            again = await return_again(self._link, stream, info, is_unheld=is_unheld)
        return OpenedConsumer(
            str(info["name"]),
            existed_before,
            predecessor_delivered=api.last_delivered_with_predecessors(info),
            last_delivered=api.last_delivered(info),
            delivery_count=api.delivery_count(info),
            floor=api.ack_floor(info),
            expected_redeliveries=again
            if is_unheld or not existed_before
            else {},  # Else others may have it.
        )

    async def _recreate_at(
        self, class_id: int, info: dict[str, Any], patterns: tuple[str, ...], start: str | Start
    ) -> OpenedConsumer:
        """Have a durable begin at `start`: consumers do not move, so it is made anew. Another one
        keeps what is stored for it until it is there."""
        name = str(info["name"])
        if await self._peers.is_consumer_held(class_id, name):
            raise RemoteProtocolError(
                Reason.DURABLE_IN_USE, f"another door has {name!r}: it is not moved under its feet"
            )
        hold = f"hold-{name}"
        at = api.start_at_sequence(api.ack_floor(info))
        await self._create_consumer(class_id, hold, "hold", at, channels=patterns)
        await self._delete(class_id, name)
        begin, owner = await self._starting(class_id, start), api.owner_of(info)
        seconds, terms = api.idle_seconds_of(info), api.delivery_policy_of(info)
        await self._create_consumer(
            class_id,
            name,
            "durable",
            begin,
            channels=patterns,
            owner=owner,
            terms=terms,
            idle_seconds=seconds,
        )
        await self._delete(class_id, hold)
        return OpenedConsumer(name, True)

    async def _starting(self, class_id: int, start: str | Start) -> dict[str, Any]:
        """Where a position begins, as of now."""
        if not (isinstance(start, Start) and start.sequence is not None):
            return api.start_config(start)
        info = await self._link.api_request(
            f"STREAM.INFO.{self._options.names.stream_name(class_id)}"
        )
        return api.start_config(start, int(info["state"]["last_seq"]))

    def _new_name(self) -> str:
        self._count += 1
        return f"p-{self._server_id}-{self._count}"

    def _reserve_name(self, position: BrokerSubscription) -> str:
        """Of the consumer that a position is to have. It stays, however often that is asked for:
        it may be there though nobody has heard so."""
        return self._unconfirmed.setdefault(position, self._new_name())

    def pop_unconfirmed(self, position: BrokerSubscription) -> str:
        """What the consumer is called that a position has had asked for in vain, and that may be
        there all the same; empty for none."""
        return self._unconfirmed.pop(position, "")

    async def replace(
        self, cls: RemoteClass, position: BrokerSubscription, name: str, feed: ConsumerFeed
    ) -> OpenedConsumer | None:
        """Something that a consumer has sent was lost, or it may be gone: have one that goes on
        with what was not acknowledged. None where it is there and lacks nothing."""
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
            what = "came back with less than it had: what it has may come again"
            log.warning("the stream of class %d %s", class_id, what)
            self._trimmed_floor.pop(class_id, None)
            is_new = True
        if info is None:
            log.warning("the consumer %s of class %d is gone, and made again", name, class_id)
        patterns = tuple(position.channel_filter.patterns) if position.channel_filter else ()
        needed = 0 if is_new else feed.restart_sequence
        kind = "durable" if position.durable else "group" if position.group else "plain"
        start = api.start_config("earliest" if is_new or kind != "plain" else "new")
        floor = 0
        if feed.ack_all is not None:
            if info is not None and not is_new:
                at = api.ack_floor(info)
                needed = min(at, needed) if needed else at
            former, name = name, self._reserve_name(position)
            start = api.start_at_sequence(needed) if needed else start
            more: dict[str, Any] = {"channels": patterns, "sent": feed.ack_all.delivered_before}
            floor = await self._create_consumer(
                class_id, name, kind, start, is_ack_all=True, **more
            )
            await self._delete(class_id, former)
        elif info is None:
            # What other server_ids have of a group is not known here: all that is stored comes again.
            start = api.start_at_sequence(needed) if needed and not position.group else start
            said = self._durable_settings(position)
            floor = await self._create_consumer(
                class_id, name, kind, start, channels=patterns, **said
            )
        if is_new:  # Nothing there is for whoever comes first.
            await self._delete(class_id, BACKLOG_CONSUMER)
        self._unconfirmed.pop(position, None)
        feed.stream_created = self.stream_created(class_id)
        sent_to = highest if is_rolled_back else 0
        is_ack_all = feed.ack_all is not None
        return OpenedConsumer(name, True, is_ack_all, sent_to, floor=floor, is_new_stream=is_new)

    async def _create_or_take_over(
        self,
        class_id: int,
        position: BrokerSubscription,
        name: str,
        make: Callable[..., Awaitable[int]],
        start: str | Start,
    ) -> OpenedConsumer:
        """Make a consumer; one that is for what waits takes that over, if there is any."""
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
                raise JetStreamError(0, "another door takes up what waits")
            await self._delete(class_id, name)  # It may have been made before.
            self._unconfirmed[position] = found
            await self._update(
                class_id, found, api.taken_over_config(unheld[0]["config"], self._server_id)
            )
            return await self._resume(class_id, unheld[0], existed_before=False)
        at = min(api.ack_floor(info) for info in unheld)
        sent = max(api.last_delivered_with_predecessors(info) for info in unheld)
        floor = await make(api.start_at_sequence(at), sent=sent)
        taken = [await self._delete(class_id, str(info["name"])) for info in unheld]
        if not any(taken):  # Somebody else has it, or what goes on in its stead.
            await self._delete(class_id, name)
            return await self._create_or_take_over(class_id, position, name, make, start)
        return OpenedConsumer(name, False, is_ack_all, sent, floor=floor)

    async def _can_take_over(self, info: dict[str, Any]) -> bool:
        """Whether a plain subscription can go on with what is unheld itself: not with what a door is
        about to leave, which says something of it still."""
        if api.is_ack_all(info) or info["name"] == BACKLOG_CONSUMER:
            return False
        server_id = api.server_id_of(info)
        return not server_id or (
            server_id != self._server_id and not await self._peers.is_alive(server_id)
        )

    async def _claim(self, class_id: int, name: str) -> bool:
        """Whether this door may take up a consumer that nobody holds: of several, one may. Which
        one says a consumer that is there for a moment."""
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
        """All consumers of a class. Raises BusConnectionError and JetStreamError."""
        return await list_consumers(self._link, self._options.names.stream_name(class_id))

    async def list_unheld(
        self, class_id: int, *, include_releasing: bool = False
    ) -> list[dict[str, Any]]:
        """Plain consumers that no door holds; and those that server_ids are about to leave, to be taken
        over, if nothing else is there. Raises as `all` does."""
        plain = [i for i in await self.list_all(class_id) if api.kind_of(i) == "plain"]
        server_ids = {api.server_id_of(info) for info in plain} - {self._server_id, ""}
        alive, names = await self._peers.find_alive(
            server_ids, class_id if include_releasing else None
        )
        if include_releasing:
            names |= self.releasing.offer_names(class_id, trio.current_time())
        gone = server_ids - alive | {""}
        # What server_ids have unheld until they answered is there by now.
        there = [info for info in await self.list_all(class_id) if api.kind_of(info)]
        plain = [info for info in there if api.kind_of(info) == "plain"]
        nobodys = [info for info in plain if api.server_id_of(info) in gone]
        names |= {str(info["name"]) for info in nobodys}
        stay = {str(info["name"]) for info in there} - names - set(self._unconfirmed.values())
        return nobodys if stay else [info for info in plain if info["name"] in names]

    async def close(
        self,
        cls: RemoteClass,
        position: BrokerSubscription,
        name: str,
        *,
        forget: bool,
        returned: ReturnedMessages | None = None,
        unacked: UnackedOnExit | None = None,
    ) -> None:
        """A position is gone from this door. What is to be forgotten, or nobody can come back to,
        goes; what the last one leaves waits for whoever comes, `returned` or `unacked` among it. May be
        asked again where it fails."""
        await self._close(cls, position, name, forget=forget, returned=returned, unacked=unacked)
        self._return_consumers.pop(position, None)

    async def _close(
        self,
        cls: RemoteClass,
        position: BrokerSubscription,
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
            with contextlib.suppress(ConsumerRefusedError):  # Then it goes on with its floor.
                name = await self._move_unacked(cls, position, name, unacked)
        if not is_plain:
            info = await self._info(class_id, name) if forget else None
            if info is None:
                return
            others = [i for i in await self.list_all(class_id) if api.kind_of(i)]
            if len(others) == 1:
                start = api.start_at_sequence(api.ack_floor(info))
                await self._create_consumer(
                    class_id, BACKLOG_CONSUMER, "plain", start, server_id=""
                )
            await self._delete(class_id, name)
            return
        # It is nobody's before it is looked who else is there: of two that leave at once, neither
        # takes the other one for one that stays.
        info = await self._info(class_id, name)
        if info is None or api.server_id_of(info) not in ("", self._server_id):
            return
        config = info["config"]
        if unacked is not None:
            config = with_return_note(info, unacked.sequences[unacked.delays == 0.0])
        await self._update(class_id, name, api.released_config(config))
        if not api.is_ack_all(info):  # Whoever comes next may claim it at once.
            await self._delete(class_id, api.claim_config(name, self._server_id)["name"])
        nobodys = {str(each["name"]) for each in await self.list_unheld(class_id)}
        stay = [i for i in await self.list_all(class_id) if api.kind_of(i)]
        if any(each["name"] not in nobodys for each in stay):
            await self._delete(class_id, name)

    async def _is_own(self, class_id: int, position: BrokerSubscription, name: str) -> bool:
        """Whether nobody else has taken over what a position leaves."""
        names = {name, self._return_consumers.get(position, name)}
        infos = [await self._info(class_id, each) for each in names]
        return any(info and api.server_id_of(info) in ("", self._server_id) for info in infos)

    async def _move_unacked(
        self, cls: RemoteClass, position: BrokerSubscription, name: str, unacked: UnackedOnExit
    ) -> str:
        """What a sole consumer has sent and is not done with goes on in another one, in which each
        message is acknowledged, or given back with its pause. Returns what that is called."""
        class_id = cls.class_id
        stream = self._options.names.stream_name(class_id)
        fresh = self._return_consumers.setdefault(position, self._new_name())
        patterns = tuple(position.channel_filter.patterns) if position.channel_filter else ()
        first = int(unacked.sequences[unacked.delays >= 0.0][0])
        begin = api.start_at_sequence(first)
        await self._create_consumer(
            class_id, fresh, "plain", begin, channels=patterns, sent=unacked.sent_to
        )
        await self._delete(class_id, name)
        await transfer_messages(self._link, stream, fresh, unacked)
        return fresh

    async def trim(self, class_id: int) -> dict[str, int]:
        """Have removed what all consumers have acknowledged. A stream without any keeps all.
        Returns by the name of each up to which message it has."""
        found = [i for i in await self.list_all(class_id) if api.kind_of(i)]
        floors = {str(info["name"]): api.ack_floor(info) for info in found}
        floor = min(floors.values(), default=0)
        if floor > self._trimmed_floor.get(class_id, 1):
            stream = self._options.names.stream_name(class_id)
            state = (await self._link.api_request(f"STREAM.INFO.{stream}"))["state"]
            if floor > int(state["first_seq"]):  # A purge of nothing would disturb others, too.
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
        **more: Any,
    ) -> int:
        """Returns from which message of the stream on it has not acknowledged any."""
        stream = self._options.names.stream_name(class_id)
        owner_id = self._server_id if server_id is None else server_id
        config = api.consumer_config(
            self._options, name, kind=kind, server_id=owner_id, start=start, **more
        )
        body = {"stream_name": stream, "config": config, "action": "create"}
        subject, info = f"CONSUMER.CREATE.{stream}.{name}", None
        try:
            info = await self._link.api_request(subject, body, seconds=_STREAM_SECONDS)
        except JetStreamError as error:  # Another door was first, or the answer was lost.
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
        """Returns whether it was there."""
        try:
            await self._link.api_request(
                f"CONSUMER.DELETE.{self._options.names.stream_name(class_id)}.{name}"
            )
        except JetStreamError as error:
            if error.code in jetstream_codec.NOT_FOUND:
                return False
            raise
        return True
