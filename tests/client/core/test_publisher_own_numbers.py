"""Publishers whose numbers are their own: known elsewhere, ascending, with some left out."""

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
    connect,
    connect_version2,
    publish,
)
from tests.client.core.client_and_broker import Pair
from tests.support.oracles import ID_COUNT, build_frame, parse_frame


def remote() -> Broker:
    """A broker whose messages are known elsewhere by their numbers."""
    broker = Broker(identity="cluster")
    broker.store.class_registry.dedup_window_seconds = 120.0
    return broker


def door() -> BrokerHarness:
    bus = BrokerHarness()
    bus.broker = remote()
    return bus


def frame(number: int) -> bytes:
    return publish(1, number % ID_COUNT, b"%d" % number)


def stored(bus: BrokerHarness) -> list[int]:
    ring = bus.broker.classes[1].ring
    return [int(parse_frame(ring.frame(s))[4]) for s in range(ring.floor, ring.head)]


@given(
    st.sampled_from([0, 7, ID_COUNT - 20, ID_COUNT // 2 - 3]),
    st.lists(
        st.tuples(st.integers(-3, 60), st.sampled_from([1, 1, 2, LARGE_BATCH_COUNT])), min_size=1, max_size=8
    ),
    st.booleans(),
)
def test_what_is_ahead_is_stored_and_what_is_behind_was(
    first: int, runs: list[tuple[int, int]], is_one_read: bool
) -> None:
    """The oracle takes one number after the other. Runs that overlap take the slow path."""
    bus = door()
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect(1, name="lane", instance="one", first=first))
    assert peer.receive_replies()[0].content["next"] == first
    at, numbers, expected, following = first, list[int](), list[int](), first
    for skipped, count in runs:
        at = max(first, at + skipped)
        numbers += range(at, at + count)
        at += count
    for number in numbers:
        if number >= following:
            expected.append(number)
            following = number + 1
    said = [frame(number) for number in numbers]
    for part in [b"".join(said)] if is_one_read else said:
        peer.send(part)
    assert stored(bus) == expected
    assert peer.receive_replies()[-1].message_id == following % ID_COUNT
    assert bus.broker.refusal_counts[Reason.DUPLICATE] == len(numbers) - len(expected)


def test_a_number_is_where_its_program_says_whatever_was_there() -> None:
    """Another message may have had it, of a bus that came back from an old copy."""
    bus = door()
    for _ in range(2):
        peer = Version2Peer(bus, bus.broker.open_session())
        peer.send(connect(1, name="lane", instance="one", first=5) + frame(5) + frame(9))
        bus.broker.close_session(peer.session)
    assert stored(bus) == [5, 9, 5, 9]


def test_what_lies_between_two_numbers_costs_nothing() -> None:
    """However many that are, and though the session ends in the middle."""
    bus, far = door(), ID_COUNT // 2
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect(1, name="lane", instance="one", first=0) + frame(0))
    said = frame(far) + frame(2 * far - 1) + build_frame(ord("~")) + frame(2 * far)
    assert peer.send_refused(said) is Reason.UNKNOWN_TYPE
    bus.broker.close_session(peer.session)
    assert stored(bus) == [0, far, 2 * far - 1]


@pytest.mark.parametrize("more", [{}, {"name": "a"}])
def test_nobody_has_such_numbers_where_nobody_would_know_them(more: dict[str, str]) -> None:
    bus = BrokerHarness() if more else door()
    peer = Version2Peer(bus, bus.broker.open_session())
    assert peer.send_refused(connect(1, first=3, **more)) is Reason.BAD_CONNECT
    assert not len(bus.broker.connection_requests.producer_states)


def test_others_leave_nothing_out_there() -> None:
    assert connect_version2(door(), name="a").send_refused(frame(1)) is Reason.NUMBER_GAP


# The client ---------------------------------------------------------------------------------------


def numbers_in(said: bytes) -> list[int]:
    """Of the messages that a client has written."""
    found = [parse_frame(part + DELIMITER) for part in said.split(DELIMITER)[:-1]]
    return [each[2] for each in found if each[0] == MESSAGE]


def hand_over(core: ClientCore, left_out: int, count: int) -> None:
    frames = [build_frame(MESSAGE, class_id=1, content=b"x" * 20) for _ in range(count)]
    raw = bytearray(DELIMITER) + b"".join(frames)
    bounds = np.array([0, *accumulate(map(len, frames))])
    core.publish_buffer.publish_frames(raw, bounds, 1, skipped_count=left_out)


@given(
    st.sampled_from([0, 70_000, ID_COUNT - 30]),
    st.lists(
        st.tuples(st.integers(0, 70_000), st.sampled_from([1, 2, LARGE_BATCH_COUNT])), min_size=1, max_size=6
    ),
    st.integers(0, 20),
    st.sampled_from([64, 1000, 1 << 16]),
)
def test_what_is_left_out_is_a_position_of_no_message(
    first: int, runs: list[tuple[int, int]], calls: int, chunk: int
) -> None:
    """Whenever the connection is lost: what was not confirmed is sent again under its numbers."""
    pair = Pair(broker=remote(), chunk=chunk)
    pair.core = ClientCore(name="lane", instance="one", first_number=first)
    pair.connect()
    at, expected = first, list[int]()
    for left_out, count in runs:
        hand_over(pair.core, left_out, count)
        at += left_out
        expected += [number % ID_COUNT for number in range(at, at + count)]
        at += count
    for _ in range(calls):
        pair.say()
        pair.hear()
    confirmed, said = pair.core.confirmed_position, numbers_in(pair.said)
    pair.lose()
    pair.connect()
    pair.exchange()
    again = numbers_in(pair.said)
    assert again == expected[len(expected) - len(again) :]
    assert said == expected[: len(said)]
    assert len(said) + len(again) >= len(expected)
    assert pair.core.confirmed_position == pair.core.published_position == at - first
    left = [n for n in expected if (n - first) % ID_COUNT >= confirmed]
    assert again == left
