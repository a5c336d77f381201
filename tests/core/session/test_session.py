"""Session: decoded events, their order, errors, and timeouts."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import FEW_FRAMES_MAX, PLAIN_FRAMES_MAX, Limits
from simplebus.core.protocol.events import (
    AckedRange,
    AckedRanges,
    Event,
    PublishedBatch,
    PublishedFrame,
    Version1Connected,
    Version1Subscribed,
)
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.session.session import Session
from tests.behaviour.wire_peer import (
    LARGE_BATCH_COUNT,
    ack,
    connect,
    heartbeat,
    numbered,
    publish,
    subscribe,
)
from tests.support.oracles import DELIMITER, build_frame, parse_connect, parse_frame, split_frames
from tests.support.strategies import CONNECT, MESSAGE, SUBSCRIBE, Chunks, ack_frame, chunkings

BUFFER = ReceiveBuffer()

Fact = tuple[object, ...]


def create_session(*class_ids: int, frame_bytes_max: int = 1 << 20) -> Session:
    """Return a session of a bus that has these classes."""
    return Session(3, frame_bytes_max=frame_bytes_max, known_classes=set(class_ids), peer="test")


def describe_event(event: Event) -> list[Fact]:
    """Return the frames of an event one by one."""
    match event:
        case PublishedBatch(class_id, batch):
            payloads = [parse_frame(frame)[4] for frame in split_frames(batch.data.tobytes())[0]]
            return [("published", class_id, payload) for payload in payloads]
        case PublishedFrame(class_id, frame):
            return [("published", class_id, parse_frame(bytes(frame))[4])]
        case AckedRanges(class_id, firsts, lasts):
            ranges = zip(firsts.tolist(), lasts.tolist(), strict=True)
            return [("acked", class_id, first, last) for first, last in ranges]
        case AckedRange(class_id, first, last):
            return [("acked", class_id, first, last)]
        case Version1Connected(class_ids):
            return [("connected", class_ids)]
        case Version1Subscribed(class_id):
            return [("subscribed", class_id)]


def decode(session: Session, *chunks: bytes) -> tuple[list[Fact], Reason | None]:
    """Return the decoded frames, and the reason of the error that ended the session."""
    facts: list[Fact] = []
    try:
        for chunk in filter(None, chunks):
            count = BUFFER.fill(chunk)
            skipped_bytes = 0
            for single, end in session.receive_few(BUFFER, count):
                facts += describe_event(single)
                skipped_bytes = end
            if skipped_bytes < count:
                for event in session.receive(BUFFER, count, skipped_bytes=skipped_bytes):
                    facts += describe_event(event)
    except RemoteProtocolError as error:
        return facts, error.reason
    return facts, None


def decode_legal(*chunks: bytes, class_ids: Iterable[int] = ()) -> list[Fact]:
    facts, reason = decode(create_session(*class_ids), *chunks)
    assert reason is None
    return facts


def test_decodes_each_frame_type() -> None:
    assert decode_legal(connect(1, 2)) == [("connected", (1, 2))]
    assert decode_legal(subscribe(7)) == [("subscribed", 7)]
    assert decode_legal(publish(7, b"hi\r\n"), class_ids=[7]) == [("published", 7, b"hi\r\n")]
    assert decode_legal(ack(7, 0, 100)) == [("acked", 7, 0, 100)]
    assert decode_legal(heartbeat()) == []


def test_ignored_header_fields_have_no_effect() -> None:
    def wild(frame_type: int, content: bytes) -> bytes:
        return build_frame(
            frame_type, class_id=0x0A3E, message_id=0x7FFFFFFF, timer_index=65535, content=content
        )

    assert decode_legal(wild(ord("0"), b"still here")) == []
    assert decode_legal(wild(CONNECT, b"[5]")) == [("connected", (5,))]
    assert decode_legal(wild(SUBSCRIBE, b"from=5")) == [("subscribed", 0x0A3E)]
    assert decode_legal(wild(MESSAGE, b"m"), class_ids=[0x0A3E]) == [("published", 0x0A3E, b"m")]
    assert decode_legal(wild(ord("3"), b"4-5")) == [("acked", 0x0A3E, 4, 5)]


def receive_few(session: Session, data: bytes) -> tuple[list[Fact], int]:
    """Return the events of the leading frames that are decoded one by one, and their length."""
    facts: list[Fact] = []
    decoded_bytes = 0
    for event, end in session.receive_few(BUFFER, BUFFER.fill(data)):
        facts += describe_event(event)
        decoded_bytes = end
    return facts, decoded_bytes


def test_few_messages_and_acks_are_decoded_one_by_one() -> None:
    session = create_session(7)
    assert decode(session, connect()) == ([("connected", ())], None)
    data = publish(7, b"hi") + ack(7, 5, 6) + publish(7, b"ho")
    expected = [("published", 7, b"hi"), ("acked", 7, 5, 6), ("published", 7, b"ho")]
    assert receive_few(session, data) == (expected, len(data))
    assert session.receiver.frame_count == 4


@pytest.mark.parametrize(
    "data",
    [
        b"1",
        b"3",
        publish(7, b"hi")[:-1],
        ack(7, 5, 6)[:-1],
        publish(7, b"hi") + b"1",
        ack(7, 5, 6) * (FEW_FRAMES_MAX + 1),
        publish(8, b"of an unknown class"),
        publish(7, b"long" * 5000),
        heartbeat(),
        subscribe(7),
        connect(7),
        build_frame(0x39),
    ],
)
def test_other_reads_are_left_to_the_batch_decoder(data: bytes) -> None:
    session = create_session(7)
    decode(session, connect())
    assert receive_few(session, data) == ([], 0)
    assert session.receiver.frame_count == 1


def test_frames_behind_the_first_other_frame_are_left() -> None:
    session = create_session(7)
    decode(session, connect())
    assert receive_few(session, ack(7, 5, 6) + subscribe(7) + ack(7, 6, 7)) == (
        [("acked", 7, 5, 6)],
        len(ack(7, 5, 6)),
    )
    assert decode(session, ack(7, 6, 7) + subscribe(7) + ack(7, 7, 8)) == (
        [("acked", 7, 6, 7), ("subscribed", 7), ("acked", 7, 7, 8)],
        None,
    )


def test_end_of_a_frame_is_not_a_single_message() -> None:
    session = create_session(7)
    outer = publish(7, publish(7, b"inner")[:-4])
    assert decode(session, outer[:9], outer[9:]) == ([("published", 7, outer[9:-4])], None)


@pytest.mark.parametrize("count", [1, 2, PLAIN_FRAMES_MAX, LARGE_BATCH_COUNT])
def test_run_of_one_type_and_class_is_one_event(count: int) -> None:
    session = create_session(7)
    data = publish(7, *numbered(count))
    events = list(session.receive(BUFFER, BUFFER.fill(data)))
    assert len(events) == 1
    assert describe_event(events[0]) == [("published", 7, payload) for payload in numbered(count)]


def test_mixed_frames_keep_their_order() -> None:
    assert decode_legal(
        connect(1) + subscribe(1) + publish(1, b"a", b"b") + ack(1, 0, 1) + publish(1, b"c"),
        class_ids=[1],
    ) == [
        ("connected", (1,)),
        ("subscribed", 1),
        ("published", 1, b"a"),
        ("published", 1, b"b"),
        ("acked", 1, 0, 1),
        ("published", 1, b"c"),
    ]


def test_each_connect_is_one_event() -> None:
    assert decode_legal(connect(1) + connect(2) + connect()) == [
        ("connected", (1,)),
        ("connected", (2,)),
        ("connected", ()),
    ]


def test_interleaved_classes_are_grouped_acks_first() -> None:
    frames = [publish(1 + i % 2, b"%d" % i) + ack(1, i, i + 1) for i in range(LARGE_BATCH_COUNT)]
    facts = decode_legal(b"".join(frames), class_ids=[1, 2])
    assert facts == [
        *(("acked", 1, i, i + 1) for i in range(LARGE_BATCH_COUNT)),
        *(("published", 1, b"%d" % i) for i in range(0, LARGE_BATCH_COUNT, 2)),
        *(("published", 2, b"%d" % i) for i in range(1, LARGE_BATCH_COUNT, 2)),
    ]


def test_sorting_does_not_cross_other_frames() -> None:
    turns = b"".join(publish(1 + i % 2, b"%d" % i) for i in range(LARGE_BATCH_COUNT))
    facts = decode_legal(turns + subscribe(2) + turns, class_ids=[1, 2])
    assert facts.index(("subscribed", 2)) == LARGE_BATCH_COUNT == len(facts) // 2


def test_connect_and_message_in_one_read() -> None:
    class_ids: set[int] = set()
    session = Session(3, frame_bytes_max=1 << 20, known_classes=class_ids, peer="test")
    turns = b"".join(publish(1 + i % 2, b"%d" % i) for i in range(LARGE_BATCH_COUNT))
    fact_count = 0
    for event in session.receive(BUFFER, BUFFER.fill(connect(1, 2) + turns)):
        fact_count += len(describe_event(event))
        if isinstance(event, Version1Connected):
            class_ids.update(event.class_ids)
    assert fact_count == 1 + LARGE_BATCH_COUNT


OFFENCES = {
    Reason.UNKNOWN_TYPE: build_frame(ord("5"), class_id=1),
    Reason.UNKNOWN_CLASS: publish(9, b"x"),
    Reason.BAD_ACK: ack_frame(1, b"5-5"),
    Reason.BAD_CONNECT: build_frame(CONNECT, content=b"7"),
    Reason.FRAME_TOO_LONG: publish(1, b"x" * 100),
}


@pytest.mark.parametrize(("reason", "offence"), OFFENCES.items())
@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("before", [0, 1, 3, LARGE_BATCH_COUNT])
def test_error_is_raised_after_preceding_events(
    reason: Reason, offence: bytes, kinds: int, before: int
) -> None:
    # As a single frame, in a few runs, and in a sorted batch.
    good = [publish(1 + i % kinds, b"%d" % i) for i in range(before)]
    later_frames = [publish(1, b"behind")] * 3
    session = create_session(1, 2, frame_bytes_max=100)
    facts, actual_reason = decode(session, b"".join([*good, offence, *later_frames]))
    assert actual_reason is reason
    expected = [("published", 1 + i % kinds, b"%d" % i) for i in range(before)]
    assert sorted(facts) == sorted(expected)


def test_unknown_frame_type_is_refused() -> None:
    for frame_type in sorted({*range(256)} - {*b"01234"}):
        for count in (1, 2):
            outcome = decode(create_session(), build_frame(frame_type) * count)
            assert outcome == ([], Reason.UNKNOWN_TYPE), (frame_type, count)


def test_error_states_received_and_expected() -> None:
    for offence, words in (
        (build_frame(0x4D), ["0x4d", "digits 0 to 4"]),
        (publish(9, b""), ["class 9", "Connect"]),
        (ack_frame(1, b"8-5"), ["'8-5'", "first-last"]),
        (build_frame(CONNECT, content=b"[70000]"), ["[70000]", "65535"]),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            list(create_session().receive(BUFFER, BUFFER.fill(offence)))
        for word in words:
            assert word in caught.value.sentence


json_like = st.lists(
    st.sampled_from([b"[", b"]", b",", b" ", b"\n", b"0", b"1", b"65535", b"65536", b"-", b"."]),
    max_size=7,
).map(b"".join)
arrays = st.lists(st.integers(-1, 65537), max_size=6).map(lambda ids: str(ids).encode())


@given(st.one_of(json_like, arrays, json_like.map(lambda inner: b"[" + inner + b"]")))
def test_connect_accepts_only_valid_class_lists(content: bytes) -> None:
    expected = parse_connect(content)
    facts, reason = decode(create_session(), build_frame(CONNECT, content=content))
    if expected is None:
        assert (facts, reason) == ([], Reason.BAD_CONNECT)
    else:
        assert reason is None
        [(_, class_ids)] = facts
        assert isinstance(class_ids, tuple)
        assert len(class_ids) == len(set(class_ids))
        assert set(class_ids) == expected


@given(
    st.lists(
        st.sampled_from(
            [
                connect(1),
                subscribe(1),
                publish(1, b"<\r\n"),
                publish(0x3C0D, b"x"),
                ack(1, 5, 6),
                heartbeat(),
            ]
        ),
        max_size=20,
    )
    .map(b"".join)
    .flatmap(chunkings)
)
def test_events_are_independent_of_read_boundaries(chunks: Chunks) -> None:
    def without_repeats(facts: list[Fact]) -> list[Fact]:
        # A duplicate Subscribe has no effect and may be omitted.
        repeats = zip(facts, [None, *facts], strict=False)
        return [fact for fact, before in repeats if fact != before or fact[0] != "subscribed"]

    whole, cut = (
        decode_legal(*parts, class_ids=[1, 0x3C0D]) for parts in ([b"".join(chunks)], chunks)
    )
    assert without_repeats(cut) == without_repeats(whole)


# Timeouts -----------------------------------------------------------------------------------------

LIMITS = Limits(hello_seconds=30, frame_seconds=60, stall_seconds=10)


def ticks_until_closed(
    session: Session, *, holds_back: bool = False, most: int = 200, data: bytes = b""
) -> tuple[int, Reason] | None:
    """Return after how many ticks the session is closed, and the reason.

    The bytes are sent before each tick of one second.
    """
    for ticks in range(1, most + 1):
        if data:
            decode(session, data)
        error = session.tick(LIMITS, 1.0, is_blocking_publishers=holds_back)
        if error is not None:
            return ticks, error.reason
    return None


def test_silent_session_is_closed_after_hello_timeout() -> None:
    assert ticks_until_closed(create_session()) == (31, Reason.HELLO_TIMEOUT)


def test_first_byte_ends_hello_timeout() -> None:
    session = create_session()
    decode(session, b"3")
    assert ticks_until_closed(session) == (61, Reason.FRAME_TIMEOUT)


def test_incomplete_frame_is_closed_after_frame_timeout() -> None:
    session = create_session()
    decode(session, heartbeat() + heartbeat()[:5])
    overdue = ticks_until_closed(session)
    assert overdue in {(61, Reason.FRAME_TIMEOUT), (62, Reason.FRAME_TIMEOUT)}


def test_slowly_arriving_frame_is_closed_after_frame_timeout() -> None:
    session = create_session(1)
    decode(session, publish(1, b"")[:9])
    assert ticks_until_closed(session, data=b"x") == (61, Reason.FRAME_TIMEOUT)


def test_frames_completed_in_time_keep_session_open() -> None:
    session = create_session()
    frame = heartbeat()
    decode(session, frame[:5])
    assert ticks_until_closed(session, data=frame[5:] + frame[:5]) is None


def test_silence_after_complete_frame_keeps_session_open() -> None:
    session = create_session()
    decode(session, heartbeat())
    assert ticks_until_closed(session) is None


def test_timeouts_are_measured_in_seconds_not_ticks() -> None:
    session = create_session()
    ticks = next(
        n
        for n in range(1, 999)
        if session.tick(LIMITS, 0.1, is_blocking_publishers=False) is not None
    )
    assert 300 <= ticks <= 302


def test_stalled_peer_is_closed_only_if_it_blocks_a_class() -> None:
    session = create_session()
    decode(session, heartbeat())
    session.outbox.queue_reply(b"waits to be taken")
    assert ticks_until_closed(session) is None
    session.tick(LIMITS, 1.0, is_blocking_publishers=False)
    assert ticks_until_closed(session, holds_back=True) == (11, Reason.STALLED)


def test_slowly_reading_peer_is_not_stalled() -> None:
    session = create_session()
    decode(session, heartbeat())
    session.outbox.queue_reply(b"x" * 100)
    for _ in range(20):
        for _ in range(9):
            assert session.tick(LIMITS, 1.0, is_blocking_publishers=True) is None
        session.outbox.peek(0)
        session.outbox.mark_sent(1, 0)
        assert session.tick(LIMITS, 1.0, is_blocking_publishers=True) is None


def test_peer_without_waiting_bytes_is_not_stalled() -> None:
    session = create_session()
    decode(session, heartbeat())
    assert ticks_until_closed(session, holds_back=True) is None


def test_pending_bytes_are_tail_replies_and_parked_messages() -> None:
    session = create_session()
    assert session.pending_bytes == 0
    decode(session, heartbeat() + b"12345")
    assert session.pending_bytes == 5
    session.outbox.queue_reply(b"reply")
    session.parked_bytes += 100
    assert session.pending_bytes == 110


def test_delimiter_in_payload_starts_a_new_frame() -> None:
    data = publish(1, b"one")[:-4] + DELIMITER + b"two two two" + DELIMITER
    facts, reason = decode(create_session(1), data)
    assert (facts, reason) == ([("published", 1, b"one")], Reason.UNKNOWN_TYPE)
