"""Into a stream that takes chains each message comes once and in its order, whatever becomes of its
leader: against a stream in this process that changes it, and against real ones.

Rule 1: what a leader has taken is stored later, in order, and answered then; it knows the ids of
that, and passes over what a chain has of them.
Rule 2: a leader that goes loses what it took last, or nothing of it; the next one leads when it has
stored the rest.
"""

from __future__ import annotations

import random
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

import simplebus
from simplebus.bridge.copier import Copier
from simplebus.bridge.interfaces import STREAM_FULL, Refusal, SourceBatch, TargetBatch
from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.bridge.runner import create_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.bridge.source.bus import BusSource
from simplebus.bridge.source.identity import SourceIdentity
from simplebus.bridge.target.batched_stream import BatchedStreamTarget
from simplebus.bridge.target.bus import TargetSettings
from simplebus.bridge.target.nats import NatsTarget, TargetStreamState
from simplebus.bridge.transform import MessageRun
from simplebus.core.errors import BusConnectionError
from simplebus.core.protocol import frames
from simplebus.nats.client.client import NatsClientCore, RequestReplies
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.nats.protocol.events import Pub
from tests.bridge.memory_buses import numbered
from tests.bridge.nats_copiers import (
    BusServer,
    NatsServer,
    connect,
    copying,
    stored,
    stream,
    until,
)
from tests.jetstream.publish.test_stream_publisher import publications

COUNT = 60
WILD_TURNS, CALM_TURNS = 40, 4000
UNKNOWN = b'{"error":{"code":400,"err_code":10208,"description":"batch publish ID unknown"}}'
IN_FLIGHT = (
    b'{"error":{"code":400,"err_code":10158,"description":"duplicate message id is in process"}}'
)
FULL = b'{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"}}'
NO_ROLLUP = b'{"error":{"code":500,"err_code":10111,"description":"rollup not permitted"}}'
TOO_MANY_REQUESTS = b"NATS/1.0 429 Too Many Requests\r\n\r\n"
NOBODY = b"NATS/1.0 503\r\n\r\n"


@dataclass(slots=True)
class Taken:
    """A message that the leader has taken, and that is not stored yet."""

    number: int
    id: str
    reply: bytes
    fast_batch: bytes = b""
    far: int = 0
    """How far its chain is with it."""
    is_end: bool = False
    is_known: bool = False
    """Whether it is there, or on its way, already: one of a chain is passed over."""


