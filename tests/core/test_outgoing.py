"""What a client writes: acknowledgements as ranges, ahead of everything that is not begun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    DELIMITER,
    ID_COUNT,
    build_frame,
    group_ids,
    parse_ack,
    parse_frame,
    split_frames,
)
from strategies import ACK, CONNECT, MESSAGE

from simplebus.core import frames, outgoing
from simplebus.core.outgoing import AckLog, Outgoing

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors" / "acks.json"
GROUPING = json.loads(VECTORS.read_text())["grouping"]


def log_of(ids: list[int], *, timer_index: int = 0) -> AckLog:
    log = AckLog()
    for message_id in ids:
        log.add(class_id=7, timer_index=timer_index, first=message_id, last=message_id + 1)
    return log


def ranges_in(data: bytes) -> list[tuple[int, int]]:
    """The ranges that Ack frames of class 7 hold."""
    found, rest = split_frames(data)
    assert rest == b""
    parsed = [parse_frame(frame) for frame in found]
    assert {(kind, class_id) for kind, class_id, *_ in parsed} <= {(ACK, 7)}
    ranges = [parse_ack(content) for *_, content in parsed]
    assert None not in ranges
    return ranges  # type: ignore[return-value]


@pytest.mark.parametrize("case", GROUPING, ids=lambda case: case["name"])
def test_ids_are_grouped_as_the_vectors_say(case: dict[str, list[list[int]]]) -> None:
    assert ranges_in(log_of(case["ids"]).take()) == [tuple(pair) for pair in case["ranges"]]


@pytest.mark.parametrize(
    ("ids", "ranges"),
    [
        ([0, 1], [(0, 2)]),
        ([5, 6, 7, 0, 1, 2], [(5, 8), (0, 3)]),
        ([5, 7, 0, 2], [(5, 6), (7, 8), (0, 1), (2, 3)]),
    ],
)
def test_ids_are_grouped_as_the_original_does(
    ids: list[int], ranges: list[tuple[int, int]]
) -> None:
    assert ranges_in(log_of(ids).take()) == ranges


@given(
    st.lists(st.one_of(st.integers(0, 40), st.integers(ID_COUNT - 20, ID_COUNT - 1)), max_size=200)
)
def test_ranges_name_exactly_the_acknowledged_ids_and_never_span_the_wrap(ids: list[int]) -> None:
    log = log_of(ids)
    assert log.count == len(ids)
    ranges = ranges_in(log.take())
    assert ranges == group_ids(ids)
    assert [message_id for first, last in ranges for message_id in range(first, last)] == ids
    assert all(first < last <= ID_COUNT for first, last in ranges)
    assert (log.count, log.total, log.take()) == (0, len(ids), b"")


def test_timer_indexes_and_classes_are_kept_apart() -> None:
    log = AckLog()
    for class_id, timer_index, message_id in (
        (1, 3, 0),
        (1, 3, 1),
        (1, 4, 2),
        (2, 3, 3),
        (1, 3, 2),
    ):
        log.add(class_id=class_id, timer_index=timer_index, first=message_id, last=message_id + 1)
    found = [parse_frame(frame) for frame in split_frames(log.take())[0]]
    assert [(class_id, timer, content) for _, class_id, _, timer, content in found] == [
        (1, 3, b"0-3"),
        (1, 4, b"2-3"),
        (2, 3, b"3-4"),
    ]


# Order -------------------------------------------------------------------------------------------


def put_message(out: Outgoing, payload: bytes, class_id: int = 7) -> bytes:
    out.put_piece(out.opening(frames.HEADER.pack(MESSAGE, class_id, 0, 0)))
    out.put_piece(payload)
    out.queued_bytes += len(payload) + 13
    return build_frame(MESSAGE, class_id=class_id, content=payload)


def run_of(*payloads: bytes) -> bytes:
    return b"".join(build_frame(MESSAGE, class_id=7, content=payload) for payload in payloads)


def take(out: Outgoing, most: int = 1 << 40) -> bytes:
    """Write up to so many bytes, as a socket that takes no more would."""
    taken = b""
    while len(taken) < most and (data := out.peek()):
        count = min(len(data), most - len(taken))
        taken += bytes(data[:count])
        out.sent(count)
    return taken


def test_frames_leave_in_the_order_in_which_they_were_put() -> None:
    out = Outgoing()
    connect = build_frame(CONNECT, content=b"[7]")
    expected = connect
    out.put(connect)
    expected += put_message(out, b"one") + put_message(out, b"")
    out.put_many(run_of(b"two", b"three"))
    expected += run_of(b"two", b"three") + put_message(out, b"four")
    assert out.messages == 3
    assert out.queued_bytes == len(expected)
    assert take(out) == expected
    assert (out.messages, out.queued_bytes, out.sent_bytes) == (3, 0, len(expected))
    assert out.peek() == b""


@pytest.mark.parametrize("taken", range(2 * 17 + 1))
def test_acks_go_before_every_frame_that_is_not_begun(taken: int) -> None:
    out = Outgoing()
    out.put_many(run_of(b"frst", b"scnd"))
    first = take(out, taken)
    out.acks.add(class_id=7, timer_index=0, first=0, last=3)
    ack = build_frame(ACK, class_id=7, content=b"0-3")
    found, rest = split_frames(first + take(out))
    assert rest == b""
    assert found.index(ack) == -(-taken // 17)
    assert [frame for frame in found if frame != ack] == split_frames(run_of(b"frst", b"scnd"))[0]


def test_acks_that_come_one_after_the_other_never_cut_a_frame() -> None:
    out = Outgoing()
    out.put_many(run_of(*[b"payload %d" % number for number in range(20)]))
    written = b""
    for number in range(100):
        out.acks.add(class_id=7, timer_index=0, first=number, last=number + 1)
        written += take(out, 3)
    found, rest = split_frames(written + take(out))
    assert rest == b""
    messages = [content for kind, *_, content in map(parse_frame, found) if kind == MESSAGE]
    assert messages == [b"payload %d" % number for number in range(20)]
    acks = [content for kind, *_, content in map(parse_frame, found) if kind == ACK]
    assert [number for ack in acks for number in range(*parse_ack(ack))] == list(range(100))


def test_a_long_run_is_cut_between_frames_also_where_one_frame_is_longer_than_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing, "_CHUNK_BYTES", 64)
    payloads = [b"x" * size for size in (0, 1, 300, 50, 51, 52, 7, 200, 0, 0, 0, 0, 0, 0, 30)]
    out = Outgoing()
    out.put_many(run_of(*payloads))
    pieces = []
    while data := out.peek():
        pieces.append(bytes(data))
        out.sent(len(data))
    assert b"".join(pieces) == run_of(*payloads)
    assert len(pieces) > 5
    for piece in pieces:
        assert split_frames(piece)[1] == b""
        assert len(piece) <= 64 or piece.count(DELIMITER) == 1


@given(st.data())
def test_a_mark_is_written_when_all_before_it_is(data: st.DataObject) -> None:
    """A flush waits for everything before it, and for no message after it."""
    out = Outgoing()
    for number in range(data.draw(st.integers(0, 3))):
        put_message(out, b"before %d" % number)
    if data.draw(st.booleans()):
        out.acks.add(class_id=7, timer_index=0, first=0, last=1)
    mark = out.mark()
    before = out.queued_bytes
    written = 0
    while True:
        assert out.has_written(mark) == (written >= before)
        step = data.draw(st.integers(1, 20))
        overtaking = data.draw(st.booleans())
        if overtaking and written < before:
            out.acks.add(class_id=9, timer_index=0, first=5, last=6)
            size = out.queued_bytes
            out.peek()
            before += out.queued_bytes - size
        put_message(out, b"after")
        if out.has_written(mark):
            break
        written += len(take(out, min(step, before - written)))
