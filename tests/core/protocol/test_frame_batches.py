"""Array paths against oracles that handle one frame, one ack or one message at a time.

A fast path may only skip work; its result never differs. Batches below PLAIN_FRAMES_MAX use plain
loops, so the inputs repeat a few frames often enough. Where a path is visible from outside, a test
checks that it was used; otherwise a changed threshold would disable these tests unnoticed.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.protocol import frame_splitter
from simplebus.core.protocol.frame_splitter import SplitterScratch, find_delimiters
from simplebus.core.protocol.frames import FrameBatch
from tests.behaviour.wire_peer import LARGE_BATCH_COUNT, build_batch
from tests.support.oracles import DELIMITER, build_frame, split_frames
from tests.support.strategies import MESSAGE, frames, garbled_streams, streams

# Splitting ---------------------------------------------------------------------------------------


def split_all(data: bytes, *, before: bytes = DELIMITER) -> tuple[list[FrameBatch], bytes]:
    """Return all batches found in the middle of a larger buffer, and the remaining bytes."""
    buffer = bytearray(before + data + DELIMITER * 4)
    scratch = SplitterScratch(len(buffer))
    first, last = len(before), len(before) + len(data)
    batches = []
    while (batch := frame_splitter.split_frames(buffer, first, last, scratch)) is not None:
        batch.check()
        batches.append(batch.copy())
        first += batch.data.size
    return batches, bytes(buffer[first:last])


def list_frames(batch: FrameBatch) -> list[bytes]:
    data = batch.data.tobytes()
    starts, ends = batch.starts.tolist(), batch.ends.tolist()
    return [data[start:end] for start, end in zip(starts, ends, strict=True)]


def assert_splits(data: bytes) -> None:
    expected = split_frames(data)
    for before in (b"", DELIMITER, DELIMITER + b"<\r\n", b"<<<<<\r\n"):  # Aligned, and not.
        batches, leftover = split_all(data, before=before)
        assert ([frame for batch in batches for frame in list_frames(batch)], leftover) == expected


@given(streams())
def test_streams_split_like_the_oracle(data: bytes) -> None:
    assert_splits(data)


@given(garbled_streams())
def test_garbled_streams_split_like_the_oracle(data: bytes) -> None:
    assert_splits(data)


@given(
    frames(),
    frames(),
    frames(),
    st.integers(0, LARGE_BATCH_COUNT),
    st.integers(0, 3),
    st.integers(0, 12),
)
def test_frame_of_another_length_among_uniform_frames(
    usual: bytes, stranger: bytes, next_one: bytes, at: int, strangers: int, tail: int
) -> None:
    # The uniform path takes the frames in front of the stranger, or gives way to the arrays.
    data = usual * at + stranger * strangers + usual * (LARGE_BATCH_COUNT - at) + next_one[:tail]
    assert_splits(data)


def test_uniform_frames_use_the_uniform_path() -> None:
    frame = build_frame(MESSAGE, content=b"<x" * 8)
    batches, _ = split_all(frame * LARGE_BATCH_COUNT)
    assert [(batch.stride, batch.count) for batch in batches] == [(len(frame), LARGE_BATCH_COUNT)]


@given(st.lists(frames(), min_size=1, max_size=6), frames(), st.integers(0, 12))
def test_other_frames_before_uniform_frames(
    other_frames: list[bytes], usual: bytes, tail: int
) -> None:
    assert_splits(b"".join(other_frames) + usual * 300 + other_frames[0][:tail])


@pytest.mark.parametrize(("count", "engages"), [(1, True), (4, True), (5, False)])
def test_uniform_path_is_used_after_few_other_frames(count: int, engages: bool) -> None:
    other_frames = [build_frame(MESSAGE, content=bytes(n)) for n in range(count)]
    frame = build_frame(MESSAGE, content=bytes(150))
    batches, _ = split_all(b"".join(other_frames) + frame * 300)
    assert ((163, 300) in [(batch.stride, batch.count) for batch in batches]) == engages


def test_frames_of_different_lengths_use_arrays() -> None:
    data = b"".join(build_frame(MESSAGE, content=b"x" * (i % 7)) for i in range(LARGE_BATCH_COUNT))
    batches, _ = split_all(data)
    assert [(batch.stride, batch.count) for batch in batches] == [(0, LARGE_BATCH_COUNT)]


@pytest.mark.parametrize("content", [b"", b"hi", b"\r\n>", b"<"])
@pytest.mark.parametrize("count", [2, LARGE_BATCH_COUNT])
def test_delimiters_in_headers_are_ignored(content: bytes, count: int) -> None:
    # Uniform: it sees other delimiters and gives way. Arrays: some candidates lie in headers.
    for at in range(10):
        header = (b"1" * at + DELIMITER * 3)[:9]
        assert_splits((header + content + DELIMITER) * count)
        assert_splits((header + content + DELIMITER + header + b"y" + DELIMITER) * count)


@pytest.mark.parametrize("count", [3, LARGE_BATCH_COUNT])
def test_delimiter_in_the_content_ends_the_frame(count: int) -> None:
    assert_splits((b"1" * 9 + b"one" + DELIMITER + b"two" + DELIMITER) * count)
    assert_splits((b"1" * 9 + b"one" + DELIMITER + b"2" * 9 + b"two" + DELIMITER) * count)
    assert_splits(DELIMITER * count)


@given(
    st.binary(max_size=20), st.integers(0, 29), st.integers(0, LARGE_BATCH_COUNT), st.integers(1, 3)
)
def test_inner_delimiter_of_a_uniform_frame_is_found(
    content: bytes, place: int, at: int, count: int
) -> None:
    # The lengths stay the same: only looking for every delimiter tells that frames end elsewhere.
    frame = build_frame(MESSAGE, content=content.replace(b"<", b"x"))
    place = min(place, len(frame) - 4)
    broken = frame[:place] + DELIMITER + frame[place + 4 :]
    assert_splits(frame * at + broken * count + frame * (LARGE_BATCH_COUNT - at))


@given(st.lists(st.sampled_from([*b"<<<<\r\n>x=\xbd\0"]), max_size=200), st.data())
def test_find_delimiters_equals_a_plain_search(characters: list[int], data: st.DataObject) -> None:
    # Letters of delimiters, and letters that arithmetic on whole words may mistake for them.
    text = bytes(characters).replace(b"x", DELIMITER)
    first = data.draw(st.integers(0, min(9, len(text))))
    last = data.draw(st.integers(max(first, len(text) - 9), len(text)))
    buffer = bytearray(text + DELIMITER * 4)
    positions, words = find_delimiters(buffer, first, last, SplitterScratch(len(buffer)))
    expected = [found.start() for found in re.finditer(DELIMITER, text[first:last])]
    assert positions.tolist() == expected
    assert words.astype("<u8").tobytes() == b"".join(
        buffer[first + at : first + at + 8] for at in expected
    )


def test_bytes_after_the_end_are_ignored() -> None:
    frame = build_frame(MESSAGE, content=b"x")
    for count in (1, 17, LARGE_BATCH_COUNT):
        data = frame * count
        for last in range(len(data) - len(frame), len(data) + 1):
            batch = frame_splitter.split_frames(
                bytearray(data + frame * 3), 0, last, SplitterScratch(last)
            )
            found = 0 if batch is None else batch.count
            assert found == last // len(frame)


# Batches -----------------------------------------------------------------------------------------

frame_lists = st.one_of(
    # One repeated frame makes a strided batch, frames of several lengths do not.
    st.tuples(frames(), st.integers(1, LARGE_BATCH_COUNT)).map(lambda pair: [pair[0]] * pair[1]),
    st.lists(frames(), min_size=1, max_size=6).flatmap(
        lambda frame_list: st.integers(1, 40).map(lambda times: frame_list * times)
    ),
)


@given(frame_lists)
def test_a_batch_describes_its_frames(frame_list: list[bytes]) -> None:
    batch = build_batch(*frame_list)
    ends = [sum(len(frame) for frame in frame_list[: i + 1]) for i in range(len(frame_list))]
    assert batch.count == len(frame_list)
    assert batch.ends.tolist() == ends
    assert batch.starts.tolist() == [0, *ends[:-1]]
    assert batch.lengths.tolist() == [len(frame) for frame in frame_list]


@given(frame_lists)
def test_keys_are_equal_if_type_and_class_are(frame_list: list[bytes]) -> None:
    keys = build_batch(*frame_list).keys().tolist()
    kinds = [frame[:3] for frame in frame_list]
    assert len(set(zip(keys, kinds, strict=True))) == len(set(keys)) == len(set(kinds))


@given(frame_lists, st.data())
def test_slice_returns_the_frames(frame_list: list[bytes], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(frame_list) - 1))
    last = data.draw(st.integers(first + 1, len(frame_list)))
    part = build_batch(*frame_list).slice(first, last)
    part.check()
    assert part.stride == build_batch(*frame_list).stride, "the strided paths are lost"
    assert list_frames(part) == frame_list[first:last]
    whole = part.slice(0, part.count)
    assert list_frames(whole) == frame_list[first:last]


@given(frame_lists, st.data())
def test_select_returns_frames_in_order(frame_list: list[bytes], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(frame_list))))
    order = order[: data.draw(st.integers(1, len(frame_list)))]
    if data.draw(st.booleans()):
        order.sort()  # Neighbours: copied together.
    taken = build_batch(*frame_list).select(np.array(order, np.intp))
    taken.check()
    assert list_frames(taken) == [frame_list[i] for i in order]


@given(frame_lists)
def test_copy_is_independent(frame_list: list[bytes]) -> None:
    batch = build_batch(*frame_list)
    copy = batch.copy()
    copy.check()
    assert list_frames(copy) == frame_list
    assert not np.shares_memory(copy.data, batch.data)
