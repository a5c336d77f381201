"""Frames by example: encoding, splitting, batches and ack ranges. For arrays see
test_frame_batches.
"""

from __future__ import annotations

import numpy as np
import pytest

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import RECEIVE_PADDING_BYTES
from simplebus.core.protocol import frames
from simplebus.core.protocol.frame_splitter import SplitterScratch
from simplebus.core.protocol.frame_splitter import split_frames as split_buffer
from simplebus.core.protocol.frames import FrameBatch
from tests.behaviour.wire_peer import build_batch
from tests.support.oracles import DELIMITER, build_frame, parse_frame, split_frames
from tests.support.strategies import ACK, HEARTBEAT, MESSAGE

SMALLEST = build_frame(HEARTBEAT)
HEADER_FULL_OF_DELIMITER = bytes.fromhex("313c0d0a3e3c0d0a3e") + b"hi" + DELIMITER


def split_bytes(data: bytes, first: int = 0, last: int | None = None) -> FrameBatch | None:
    buffer = bytearray(data + bytes(RECEIVE_PADDING_BYTES))
    return split_buffer(
        buffer, first, len(data) if last is None else last, SplitterScratch(len(buffer))
    )


def test_frame_encoding_example() -> None:
    frame = frames.encode(
        frames.MESSAGE, class_id=7, message_id=99, timer_index=3, content=b"hi\r\n"
    )
    assert frame == bytes.fromhex("310007000000630003" + "68690d0a" + "3c0d0a3e")


def test_default_fields_are_zero() -> None:
    assert frames.encode(frames.HEARTBEAT) == bytes.fromhex("300000000000000000" + "3c0d0a3e")


def test_ack_encoding_example() -> None:
    frame = frames.encode_ack(class_id=1, timer_index=3, first=0, last=100)
    assert frame == bytes.fromhex("330001000000000003" + "302d313030" + "3c0d0a3e")


@pytest.mark.parametrize("message_id", [0, 1, 0x0A3E3C0D, (1 << 31) - 1])
def test_encoded_frame_is_split_again(message_id: int) -> None:
    frame = frames.encode(
        frames.MESSAGE, class_id=0x3C0D, message_id=message_id, timer_index=0x0A3E, content=b"<"
    )
    assert parse_frame(frame) == (MESSAGE, 0x3C0D, message_id, 0x0A3E, b"<")


@pytest.mark.parametrize("length", range(13))
def test_fewer_than_13_bytes_are_no_frame(length: int) -> None:
    for frame in (SMALLEST, HEADER_FULL_OF_DELIMITER):
        assert split_bytes(frame[:length]) is None


def test_delimiter_before_offset_9_is_ignored() -> None:
    for at in range(6):
        frame = (b"1" * at + DELIMITER).ljust(9, b"1") + b"body" + DELIMITER
        batch = split_bytes(frame)
        assert batch is not None
        assert batch.data.tobytes() == frame


def test_split_is_limited_to_the_given_bytes() -> None:
    buffer = b"junk" + SMALLEST + SMALLEST
    batch = split_bytes(buffer, 4, 4 + 13 + 12)
    assert batch is not None
    assert batch.data.tobytes() == SMALLEST
    assert split_bytes(buffer, 4, 4 + 12) is None


def test_incomplete_frame_is_left_for_the_next_call() -> None:
    data = SMALLEST + HEADER_FULL_OF_DELIMITER + b"31"
    at = 0
    found: list[bytes] = []
    while (batch := split_bytes(data, at)) is not None:
        batch.check()
        found += [batch.slice(i, i + 1).data.tobytes() for i in range(batch.count)]
        at += batch.data.size
    assert (found, data[at:]) == split_frames(data)


def test_stride_is_set_for_uniform_frames() -> None:
    alike = split_bytes(SMALLEST * 3, 0, 39)
    assert alike is not None
    assert (alike.stride, alike.count) == (13, 3)
    mixed = split_bytes(SMALLEST + HEADER_FULL_OF_DELIMITER, 0, 28)
    assert mixed is not None
    assert (mixed.stride, mixed.count) == (0, 2)


def test_batch_bounds() -> None:
    batch = build_batch(SMALLEST, HEADER_FULL_OF_DELIMITER, SMALLEST)
    batch.check()
    assert batch.starts.tolist() == [0, 13, 28]
    assert batch.ends.tolist() == [13, 28, 41]
    assert batch.lengths.tolist() == [13, 15, 13]


def test_from_frame_returns_the_frame() -> None:
    batch = FrameBatch.from_frame(memoryview(HEADER_FULL_OF_DELIMITER))
    batch.check()
    assert (batch.count, batch.stride) == (1, 15)
    assert batch.data.tobytes() == HEADER_FULL_OF_DELIMITER


