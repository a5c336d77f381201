"""Vectors of protocol version 2 (protocol/vectors/v2-*.json), run against a broker.

Received frames are decoded only with oracles.py and json. Confirms, the messages of each
subscription, and everything else are compared separately, each in order, as `protocol/binary.md`
specifies.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from typing import Any, NamedTuple

import msgspec
import pytest

from simplebus.core.broker.broker import NO_ACTIONS, Settings
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import PLAIN_FRAMES_MAX, RECEIVE_PADDING_BYTES, Limits
from simplebus.core.protocol import envelope_batch, frames, inquiry, requests
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frame_splitter import SplitterScratch, split_frames
from tests.behaviour.wire_peer import BrokerHarness, WirePeer, build_batch
from tests.core.protocol.vectors import Vector, vector_bytes, vectors
from tests.support.oracles import build_frame, parse_frame

KINDS = {
    "heartbeat": "0",
    "message": "1",
    "subscribe": "2",
    "ack": "3",
    "connect": "4",
    "envelope": "5",
    "confirm": "6",
    "deliver": "7",
    "nack": "8",
    "working": "9",
    "unsubscribe": "U",
    "fetch": "F",
    "purge": "P",
    "inquire": "I",
    "error": "E",
}
HEARTBEAT, MESSAGE, ENVELOPE, CONFIRM, DELIVER, ERROR = b"01567E"
OBJECTS: dict[tuple[str, str], type[requests._JsonBody]] = {
    ("client", "connect"): requests.ConnectRequest,
    ("server", "connect"): requests.ConnectReply,
    ("client", "subscribe"): requests.SubscribeRequest,
    ("server", "subscribe"): requests.SubscribeReply,
    ("client", "unsubscribe"): requests.UnsubscribeRequest,
    ("client", "fetch"): requests.FetchRequest,
    ("server", "fetch"): requests.FetchReply,
    ("client", "purge"): requests.PurgeRequest,
    ("server", "purge"): requests.PurgeReply,
    ("server", "error"): requests.ErrorReply,
}


# Frames ------------------------------------------------------------------------------------------


@vectors("v2-frames", "frames")
def test_a_frame_reads_and_writes_as_its_fields(vector: Vector) -> None:
    frame, content = vector_bytes(vector), vector_bytes(vector, "content_")
    frame_type, a, b, c = (vector[name] for name in ("type", "a", "b", "c"))
    buffer = bytearray(frame + bytes(RECEIVE_PADDING_BYTES))
    batch = split_frames(buffer, 0, len(frame), SplitterScratch(len(buffer)))
    assert batch is not None
    assert (batch.count, batch.data.size) == (1, len(frame))
    assert parse_frame(frame) == (frame_type, a, b, c, content)
    assert frame_type == ord(KINDS[vector["kind"]])
    encoded = frames.encode(frame_type, class_id=a, message_id=b, timer_index=c, content=content)
    assert encoded == frame


@vectors("v2-frames", "frames")
def test_json_bodies_decode_and_encode(vector: Vector) -> None:
    content, expected = vector_bytes(vector, "content_"), vector.get("json")
    if vector["kind"] == "inquire":
        find = inquiry.decode_inquiry if vector["sender"] == "client" else inquiry.decode_reply
        found = msgspec.json.encode(find(content))
        assert (
            {name: json.loads(found)[name] for name in expected} == expected == json.loads(content)
        )
        return
    if expected is None:
        assert content[:1] != b"{"
        return
    assert json.loads(content) == expected
    kind = OBJECTS[vector["sender"], vector["kind"]]
    found = requests.decode(kind, content)
    assert requests.decode(kind, found.encode()) == found
    for name, value in json.loads(found.encode()).items():
        assert expected[name] == value


# Envelopes ---------------------------------------------------------------------------------------


def describe_envelope(vector: Vector) -> tuple[Envelope, bytes]:
    about = Envelope(
        channel=vector["channel"],
        key=vector_bytes(vector, "key_"),
        headers=tuple((name, value) for name, value in vector["headers"]),
        published=vector["published"],
        expires_ms=vector["expires"],
        not_before_ms=vector["not_before"],
    )
    return about, vector_bytes(vector, "payload_")


@vectors("v2-envelopes", "valid")
def test_envelope_vectors(vector: Vector) -> None:
    content = vector_bytes(vector, "content_")
    about, payload = describe_envelope(vector)
    assert envelope_batch.decode(content) == (about, payload)
    assert envelope_batch.extract_payload(content) == payload
    assert (envelope_batch.encode(about, payload) == content) is vector["shortest"]
    for count in (1, PLAIN_FRAMES_MAX + 1):
        found = envelope_batch.scan_envelopes(
            build_batch(*[build_frame(ENVELOPE, content=content)] * count)
        )
        assert (found.count, found.names) == (count, [vector["channel"]])


@vectors("v2-envelopes", "invalid")
def test_malformed_envelope_vectors_are_refused(vector: Vector) -> None:
    content = vector_bytes(vector, "content_")
    with pytest.raises(RemoteProtocolError) as caught:
        envelope_batch.decode(content)
    assert caught.value.reason == vector["reason"]
    for count in (1, PLAIN_FRAMES_MAX + 1):
        bad = build_frame(ENVELOPE, content=content)
        assert envelope_batch.scan_envelopes(build_batch(*[bad] * count)).count == 0


@vectors("v2-stuffing", "stuffing")
def test_stuffing_vectors(vector: Vector) -> None:
    plain, stuffed = vector_bytes(vector, "plain_"), vector_bytes(vector, "stuffed_")
    assert envelope_batch.stuff(plain) == stuffed
    assert envelope_batch.unstuff(stuffed) == plain


@vectors("v2-stuffing", "unstuffing")
def test_unstuffed_bytes_are_unchanged(vector: Vector) -> None:
    plain, stuffed = vector_bytes(vector, "plain_"), vector_bytes(vector, "stuffed_")
    assert envelope_batch.unstuff(stuffed) == plain
    assert envelope_batch.stuff(plain) != stuffed


# Sessions ----------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """Received frame: header fields and content."""

    type: int
    a: int
    b: int
    c: int
    content: bytes

    @property
    def is_message(self) -> bool:
        return self.type in (MESSAGE, ENVELOPE)


Delivery = tuple[int, int, int] | None
"""Class, subscription and attempt of a Deliver frame; None before the first."""


class SessionPeer:
    """One peer, with the received frames that no line of the session has checked yet."""

    def __init__(self, server: SessionServer) -> None:
        self.server = server
        self.wire = WirePeer(server.bus, server.bus.broker.open_session())
        self.is_closed = False
        self.confirmed: int | None = None
        """Message number of the last Confirm."""
        self.expected_confirm: int | None = None
        """Message number of the last expected Confirm."""
        self.other_frames: deque[Frame] = deque()
        self.messages: dict[Delivery, deque[tuple[Delivery, Frame]]] = defaultdict(deque)
        self.delivery: Delivery = None
        self.expected: Delivery = None
        """Last expected Deliver."""

    def send(self, *chunks: bytes) -> None:
        assert not self.is_closed, "the server has closed the connection"
        for data in chunks:
            if not self.is_closed:
                self._send_bytes(data)

    def _send_bytes(self, data: bytes) -> None:
        try:
            self.wire.send(data)
        except RemoteProtocolError as error:
            self.server.cut(self, error)
        self.server.process()

    def disconnect(self) -> None:
        self.wire.disconnect()
        self.is_closed = True
        self.server.process()

    def receive(self) -> None:
        for whole in self.wire.receive_frames():
            frame = Frame(*parse_frame(whole))
            if frame.type == CONFIRM:
                self.confirmed = frame.b
            elif frame.type == DELIVER:
                self.delivery = (frame.a, frame.c, frame.b)
            elif frame.is_message:
                subscription = self.delivery and self.delivery[:2]
                self.messages[subscription].append((self.delivery, frame))
            elif frame.type != HEARTBEAT:
                self.other_frames.append(frame)

    def expect(self, data: bytes, expected_json: Vector | None) -> None:
        self.receive()
        frame = Frame(*parse_frame(data if expected_json is None else data + frames.DELIMITER))
        if frame.type == CONFIRM:
            self.expected_confirm = frame.b
            assert self.confirmed == frame.b
        elif frame.type == DELIVER:
            self.expected = (frame.a, frame.c, frame.b)
        elif frame.is_message:
            waiting = self.messages[self.expected and self.expected[:2]]
            assert waiting, f"no message received; other frames: {self.pending_frames()}"
            delivery, found = waiting.popleft()
            assert (delivery, found._replace(c=0)) == (self.expected, frame._replace(c=0))
        else:
            assert self.other_frames, f"no frame received; messages: {self.pending_frames()}"
            found = self.other_frames.popleft()
            assert found[:4] == frame[:4], found
            if expected_json is None:
                assert found == frame
                return
            content = json.loads(found.content)
            assert {key: content.get(key) for key in expected_json} == expected_json

    def expect_nothing(self) -> None:
        self.receive()
        assert not self.pending_frames()
        assert self.confirmed == self.expected_confirm

    def pending_frames(self) -> list[Any]:
        return [
            *self.other_frames,
            *(message for queue in self.messages.values() for message in queue),
        ]


class SessionServer:
    """A bus and its peers by name. Its clock advances with its ticks."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self.bus = BrokerHarness(Settings(limits=Limits(**limits)))
        self.peers: dict[str, SessionPeer] = {}

    def get_peer(self, name: str) -> SessionPeer:
        if name not in self.peers:
            self.peers[name] = SessionPeer(self)
        return self.peers[name]

    def cut(self, peer: SessionPeer, error: RemoteProtocolError) -> None:
        """Send the error, then close the session, as the server does."""
        broker, session = self.bus.broker, peer.wire.session
        broker.send_fatal_error(session, error)
        peer.receive()
        broker.close_session(session)
        peer.is_closed = True

    def process(self) -> None:
        broker = self.bus.broker
        while (actions := broker.end_turn()) is not NO_ACTIONS:
            for session, _ in actions.close:
                self.peer_of(session).receive()
                self.peer_of(session).is_closed = True

    def peer_of(self, session: object) -> SessionPeer:
        (found,) = [peer for peer in self.peers.values() if peer.wire.session is session]
        return found

    def tick(self, times: int) -> None:
        broker = self.bus.broker
        for _ in range(times):
            broker.clock.now += broker.settings.tick_seconds
            for session, error in self.bus.tick():
                self.cut(self.peer_of(session), error)
            broker.run_due_wakeups()
            self.process()
            for peer in self.peers.values():
                if not peer.is_closed:
                    peer.receive()