class Led:
    """A stream, its leader, and what is on its way to and from that."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.trouble = 1.0
        self.loses, self.refuses = (chance.choice([0.0, 0.003, 0.05]) for _ in range(2))
        self.unrest = chance.choice([0.0, 0.03, 0.2])
        self.version = ""
        self.room = 1 << 30
        """So many it takes at all."""
        self.has_ends_only = False
        """Whether of a chain it stores the last message, and says that it has all of it."""
        self.forgets = False
        """Whether it knows no ids any more when it is asked for them."""
        self.log: list[int] = []
        self.source_identity, self.stream_state = SourceIdentity(), TargetStreamState()
        """What a lane knows of it from one connection to the next one."""
        self.stored: list[str] = []
        self.ids: set[str] = set()
        self.written: deque[Pub] = deque()
        self.taken: deque[Taken] = deque()
        self.known: set[str] = set()
        self.open: dict[bytes, int] = {}
        self.is_led = True
        self.answers: list[bytes] = []

    def happens(self, chance: float) -> bool:
        return self.chance.random() < chance * self.trouble

    def say(self, reply: bytes, answer: bytes) -> None:
        if self.happens(self.loses):
            return
        sid = 2 if reply.endswith(b".$FI") else 1
        head = b"MSG %b %d %d\r\n" % (reply, sid, len(answer))
        if answer.startswith(b"NATS/1.0"):
            head = b"HMSG %b %d %d %d\r\n" % (reply, sid, len(answer), len(answer))
        self.answers.append(head + answer + b"\r\n")

    def work(self) -> None:
        for _ in range(self.chance.choice([1, 5, 40, 500])):
            if self.written:
                self._deal_with(self.written.popleft())
        if self.happens(self.unrest):
            self._lose_leader()
        elif not self.is_led and self.chance.random() < 0.5:
            while self.taken:
                self._store_batch(self.taken.popleft())
            self.is_led = True
        if self.is_led:
            for _ in range(self.chance.choice([0, 1, 5, 40, 500])):
                if self.taken:
                    self._store_batch(self.taken.popleft())

    def _lose_leader(self) -> None:
        for _ in range(self.chance.choice([0, len(self.taken) // 2, len(self.taken)])):
            self.taken.pop()
        self.known, self.open, self.is_led = set(), {}, False

    def _deal_with(self, message: Pub) -> None:
        if not self.is_led:
            if self.happens(0.7) or not self.trouble:
                self.say(message.reply, NOBODY)
            return
        if self.happens(self.loses):
            return
        body = bytes(message.body)
        block, payload = body[: message.header_bytes].decode(), body[message.header_bytes :]
        headers = dict(line.split(": ") for line in block.split("\r\n")[1:-2])
        id_ = headers.get("Nats-Msg-Id", "")
        if message.reply.endswith(b".$FI"):
            self._take_of_chain(message.reply, id_, int(payload or -1))
        elif id_ in self.known:
            self.say(message.reply, IN_FLIGHT)
        elif id_ in self.ids and not self.forgets:
            self.say(message.reply, b'{"stream":"S","seq":9,"duplicate":true}')
        elif "Nats-Rollup" in headers:
            self.say(message.reply, NO_ROLLUP)
        elif self.happens(self.refuses):
            self.say(message.reply, FULL)
        elif len(self.ids) + len(self.known) >= self.room:
            self.say(message.reply, TOO_MANY_REQUESTS)
        else:
            self.known.add(id_)
            self.taken.append(Taken(int(payload), id_, message.reply))

    def _take_of_chain(self, reply: bytes, id_: str, number: int) -> None:
        *_, name, _, _, index, step, _ = reply.split(b".")
        at, far = int(index), self.open.get(name)
        if far is None:
            if at != 1 or self.happens(self.refuses):
                self.say(reply, FULL if at == 1 else UNKNOWN)
                return
            far = self.open[name] = 0
            self.say(reply, b'{"type":"ack","seq":0,"msgs":500}')
        one = Taken(number, id_, reply, name, at, is_known=id_ in self.ids or id_ in self.known)
        if at != far + 1 or self.happens(self.refuses):
            error = b'{"type":"gap","last_seq":%d,"seq":1}' % far
            if at == far + 1:
                error = b'{"type":"err","seq":%d,"error":%b' % (far, FULL[9:])
            self.say(reply, error)
            one.far, one.is_end, one.is_known, one.id = far, True, True, ""
            del self.open[name]
        else:
            self.open[name], one.is_end = at, step == b"2"
            self.known.add(id_)
            if one.is_end:
                del self.open[name]
        self.taken.append(one)

    def _store_batch(self, one: Taken) -> None:
        self.known.discard(one.id)
        is_lost = self.has_ends_only and one.fast_batch and not one.is_end
        if not (one.is_known or is_lost):
            self.log.append(one.number)
            self.stored.append(one.id)
            self.ids.add(one.id)
        if not one.fast_batch:
            self.say(one.reply, b'{"stream":"S","seq":%d}' % len(self.log))
        elif one.is_end:
            said = b'{"stream":"S","seq":%d,"batch":"%b","count":%d}'
            is_told = not (one.is_known and one.id)  # Nor is it of a server.
            self.say(one.reply, said % (len(self.log) * is_told, one.fast_batch, one.far))


class Wire:
    """A connection to it; who waits for too long is told that nothing came."""

    def __init__(self, led: Led) -> None:
        self.led, self.lost_reason, self.timeout_seconds = led, "", 60.0
        self.core = NatsClientCore(inbox="_INBOX.x")
        self.core.start_connection(0.0)
        says = b'INFO {"headers":true,"max_payload":1048576,"version":"%b"}\r\n'
        list(self.core.receive(says % led.version.encode(), 0.0))
        self.core.send_connect()
        list(self.core.receive(b"PONG\r\n", 0.0))
        self.nats = SimpleNamespace(flush=self._flush, api_request=self._api_request, server="here")
        self.replies: list[RequestReplies] = []
        self.complaints: list[str] = []
        self.on_messages: Any = None
        self._flush()
        led.written.clear()

    def _flush(self) -> None:
        said = b"".join(bytes(each) for each in self.core.drain_output())
        at = said.find(b"SUB _INBOX")
        while at >= 0:  # Only what is published is of interest.
            end = said.index(b"\r\n", at) + 2
            said = said[:at] + said[end:]
            at = said.find(b"SUB _INBOX")
        if not said.startswith(b"CONNECT"):
            self.led.written += publications(said)

    async def _api_request(self, subject: str, body: dict[str, int] | None = None) -> dict[str, Any]:
        if subject == "STREAM.INFO.S":
            return {"config": {"subjects": ["class.>"]}}
        assert subject == "STREAM.MSG.GET.S"
        assert body is not None
        if not 0 < body["seq"] <= len(self.led.stored):
            raise JetStreamError(10037, "no message found")
        headers = f"NATS/1.0\r\nNats-Msg-Id: {self.led.stored[body['seq'] - 1]}\r\n\r\n"
        return {"message": {"seq": body["seq"], "hdrs": b64encode(headers.encode()).decode()}}

    async def wait_expected(self, what: str) -> None:
        for _ in range(20):
            self.led.work()
            some, self.led.answers = self.led.answers, []
            if some:
                for event in self.core.receive(b"".join(some), 0.0):
                    if isinstance(event, RequestReplies):
                        self.replies.append(event)
                    else:
                        assert isinstance(event, ReceivedMessages)
                        self.on_messages(event)
                return
        raise BusConnectionError(f"{what} did not come")


def found_from(at: int, end: int) -> SourceBatch:
    whole = [
        frames.encode(frames.MESSAGE, class_id=7, message_id=n, content=b"%03d" % n)
        for n in range(at, end)
    ]
    bounds = np.cumsum([0, *map(len, whole)])
    piece = MessageRun(b"".join(whole), bounds, np.arange(at, end), 0.0)
    return SourceBatch([piece], at, end, COUNT)


def far_of(led: Led, kind: Callable[..., NatsTarget], **own: Any) -> NatsTarget:
    """An end of this kind, connected to it."""
    near: Any = SimpleNamespace(identity="near", storage_id="near", head=COUNT)
    options: dict[str, Any] = {
        "source": near,
        "class_id": 7,
        "sequence_scope": "near",
        "source_identity": led.source_identity,
        "stream_state": led.stream_state,
    } | own
    connection: Any = Wire(led)
    terms = TargetSettings(name="l", record_channel="l", class_=7)
    return kind(connection, terms, stream="S", **options)


def far_end(led: Led) -> NatsTarget:
    return far_of(led, BatchedStreamTarget, config={"subjects": ["class.>"]})


async def copy(far: NatsTarget, led: Led, at: int) -> AsyncIterator[int]:
    """What a lane does, from there on. Returns how far it is, and whether it is through."""
    chance, cursor = led.chance, at
    under_way: deque[TargetBatch] = deque()
    while at < COUNT:
        while cursor < COUNT and len(under_way) < 3:
            made = far.prepare(found_from(cursor, min(COUNT, cursor + chance.randint(1, 25))))
            far.send(made)
            under_way.append(made)
            cursor = made.next_sequence
        later: list[Refusal] = []
        made = under_way.popleft()
        later += await far.settle_oldest()
        last = made.next_sequence
        while later and under_way:
            last = under_way.popleft().next_sequence
            later += await far.settle_oldest()
        while later:
            assert {each.code for each in later} == {STREAM_FULL}
            again = far.prepare(
                SourceBatch(
                    found_from(0, COUNT).select(np.array([e.sequence for e in later])), 0, 0, 0
                )
            )
            far.send(again)
            later = await far.settle_oldest()
        at = last
        yield at


async def all_copied(led: Led, far_end: Callable[[Led], NatsTarget]) -> None:
    at = 0
    for turn in range(CALM_TURNS):
        if turn == WILD_TURNS:
            led.trouble = 0.0
        if at == COUNT:
            return
        try:
            async for done in copy(far_end(led), led, at):
                at = done
        except BusConnectionError:
            for _ in range(led.chance.choice([0, 3, 30])):  # It goes on with what it has.
                led.work()
            led.written.clear()
            led.answers.clear()
    raise AssertionError("it hangs")


@settings(max_examples=4 * settings().max_examples, deadline=None)
@given(st.integers(0, 2**32))
def test_fast_batches_keep_order_across_leader_changes(
    seed: int,
) -> None:
    led = Led(random.Random(seed))
    trio.run(all_copied, led, far_end)
    assert led.log == list(range(COUNT))


class Forgetful(Led):
    """Once it loses the last of what it has said that it has of a chain, and of nothing else."""

    has_lost = False
    confirmed = 0
    """So much of what is stored was confirmed one by one."""

    def say(self, reply: bytes, answer: bytes) -> None:
        super().say(reply, answer)
        if b'"stream":' in answer and b'"count":' not in answer:
            self.confirmed = len(self.stored)
        elif b'"count":' in answer and len(self.stored) > self.confirmed and not self.has_lost:
            self.has_lost = True
            self.log.pop()
            self.ids.remove(self.stored.pop())


def test_resends_confirmed_messages_that_are_missing() -> None:
    """Of a chain that ends before its end, too."""
    for seed in range(100):
        led = Forgetful(random.Random(seed))
        led.refuses, led.loses, led.unrest = 0.05, 0.0, 0.0  # What is confirmed is not lost.
        trio.run(all_copied, led, far_end)
        assert (led.has_lost, led.log) == (True, list(range(COUNT))), seed


async def test_resends_messages_lost_from_confirmed_batch() -> None:
    """As one does whose chain is on its way while it is given fewer replicas."""
    led = Led(random.Random(0))
    led.trouble = 0.0
    far = far_end(led)
    far.send(far.prepare(found_from(0, 20)))
    assert await far.settle_oldest() == []
    led.has_ends_only = True
    far.send(far.prepare(found_from(20, 40)))
    with pytest.raises(BusConnectionError, match="does not have the messages that it confirmed"):
        await far.settle_oldest()
    led.has_ends_only = False
    for says_all in False, True:  # What is said of a chain whose end is known tells nothing.
        far = far_end(led)
        far.send(far.prepare(found_from(20, 40)))
        if says_all:
            assert await far.settle_oldest() == []
        else:
            with pytest.raises(BusConnectionError, match="did not confirm messages"):
                await far.settle_oldest()
    assert sorted(led.log) == list(range(40))


def test_short_duplicate_window_stores_each_message_once() -> None:
    led = Led(random.Random(0))
    led.trouble, led.forgets = 0.0, True
    trio.run(all_copied, led, far_end)
    assert led.log == list(range(COUNT))


# Real servers ------------------------------------------------------------------------------------


def into(nats: NatsServer, server: BusServer, name: str, **options: Any) -> Copier:
    copied = CopiedClass(name.lower(), stream=name, start="earliest", **options)
    return create_copiers([BridgeSettings(name, server.address, nats.url, (copied,))])[0]


async def payloads_of(connection: BridgeNatsConnection, name: str) -> list[bytes]:
    """All that a stream has, in its order."""
    state = (await connection.nats.api_request(f"STREAM.INFO.{name}"))["state"]
    found = []
    for sequence in range(state["first_seq"], state["last_seq"] + 1):
        with suppress(JetStreamError):
            said = await connection.nats.api_request(f"STREAM.MSG.GET.{name}", {"seq": sequence})
            found.append(b64decode(said["message"].get("data", "")))
    return found


async def test_refused_message_of_fast_batch_does_not_block_rest(
    nats: NatsServer, server: BusServer
) -> None:
    """What is too long, and what goes to a subject of no stream, or of another one."""
    subjects = ["class.odd", "odd.>"]
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, "ODD", "", subjects=subjects, allow_batched=True, max_msg_size=300)
        await stream(connection, "OTHER", "other.>")
        sizes = [1, 2, 1000, 4, 1000, 1000, 7, 1000]
        await bus.publish_many([b"x" * size for size in sizes], class_id="odd")
        channels = ["no.where", "odd.a", "other.b", "odd.c", "odd.d", "no.where", "odd.e"]
        for channel in channels:
            await bus.publish(channel.encode(), class_id="odd", channel=channel)
        lane = into(nats, server, "ODD")
        async with copying(lane):
            await until(lambda: lane.statistics().position == len(sizes) + len(channels))
        found = lane.statistics()
        assert (found.copied, found.refused, found.losses) == (8, 7, 0)
        good = [b"x" * size for size in sizes if size < 300]
        good += [each.encode() for each in channels if each.startswith("odd.")]
        assert await payloads_of(connection, "ODD") == good
        assert await stored(connection, "OTHER") == 0


async def test_full_stream_keeps_order(nats: NatsServer, server: BusServer) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        options = {"max_msgs": 7, "discard": "new", "allow_batched": True}
        await stream(connection, "NARROW", "class.narrow", **options)
        await bus.publish_many(numbered(0, 20), class_id="narrow")
        lane, got = into(nats, server, "NARROW"), list[bytes]()
        async with copying(lane):
            while len(got) < 20:
                while await stored(connection, "NARROW") < min(7, 20 - len(got)):
                    await connection.round_trip()
                got += await payloads_of(connection, "NARROW")
                await connection.nats.api_request("STREAM.PURGE.NARROW")
        assert got == numbered(0, 20)
        assert lane.statistics().refused == 0


async def test_restart_drops_stored_messages_as_duplicates(
    nats: NatsServer, server: BusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def not_kept(near: BusSource, at: int, *, now: bool) -> None:
        """As where it is killed first."""

    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, "ANEW", "class.anew", allow_batched=True)
        await bus.publish_many(numbered(0, 300), class_id="anew")
        with monkeypatch.context() as patch:
            patch.setattr(BusSource, "commit_position", not_kept)
            async with copying(lane := into(nats, server, "ANEW")):
                await until(lambda: lane.statistics().copied == 300)
        await bus.publish_many(numbered(300, 400), class_id="anew")
        async with copying(lane := into(nats, server, "ANEW")):
            await until(lambda: lane.statistics().position == 400)
        found = lane.statistics()
        assert (found.copied, found.skipped) == (100, {"known_there": 300})
        assert await payloads_of(connection, "ANEW") == numbered(0, 400)


async def test_stops_using_fast_batches_when_disallowed(
    nats: NatsServer, server: BusServer
) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await stream(connection, "NONE", "class.none", allow_batched=True)
        await bus.publish_many(numbered(0, 100), class_id="none")
        async with copying(lane := into(nats, server, "NONE")):
            await until(lambda: lane.statistics().copied == 100)
            config = {"name": "NONE", "subjects": ["class.none"], "allow_batched": False}
            await connection.nats.api_request("STREAM.UPDATE.NONE", config)
            await bus.publish_many(numbered(100, 5000), class_id="none")
            await until(lambda: lane.statistics().copied == 5000)
        found = lane.statistics()
        assert (found.losses, found.problem) == (1, "")
        assert await stored(connection, "NONE") == 5000
        assert (await payloads_of(connection, "NONE"))[95:105] == numbered(95, 105)
