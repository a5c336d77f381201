"""Any chunking of the same bytes gives the same frames and the same error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import HEADROOM_BYTES
from simplebus.core.protocol.receive_buffer import FrameReceiver, ReceiveBuffer, UnprocessedInput
from tests.support.oracles import DELIMITER, build_frame, split_frames
from tests.support.strategies import MESSAGE, Chunks, chunkings, cut, garbled_streams, streams

BUFFER = ReceiveBuffer()
LONG = 4 * HEADROOM_BYTES


def receive_chunks(
    chunks: Iterable[bytes], *, frame_bytes_max: int = LONG
) -> tuple[list[bytes], int, Reason | None]:
    """Return the frames of these chunks, the number of incomplete bytes, and the error, if any."""
    receiver = FrameReceiver(frame_bytes_max=frame_bytes_max)
    found: list[bytes] = []
    try:
        for chunk in chunks:
            for batch in receiver.receive(BUFFER, BUFFER.fill(chunk)):
                batch.check()
                data, starts = batch.data.tobytes(), batch.starts.tolist()
                found += [data[a:b] for a, b in zip(starts, batch.ends.tolist(), strict=True)]
            assert receiver.frame_count == len(found)
    except RemoteProtocolError as error:
        assert receiver.frame_count == len(found)
        return found, 0, error.reason
    return found, len(receiver.tail), None


def split_bytewise(data: bytes) -> Chunks:
    return [data[at : at + 1] for at in range(len(data))]


def assert_receives(chunks: Chunks) -> None:
    found, leftover = split_frames(b"".join(chunks))
    assert receive_chunks(chunks) == (found, len(leftover), None)


@given(st.one_of(streams(), garbled_streams()).flatmap(chunkings))
def test_chunking_does_not_change_frames(chunks: Chunks) -> None:
    assert_receives(chunks)


@given(st.one_of(streams(), garbled_streams()).map(lambda data: data[-600:]))
def test_frames_are_received_byte_by_byte(data: bytes) -> None:
    assert_receives(split_bytewise(data))


def test_two_frames_cut_at_every_offset() -> None:
    data = bytes.fromhex("313c0d0a3e3c0d0a3e") + b"<\r\n" + DELIMITER
    data += build_frame(MESSAGE, class_id=0x3C0D, content=b"\r\n>")
    for place in range(len(data) + 1):
        assert_receives(cut(data, [place]))


def test_fewer_than_9_bytes_are_kept() -> None:
    for length in range(9):
        assert receive_chunks([b"<\r\n><\r\n><"[:length]]) == ([], length, None)


@pytest.mark.parametrize("content_bytes", [-1, 0, 1, 1000])
def test_frames_of_about_headroom_length(content_bytes: int) -> None:
    # A tail of up to HEADROOM_BYTES is copied in front of the next read, a longer one grows aside.
    frame = build_frame(MESSAGE, class_id=1, content=b"<" * (HEADROOM_BYTES - 13 + content_bytes))
    data = frame + build_frame(MESSAGE, content=b"next") + frame + b"1"
    size = len(frame)
    for places in (
        [size - 1],
        [size - 2],
        [size - 3],
        [size - 4],
        [size - 5],
        [size],
        [size + 1],
        [HEADROOM_BYTES - 1],
        [HEADROOM_BYTES],
        [HEADROOM_BYTES + 1],
        [size // 2, size - 2, size - 1, size + 16],
        [10, HEADROOM_BYTES - 5, HEADROOM_BYTES - 4, HEADROOM_BYTES - 3, size + 20],
    ):
        assert_receives(cut(data, places))


@given(
    st.integers(HEADROOM_BYTES - 40, HEADROOM_BYTES + 40),
    st.lists(st.integers(-60, 60), max_size=6),
)
def test_long_frames_cut_near_headroom_and_end(size: int, cuts: list[int]) -> None:
    frame = build_frame(MESSAGE, content=b"<\r\n" * (size // 3))
    data = frame + frame[:40]
    near = [HEADROOM_BYTES + at for at in cuts] + [len(frame) + at for at in cuts]
    assert_receives(cut(data, [min(max(at, 0), len(data)) for at in near]))


def build_frame_of_length(length: int) -> bytes:
    return build_frame(MESSAGE, content=b"x" * (length - 13))


@pytest.mark.parametrize("most", [13, 64, HEADROOM_BYTES, HEADROOM_BYTES + 100])
def test_frame_length_limit_is_exact(most: int) -> None:
    legal, illegal = build_frame_of_length(most), build_frame_of_length(most + 1)
    for places in ([], [1], [9], [most - 2], [most - 1], [most], [most // 2, most - 1]):
        assert receive_chunks(cut(legal + legal, places), frame_bytes_max=most) == (
            [legal] * 2,
            0,
            None,
        )
        assert receive_chunks(cut(legal + illegal + legal, places), frame_bytes_max=most) == (
            [legal],
            0,
            Reason.FRAME_TOO_LONG,
        )


@pytest.mark.parametrize("most", [13, 64])
def test_too_long_frame_is_refused_before_its_end(most: int) -> None:
    unfinished = build_frame_of_length(most + 50)[: most + 1]
    assert receive_chunks([unfinished[:most]], frame_bytes_max=most) == ([], most, None)
    assert receive_chunks([unfinished], frame_bytes_max=most) == ([], 0, Reason.FRAME_TOO_LONG)
    assert receive_chunks(split_bytewise(unfinished), frame_bytes_max=most) == (
        [],
        0,
        Reason.FRAME_TOO_LONG,
    )


@given(st.lists(st.integers(13, 80), min_size=1, max_size=8), st.integers(1, 60), st.data())
def test_too_long_frame_is_refused_for_any_chunking(
    lengths: list[int], times: int, data: st.DataObject
) -> None:
    frames = [build_frame_of_length(length) for length in lengths * times]
    first_bad = next((i for i, frame in enumerate(frames) if len(frame) > 64), len(frames))
    reason = Reason.FRAME_TOO_LONG if first_bad < len(frames) else None
    chunks = data.draw(chunkings(b"".join(frames)))
    assert receive_chunks(chunks, frame_bytes_max=64) == (frames[:first_bad], 0, reason)


def test_frames_before_a_too_long_frame_are_returned() -> None:
    # Uniform, array and plain path of split, by the number of frames in front.
    for count in (300, 60, 5):
        good = [build_frame_of_length(40)] * count
        data = b"".join([*good, build_frame_of_length(65), *good])
        assert receive_chunks([data], frame_bytes_max=64) == (good, 0, Reason.FRAME_TOO_LONG)


@pytest.mark.parametrize(
    ("data", "lone"),
    [
        (build_frame_of_length(13), True),
        (build_frame_of_length(64), True),
        (build_frame_of_length(65), False),
        (build_frame_of_length(13)[:-1], False),
        (build_frame_of_length(13) * 2, False),
        (build_frame_of_length(13) + b"1", False),
        (b"<\r\n><\r\n><\r\n>", False),
        (b"<\r\n><\r\n><<\r\n>", True),
        (b"", False),
    ],
)
def test_has_single_frame(data: bytes, lone: bool) -> None:
    receiver = FrameReceiver(frame_bytes_max=64)
    assert receiver.receive_single_frame(BUFFER, BUFFER.fill(data)) is lone
    assert receiver.frame_count == lone


def test_end_of_a_started_frame_is_no_single_frame() -> None:
    receiver = FrameReceiver(frame_bytes_max=64)
    begun = build_frame(MESSAGE, content=b"y" * 30)
    assert list(receiver.receive(BUFFER, BUFFER.fill(begun[:20]))) == []
    assert not receiver.receive_single_frame(BUFFER, BUFFER.fill(build_frame_of_length(13)))


class CountingBytes(bytearray):
    """Counts the bytes that `find` searches."""

    looked_at = 0

    def find(self, sub: Any, start: Any = 0, end: Any = None, /) -> int:
        self.looked_at += (len(self) if end is None else end) - start
        return super().find(sub, start, end)


def test_long_frame_in_small_chunks_is_searched_once() -> None:
    frame = build_frame(MESSAGE, content=b"<" * (16 * HEADROOM_BYTES))
    chunk = 1000
    buffer = ReceiveBuffer()
    buffer.raw = CountingBytes(buffer.raw)
    buffer.view = memoryview(buffer.raw)
    buffer.writable = buffer.view[HEADROOM_BYTES:]
    receiver = FrameReceiver(frame_bytes_max=len(frame))
    receiver._tail = CountingBytes()
    frames = 0
    for at in range(0, len(frame), chunk):
        for batch in receiver.receive(buffer, buffer.fill(frame[at : at + chunk])):
            frames += batch.count
    assert frames == 1
    # Aside, each byte is looked at once, and three before each chunk again.
    chunks = len(frame) // chunk + 1
    assert receiver._tail.looked_at <= len(frame) + 3 * chunks
    # In the headroom, a chunk is searched with no more than the headroom in front of it.
    chunks_in_headroom = HEADROOM_BYTES // chunk + 2
    assert buffer.raw.looked_at <= chunks_in_headroom * (HEADROOM_BYTES + chunk) / 2 + len(frame)


@given(
    data=st.binary(min_size=1, max_size=60),
    steps=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30))),
)
def test_unprocessed_input_returns_bytes_in_order(
    data: bytes, steps: list[tuple[int, int]]
) -> None:
    unprocessed, processed, remaining = UnprocessedInput(), b"", data
    unprocessed.put_back([memoryview(data[:7]), memoryview(data[7:])])
    for pop_count, put_back_count in steps:
        popped = bytes(unprocessed.pop(pop_count))
        assert popped == remaining[:pop_count]
        processed, remaining = processed + popped, remaining[len(popped) :]
        end = max(0, len(processed) - put_back_count)  # More than the last pop returned, too.
        unprocessed.put_back([memoryview(processed[end:])])
        processed, remaining = processed[:end], processed[end:] + remaining
        assert len(unprocessed) == len(remaining)
    assert bytes(unprocessed.pop(len(data))) == remaining
    assert not unprocessed