@pytest.mark.parametrize("in_one", [True, False], ids=["in one", "in pieces"])
@vectors("v2-sessions", "sessions")
def test_session_vectors(vector: Vector, in_one: bool) -> None:
    """The bytes of a line arrive in one read, or each frame in a separate read."""
    server = SessionServer(vector["limits"])
    for number, (name, verb, *arguments) in enumerate(vector["lines"]):
        where = f"line {number}: {name} {verb} {arguments}"
        if name == "server":
            assert verb == "ticks"
            server.tick(*arguments)
            continue
        peer = server.get_peer(name)
        try:
            match verb:
                case "sends":
                    chunks = [bytes.fromhex(data) for data in arguments]
                    peer.send(*([b"".join(chunks)] if in_one else chunks))
                case "gets":
                    peer.expect(
                        bytes.fromhex(arguments[0]), arguments[1] if arguments[1:] else None
                    )
                case "gets nothing":
                    peer.expect_nothing()
                case "is closed":
                    assert peer.is_closed
                    peer.expect_nothing()
                case "closes":
                    peer.disconnect()
                case _:
                    raise AssertionError(f"unknown step {verb!r}")
        except AssertionError as error:
            raise AssertionError(f"{where}\n{error}") from error


# Invalid input -----------------------------------------------------------------------------------


