"""Copying into a stream with fast batches: once and in order across leader changes.

The tests use a model of a stream that changes its leader, and real servers. The model's leader
stores accepted messages later, in order, and replies then. It knows their message ids, and
skips messages of a batch that it has already. A leader that fails loses none, half or all of
the accepted messages; the next one leads after it has stored the remaining ones.
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
from tests.bridge.memory_buses import numbered_payloads
from tests.bridge.nats_copiers import (
    BusServer,
    NatsServer,
    connect,
    copying,
    count_stored,
    create_stream,
    wait_until,
)
from tests.jetstream.publish.test_stream_publisher import encode_publications

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
class AcceptedMessage:
    """Message that the leader has accepted and not stored yet."""

    number: int
    id: str
    reply: bytes
    fast_batch: bytes = b""
    batch_position: int = 0
    """Number of messages of its batch up to this one."""
    is_end: bool = False
    is_known: bool = False
    """True if the message is stored or accepted already: a batch skips it then."""


class StreamModel:
    """Model of a stream with its leader, and the messages and replies in flight."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.failure_rate = 1.0
        self.loss_probability, self.refusal_probability = (
            rng.choice([0.0, 0.003, 0.05]) for _ in range(2)
        )
        self.leader_loss_probability = rng.choice([0.0, 0.03, 0.2])
        self.version = ""
        self.capacity = 1 << 30
        """Number of messages that the stream accepts."""
        self.stores_only_batch_ends = False
        """True to store only the last message of each batch, and confirm all of them."""
        self.forgets_message_ids = False
        """True to know no message ids of stored messages, as after a short duplicate window."""
        self.log: list[int] = []
        self.source_identity, self.stream_state = SourceIdentity(), TargetStreamState()
        """State that a copier keeps from one connection to the next."""
        self.stored: list[str] = []
        self.ids: set[str] = set()
        self.written: deque[Pub] = deque()
        self.accepted: deque[AcceptedMessage] = deque()
        self.pending_ids: set[str] = set()
        self.open_batches: dict[bytes, int] = {}
        self.has_leader = True
        self.answers: list[bytes] = []

    def occurs(self, probability: float) -> bool:
        return self.rng.random() < probability * self.failure_rate

    def send_reply(self, reply: bytes, answer: bytes) -> None:
        if self.occurs(self.loss_probability):
            return
        sid = 2 if reply.endswith(b".$FI") else 1
        head = b"MSG %b %d %d\r\n" % (reply, sid, len(answer))
        if answer.startswith(b"NATS/1.0"):
            head = b"HMSG %b %d %d %d\r\n" % (reply, sid, len(answer), len(answer))
        self.answers.append(head + answer + b"\r\n")

    def process(self) -> None:
        for _ in range(self.rng.choice([1, 5, 40, 500])):
            if self.written:
                self._process_message(self.written.popleft())
        if self.occurs(self.leader_loss_probability):
            self._lose_leader()
        elif not self.has_leader and self.rng.random() < 0.5:
            while self.accepted:
                self._store(self.accepted.popleft())
            self.has_leader = True
        if self.has_leader:
            for _ in range(self.rng.choice([0, 1, 5, 40, 500])):
                if self.accepted:
                    self._store(self.accepted.popleft())

    def _lose_leader(self) -> None:
        for _ in range(self.rng.choice([0, len(self.accepted) // 2, len(self.accepted)])):
            self.accepted.pop()
        self.pending_ids, self.open_batches, self.has_leader = set(), {}, False

    def _process_message(self, message: Pub) -> None:
        if not self.has_leader:
            if self.occurs(0.7) or not self.failure_rate:
                self.send_reply(message.reply, NOBODY)
            return
        if self.occurs(self.loss_probability):
            return
        body = bytes(message.body)
        block, payload = body[: message.header_bytes].decode(), body[message.header_bytes :]
        headers = dict(line.split(": ") for line in block.split("\r\n")[1:-2])
        id_ = headers.get("Nats-Msg-Id", "")
        if message.reply.endswith(b".$FI"):
            self._accept_batch_message(message.reply, id_, int(payload or -1))
        elif id_ in self.pending_ids:
            self.send_reply(message.reply, IN_FLIGHT)
        elif id_ in self.ids and not self.forgets_message_ids:
            self.send_reply(message.reply, b'{"stream":"S","seq":9,"duplicate":true}')
        elif "Nats-Rollup" in headers:
            self.send_reply(message.reply, NO_ROLLUP)
        elif self.occurs(self.refusal_probability):
            self.send_reply(message.reply, FULL)
        elif len(self.ids) + len(self.pending_ids) >= self.capacity:
            self.send_reply(message.reply, TOO_MANY_REQUESTS)
        else:
            self.pending_ids.add(id_)
            self.accepted.append(AcceptedMessage(int(payload), id_, message.reply))

    def _accept_batch_message(self, reply: bytes, id_: str, number: int) -> None:
        *_, name, _, _, index, step, _ = reply.split(b".")
        index_, batch_position = int(index), self.open_batches.get(name)
        if batch_position is None:
            if index_ != 1 or self.occurs(self.refusal_probability):
                self.send_reply(reply, FULL if index_ == 1 else UNKNOWN)
                return
            batch_position = self.open_batches[name] = 0
            self.send_reply(reply, b'{"type":"ack","seq":0,"msgs":500}')
        message = AcceptedMessage(
            number, id_, reply, name, index_, is_known=id_ in self.ids or id_ in self.pending_ids
        )
        if index_ != batch_position + 1 or self.occurs(self.refusal_probability):
            error = b'{"type":"gap","last_seq":%d,"seq":1}' % batch_position
            if index_ == batch_position + 1:
                error = b'{"type":"err","seq":%d,"error":%b' % (batch_position, FULL[9:])
            self.send_reply(reply, error)
            message.batch_position, message.is_end, message.is_known, message.id = (
                batch_position,
                True,
                True,
                "",
            )
            del self.open_batches[name]
        else:
            self.open_batches[name], message.is_end = index_, step == b"2"
            self.pending_ids.add(id_)
            if message.is_end:
                del self.open_batches[name]
        self.accepted.append(message)

    def _store(self, message: AcceptedMessage) -> None:
        self.pending_ids.discard(message.id)
        is_lost = self.stores_only_batch_ends and message.fast_batch and not message.is_end
        if not (message.is_known or is_lost):
            self.log.append(message.number)
            self.stored.append(message.id)
            self.ids.add(message.id)
        if not message.fast_batch:
            self.send_reply(message.reply, b'{"stream":"S","seq":%d}' % len(self.log))
        elif message.is_end:
            reply = b'{"stream":"S","seq":%d,"batch":"%b","count":%d}'
            is_told = not (message.is_known and message.id)  # A server does not report it either.
            self.send_reply(
                message.reply,
                reply % (len(self.log) * is_told, message.fast_batch, message.batch_position),
            )


class ModelConnection:
    """Connection to a stream model. A wait that takes too long raises BusConnectionError."""

    def __init__(self, model: StreamModel) -> None:
        self.model, self.lost_reason, self.timeout_seconds = model, "", 60.0
        self.core = NatsClientCore(inbox="_INBOX.x")
        self.core.start_connection(0.0)
        info = b'INFO {"headers":true,"max_payload":1048576,"version":"%b"}\r\n'
        list(self.core.receive(info % model.version.encode(), 0.0))
        self.core.send_connect()
        list(self.core.receive(b"PONG\r\n", 0.0))
        self.nats = SimpleNamespace(flush=self._flush, api_request=self._api_request, server="here")
        self.replies: list[RequestReplies] = []
        self.server_errors: list[str] = []
        self.on_messages: Any = None
        self._flush()
        model.written.clear()

    def _flush(self) -> None:
        output = b"".join(bytes(each) for each in self.core.drain_output())
        offset = output.find(b"SUB _INBOX")
        while offset >= 0:  # Keep only the publish commands.
            end = output.index(b"\r\n", offset) + 2
            output = output[:offset] + output[end:]
            offset = output.find(b"SUB _INBOX")
        if not output.startswith(b"CONNECT"):
            self.model.written += encode_publications(output)

    async def _api_request(
        self, subject: str, body: dict[str, int] | None = None
    ) -> dict[str, Any]:
        if subject == "STREAM.INFO.S":
            return {"config": {"subjects": ["class.>"]}}
        assert subject == "STREAM.MSG.GET.S"
        assert body is not None
        if not 0 < body["seq"] <= len(self.model.stored):
            raise JetStreamError(10037, "no message found")
        headers = f"NATS/1.0\r\nNats-Msg-Id: {self.model.stored[body['seq'] - 1]}\r\n\r\n"
        return {"message": {"seq": body["seq"], "hdrs": b64encode(headers.encode()).decode()}}

    async def wait_expected(self, expected: str) -> None:
        for _ in range(20):
            self.model.process()
            answers, self.model.answers = self.model.answers, []
            if answers:
                for event in self.core.receive(b"".join(answers), 0.0):
                    if isinstance(event, RequestReplies):
                        self.replies.append(event)
                    else:
                        assert isinstance(event, ReceivedMessages)
                        self.on_messages(event)
                return
        raise BusConnectionError(f"{expected} did not come")


def source_batch(at: int, end: int) -> SourceBatch:
    frames_ = [
        frames.encode(frames.MESSAGE, class_id=7, message_id=n, content=b"%03d" % n)
        for n in range(at, end)
    ]
    bounds = np.cumsum([0, *map(len, frames_)])
    run_ = MessageRun(b"".join(frames_), bounds, np.arange(at, end), 0.0)
    return SourceBatch([run_], at, end, COUNT)


def connect_target(
    model: StreamModel, kind: Callable[..., NatsTarget], **settings: Any
) -> NatsTarget:
    """Return a target of type `kind` that is connected to the model."""
    source: Any = SimpleNamespace(identity="source", storage_id="source", head=COUNT)
    options: dict[str, Any] = {
        "source": source,
        "class_id": 7,
        "sequence_scope": "source",
        "source_identity": model.source_identity,
        "stream_state": model.stream_state,
    } | settings
    connection: Any = ModelConnection(model)
    target_settings = TargetSettings(name="l", record_channel="l", class_=7)
    return kind(connection, target_settings, stream="S", **options)


def create_batched_target(model: StreamModel) -> NatsTarget:
    return connect_target(model, BatchedStreamTarget, config={"subjects": ["class.>"]})


async def copy(target: NatsTarget, model: StreamModel, at: int) -> AsyncIterator[int]:
    """Copy from sequence `at` on, like a copier. Yields the position after each settled batch."""
    rng, cursor = model.rng, at
    in_flight: deque[TargetBatch] = deque()
    while at < COUNT:
        while cursor < COUNT and len(in_flight) < 3:
            batch = target.prepare(source_batch(cursor, min(COUNT, cursor + rng.randint(1, 25))))
            target.send(batch)
            in_flight.append(batch)
            cursor = batch.next_sequence
        refusals_: list[Refusal] = []
        batch = in_flight.popleft()
        refusals_ += await target.settle_oldest()
        last = batch.next_sequence
        while refusals_ and in_flight:
            last = in_flight.popleft().next_sequence
            refusals_ += await target.settle_oldest()
        while refusals_:
            assert {refusal.code for refusal in refusals_} == {STREAM_FULL}
            resent = target.prepare(
                SourceBatch(
                    source_batch(0, COUNT).select(np.array([e.sequence for e in refusals_])),
                    0,
                    0,
                    0,
                )
            )
            target.send(resent)
            refusals_ = await target.settle_oldest()
        at = last
        yield at


async def copy_all(model: StreamModel, create_target: Callable[[StreamModel], NatsTarget]) -> None:
    at = 0
    for calm_turn in range(CALM_TURNS):
        if calm_turn == WILD_TURNS:
            model.failure_rate = 0.0
        if at == COUNT:
            return
        try:
            async for settled_position in copy(create_target(model), model, at):
                at = settled_position
        except BusConnectionError:
            for _ in range(model.rng.choice([0, 3, 30])):  # The stream processes received messages.
                model.process()
            model.written.clear()
            model.answers.clear()
    raise AssertionError("it hangs")


@settings(max_examples=2 * settings().max_examples)
@given(st.integers(0, 2**32))
def test_fast_batches_keep_order_across_leader_changes(
    seed: int,
) -> None:
    model = StreamModel(random.Random(seed))
    trio.run(copy_all, model, create_batched_target)
    assert model.log == list(range(COUNT))


class LossyStreamModel(StreamModel):
    """Stream model that loses, once, the last message of a batch that it has confirmed."""

    has_lost = False
    confirmed = 0
    """Number of stored messages that were confirmed one at a time."""

    def send_reply(self, reply: bytes, answer: bytes) -> None:
        super().send_reply(reply, answer)
        if b'"stream":' in answer and b'"count":' not in answer:
            self.confirmed = len(self.stored)
        elif b'"count":' in answer and len(self.stored) > self.confirmed and not self.has_lost:
            self.has_lost = True
            self.log.pop()
            self.ids.remove(self.stored.pop())


def test_resends_confirmed_messages_that_are_missing() -> None:
    """Includes batches that end early."""
    for seed in range(40):
        model = LossyStreamModel(random.Random(seed))
        model.refusal_probability, model.loss_probability, model.leader_loss_probability = (
            0.05,
            0.0,
            0.0,
        )  # Confirmed messages are not lost otherwise.
        trio.run(copy_all, model, create_batched_target)
        assert (model.has_lost, model.log) == (True, list(range(COUNT))), seed


async def test_resends_messages_lost_from_confirmed_batch() -> None:
    """A real stream loses such messages while it is given fewer replicas."""
    model = StreamModel(random.Random(0))
    model.failure_rate = 0.0
    target = create_batched_target(model)
    target.send(target.prepare(source_batch(0, 20)))
    assert await target.settle_oldest() == []
    model.stores_only_batch_ends = True
    target.send(target.prepare(source_batch(20, 40)))
    with pytest.raises(BusConnectionError, match="does not have the messages that it confirmed"):
        await target.settle_oldest()
    model.stores_only_batch_ends = False
    for says_all in (
        False,
        True,
    ):  # If the last message is known, the confirm of a batch proves nothing.
        target = create_batched_target(model)
        target.send(target.prepare(source_batch(20, 40)))
        if says_all:
            assert await target.settle_oldest() == []
        else:
            with pytest.raises(BusConnectionError, match="did not confirm messages"):
                await target.settle_oldest()
    assert sorted(model.log) == list(range(40))


def test_short_duplicate_window_stores_each_message_once() -> None:
    model = StreamModel(random.Random(0))
    model.failure_rate, model.forgets_message_ids = 0.0, True
    trio.run(copy_all, model, create_batched_target)
    assert model.log == list(range(COUNT))


# Real servers ------------------------------------------------------------------------------------


def create_copier_into(nats: NatsServer, server: BusServer, name: str, **options: Any) -> Copier:
    copied = CopiedClass(name.lower(), stream=name, start="earliest", **options)
    return create_copiers([BridgeSettings(name, server.address, nats.url, (copied,))])[0]


async def stream_payloads(connection: BridgeNatsConnection, name: str) -> list[bytes]:
    """Return the payloads of all messages of a stream, in order."""
    state = (await connection.nats.api_request(f"STREAM.INFO.{name}"))["state"]
    found = []
    for sequence in range(state["first_seq"], state["last_seq"] + 1):
        with suppress(JetStreamError):
            reply = await connection.nats.api_request(f"STREAM.MSG.GET.{name}", {"seq": sequence})
            found.append(b64decode(reply["message"].get("data", "")))
    return found


async def test_refused_message_of_fast_batch_does_not_block_rest(
    nats: NatsServer, server: BusServer
) -> None:
    """Messages are refused because they are too long, or because their subject belongs to no
    stream or to another one.
    """
    subjects = ["class.odd", "odd.>"]
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(
            connection, "ODD", "", subjects=subjects, allow_batched=True, max_msg_size=300
        )
        await create_stream(connection, "OTHER", "other.>")
        sizes = [1, 2, 1000, 4, 1000, 1000, 7, 1000]
        await bus.publish_many([b"x" * size for size in sizes], class_id="odd")
        channels = ["no.where", "odd.a", "other.b", "odd.c", "odd.d", "no.where", "odd.e"]
        for channel in channels:
            await bus.publish(channel.encode(), class_id="odd", channel=channel)
        copier = create_copier_into(nats, server, "ODD")
        async with copying(copier):
            await wait_until(lambda: copier.statistics().position == len(sizes) + len(channels))
        statistics = copier.statistics()
        assert (statistics.copied, statistics.refused, statistics.losses) == (8, 7, 0)
        accepted = [b"x" * size for size in sizes if size < 300]
        accepted += [channel.encode() for channel in channels if channel.startswith("odd.")]
        assert await stream_payloads(connection, "ODD") == accepted
        assert await count_stored(connection, "OTHER") == 0


@pytest.mark.parametrize(("name", "is_batched"), [("NARROW", True), ("TIGHT", False)])
async def test_full_stream_keeps_order(
    name: str, is_batched: bool, nats: NatsServer, server: BusServer
) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        options = {"max_msgs": 7, "discard": "new", "allow_batched": is_batched}
        await create_stream(connection, name, f"class.{name.lower()}", **options)
        await bus.publish_many(numbered_payloads(0, 20), class_id=name.lower())
        copier, received = create_copier_into(nats, server, name), list[bytes]()
        async with copying(copier):
            while len(received) < 20:
                while await count_stored(connection, name) < min(7, 20 - len(received)):
                    await connection.round_trip()
                received += await stream_payloads(connection, name)
                await connection.nats.api_request(f"STREAM.PURGE.{name}")
        assert received == numbered_payloads(0, 20)
        assert copier.statistics().refused == 0


async def test_restart_drops_stored_messages_as_duplicates(
    nats: NatsServer, server: BusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def skip_commit(source: BusSource, at: int, *, now: bool) -> None:
        """Commit nothing, like a copier that is killed first."""

    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "ANEW", "class.anew", allow_batched=True)
        await bus.publish_many(numbered_payloads(0, 300), class_id="anew")
        with monkeypatch.context() as patch:
            patch.setattr(BusSource, "commit_position", skip_commit)
            async with copying(copier := create_copier_into(nats, server, "ANEW")):
                await wait_until(lambda: copier.statistics().copied == 300)
        await bus.publish_many(numbered_payloads(300, 400), class_id="anew")
        async with copying(copier := create_copier_into(nats, server, "ANEW")):
            await wait_until(lambda: copier.statistics().position == 400)
        statistics = copier.statistics()
        assert (statistics.copied, statistics.skipped) == (100, {"known_there": 300})
        assert await stream_payloads(connection, "ANEW") == numbered_payloads(0, 400)


async def test_stops_using_fast_batches_when_disallowed(
    nats: NatsServer, server: BusServer
) -> None:
    async with connect(nats) as connection, simplebus.connect(server.address) as bus:
        await create_stream(connection, "NONE", "class.none", allow_batched=True)
        await bus.publish_many(numbered_payloads(0, 100), class_id="none")
        async with copying(copier := create_copier_into(nats, server, "NONE")):
            await wait_until(lambda: copier.statistics().copied == 100)
            config = {"name": "NONE", "subjects": ["class.none"], "allow_batched": False}
            await connection.nats.api_request("STREAM.UPDATE.NONE", config)
            await bus.publish_many(numbered_payloads(100, 2000), class_id="none")
            await wait_until(lambda: copier.statistics().copied == 2000)
        statistics = copier.statistics()
        assert (statistics.losses, statistics.problem) == (1, "")
        assert await count_stored(connection, "NONE") == 2000
        assert (await stream_payloads(connection, "NONE"))[95:105] == numbered_payloads(95, 105)
