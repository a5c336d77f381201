"""The simulated original client: its timers, acks, order and limits."""

from __future__ import annotations

import random

import pytest

from tests.support.oracles import ID_COUNT, build_frame, parse_frame, split_frames
from tests.support.original_client import (
    GROUPING_SECONDS,
    PULSE_SECONDS,
    OriginalClient,
    OutOfOrder,
    QueueLimits,
    Reservations,
    StrictOrder,
    number_of,
    numbered,
)
from tests.support.strategies import ACK, CONNECT, HEARTBEAT, MESSAGE, SUBSCRIBE

LATEST_ACK = GROUPING_SECONDS + PULSE_SECONDS


def create_connected_client(class_ids: list[int], **options: object) -> OriginalClient:
    """Return a client that has received its Connect reply."""
    client = OriginalClient(class_ids, **options)  # type: ignore[arg-type]
    client.read_output(1 << 20)
    client.receive(build_frame(CONNECT, content=bytes(4)))
    return client


def read_frames(client: OriginalClient) -> list[tuple[int, int, int, int, bytes]]:
    frames, remainder = split_frames(client.read_output(1 << 30))
    assert remainder == b""
    return [parse_frame(frame) for frame in frames]


def deliver(client: OriginalClient, *messages: tuple[int, int], class_id: int = 1) -> None:
    """Return the bytes of messages with these (message id, timer index)."""
    client.receive(
        b"".join(
            build_frame(
                MESSAGE, class_id=class_id, message_id=i, timer_index=timer, content=numbered(i)
            )
            for i, timer in messages
        )
    )


def test_client_waits_for_connect_reply() -> None:
    client = OriginalClient([1, 2])
    client.subscribe(1, lambda message: None)
    assert read_frames(client) == [(CONNECT, 0, 0, 0, b"[1,2]")]
    assert not client.publish(1, b"too early")
    client.receive(build_frame(CONNECT, content=(77).to_bytes(4, "little")))
    assert client.session_id == 77
    client.subscribe(1, lambda message: None)
    client.subscribe(2, lambda message: None)
    assert read_frames(client) == [(SUBSCRIBE, n, 0, 0, b"") for n in (1, 2)]
    assert client.publish(1, b"in time")
    client.tick(0.0)
    assert read_frames(client) == [(MESSAGE, 1, 0, 0, b"in time")]


def test_client_acks_within_1500_ms() -> None:
    latest = []
    for moment in (0.0, 0.1, 0.499, 0.5, 0.6, 0.999, 1.0):
        client = create_connected_client([1])
        client.subscribe(1, lambda message: None)
        read_frames(client)
        client.tick(moment)
        deliver(client, (0, 0))
        now = moment
        while not (acks := read_frames(client)):
            now += 0.001
            client.tick(now)
        assert acks == [(ACK, 1, 0, 0, b"0-1")]
        latest.append(now - moment)
    assert max(latest) == pytest.approx(LATEST_ACK, abs=0.01)
    assert client.ack_delay_max_seconds == pytest.approx(LATEST_ACK, abs=0.01)


def test_client_groups_consecutive_acks() -> None:
    client = create_connected_client([1, 2])
    for class_id in (1, 2):
        client.subscribe(class_id, lambda message: None)
    read_frames(client)
    deliver(client, (5, 0), (6, 0), (7, 0), (0, 0), (1, 0), (2, 0))
    deliver(client, (8, 1), (3, 0), (9, 1))
    deliver(client, (4, 0), (6, 0), class_id=2)
    client.tick(2.0)
    assert read_frames(client) == [
        *((ACK, 1, 0, 0, content) for content in (b"5-8", b"0-4")),
        (ACK, 1, 0, 1, b"8-10"),
        *((ACK, 2, 0, 0, content) for content in (b"4-5", b"6-7")),
    ]


def test_client_uses_signed_ids() -> None:
    client = create_connected_client([1])
    client.subscribe(1, lambda message: None)
    read_frames(client)
    deliver(client, (ID_COUNT - 2, 5), (ID_COUNT - 1, 5), (0, 5), (1, 5))
    client.tick(2.0)
    assert [content for *_, content in read_frames(client)] == [b"2147483646--2147483648", b"0-2"]


