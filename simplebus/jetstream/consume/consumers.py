"""Streams and consumers, asked of JetStream as classes and positions need them (trio).

Rule 1: what is asked twice is there once: a stream or a consumer that is there is used. Of one
class one thing is asked at a time.
Rule 2: a message stays as long as a consumer has not acknowledged it. A consumer that takes over is
there before the one that it takes over from is removed.
Rule 3: a plain subscription's consumer is its door's alone, and acknowledges all up to a message
at once. What was acknowledged out of order is said when it ends: what is not then goes on in a
consumer that has a word for each message.
Rule 4: what waits for the first subscription of a class is held by a consumer that nobody asks for
messages: `waiting`, or a plain one whose door is gone. A plain subscription goes on with that one,
after it has claimed it, if it has a word for each message. Else, and others, and where there are
several, a consumer is made from there on, and then they are removed; of two doors one removes them,
and the other one looks again. What a door is about to leave counts as left (`going`).
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
from simplebus.jetstream.cluster.peers import Others
from simplebus.jetstream.cluster.stream_update import fit
from simplebus.jetstream.consume.durable_check import Judge, check_same
from simplebus.jetstream.consume.feed import Feed, Found
from simplebus.jetstream.consume.give_back import (
    Leaving,
    Owed,
    give_again,
    give_back,
    pass_on,
    with_note,
)
from simplebus.jetstream.consume.handover import Going
from simplebus.jetstream.names import BACKLOG_CONSUMER, describe_consumer, consumer_name, belongs_to_durable
from simplebus.jetstream.remote_class import RemoteClass
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

_STREAM_SECONDS = 10.0


class ConsumerRefusedError(JetStreamError):
    """The cluster makes no such consumer, however often it is asked."""


class Positions:
    """Of one door."""

    def __init__(
        self, link: NatsConnection, options: JetStreamOptions, door: str, judge: Judge
    ) -> None:
        self._link = link
        self._judge = judge
        self._options = options
        self._door = door
        self._count = 0
        self.see: Callable[[int, str], None] = lambda class_id, description: None
        """Called with what a class's stream says that it is called, when that was looked at."""
        self._unsure: dict[BrokerSubscription, str] = {}
        """What consumers are called that were asked for and may be there, by their positions."""
        self._giving_back: dict[BrokerSubscription, str] = {}
        """And in what goes on what such ones leave, until that is done."""
        self._others = Others(link, options.names)
        self.going = Going(lambda position: self._giving_back.get(position, ""))
        """What this door is about to leave."""
        self._streams: set[int] = set()
        self._born: dict[int, str] = {}
        """When each class's stream was made."""
        self._last: dict[int, int] = {}
        """Of each class, the last message of its stream when that was looked at."""
        self._trimmed: dict[int, int] = {}
        """Of each class, the first message of its stream that may be needed, as it was last."""
        self._with_chains: set[int] = set()
        """Classes whose streams take chains of messages."""

    async def classes(self) -> tuple[list[tuple[int, str]], list[str]]:
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
            await fit(self._link, info["config"], self._options)
        else:
            body = api.stream_config(self._options, class_id, name)
            try:
                info = await self._create(stream, body)
            except JetStreamError as error:  # Another door was first.
                if error.code != api.NAME_IN_USE:
                    raise
                info = await self._link.api_request(f"STREAM.INFO.{stream}")
                await fit(self._link, info["config"], self._options)
        self._with_chains.discard(class_id)
        if info.get("config", {}).get("allow_batched") is True:
            self._with_chains.add(class_id)
        state = info.get("state", {})
        self._last[class_id] = int(state.get("last_seq", 0))
        if not state.get("consumer_count") and not state.get("last_seq"):
            await self._make(class_id, BACKLOG_CONSUMER, "plain", {"deliver_policy": "all"}, door="")
        self._streams.add(class_id)
        self.see(class_id, str(info.get("config", {}).get("description") or ""))
        born = str(info.get("created", ""))
        if self._born.setdefault(class_id, born) != born:
            log.warning("the stream of class %d is a new one; what was in it is gone", class_id)
            self._born[class_id] = born
            self._trimmed.pop(class_id, None)

    async def _create(self, stream: str, body: dict[str, Any]) -> dict[str, Any]:
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

    def takes_chains(self, class_id: int) -> bool:
        """Whether its stream does, as it was last."""
        return class_id in self._with_chains

    def born(self, class_id: int) -> str:
        """When its stream was made, as far as that is known: another one has other messages."""
        return self._born.get(class_id, "")

    def doubt(self, class_id: int) -> None:
        """A class's stream may be gone: it is looked for before it is used again."""
        self._streams.discard(class_id)

    async def open(
        self,
        cls: RemoteClass,
        position: BrokerSubscription,
        start: str | Start,
        *,
        seeks: bool = False,
    ) -> Found:
        """Have a position's consumer; where it `seeks`, at `start` in any case.

        Raises RemoteProtocolError (subscription_mismatch) for a name that is there for something
        else, (unauthorized) for one of a user whose it is not to have, and (durable_in_use) for one
        that is to be moved and is another door's now; JetStreamError and BusConnectionError.
        """
        class_id = cls.class_id
        await self.open_stream(class_id, cls.name)
        name = consumer_name(position.durable, position.group)
        patterns = tuple(position.channel_filter.patterns) if position.channel_filter else ()
        if name:
            info = await self._info(class_id, name)
            if info is not None:
                check_same(position, patterns, info)
                owner = api.owner_of(info)
                may_change = self._judge.check(cls, position, owner, moves=seeks)
                await self._agree(class_id, position, info, may_change=may_change)
                if seeks:
                    return await self._move(class_id, info, patterns, start)
                return await self._again(
                    class_id, info, was_there=True, may_be_nobodys=not position.group
                )
            kind = "durable" if position.durable else "group"
            await self._check_alone(class_id, position, name)
        else:
            if (info := await self._claimed(class_id, position)) is not None:
                self._unsure.pop(position)
                return await self._again(class_id, info, was_there=False)
            name, kind = self._fresh_name(position), "plain"
        make = partial(
            self._make,
            class_id,
            name,
            kind,
            channels=patterns,
            **self._said(position),
        )
        found = await self._begin(class_id, position, name, make, start)
        self._unsure.pop(position, None)
        if kind != "plain" and (info := await self._info(class_id, name)) is not None:
            check_same(position, patterns, info)  # Another door may have been first.
        return found

    def _said(self, position: BrokerSubscription) -> dict[str, Any]:
        """What is said of a durable or a group when it is made."""
        if not (position.durable or position.group):
            return {}
        return {
            "owner": position.owner,
            "terms": self._judge.terms(position),
            "idle_seconds": position.idle_seconds,
        }

    async def _check_alone(self, class_id: int, position: BrokerSubscription, own: str) -> None:
        """Raise RemoteProtocolError (subscription_mismatch) for a durable that is there with
        another group, or with none."""
        for info in await self.all(class_id) if position.durable else ():
            name = str(info["name"])
            is_other = name != own and api.kind_of(info) == "durable"
            if is_other and belongs_to_durable(name, position.durable):
                raise RemoteProtocolError(
                    Reason.SUBSCRIPTION_MISMATCH,
                    f"there is {describe_consumer(name)}, and the durable {position.durable!r} was asked for "
                    f"with the group {position.group!r}",
                )

    async def _claimed(self, class_id: int, position: BrokerSubscription) -> dict[str, Any] | None:
        """What a position has taken up before, if that was not answered."""
        name = self._unsure.get(position)
        info = await self._info(class_id, name) if name is not None else None
        if info is None or api.is_ack_all(info):  # One that it makes for itself is.
            return None
        if api.server_id_of(info) == self._door:
            return info
        del self._unsure[position]
        return None

    async def _agree(
        self, class_id: int, position: BrokerSubscription, info: dict[str, Any], *, may_change: bool
    ) -> None:
        """Have one that is there kept for as long as who may change it says now; and served as he
        says if nobody else has it, or else as it was."""
        name, config = str(info["name"]), info["config"]
        if api.owner_of(info) in ("", position.owner):
            config = api.with_idle_seconds(config, position.idle_seconds)
        there, terms = api.delivery_policy_of(info), self._judge.terms(position)
        if there != terms:
            if there and not (may_change and not await self._others.is_held(class_id, name)):
                self._judge.agree(position, there)
            else:
                config = api.with_delivery_policy(config, terms)
        if config != info["config"]:
            info["config"] = config
            await self._update(class_id, name, config)

    async def _again(
        self, class_id: int, info: dict[str, Any], *, was_there: bool, may_be_nobodys: bool = False
    ) -> Found:
        """Go on with a consumer that others had; if they are gone, with what they had first."""
        again, is_nobodys = dict[int, bytes](), False
        if info.get("num_ack_pending"):
            stream, name = self._options.names.stream_name(class_id), str(info["name"])
            is_nobodys = may_be_nobodys and not await self._others.is_held(class_id, name)
            again = await give_again(self._link, stream, info, is_nobodys=is_nobodys)
        return Found(
            str(info["name"]),
            was_there,
            sent_to=api.last_delivered_with_predecessors(info),
            sent_before=api.last_delivered(info),
            sent_count=api.delivery_count(info),
            floor=api.ack_floor(info),
            awaited=again if is_nobodys or not was_there else {},  # Else others may have it.
        )

    async def _move(
        self, class_id: int, info: dict[str, Any], patterns: tuple[str, ...], start: str | Start
    ) -> Found:
        """Have a durable begin at `start`: consumers do not move, so it is made anew. Another one
        keeps what is stored for it until it is there."""
        name = str(info["name"])
        if await self._others.is_held(class_id, name):
            raise RemoteProtocolError(
                Reason.DURABLE_IN_USE, f"another door has {name!r}: it is not moved under its feet"
            )
        hold = f"hold-{name}"
        at = api.start_at_sequence(api.ack_floor(info))
        await self._make(class_id, hold, "hold", at, channels=patterns)
        await self._delete(class_id, name)
        begin, owner = await self._starting(class_id, start), api.owner_of(info)
        seconds, terms = api.idle_seconds_of(info), api.delivery_policy_of(info)
        await self._make(
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
        return Found(name, True)

    async def _starting(self, class_id: int, start: str | Start) -> dict[str, Any]:
        """Where a position begins, as of now."""
        if not (isinstance(start, Start) and start.sequence is not None):
            return api.start_config(start)
        info = await self._link.api_request(f"STREAM.INFO.{self._options.names.stream_name(class_id)}")
        return api.start_config(start, int(info["state"]["last_seq"]))

    def _new_name(self) -> str:
        self._count += 1
        return f"p-{self._door}-{self._count}"

    def _fresh_name(self, position: BrokerSubscription) -> str:
        """Of the consumer that a position is to have. It stays, however often that is asked for:
        it may be there though nobody has heard so."""
        return self._unsure.setdefault(position, self._new_name())

    def take_unsure(self, position: BrokerSubscription) -> str:
        """What the consumer is called that a position has had asked for in vain, and that may be
        there all the same; empty for none."""
        return self._unsure.pop(position, "")

    async def renew(
        self, cls: RemoteClass, position: BrokerSubscription, name: str, feed: Feed
    ) -> Found | None:
        """Something that a consumer has sent was lost, or it may be gone: have one that goes on
        with what was not acknowledged. None where it is there and lacks nothing."""
        class_id = cls.class_id
        self.doubt(class_id)
        await self.open_stream(class_id, cls.name)
        info = await self._info(class_id, name)
        highest = feed.remembered.highest
        is_behind = feed.is_behind or (info is None and self._last[class_id] < highest)
        is_new = feed.born != self.born(class_id)
        if info is not None and not (is_new or feed.is_broken):
            return None
        if is_behind and not is_new:
            what = "came back with less than it had: what it has may come again"
            log.warning("the stream of class %d %s", class_id, what)
            self._trimmed.pop(class_id, None)
            is_new = True
        if info is None:
            log.warning("the consumer %s of class %d is gone, and made again", name, class_id)
        patterns = tuple(position.channel_filter.patterns) if position.channel_filter else ()
        needed = 0 if is_new else feed.needed
        kind = "durable" if position.durable else "group" if position.group else "plain"
        start = api.start_config("earliest" if is_new or kind != "plain" else "new")
        floor = 0
        if feed.sole is not None:
            if info is not None and not is_new:
                at = api.ack_floor(info)
                needed = min(at, needed) if needed else at
            former, name = name, self._fresh_name(position)
            start = api.start_at_sequence(needed) if needed else start
            more: dict[str, Any] = {"channels": patterns, "sent": feed.sole.sent_to}
            floor = await self._make(class_id, name, kind, start, is_sole=True, **more)
            await self._delete(class_id, former)
        elif info is None:
            # What other doors have of a group is not known here: all that is stored comes again.
            start = api.start_at_sequence(needed) if needed and not position.group else start
            said = self._said(position)
            floor = await self._make(class_id, name, kind, start, channels=patterns, **said)
        if is_new:  # Nothing there is for whoever comes first.
            await self._delete(class_id, BACKLOG_CONSUMER)
        self._unsure.pop(position, None)
        feed.born = self.born(class_id)
        sent_to = highest if is_behind else 0
        is_sole = feed.sole is not None
        return Found(name, True, is_sole, sent_to, floor=floor, is_of_new_stream=is_new)

    async def _begin(
        self,
        class_id: int,
        position: BrokerSubscription,
        name: str,
        make: Callable[..., Awaitable[int]],
        start: str | Start,
    ) -> Found:
        """Make a consumer; one that is for what waits takes that over, if there is any."""
        sole = not (position.durable or position.group)
        left = await self.left(class_id, going=True) if start == "waiting" else []
        make = partial(make, is_sole=sole)
        if not left:
            floor = await make(await self._starting(class_id, start))
            return Found(name, False, sole, floor=floor)
        if len(left) == 1 and sole and await self._may_go_on(left[0]):
            found = str(left[0]["name"])
            if not await self._claim(class_id, found):
                raise JetStreamError(0, "another door takes up what waits")
            await self._delete(class_id, name)  # It may have been made before.
            self._unsure[position] = found
            await self._update(class_id, found, api.taken_over_config(left[0]["config"], self._door))
            return await self._again(class_id, left[0], was_there=False)
        at = min(api.ack_floor(info) for info in left)
        sent = max(api.last_delivered_with_predecessors(info) for info in left)
        floor = await make(api.start_at_sequence(at), sent=sent)
        taken = [await self._delete(class_id, str(info["name"])) for info in left]
        if not any(taken):  # Somebody else has it, or what goes on in its stead.
            await self._delete(class_id, name)
            return await self._begin(class_id, position, name, make, start)
        return Found(name, False, sole, sent, floor=floor)

    async def _may_go_on(self, info: dict[str, Any]) -> bool:
        """Whether a plain subscription can go on with what is left itself: not with what a door is
        about to leave, which says something of it still."""
        if api.is_ack_all(info) or info["name"] == BACKLOG_CONSUMER:
            return False
        door = api.server_id_of(info)
        return not door or (door != self._door and not await self._others.is_alive(door))

    async def _claim(self, class_id: int, name: str) -> bool:
        """Whether this door may take up a consumer that nobody holds: of several, one may. Which
        one says a consumer that is there for a moment."""
        stream = self._options.names.stream_name(class_id)
        config = api.claim_config(name, self._door)
        body = {"stream_name": stream, "config": config, "action": "create"}
        try:
            await self._link.api_request(f"CONSUMER.CREATE.{stream}.{config['name']}", body)
        except JetStreamError as error:
            if error.code not in api.CONSUMER_EXISTS:
                raise
            return False
        info = await self._info(class_id, name)
        door = api.server_id_of(info) if info is not None else ""
        return info is not None and not (door and await self._others.is_alive(door))

    async def all(self, class_id: int) -> list[dict[str, Any]]:
        """All consumers of a class. Raises BusConnectionError and JetStreamError."""
        return await list_consumers(self._link, self._options.names.stream_name(class_id))

    async def left(self, class_id: int, *, going: bool = False) -> list[dict[str, Any]]:
        """Plain consumers that no door holds; and those that doors are about to leave, to be taken
        over, if nothing else is there. Raises as `all` does."""
        plain = [i for i in await self.all(class_id) if api.kind_of(i) == "plain"]
        doors = {api.server_id_of(info) for info in plain} - {self._door, ""}
        alive, names = await self._others.alive(doors, class_id if going else None)
        if going:
            names |= self.going.names(class_id, trio.current_time())
        gone = doors - alive | {""}
        # What doors have left until they answered is there by now.
        there = [info for info in await self.all(class_id) if api.kind_of(info)]
        plain = [info for info in there if api.kind_of(info) == "plain"]
        nobodys = [info for info in plain if api.server_id_of(info) in gone]
        names |= {str(info["name"]) for info in nobodys}
        stay = {str(info["name"]) for info in there} - names - set(self._unsure.values())
        return nobodys if stay else [info for info in plain if info["name"] in names]

    async def close(
        self,
        cls: RemoteClass,
        position: BrokerSubscription,
        name: str,
        *,
        forget: bool,
        leaving: Leaving | None = None,
        owed: Owed | None = None,
    ) -> None:
        """A position is gone from this door. What is to be forgotten, or nobody can come back to,
        goes; what the last one leaves waits for whoever comes, `leaving` or `owed` among it. May be
        asked again where it fails."""
        await self._close(cls, position, name, forget=forget, leaving=leaving, owed=owed)
        self._giving_back.pop(position, None)

    async def _close(
        self,
        cls: RemoteClass,
        position: BrokerSubscription,
        name: str,
        *,
        forget: bool,
        leaving: Leaving | None,
        owed: Owed | None,
    ) -> None:
        class_id = cls.class_id
        is_plain = not (position.durable or position.group)
        if is_plain and not await self._is_own(class_id, position, name):
            return
        if leaving is not None and not forget:
            stream = self._options.names.stream_name(class_id)
            config = await give_back(self._link, stream, name, leaving)
            if config is not None:
                await self._update(class_id, name, config)
        if owed is not None:
            with contextlib.suppress(ConsumerRefusedError):  # Then it goes on with its floor.
                name = await self._give_back(cls, position, name, owed)
        if not is_plain:
            info = await self._info(class_id, name) if forget else None
            if info is None:
                return
            others = [i for i in await self.all(class_id) if api.kind_of(i)]
            if len(others) == 1:
                start = api.start_at_sequence(api.ack_floor(info))
                await self._make(class_id, BACKLOG_CONSUMER, "plain", start, door="")
            await self._delete(class_id, name)
            return
        # It is nobody's before it is looked who else is there: of two that leave at once, neither
        # takes the other one for one that stays.
        info = await self._info(class_id, name)
        if info is None or api.server_id_of(info) not in ("", self._door):
            return
        config = info["config"]
        if owed is not None:
            config = with_note(info, owed.sequences[owed.waits == 0.0])
        await self._update(class_id, name, api.released_config(config))
        if not api.is_ack_all(info):  # Whoever comes next may claim it at once.
            await self._delete(class_id, api.claim_config(name, self._door)["name"])
        nobodys = {str(each["name"]) for each in await self.left(class_id)}
        stay = [i for i in await self.all(class_id) if api.kind_of(i)]
        if any(each["name"] not in nobodys for each in stay):
            await self._delete(class_id, name)

    async def _is_own(self, class_id: int, position: BrokerSubscription, name: str) -> bool:
        """Whether nobody else has taken over what a position leaves."""
        names = {name, self._giving_back.get(position, name)}
        infos = [await self._info(class_id, each) for each in names]
        return any(info and api.server_id_of(info) in ("", self._door) for info in infos)

    async def _give_back(
        self, cls: RemoteClass, position: BrokerSubscription, name: str, owed: Owed
    ) -> str:
        """What a sole consumer has sent and is not done with goes on in another one, in which each
        message is acknowledged, or given back with its pause. Returns what that is called."""
        class_id = cls.class_id
        stream = self._options.names.stream_name(class_id)
        fresh = self._giving_back.setdefault(position, self._new_name())
        patterns = tuple(position.channel_filter.patterns) if position.channel_filter else ()
        first = int(owed.sequences[owed.waits >= 0.0][0])
        begin = api.start_at_sequence(first)
        await self._make(class_id, fresh, "plain", begin, channels=patterns, sent=owed.sent_to)
        await self._delete(class_id, name)
        await pass_on(self._link, stream, fresh, owed)
        return fresh

    async def trim(self, class_id: int) -> dict[str, int]:
        """Have removed what all consumers have acknowledged. A stream without any keeps all.
        Returns by the name of each up to which message it has."""
        found = [i for i in await self.all(class_id) if api.kind_of(i)]
        floors = {str(info["name"]): api.ack_floor(info) for info in found}
        floor = min(floors.values(), default=0)
        if floor > self._trimmed.get(class_id, 1):
            stream = self._options.names.stream_name(class_id)
            state = (await self._link.api_request(f"STREAM.INFO.{stream}"))["state"]
            if floor > int(state["first_seq"]):  # A purge of nothing would disturb others, too.
                await self._link.api_request(f"STREAM.PURGE.{stream}", {"seq": floor})
            self._trimmed[class_id] = floor
        return floors

    # Requests ------------------------------------------------------------------------------------

    async def _make(
        self,
        class_id: int,
        name: str,
        kind: str,
        start: dict[str, Any],
        *,
        door: str | None = None,
        **more: Any,
    ) -> int:
        """Returns from which message of the stream on it has not acknowledged any."""
        stream = self._options.names.stream_name(class_id)
        whose = self._door if door is None else door
        config = api.consumer_config(self._options, name, kind=kind, server_id=whose, start=start, **more)
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
