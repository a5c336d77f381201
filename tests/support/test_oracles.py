"""Tests of the oracles with examples worked out by hand."""

from __future__ import annotations

from tests.support.oracles import AckOracle, RingOracle, group_ids, parse_frame, split_frames

SUBSCRIBE_1 = bytes.fromhex("320001000000000000" + "3c0d0a3e")
ACK_0_TO_100 = bytes.fromhex("330001000000000003" + "302d313030" + "3c0d0a3e")
HEADER_FULL_OF_DELIMITER = bytes.fromhex("313c0d0a3e3c0d0a3e" + "6869" + "3c0d0a3e")
LAST_ID = 2147483647


def test_stream_is_split_into_frames() -> None:
    assert split_frames(SUBSCRIBE_1 + ACK_0_TO_100) == ([SUBSCRIBE_1, ACK_0_TO_100], b"")


def test_incomplete_frame_is_left_over() -> None:
    for length in range(len(ACK_0_TO_100)):
        data = SUBSCRIBE_1 + ACK_0_TO_100[:length]
        assert split_frames(data) == ([SUBSCRIBE_1], ACK_0_TO_100[:length])


def test_delimiter_in_the_header_is_ignored() -> None:
    assert split_frames(HEADER_FULL_OF_DELIMITER) == ([HEADER_FULL_OF_DELIMITER], b"")
    assert split_frames(HEADER_FULL_OF_DELIMITER[:9]) == ([], HEADER_FULL_OF_DELIMITER[:9])


def test_delimiter_that_begins_in_the_header_is_ignored() -> None:
    frame = bytes.fromhex("31000100000000003c" + "0d0a3e" + "3c0d0a3e")
    assert split_frames(frame) == ([frame], b"")
    assert parse_frame(frame) == (0x31, 1, 0, 0x3C, b"\r\n>")


def test_first_delimiter_ends_the_frame() -> None:
    data = SUBSCRIBE_1[:9] + b"one<\r\n>two<\r\n>"
    assert split_frames(data) == ([SUBSCRIBE_1[:9] + b"one<\r\n>"], b"two<\r\n>")


def test_header_fields_are_big_endian() -> None:
    assert parse_frame(ACK_0_TO_100) == (0x33, 1, 0, 3, b"0-100")
    assert parse_frame(HEADER_FULL_OF_DELIMITER) == (0x31, 0x3C0D, 0x0A3E3C0D, 0x0A3E, b"hi")


def test_acks_in_order_move_the_floor() -> None:
    window = AckOracle(floor=0, cursor=10)
    assert window.ack_ids(0, 4) == 0
    assert (window.floor, window.unacked_ranges(0, 10)) == (4, [(4, 10)])
    assert window.ack_ids(4, 10) == 0
    assert (window.floor, window.unacked_ranges(0, 10)) == (10, [])


def test_floor_waits_for_the_gap_before_an_ack_out_of_order() -> None:
    window = AckOracle(floor=0, cursor=10)
    window.ack_ids(4, 6)
    window.ack_ids(5, 8)
    assert (window.floor, window.unacked_ranges(0, 10)) == (0, [(0, 4), (8, 10)])
    window.ack_ids(0, 4)
    assert (window.floor, window.unacked_ranges(2, 9)) == (8, [(8, 9)])


def test_acks_outside_the_window_change_nothing() -> None:
    window = AckOracle(floor=100, cursor=110)
    assert window.ack_ids(90, 95) == 0
    assert window.ack_ids(110, 113) == 3
    assert window.ack_ids(108, 112) == 2
    assert (window.floor, window.unacked_ranges(0, 200)) == (100, [(100, 108)])
    window.cursor = 113
    assert window.unacked_ranges(0, 200) == [(100, 108), (110, 113)]


def test_ids_after_the_wrap_map_to_later_sequences() -> None:
    window = AckOracle(floor=LAST_ID - 1, cursor=LAST_ID + 3)
    assert window.nearest_sequence(LAST_ID) == LAST_ID
    assert window.nearest_sequence(0) == LAST_ID + 1
    assert window.ack_ids(0, 2) == 0
    assert window.unacked_ranges(0, 1 << 40) == [(LAST_ID - 1, LAST_ID + 1)]
    assert window.ack_ids(LAST_ID - 1, LAST_ID + 1) == 0
    assert window.floor == LAST_ID + 3


def test_nearest_id_rule_at_half_the_range() -> None:
    window = AckOracle(floor=0, cursor=3)
    assert window.nearest_sequence((1 << 30) - 1) == (1 << 30) - 1
    assert window.nearest_sequence(1 << 30) == -(1 << 30)


def test_ring_keeps_messages_until_they_are_released() -> None:
    ring = RingOracle(floor=7)
    assert [ring.append(frame) for frame in (b"a", b"b", b"c")] == [7, 8, 9]
    ring.release(8, 9)
    assert (ring.floor, ring.head, ring.read(0, 100)) == (7, 10, b"ac")
    ring.release(0, 8)
    assert (ring.floor, ring.head, ring.read(7, 10)) == (9, 10, b"c")
    ring.release(9, 10)
    assert (ring.floor, ring.head, ring.read(7, 10)) == (10, 10, b"")


def test_ids_are_grouped_in_order_of_arrival() -> None:
    assert group_ids([]) == []
    assert group_ids([0, 1]) == [(0, 2)]
    assert group_ids([5, 6, 7, 0, 1, 2]) == [(5, 8), (0, 3)]
    assert group_ids([5, 7, 0, 2]) == [(5, 6), (7, 8), (0, 1), (2, 3)]
    assert group_ids([3, 3]) == [(3, 4), (3, 4)]
    assert group_ids([LAST_ID - 1, LAST_ID, 0]) == [(LAST_ID - 1, LAST_ID + 1), (0, 1)]