def check_error(server: SessionServer, peer: SessionPeer, vector: Vector) -> None:
    server.tick(vector["silence_seconds"])
    peer.receive()
    frame = peer.other_frames.popleft()
    assert frame[:4] == (ERROR, vector["a"], vector["b"], vector["c"])
    reply = json.loads(frame.content)
    assert (reply["code"], reply["fatal"]) == (vector["code"], vector["fatal"])
    assert reply["count"] == vector["count"]
    assert reply["message"]
    assert peer.is_closed is vector["fatal"]
    assert not peer.pending_frames()
    if not vector["fatal"]:
        peer.send(build_frame(frames.CONNECT, message_id=99, content=b"{}"))
        peer.receive()
        assert [(frame.type, frame.b) for frame in peer.other_frames] == [(frames.CONNECT, 99)]


@vectors("v2-invalid", "connects")
def test_refused_first_connect_ends_the_session(vector: Vector) -> None:
    server = SessionServer(vector["limits"])
    peer = server.get_peer("a")
    peer.send(vector_bytes(vector))
    check_error(server, peer, vector)
    assert server.bus.broker.classes == {}


@vectors("v2-invalid", "frames")
def test_malformed_frame_gets_an_error(vector: Vector) -> None:
    server = SessionServer(vector["limits"])
    peer = server.get_peer("a")
    peer.send(build_frame(frames.CONNECT, message_id=1, content=b'{"classes":[1]}'))
    peer.receive()
    assert peer.other_frames.popleft().type == frames.CONNECT
    peer.send(vector_bytes(vector))
    check_error(server, peer, vector)
