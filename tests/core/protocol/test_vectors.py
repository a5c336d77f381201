"""Vectors of protocol version 1 (protocol/vectors/*.json), run against a broker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from simplebus.core.broker.broker import Settings
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import RECEIVE_PADDING_BYTES, Limits
from simplebus.core.protocol import frame_splitter, frames
from simplebus.core.protocol.frame_splitter import SplitterScratch
from simplebus.core.protocol.receive_buffer import FrameReceiver, ReceiveBuffer
from simplebus.core.redelivery.ack_window import AckWindow
from tests.behaviour.wire_peer import (
    BrokerHarness,
    WirePeer,
    ack,
    connect,
    numbered,
    publish,
    subscribe,
)
from tests.core.protocol.vectors import VECTORS, Vector, vector_bytes, vectors
from tests.support.oracles import (
    AckOracle,
    build_frame,
    group_ids,
    parse_ack,
    parse_connect,
    parse_frame,
    split_frames,
)
from tests.support.strategies import ACK, CONNECT, HEARTBEAT, MESSAGE, SUBSCRIBE, cut

KINDS = {
    "heartbeat": HEARTBEAT,
    "message": MESSAGE,
    "subscribe": SUBSCRIBE,
    "ack": ACK,
    "connect": CONNECT,
}
ACK_TIMEOUT = 6
BUFFER = ReceiveBuffer()

Fields = tuple[int, int, int, int, bytes]


def frame_fields(vector: Vector) -> Fields:
    return (
        vector["type"],
        vector["class_id"],
        vector["message_id"],
        vector["timer_index"],
        vector_bytes(vector, "content_"),
    )


def range_pairs(ranges: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(first, last) for first, last in ranges]


@pytest.mark.parametrize("path", sorted(VECTORS.glob("[!m]*.json")), ids=lambda path: path.name)
def test_vector_file_has_description_and_unique_names(path: Path) -> None:
    file = json.loads(path.read_text())
    assert file.pop("protocol") == (2 if path.name.startswith("v2-") else 1)
    assert file.pop("about").endswith(".")
    for entries in file.values():
        names = [vector["name"] for vector in entries]
        assert len(set(names)) == len(names) > 0


# Frames ------------------------------------------------------------------------------------------


@vectors("frames", "frames")
def test_a_frame_reads_and_writes_as_its_fields(vector: Vector) -> None:
    frame, fields = vector_bytes(vector), frame_fields(vector)
    frame_type, class_id, message_id, timer_index, content = fields
    buffer = bytearray(frame + bytes(RECEIVE_PADDING_BYTES))
    batch = frame_splitter.split_frames(buffer, 0, len(frame), SplitterScratch(len(buffer)))
    assert batch is not None
    assert (batch.count, batch.data.size) == (1, len(frame))
    assert parse_frame(frame) == fields
    assert frame_type == KINDS[vector["kind"]]
    signed = message_id - (1 << 32) if message_id >> 31 else message_id
    encoded = frames.encode(
        frame_type,
        class_id=class_id,
        message_id=signed,
        timer_index=timer_index,
        content=content,
    )
    assert encoded == frame


@vectors("frames", "frames")
def test_client_frames_are_accepted_and_server_frames_encoded(vector: Vector) -> None:
    frame_type, class_id, message_id, timer_index, content = frame_fields(vector)
    bus = BrokerHarness(Settings(ack_timeout=65535))
    if vector["sender"] == "client":
        peer = bus.peer(connect(class_id), subscribe(class_id))
        peer.receive_frames()
        peer.send(vector_bytes(vector))
        received = peer.receive_frames()
        if frame_type == MESSAGE:
            assert [parse_frame(frame) for frame in received] == [
                (MESSAGE, class_id, 0, 0, content)
            ]
        elif frame_type == CONNECT:
            assert received == [build_frame(CONNECT, content=bytes(4))]
            assert set(bus.broker.classes) == {class_id} | (parse_connect(content) or set())
        else:
            assert received == []
        return
    if frame_type == CONNECT:
        bus.broker._next_session_id = int.from_bytes(content, "little")
        assert bus.peer(connect()).receive_frames() == [vector_bytes(vector)]
    elif frame_type == MESSAGE:
        bus.peer(connect(class_id))
        cls = bus.broker.classes[class_id]
        cls.ring.floor = cls.ring.head = message_id
        cls.backlog_window = AckWindow(floor=message_id)
        bus.skips_checks = True  # Checking the bus in each of 65,535 ticks takes seconds.
        bus.tick(timer_index)
        bus.skips_checks = False
        bus.check_invariants()
        peer = bus.peer(subscribe(class_id), publish(class_id, content))
        assert peer.receive_frames() == [vector_bytes(vector)]


# Streams -----------------------------------------------------------------------------------------


def receive_frames(chunks: Sequence[bytes]) -> tuple[list[bytes], int]:
    receiver = FrameReceiver(frame_bytes_max=Limits().frame_bytes)
    whole: list[bytes] = []
    for chunk in chunks:
        for at in range(0, len(chunk), len(BUFFER.writable)):
            count = BUFFER.fill(chunk[at : at + len(BUFFER.writable)])
            for batch in receiver.receive(BUFFER, count):
                whole += split_frames(batch.data.tobytes())[0]
    return whole, len(receiver.tail)


@vectors("streams", "streams")
def test_stream_vectors_for_any_chunking(vector: Vector) -> None:
    data = vector_bytes(vector)
    expected = ([frame_fields(frame) for frame in vector["frames"]], vector["leftover"])
    long = len(data) > 2000
    chunkings = [[data]]
    if not long:
        chunkings.append([data[at : at + 1] for at in range(len(data))])
    places = range(0, len(data) + 1, 99_991 if long else 1)
    chunkings += [cut(data, [place]) for place in (*places, len(data) - 1, len(data) - 2)]
    for chunks in chunkings:
        whole, leftover = receive_frames(chunks)
        assert ([parse_frame(frame) for frame in whole], leftover) == expected


# Refusals -----------------------------------------------------------------------------------------


def vector_limits(vector: Vector) -> Limits:
    return Limits(**vector["limits"])


@vectors("invalid", "invalid")
@pytest.mark.parametrize("bytewise", [False, True])
def test_invalid_frames_are_refused_with_their_reason(vector: Vector, bytewise: bool) -> None:
    data, reason = vector_bytes(vector), Reason(vector["reason"])
    bus = BrokerHarness(Settings(limits=vector_limits(vector)))
    peer = bus.peer()
    piece = 1 + len(data) // 2000 if bytewise else len(data) + 1
    chunks = [data[at : at + piece] for at in range(0, len(data), piece)]
    caught: RemoteProtocolError | None = None
    try:
        peer.send(*chunks)
    except RemoteProtocolError as error:
        caught = error
    overdue = bus.tick(vector["silence_seconds"]) if caught is None else []
    assert actual_effects(bus, peer, data) == expected_effects(
        split_frames(data)[0], vector["frames_before"]
    )
    if not vector["disconnects"]:
        assert (caught, overdue) == (None, [])
        assert bus.broker.refusal_counts == {reason: 1}
        peer.receive_frames()
        peer.send(connect(1))
        assert len(peer.receive_frames()) == 1
        return
    assert bus.broker.refusal_counts == {}
    if caught is None:
        session, caught = overdue[0]
        assert session is peer.session
    assert caught.reason is reason


def expected_effects(
    sent_frames: list[bytes], count: int
) -> tuple[set[int], dict[int, list[bytes]], int]:
    """Return the classes, messages and replies that the first `count` frames cause."""
    named: set[int] = set()
    stored: dict[int, list[bytes]] = {}
    replies = 0
    for frame in sent_frames[:count]:
        frame_type, class_id, _, _, content = parse_frame(frame)
        if frame_type == CONNECT:
            named |= parse_connect(content) or set()
            replies += 1
        elif frame_type == MESSAGE:
            stored.setdefault(class_id, []).append(content)
    return named, stored, replies


def actual_effects(
    bus: BrokerHarness, peer: WirePeer, data: bytes
) -> tuple[set[int], dict[int, list[bytes]], int]:
    """Return the same from the broker."""
    stored = {}
    for class_id, cls in bus.broker.classes.items():
        frames_ = [
            cls.ring.copy_frame(sequence) for sequence in range(cls.ring.floor, cls.ring.head)
        ]
        if frames_:
            stored[class_id] = [parse_frame(frame)[4] for frame in frames_]
    replies = bytes(peer.session.outbox.peek(0))
    return set(bus.broker.classes), stored, len(split_frames(replies)[0])


# Connects ----------------------------------------------------------------------------------------


@vectors("connects", "valid")
def test_connect_classes(vector: Vector) -> None:
    content = vector_bytes(vector, "content_")
    bus = BrokerHarness(classes=65536)
    peer = bus.peer(build_frame(CONNECT, content=content))
    assert sorted(bus.broker.classes) == vector["class_ids"]
    assert len(peer.receive_frames()) == 1
    assert parse_connect(content) == set(vector["class_ids"])


@vectors("connects", "invalid")
def test_malformed_connect_is_refused(vector: Vector) -> None:
    content = vector_bytes(vector, "content_")
    assert parse_connect(content) is None
    if vector["version_1_only"]:  # This server speaks version 2 as well.
        return
    bus = BrokerHarness(classes=65536)
    assert bus.peer().send_refused(build_frame(CONNECT, content=content)) == vector["reason"]
    assert bus.broker.classes == {}


# Acks --------------------------------------------------------------------------------------------


@vectors("acks", "windows")
@pytest.mark.parametrize("times", [1, 60])
def test_ack_window_vectors(vector: Vector, times: int) -> None:
    # Said sixty times over in one read, they are read and mapped and marked in arrays.
    floor, cursor = vector["floor"], vector["cursor"]
    oracle = AckOracle(floor=floor, cursor=cursor)
    bus = BrokerHarness()
    bus.peer(connect(1))
    cls = bus.broker.classes[1]
    cls.ring.floor = cls.ring.head = floor
    cls.backlog_window = AckWindow(floor=floor)
    peer = bus.peer(subscribe(1), publish(1, *numbered(cursor - floor)))
    assert len(peer.receive_messages()) == cursor - floor
    acks = range_pairs(vector["acks"])
    peer.send(b"".join(ack(1, first, last) for first, last in acks) * times)
    for first, last in acks:
        oracle.ack_ids(first, last)
    window = peer.session.subscriptions[1].window
    assert window.floor == oracle.floor == vector["expected_floor"]
    unacked = range_pairs(vector["expected_unacked"])
    assert window.unacked_ranges(floor, cursor) == oracle.unacked_ranges(floor, cursor) == unacked
    assert bus.broker.refusal_counts[Reason.ACK_UNSENT] == times * vector["expected_unsent"]
    assert bus.statistics(1).ring.floor == vector["expected_floor"]


@vectors("acks", "releases")
def test_messages_are_released_when_all_subscriptions_acked(
    vector: Vector,
) -> None:
    floor, head = vector["floor"], vector["head"]
    bus = BrokerHarness()
    peers: list[WirePeer | None] = [
        bus.peer(connect(1), subscribe(1), publish(1, *numbered(floor))),
    ]
    assert peers[0] is not None
    assert len(peers[0].receive_messages()) == floor
    if floor:
        peers[0].send(ack(1, 0, floor))
    peers += [bus.peer(subscribe(1)) for _ in range(vector["subscriptions"] - 1)]
    bus.peer(publish(1, *numbered(head - floor)))
    for peer in peers:
        assert peer is not None
        assert peer.receive_ids(1) == list(range(floor, head))
    for number, verb, *ids in vector["steps"]:
        peer = peers[number]
        assert peer is not None
        if verb == "end":
            peer.disconnect()
            peers[number] = None
        else:
            peer.send(ack(1, *ids))
    bus.tick(ACK_TIMEOUT)
    unacked = [None if peer is None else group_ids(peer.receive_ids(1)) for peer in peers]
    expected = [
        None if ranges is None else range_pairs(ranges) for ranges in vector["expected_unacked"]
    ]
    assert unacked == expected
    waiting: list[tuple[int, int]] = []
    if all(peer is None for peer in peers):
        waiting = group_ids(bus.peer(subscribe(1)).receive_ids(1))
    assert waiting == range_pairs(vector["expected_waiting"])
    needed = {i for ranges in (*unacked, waiting) for a, b in ranges or () for i in range(a, b)}
    released = group_ids([i for i in range(floor, head) if i not in needed])
    assert released == range_pairs(vector["expected_released"])


@vectors("acks", "grouping")
def test_message_id_grouping_vectors(vector: Vector) -> None:
    ranges = group_ids(vector["ids"])
    assert ranges == range_pairs(vector["ranges"])
    contents = []
    for first, last in ranges:
        frame = frames.encode_ack(class_id=1, timer_index=0, first=first, last=last)
        content = parse_frame(frame)[4]
        assert frames.parse_ack_range(content) == parse_ack(content) == (first, last)
        contents.append(content.decode())
    assert contents == vector["contents"]