def test_slice_is_a_view() -> None:
    batch = build_batch(SMALLEST, HEADER_FULL_OF_DELIMITER, SMALLEST)
    middle = batch.slice(1, 2)
    middle.check()
    assert middle.data.tobytes() == HEADER_FULL_OF_DELIMITER
    assert np.shares_memory(middle.data, batch.data)


def test_a_copy_outlives_the_buffer() -> None:
    buffer = bytearray(SMALLEST * 2 + bytes(RECEIVE_PADDING_BYTES))
    batch = split_buffer(buffer, 0, 2 * len(SMALLEST), SplitterScratch(len(buffer)))
    assert batch is not None
    copy = batch.copy()
    buffer[:] = bytes(len(buffer))
    copy.check()
    assert copy.data.tobytes() == SMALLEST * 2


def test_select_keeps_the_given_order() -> None:
    first, second = build_frame(MESSAGE, content=b"one"), build_frame(MESSAGE, content=b"second")
    taken = build_batch(first, second, SMALLEST).select(np.array([2, 0, 1], np.intp))
    taken.check()
    assert taken.data.tobytes() == SMALLEST + first + second


def test_keys_depend_on_type_and_class_only() -> None:
    keys = build_batch(
        build_frame(MESSAGE, class_id=1, message_id=5, content=b"x"),
        build_frame(MESSAGE, class_id=1, timer_index=9),
        build_frame(MESSAGE, class_id=256),
        build_frame(ACK, class_id=1),
    ).keys()
    assert keys[0] == keys[1]
    assert len(set(keys.tolist())) == 3


def test_check_detects_inconsistent_batches() -> None:
    data = np.frombuffer(SMALLEST * 2, np.uint8)
    for bounds, stride in (([0, 13], 13), ([0, 5, 26], 0), ([0, 13, 26], 12), ([1, 26], 0)):
        with pytest.raises(AssertionError):
            FrameBatch(data, np.array(bounds, np.int64), stride).check()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"0-1", (0, 1)),
        (b"0-100", (0, 100)),
        (b"5-8", (5, 8)),
        (b"0000000005-0000000008", (5, 8)),
        (b"2147483647-2147483648", (2147483647, 2147483648)),
        (b"0-2147483648", (0, 2147483648)),
        (b"99999999-100000000", (99_999_999, 100_000_000)),
    ],
)
def test_parse_ack_range(content: bytes, expected: tuple[int, int]) -> None:
    assert frames.parse_ack_range(content) == expected
    assert frames.parse_ack_range(memoryview(content)) == expected


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"-",
        b"5",
        b"5-",
        b"-5",
        b"5-5",
        b"8-5",
        b" 5-8",
        b"5-8\n",
        b"+5-8",
        b"5--8",
        b"5-8-9",
        b"00000000005-8",
        b"5-00000000008",
        b"2147483648-2147483649",
        b"0-2147483649",
        b"9999999999-9999999999",
        b"a-b",
        "\uff15-\uff18".encode(),
    ],
)
def test_malformed_ack_is_refused(content: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="expected first-last") as caught:
        frames.parse_ack_range(content)
    assert caught.value.reason is Reason.BAD_ACK


def test_error_shows_an_excerpt_of_the_ack() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        frames.parse_ack_range(b"\xff" * 100_000)
    assert "100000 bytes" in caught.value.sentence
    assert len(caught.value.sentence) < 300


def test_ack_ranges_stop_before_the_first_bad_one() -> None:
    acks = [build_frame(ACK, content=c) for c in (b"0-1", b"4-9", b"x", b"9-10")]
    firsts, lasts = frames.parse_ack_ranges(build_batch(*acks))
    assert (firsts.tolist(), lasts.tolist()) == ([0, 4], [1, 9])


def test_malformed_first_ack_gives_no_range() -> None:
    firsts, lasts = frames.parse_ack_ranges(build_batch(build_frame(ACK)))
    assert (firsts.size, lasts.size) == (0, 0)


def test_writing_id_and_timer_changes_no_other_byte() -> None:
    buffer = bytearray(SMALLEST + HEADER_FULL_OF_DELIMITER + SMALLEST)
    frames.ID_AND_TIMER.pack_into(buffer, 13 + frames.ID_OFFSET, 0x7FFFFFFF, 0xFFFF)
    stamped = build_frame(
        MESSAGE, class_id=0x3C0D, message_id=0x7FFFFFFF, timer_index=0xFFFF, content=b"hi"
    )
    assert bytes(buffer) == SMALLEST + stamped + SMALLEST
