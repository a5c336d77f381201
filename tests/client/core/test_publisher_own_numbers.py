"""Tests of publishers that assign their own message numbers and may skip some."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core.client import ClientCore
from simplebus.core.broker.broker import Broker
from simplebus.core.errors import Reason
from simplebus.core.protocol.frames import DELIMITER
from tests.behaviour.wire_peer import LARGE_BATCH_COUNT, BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    MESSAGE,
    Version2Peer,
    connect_request,
    connect_version2,
    publish,
)
from tests.client.core.client_and_broker import ClientAndBroker
from tests.support.oracles import ID_COUNT, build_frame, parse_frame


def create_remote_broker() -> Broker:
    """Return a broker with remote duplicate detection by message number."""
    broker = Broker(identity="cluster")
    broker.store.class_registry.dedup_window_seconds = 120.0
    return broker


def create_stateless_server() -> BrokerHarness:
    bus = BrokerHarness()
    bus.broker = create_remote_broker()
    return bus


def frame(number: int) -> bytes:
    return publish(1, number % ID_COUNT, b"%d" % number)


def stored_numbers(bus: BrokerHarness) -> list[int]:
    ring = bus.broker.classes[1].ring
    return [int(parse_frame(ring.copy_frame(s))[4]) for s in range(ring.floor, ring.head)]


@given(
    st.sampled_from([0, 7, ID_COUNT - 20, ID_COUNT // 2 - 3]),
    st.lists(
        st.tuples(st.integers(-3, 60), st.sampled_from([1, 1, 2, LARGE_BATCH_COUNT])),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
)
def test_stores_numbers_ahead_and_drops_numbers_behind(
    first: int, runs: list[tuple[int, int]], is_one_read: bool
) -> None:
    """The oracle processes one number at a time. Overlapping runs take the slow path."""
    bus = create_stateless_server()
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect_request(1, name="copier", instance="one", first=first))
    assert peer.receive_replies()[0].content["next"] == first
    next_number, numbers, expected, expected_next = first, list[int](), list[int](), first
    for skipped, count in runs:
        next_number = max(first, next_number + skipped)
        numbers += range(next_number, next_number + count)
        next_number += count
    for number in numbers:
        if number >= expected_next:
            expected.append(number)
            expected_next = number + 1
    sent = [frame(number) for number in numbers]
    for chunk in [b"".join(sent)] if is_one_read else sent:
        peer.send(chunk)
    assert stored_numbers(bus) == expected
    assert peer.receive_replies()[-1].message_id == expected_next % ID_COUNT
    assert bus.broker.refusal_counts[Reason.DUPLICATE] == len(numbers) - len(expected)


def test_first_number_of_a_session_replaces_stored_state() -> None:
    """A server that was restored from an old copy may have another message with the number."""
    bus = create_stateless_server()
    for _ in range(2):
        peer = Version2Peer(bus, bus.broker.open_session())
        peer.send(connect_request(1, name="copier", instance="one", first=5) + frame(5) + frame(9))
        bus.broker.close_session(peer.session)
    assert stored_numbers(bus) == [5, 9, 5, 9]


def test_gaps_between_numbers_use_no_memory() -> None:
    """Also for large gaps, and if the session ends within one."""
    bus, distance = create_stateless_server(), ID_COUNT // 2
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect_request(1, name="copier", instance="one", first=0) + frame(0))
    sent = frame(distance) + frame(2 * distance - 1) + build_frame(ord("~")) + frame(2 * distance)
    assert peer.send_refused(sent) is Reason.UNKNOWN_TYPE
    bus.broker.close_session(peer.session)
    assert stored_numbers(bus) == [0, distance, 2 * distance - 1]


@pytest.mark.parametrize("options", [{}, {"name": "a"}])
def test_own_numbers_need_remote_duplicate_detection(options: dict[str, str]) -> None:
    bus = BrokerHarness() if options else create_stateless_server()
    peer = Version2Peer(bus, bus.broker.open_session())
    assert peer.send_refused(connect_request(1, first=3, **options)) is Reason.BAD_CONNECT
    assert not len(bus.broker.subscription_manager.producer_states)


def test_publishers_without_own_numbers_may_not_skip() -> None:
    assert (
        connect_version2(create_stateless_server(), name="a").send_refused(frame(1))
        is Reason.NUMBER_GAP
    )


# The client ---------------------------------------------------------------------------------------


def message_numbers(sent: bytes) -> list[int]:
    """Return the numbers of the messages that a client has sent."""
    found = [parse_frame(part + DELIMITER) for part in sent.split(DELIMITER)[:-1]]
    return [each[2] for each in found if each[0] == MESSAGE]


def publish_frames(core: ClientCore, skipped_count: int, count: int) -> None:
    frames = [build_frame(MESSAGE, class_id=1, content=b"x" * 20) for _ in range(count)]
    raw = bytearray(DELIMITER) + b"".join(frames)
    bounds = np.array([0, *accumulate(map(len, frames))])
    core.publish_buffer.publish_frames(raw, bounds, 1, skipped_count=skipped_count)


@given(
    st.sampled_from([0, 70_000, ID_COUNT - 30]),
    st.lists(
        st.tuples(st.integers(0, 70_000), st.sampled_from([1, 2, LARGE_BATCH_COUNT])),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 20),
    st.sampled_from([64, 1000, 1 << 16]),
)
def test_skipped_numbers_are_positions_without_message(
    first: int, runs: list[tuple[int, int]], calls: int, chunk: int
) -> None:
    """After a reconnect at any point, unconfirmed messages are sent again with the same numbers."""
    pair = ClientAndBroker(broker=create_remote_broker(), chunk_bytes=chunk)
    pair.core = ClientCore(name="copier", instance="one", first_number=first)
    pair.connect()
    next_number, expected = first, list[int]()
    for skipped_count, count in runs:
        publish_frames(pair.core, skipped_count, count)
        next_number += skipped_count
        expected += [number % ID_COUNT for number in range(next_number, next_number + count)]
        next_number += count
    for _ in range(calls):
        pair.send_chunk()
        pair.receive_chunk()
    confirmed, sent = pair.core.confirmed_position, message_numbers(pair.sent_data)
    pair.disconnect()
    pair.connect()
    pair.exchange()
    resent_numbers = message_numbers(pair.sent_data)
    assert resent_numbers == expected[len(expected) - len(resent_numbers) :]
    assert sent == expected[: len(sent)]
    assert len(sent) + len(resent_numbers) >= len(expected)
    assert pair.core.confirmed_position == pair.core.published_position == next_number - first
    unconfirmed = [n for n in expected if (n - first) % ID_COUNT >= confirmed]
    assert resent_numbers == unconfirmed
