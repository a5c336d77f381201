"""Messages on their way into numbered frames: the same frames, however they are taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core.publish_batch import (
    PublishBatch,
    UnnumberedFrames,
    count_fitting,
    encode_frame_prefix,
    longest_frame_bytes,
    slice_bounds,
)
from tests.support.oracles import ID_COUNT, build_frame

MESSAGE, ENVELOPE = b"15"
NEAR_THE_WRAP = st.sampled_from([0, 9, 0x0A3E3C0D, ID_COUNT - 3, ID_COUNT - 70])


def segment_of(contents: list[bytes], class_id: int = 0x3C0D) -> UnnumberedFrames:
    return UnnumberedFrames.from_mixed(
        [encode_frame_prefix(MESSAGE, class_id)] * len(contents), contents
    )


def frame(number: int, content: bytes) -> bytes:
    return build_frame(MESSAGE, class_id=0x3C0D, message_id=number % ID_COUNT, content=content)


some_contents = st.lists(
    st.sampled_from([b"", b"x", b"<\r\n", b"longer than others"]), min_size=1, max_size=4
)


def frames_of(segment: UnnumberedFrames | None) -> bytes:
    assert segment is not None
    chunk = segment.pop_batch(
        max_bytes=1 << 20, available_bytes=1 << 20, first_position=0, first_number=5
    )
    assert chunk is not None
    assert segment.is_empty
    assert segment.size_bytes == chunk.size_bytes
    return bytes(chunk.data)


@given(some_contents, st.integers(1, 40))
def test_messages_of_one_kind_make_the_same_segment_without_their_openings(
    some: list[bytes], times: int
) -> None:
    contents = some * times
    alike = UnnumberedFrames.from_uniform(encode_frame_prefix(MESSAGE, 0x3C0D), contents, b"<\r\n>")
    assert frames_of(alike) == frames_of(segment_of(contents))


@given(some_contents, st.integers(0, 9), st.sampled_from([b"<\r\n>", b"a<\r\n>b"]))
def test_a_delimiter_in_a_content_is_seen(some: list[bytes], at: int, content: bytes) -> None:
    some.insert(at, content)
    assert (
        UnnumberedFrames.from_uniform(encode_frame_prefix(MESSAGE, 0x3C0D), some, b"<\r\n>") is None
    )


@given(some_contents, st.integers(1, 40), NEAR_THE_WRAP, st.data())
def test_frames_are_numbered_on_however_they_are_taken(
    some: list[bytes], times: int, number: int, data: st.DataObject
) -> None:
    """Above 50 messages the array paths are engaged."""
    contents = some * times
    segment = segment_of(contents)
    taken = b""
    first = 0
    while not segment.is_empty:
        most = data.draw(st.integers(0, 2000))
        chunk = segment.pop_batch(
            max_bytes=most, available_bytes=2000, first_position=first, first_number=number + first
        )
        assert chunk is not None
        chunk.assign_numbers((number + first) % ID_COUNT)
        assert (chunk.first_position, chunk.end_position) == (first, first + chunk.count)
        assert chunk.size_bytes <= max(most, len(frame(0, contents[first])))
        assert chunk.bytes_below(chunk.end_position) == chunk.size_bytes == len(chunk.data)
        taken += chunk.data
        first = chunk.end_position
    assert taken == b"".join(frame(number + n, content) for n, content in enumerate(contents))


@given(some_contents, st.integers(1, 40), st.data())
def test_a_chunk_can_be_cut_and_numbered_anew(
    some: list[bytes], times: int, data: st.DataObject
) -> None:
    contents = [*some, b"one more"] * times
    chunk = segment_of(contents).pop_batch(
        max_bytes=1 << 20, available_bytes=1 << 20, first_position=7, first_number=1
    )
    assert chunk is not None
    cut = data.draw(st.integers(1, chunk.count - 1))
    front, rest = chunk.split(cut)
    assert (front.first_position, front.end_position, rest.first_position, rest.end_position) == (
        7,
        7 + cut,
        7 + cut,
        chunk.end_position,
    )
    assert bytes(front.data) + bytes(rest.data) == bytes(chunk.data)
    rest.assign_numbers(500)
    expected = [frame(500 + n, content) for n, content in enumerate(contents[cut:])]
    assert bytes(rest.data) == b"".join(expected)
    assert longest_frame_bytes(rest.bounds) == max(map(len, expected))


@pytest.mark.parametrize("count", [3, 100])
def test_the_end_of_the_frame_that_a_byte_belongs_to_is_found(count: int) -> None:
    chunk = segment_of([b"abc"] * count).pop_batch(
        max_bytes=1 << 20, available_bytes=1 << 20, first_position=0, first_number=0
    )
    assert chunk is not None
    for at in range(1, chunk.size_bytes + 1):
        assert chunk.frame_end_offset(at) == -(-at // 16) * 16


def test_one_message_is_a_chunk_like_others() -> None:
    one = PublishBatch.from_message(
        encode_frame_prefix(MESSAGE, 0x3C0D), b"<\r\n", position=5, number=0x0A3E3C0D
    )
    assert bytes(one.data) == frame(0x0A3E3C0D, b"<\r\n")
    assert (one.first_position, one.end_position, one.size_bytes, one.bytes_below(6)) == (
        5,
        6,
        16,
        16,
    )


@given(st.lists(st.integers(13, 60), min_size=1, max_size=80), st.integers(0, 300), st.data())
def test_as_many_frames_fit_as_there_are_bytes_for(
    lengths: list[int], most: int, data: st.DataObject
) -> None:
    room = data.draw(st.integers(0, 300))
    begin = data.draw(st.integers(0, len(lengths) - 1))
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    expected = 0
    while begin + expected < len(lengths):
        if sum(lengths[begin : begin + expected + 1]) > min(most, room):
            break
        expected += 1
    if not expected and lengths[begin] <= room:
        expected = 1
    for either in (bounds, np.array(bounds)):
        assert count_fitting(either, begin, max_bytes=most, available_bytes=room) == expected
        part = slice_bounds(either, begin, begin + expected)
        assert np.diff(part).tolist() == lengths[begin : begin + expected]
        assert int(part[0]) == 0


def test_of_no_frames_none_is_long() -> None:
    assert longest_frame_bytes([0]) == 0
