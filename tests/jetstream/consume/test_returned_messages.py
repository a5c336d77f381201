"""Returned messages come first and in order at any server, also after a purge.

The ack wait is longer than any test, so a redelivery by ack wait would fail it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio

import simplebus
from simplebus.core.protocol import frames
from simplebus.jetstream.consume.returned_messages import (
    RETURNED_MESSAGES_MAX,
    ReturnedMessages,
    return_messages,
    returned_sequences,
    unacked_sequences,
    with_return_note,
)
from tests.behaviour.wire_peer_v2 import ack, connect_request, subscribe
from tests.jetstream.consume.test_feed import arrived, message
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    address,
    cluster_of,
    options,
    stateless_server,
    wait_until_idle,
)
from tests.support import running_server

ACK_WAIT_SECONDS = 3600.0
NUMBERED = [b"%d" % number for number in range(10)]


async def get(messages: Any, count: int) -> list[bytes]:
    return [(await messages.get(PATIENCE_SECONDS)).payload for _ in range(count)]


@pytest.mark.parametrize(
    "subscribe_options", [{"durable": "d"}, {"durable": "d", "group": "g"}, {}]
)
@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_returned_messages_come_first_after_purge(
    jetstream_server: NatsServer, subscribe_options: dict[str, str], is_elsewhere: bool
) -> None:
    cluster = options(jetstream_server.url, ack_wait_seconds=ACK_WAIT_SECONDS)
    async with (
        stateless_server(cluster) as server,
        stateless_server(cluster) as second_server,
        simplebus.connect(address(server)) as bus,
    ):
        async with (
            simplebus.connect(address(server)) as first,
            first.subscribe(7, auto_ack=False, **subscribe_options) as messages,
        ):
            await bus.publish_many(NUMBERED[:5], class_id=7)
            for message in [await messages.get(PATIENCE_SECONDS) for _ in range(5)][:3]:
                message.ack()
        await wait_until_idle(server)
        await cluster_of(server).link.api_request(
            f"STREAM.PURGE.{cluster.names.stream_name(7)}", {"seq": 4}
        )
        await bus.publish_many(NUMBERED[5:], class_id=7)
        async with (
            simplebus.connect(address(second_server if is_elsewhere else server)) as second,
            second.subscribe(7, **subscribe_options) as messages,
        ):
            assert await get(messages, 7) == NUMBERED[3:]


async def test_returns_messages_sent_to_departed_request(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url, ack_wait_seconds=ACK_WAIT_SECONDS)
    async with stateless_server(cluster) as server, simplebus.connect(address(server)) as bus:
        async with (
            simplebus.connect(address(server)) as first,
            first.subscribe(7, auto_ack=False, durable="d", max_in_flight=2) as messages,
        ):
            await bus.publish_many(NUMBERED, class_id=7)
            assert await get(messages, 2) == NUMBERED[:2]
            link, stream = cluster_of(server).link, cluster.names.stream_name(7)
            request = b'{"batch":3,"no_wait":true}'
            lost_messages = await link.request_many(
                f"$JS.API.CONSUMER.MSG.NEXT.{stream}.d-d", request, max_messages=3
            )
            assert [p for batch in lost_messages for p in batch.all_payloads()] == NUMBERED[2:5]
        await wait_until_idle(server)
        async with (
            simplebus.connect(address(server)) as second,
            second.subscribe(7, durable="d") as messages,
        ):
            assert await get(messages, 10) == NUMBERED


class FakeLink:
    """Records the replies to a consumer that has sent messages 1 to `sent`."""

    def __init__(self, sent: int, *, waiting: int = 0) -> None:
        self.core = self
        self.requests: list[str] = []
        self._info = {**info(sent), "name": "c", "num_waiting": waiting, "ack_floor": {}}

    async def api_request(self, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        self.requests.append(subject)
        return self._info

    def write(self, data: bytes) -> None:
        lines = data.decode().split("\r\n")
        for head, content in zip(lines[::2], lines[1::2], strict=False):
            self._record(head.split()[1], content)

    async def request(self, subject: str, payload: bytes) -> tuple[bytes, bytes]:
        self._record(subject, payload.decode())
        return b"", b""

    def _record(self, subject: str, content: str) -> None:
        self.requests.append(f"{subject.split('.')[5]} {content[:12]}")


async def test_server_drops_dead_requests_before_return() -> None:
    link = FakeLink(5)
    undelivered = [(arrived(message(3), message(5)), 0.0), (arrived(message(4)), 2.0)]
    config = await return_messages(link, "S", "c", ReturnedMessages(undelivered, (5, 5)))  # type: ignore[arg-type]
    delayed_nak = '4 -NAK {"delay'
    assert link.requests == ["CONSUMER.INFO.S.c", "3 -NAK", "5 -NAK", delayed_nak, delayed_nak]
    assert config is not None
    assert config["metadata"] == {"simplebus-left": "5 3-3 5-5", "simplebus-pause": "4-4"}


async def test_lost_messages_come_after_older_ones() -> None:
    link = FakeLink(7)
    undelivered = [(arrived(message(4), message(5)), 0.0)]
    config = await return_messages(link, "S", "c", ReturnedMessages(undelivered, (5, 5)))  # type: ignore[arg-type]
    aside = '-NAK {"delay'
    assert link.requests[1:3] == [f"6 {aside}", f"7 {aside}"]
    assert link.requests[3:] == ["4 -NAK", "5 -NAK", "6 -NAK", "7 -NAK", "7 -NAK"]
    assert config is not None
    assert config["metadata"] == {"simplebus-left": "7 4-7"}


@pytest.mark.parametrize(("claim", "waiting"), [(None, 0), ((5, 5), 1), ((7, 7), 0)])
async def test_leaves_messages_of_other_servers(
    claim: tuple[int, int] | None, waiting: int
) -> None:
    link = FakeLink(7, waiting=waiting)
    config = await return_messages(link, "S", "c", ReturnedMessages([], claim))  # type: ignore[arg-type]
    assert link.requests == ["CONSUMER.INFO.S.c"]
    assert config is None


async def test_messages_of_dead_server_come_first(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url, ack_wait_seconds=ACK_WAIT_SECONDS)
    async with stateless_server(cluster) as server, simplebus.connect(address(server)) as publisher:
        async with stateless_server(cluster) as dying_server:
            peer = await running_server.connect(dying_server)
            await peer.send(connect_request(7) + subscribe(7, 1, durable="d"))
            for expected in (frames.CONNECT, frames.SUBSCRIBE):
                assert (await peer.read_frame())[0] == expected
            await publisher.publish_many(NUMBERED[:5], class_id=7)
            received: list[bytes] = []
            while len(received) < 5:
                frame = await peer.read_frame()
                received += [frame[9:-4]] if frame[0] == frames.MESSAGE else []
            assert received == NUMBERED[:5]
            await peer.send(ack(1, 0, 2))
            info_subject = f"CONSUMER.INFO.{cluster.names.stream_name(7)}.d-d"
            with trio.fail_after(PATIENCE_SECONDS):
                while True:
                    info = await cluster_of(server).link.api_request(info_subject)
                    if info["ack_floor"]["stream_seq"] == 2:
                        break
                    await trio.sleep(0.01)
            (feed,) = cluster_of(dying_server).feeds.values()
            cluster_of(
                dying_server
            ).link.core.end_connection()  # From now on the server does not answer.
            assert feed.outstanding
        await publisher.publish_many(NUMBERED[5:], class_id=7)
        async with publisher.subscribe(7, durable="d") as messages:
            messages_ = [await messages.get(PATIENCE_SECONDS) for _ in range(8)]
            assert [message.payload for message in messages_] == NUMBERED[2:]
            assert all(message.attempt > 1 for message in messages_[:3])


@pytest.mark.parametrize("pauses", ["", "4-5", "4-5 7-7"])
def test_unheld_messages_are_expected_except_delayed_ones(pauses: str) -> None:
    found = {
        **info(8, {"simplebus-pause": pauses}),
        "ack_floor": {"stream_seq": 2},
    }
    paused = {"": [], "4-5": [4, 5], "4-5 7-7": [4, 5, 7]}[pauses]
    assert unacked_sequences(found) == [n for n in range(3, 9) if n not in paused]


def info(sent: int, metadata: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "config": {"metadata": metadata},
        "delivered": {"stream_seq": sent, "consumer_seq": sent},
    }


@pytest.mark.parametrize(
    "sequences", [[], [4], [4, 5, 9], list(range(1, 200, 2)), [10**17, 10**17 + 1]]
)
def test_return_note_is_valid_until_next_delivery(sequences: list[int]) -> None:
    config = with_return_note(info(7, {"simplebus": "durable"}), np.array(sequences, np.int64))
    assert config["metadata"]["simplebus"] == "durable"
    assert returned_sequences({**info(7), "config": config}) == sequences
    assert returned_sequences({**info(8), "config": config}) == []
    assert with_return_note({**info(8), "config": config}, np.empty(0, np.int64))["metadata"] == {
        "simplebus": "durable"
    }


def test_return_note_is_bounded() -> None:
    sequences = np.arange(1, 10 * RETURNED_MESSAGES_MAX)
    assert (
        returned_sequences({**info(7), "config": with_return_note(info(7), sequences)})
        == sequences[:RETURNED_MESSAGES_MAX].tolist()
    )
    holes = returned_sequences({**info(7), "config": with_return_note(info(7), sequences[::2])})
    assert holes == sequences[::2][: len(holes)].tolist()
    assert len(holes) > 200


@pytest.mark.parametrize(
    "metadata",
    ["", "7", "7 ", "7 4", "7 4-", "7 5-4", "8 4-5", "7 4-5,6", "x", "7 4-5\n", "-1 4-5", "٧ 4-5"],
)
def test_ignores_invalid_return_note(metadata: str) -> None:
    assert returned_sequences(info(7, {"simplebus-left": metadata})) == []
    assert returned_sequences(info(7)) == []


def test_foreign_return_note_is_bounded() -> None:
    assert (
        len(returned_sequences(info(7, {"simplebus-left": "7 1-999999999999999999"})))
        == RETURNED_MESSAGES_MAX
    )
    assert (
        len(returned_sequences(info(7, {"simplebus-left": "7" + " 1-9999" * 200})))
        <= RETURNED_MESSAGES_MAX
    )