def test_client_timers_survive_handler_exception() -> None:
    client = create_connected_client([1])
    handled: list[int] = []
    client.subscribe(1, StrictOrder())
    client.subscribe(1, lambda message: handled.append(message.message_id))
    read_frames(client)
    deliver(client, (0, 0), (1, 0), (3, 0), (4, 0))
    assert isinstance(client.handler_error, OutOfOrder)
    assert handled == [0, 1]
    deliver(client, (2, 0))
    client.tick(2.0)
    assert read_frames(client) == [(ACK, 1, 0, 0, b"0-2")]
    assert client.publish(1, b"others live on")
    client.tick(2.0)
    assert len(read_frames(client)) == 1


def test_client_runs_handlers_sequentially() -> None:
    client = create_connected_client([1])
    client.subscribe(1, StrictOrder(seconds=2.0))
    read_frames(client)
    deliver(client, *((i, 0) for i in range(5)))
    for now, processed in ((1.9, 0), (2.0, 1), (3.9, 1), (9.9, 4), (100.0, 5)):
        client.tick(now)
        assert client.processed_count == processed


@pytest.mark.parametrize("seed", range(5))
def test_client_keeps_result_order(seed: int) -> None:
    shuffled = random.Random(seed)
    ring = Reservations()
    results: list[object] = []
    hands: list[tuple[int, str]] = []
    for job in range(200):
        hands.append((ring.reserve(), f"result {job}"))
        if len(hands) == 8 or job == 199:
            shuffled.shuffle(hands)
            for place, result in hands[: 8 if job == 199 else 4]:
                ring.set_result(place, result)
                results += ring.pop_ready()
            del hands[: 8 if job == 199 else 4]
    for place, result in hands:
        ring.set_result(place, result)
    results += ring.pop_ready()
    assert results == [f"result {job}" for job in range(200)]


def test_client_queues_are_bounded() -> None:
    bounds = QueueLimits()
    assert (bounds.unserialised, bounds.raw, bounds.received) == (1_100, 10_000, 1_500)
    assert (bounds.chunks, bounds.acks) == (1_000, 2_000_000)
    # Outgoing: the chunks are not read.
    client = create_connected_client([1], bounds=QueueLimits(chunks=3, unserialised=40))
    accepted = 0
    while client.publish(1, numbered(accepted)):
        accepted += 1
        if accepted % 20 == 0:
            client.tick(0.0)
    assert 40 < accepted <= 3 * 100 + 40
    numbers = [number_of(content) for *_, content in read_frames(client)]
    client.tick(0.0)
    numbers += [number_of(content) for *_, content in read_frames(client)]
    assert numbers == list(range(accepted))
    # Incoming: the handler is slow.
    client = create_connected_client([1], bounds=QueueLimits(raw=50, received=10))
    client.subscribe(1, StrictOrder(seconds=1.0))
    read_frames(client)
    count = 0
    while client.can_receive:
        deliver(client, (count, 0))
        count += 1
    assert count == 1 + 10 + 50
    client.tick(10.0)
    assert client.can_receive
    client.tick(100.0)
    assert client.processed_count == count
    # Acknowledgements: they cannot be sent.
    client = create_connected_client([1], bounds=QueueLimits(acks=20, chunks=1))
    client.subscribe(1, StrictOrder())
    client.publish(1, b"in the way")
    client.tick(0.0)
    deliver(client, *((i, 0) for i in range(30)))
    client.tick(10.0)
    assert client.processed_count == 20
    read_frames(client)
    client.tick(20.0)
    assert client.processed_count == 30


def test_client_ignores_heartbeat_and_fails_on_unknown_type() -> None:
    client = create_connected_client([1])
    client.receive(build_frame(HEARTBEAT))
    assert client.is_idle
    with pytest.raises(AssertionError):
        client.receive(build_frame(ord("5")))
