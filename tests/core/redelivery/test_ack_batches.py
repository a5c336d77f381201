"""Ack ranges parsed and applied with arrays equal the oracle. See protocol/test_frame_batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import PLAIN_FRAMES_MAX
from simplebus.core.protocol import frames as wire
from simplebus.core.protocol.frames import parse_ack_ranges
from simplebus.core.redelivery.ack_window import AckWindow
from tests.behaviour.wire_peer import LARGE_BATCH_COUNT, build_batch, window_state
from tests.support.oracles import ID_COUNT, AckOracle, parse_ack
from tests.support.strategies import ack_contents, ack_frame

# Acks --------------------------------------------------------------------------------------------


def parse_one_by_one(contents: Sequence[bytes]) -> list[tuple[int, int]]:
    ranges = []
    for content in contents:
        expected = parse_ack(content)
        try:
            assert wire.parse_ack_range(content) == expected
        except RemoteProtocolError:
            assert expected is None
            break
        ranges.append(wire.parse_ack_range(content))
    return ranges


def assert_parses_acks(contents: Sequence[bytes]) -> None:
    firsts, lasts = parse_ack_ranges(build_batch(*(ack_frame(1, content) for content in contents)))
    read = list(zip(firsts.tolist(), lasts.tolist(), strict=True))
    assert read == parse_one_by_one(contents)


@given(
    st.lists(ack_contents(), min_size=1, max_size=6),
    st.integers(1, LARGE_BATCH_COUNT),
    st.randoms(),
)
def test_many_acks_parse_like_single_acks(acks: list[bytes], times: int, random: Random) -> None:
    contents = acks * times
    assert_parses_acks(contents)
    random.shuffle(contents)
    assert_parses_acks(contents)


@given(st.integers(0, ID_COUNT - 2 * LARGE_BATCH_COUNT), st.integers(1, 3), st.integers(0, 3))
def test_consecutive_acks_parse_like_single_acks(first: int, step: int, zeros: int) -> None:
    # In columns where the digits stay as many, anywhere where they become more.
    contents = [
        b"0" * zeros + b"%d-%d" % (at, at + step)
        for at in range(first, first + step * LARGE_BATCH_COUNT, step)
    ]
    assert_parses_acks(contents)


bad_acks = [
    b"",
    b"-",
    b"5-",
    b"-5",
    b"8-5",
    b"5-5",
    b"5:8",
    b"5-8 ",
    b"5/-8",
    b"5--8",
    b"00000000005-8",
    b"5-00000000008",
    b"0-2147483649",
    b"2147483648-2147483649",
    b"\xb5-\xb8",
]


@pytest.mark.parametrize("good", [b"3-4", b"10-20", b"2147483647-2147483648", b"7--2147483648"])
def test_parsing_stops_at_the_first_malformed_ack(good: bytes) -> None:
    for bad, at in product(bad_acks, (0, 1, LARGE_BATCH_COUNT // 2, LARGE_BATCH_COUNT - 1)):
        contents = [good] * LARGE_BATCH_COUNT
        contents[at] = bad
        assert_parses_acks(contents)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("byte", [*b"/:-+ \x00\x80\xff\xb0"])
def test_non_digit_is_detected_at_every_position(place: int, byte: int) -> None:
    content = bytearray(b"1-2")
    content[place] = byte
    assert_parses_acks(
        [b"1-2"] * LARGE_BATCH_COUNT + [bytes(content)] + [b"1-2"] * LARGE_BATCH_COUNT
    )
    assert_parses_acks([bytes(content)] * LARGE_BATCH_COUNT)


def test_numbers_of_all_lengths_parse_in_one_batch() -> None:
    numbers = [10**digits - 1 for digits in range(1, 10)] + [10**digits for digits in range(10)]
    contents = [b"%d-%d" % (a, b) for a in numbers for b in [*numbers, ID_COUNT] if a < b]
    assert len(contents) > PLAIN_FRAMES_MAX
    assert_parses_acks(contents)
    assert_parses_acks([content.replace(b"-", b"-0") for content in contents])


# Ack windows -------------------------------------------------------------------------------------


def build_window(
    floor: int, cursor: int, ranges: Sequence[tuple[int, int]], *, at_once: bool
) -> AckWindow:
    window = AckWindow(floor=floor)
    window.cursor = cursor
    if at_once:
        pairs = np.array(ranges, np.int64).reshape(-1, 2)
        window.ack_ranges(pairs[:, 0], pairs[:, 1])
    else:
        for first, last in ranges:
            window.ack_range(first, last)
    window.check()
    return window


@given(
    st.sampled_from([0, 100, 1020, ID_COUNT - 150, 7 * ID_COUNT - 1]),
    st.lists(st.tuples(st.integers(-20, 320), st.integers(1, 40)), min_size=1, max_size=6),
    st.sampled_from([1, LARGE_BATCH_COUNT // 2]),
    st.booleans(),
    st.booleans(),
    st.randoms(),
)
def test_ack_ranges_equals_single_acks(
    floor: int,
    spans: list[tuple[int, int]],
    times: int,
    singles: bool,
    shuffled: bool,
    random: Random,
) -> None:
    # Single messages, ranges that touch, and any ranges take three ways through the arrays.
    cursor = floor + 400
    ranges = [(floor + at + i, floor + at + i + n) for i in range(times) for at, n in spans]
    if singles:
        ranges = [(first, first + 1) for first, _ in ranges]
    if shuffled:
        random.shuffle(ranges)
    ranges = [(min(first, cursor - 1), min(last, cursor)) for first, last in ranges]
    oracle = AckOracle(floor=floor, cursor=cursor)
    for first, last in ranges:
        oracle.acked.update(range(max(first, floor), last))
    at_once = build_window(floor, cursor, ranges, at_once=True)
    one_by_one = build_window(floor, cursor, ranges, at_once=False)
    assert window_state(at_once) == window_state(one_by_one) == window_state(oracle)


@given(
    st.lists(st.integers(1, 5), min_size=LARGE_BATCH_COUNT, max_size=LARGE_BATCH_COUNT),
    st.integers(-3, 3),
)
def test_adjacent_ranges_equal_single_acks(lengths: list[int], start: int) -> None:
    ends = np.cumsum([start, *lengths]).tolist()
    ranges = list(pairwise(ends))
    at_once = build_window(0, 5 * LARGE_BATCH_COUNT + 3, ranges, at_once=True)
    one_by_one = build_window(0, 5 * LARGE_BATCH_COUNT + 3, ranges, at_once=False)
    assert window_state(at_once) == window_state(one_by_one)
