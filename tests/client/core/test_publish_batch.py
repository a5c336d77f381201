"""Tests of building and numbering frame batches."""

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
NUMBERS_BEFORE_WRAP = st.sampled_from([0, 9, 0x0A3E3C0D, ID_COUNT - 3, ID_COUNT - 70])


def join_frames(contents: list[bytes], class_id: int = 0x3C0D) -> UnnumberedFrames:
    return UnnumberedFrames.from_mixed(
        [encode_frame_prefix(MESSAGE, class_id)] * len(contents), contents
    )


def frame(number: int, content: bytes) -> bytes:
    return build_frame(MESSAGE, class_id=0x3C0D, message_id=number % ID_COUNT, content=content)


content_lists = st.lists(
    st.sampled_from([b"", b"x", b"<\r\n", b"longer than others"]), min_size=1, max_size=4
)


def pop_all_frames(unnumbered: UnnumberedFrames | None) -> bytes:
    assert unnumbered is not None
    batch = unnumbered.pop_batch(
        max_bytes=1 << 20, available_bytes=1 << 20, first_position=0, first_number=5
    )
    assert batch is not None
    assert unnumbered.is_empty
    assert unnumbered.size_bytes == batch.size_bytes
    return bytes(batch.data)


@given(content_lists, st.integers(1, 40))
def test_uniform_and_mixed_contents_give_equal_frames(payloads: list[bytes], times: int) -> None:
    contents = payloads * times
    uniform = UnnumberedFrames.from_uniform(
        encode_frame_prefix(MESSAGE, 0x3C0D), contents, b"<\r\n>"
    )
    assert pop_all_frames(uniform) == pop_all_frames(join_frames(contents))


@given(content_lists, st.integers(0, 9), st.sampled_from([b"<\r\n>", b"a<\r\n>b"]))
def test_detects_delimiter_in_content(payloads: list[bytes], index: int, content: bytes) -> None:
    payloads.insert(index, content)
    assert (
        UnnumberedFrames.from_uniform(encode_frame_prefix(MESSAGE, 0x3C0D), payloads, b"<\r\n>")
        is None
    )


@given(content_lists, st.integers(1, 40), NUMBERS_BEFORE_WRAP, st.data())
def test_numbers_frames_consecutively_for_any_batch_sizes(
    payloads: list[bytes], times: int, number: int, data: st.DataObject
) -> None:
    """More than 50 messages take the numpy paths."""
    contents = payloads * times
    unnumbered = join_frames(contents)
    written = b""
    first = 0
    while not unnumbered.is_empty:
        max_bytes = data.draw(st.integers(0, 2000))
        batch = unnumbered.pop_batch(
            max_bytes=max_bytes,
            available_bytes=2000,
            first_position=first,
            first_number=number + first,
        )
        assert batch is not None
        batch.assign_numbers((number + first) % ID_COUNT)
        assert (batch.first_position, batch.end_position) == (first, first + batch.count)
        assert batch.size_bytes <= max(max_bytes, len(frame(0, contents[first])))
        assert batch.bytes_below(batch.end_position) == batch.size_bytes == len(batch.data)
        written += batch.data
        first = batch.end_position
    assert written == b"".join(frame(number + n, content) for n, content in enumerate(contents))


@given(content_lists, st.integers(1, 40), st.data())
def test_batch_can_be_split_and_renumbered(
    payloads: list[bytes], times: int, data: st.DataObject
) -> None:
    contents = [*payloads, b"one more"] * times
    batch = join_frames(contents).pop_batch(
        max_bytes=1 << 20, available_bytes=1 << 20, first_position=7, first_number=1
    )
    assert batch is not None
    cut = data.draw(st.integers(1, batch.count - 1))
    front, back = batch.split(cut)
    assert (front.first_position, front.end_position, back.first_position, back.end_position) == (
        7,
        7 + cut,
        7 + cut,
        batch.end_position,
    )
    assert bytes(front.data) + bytes(back.data) == bytes(batch.data)
    back.assign_numbers(500)
    expected = [frame(500 + n, content) for n, content in enumerate(contents[cut:])]
    assert bytes(back.data) == b"".join(expected)
    assert longest_frame_bytes(back.bounds) == max(map(len, expected))


@pytest.mark.parametrize("count", [3, 100])
def test_frame_end_offset(count: int) -> None:
    batch = join_frames([b"abc"] * count).pop_batch(
        max_bytes=1 << 20, available_bytes=1 << 20, first_position=0, first_number=0
    )
    assert batch is not None
    for offset in range(1, batch.size_bytes + 1):
        assert batch.frame_end_offset(offset) == -(-offset // 16) * 16


def test_batch_of_one_message() -> None:
    single = PublishBatch.from_message(
        encode_frame_prefix(MESSAGE, 0x3C0D), b"<\r\n", position=5, number=0x0A3E3C0D
    )
    assert bytes(single.data) == frame(0x0A3E3C0D, b"<\r\n")
    assert (
        single.first_position,
        single.end_position,
        single.size_bytes,
        single.bytes_below(6),
    ) == (
        5,
        6,
        16,
        16,
    )


@given(st.lists(st.integers(13, 60), min_size=1, max_size=80), st.integers(0, 300), st.data())
def test_count_fitting_frames(lengths: list[int], max_bytes: int, data: st.DataObject) -> None:
    credit = data.draw(st.integers(0, 300))
    start = data.draw(st.integers(0, len(lengths) - 1))
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    expected = 0
    while start + expected < len(lengths):
        if sum(lengths[start : start + expected + 1]) > min(max_bytes, credit):
            break
        expected += 1
    if not expected and lengths[start] <= credit:
        expected = 1
    for any_bounds in (bounds, np.array(bounds)):
        assert (
            count_fitting(any_bounds, start, max_bytes=max_bytes, available_bytes=credit)
            == expected
        )
        slice_ = slice_bounds(any_bounds, start, start + expected)
        assert np.diff(slice_).tolist() == lengths[start : start + expected]
        assert int(slice_[0]) == 0


def test_longest_frame_of_no_frames_is_zero() -> None:
    assert longest_frame_bytes([0]) == 0
