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
    content, said = vector_bytes(vector, "content_"), vector.get("json")
    if vector["kind"] == "inquire":
        find = inquiry.decode_inquiry if vector["sender"] == "client" else inquiry.decode_reply
        found = msgspec.json.encode(find(content))
        assert {name: json.loads(found)[name] for name in said} == said == json.loads(content)
        return
    if said is None:
        assert content[:1] != b"{"
        return
    assert json.loads(content) == said
    kind = OBJECTS[vector["sender"], vector["kind"]]
    found = requests.decode(kind, content)
    assert requests.decode(kind, found.encode()) == found
    for name, value in json.loads(found.encode()).items():
        assert said[name] == value


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


# Dialogues ---------------------------------------------------------------------------------------


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


class DialoguePeer:
    """One peer, with the received frames that no line of the dialogue has checked yet."""

    def __init__(self, server: DialogueServer) -> None:
        self.server = server
        self.peer = WirePeer(server.bus, server.bus.broker.open_session())
        self.is_closed = False
        self.confirmed: int | None = None
        """Message number of the last Confirm."""
        self.was_told: int | None = None
        """Message number of the last expected Confirm."""
        self.others: deque[Frame] = deque()
        self.messages: dict[Delivery, deque[tuple[Delivery, Frame]]] = defaultdict(deque)
        self.delivery: Delivery = None
        self.expected: Delivery = None
        """Last expected Deliver."""

    def send(self, *said: bytes) -> None:
        assert not self.is_closed, "the server has closed the connection"
        for data in said:
            if not self.is_closed:
                self._send_bytes(data)

    def _send_bytes(self, data: bytes) -> None:
        try:
            self.peer.send(data)
        except RemoteProtocolError as error:
            self.server.cut(self, error)
        self.server.process()

    def disconnect(self) -> None:
        self.peer.disconnect()
        self.is_closed = True
        self.server.process()

    def receive(self) -> None:
        for whole in self.peer.receive_frames():
            frame = Frame(*parse_frame(whole))
            if frame.type == CONFIRM:
                self.confirmed = frame.b
            elif frame.type == DELIVER:
                self.delivery = (frame.a, frame.c, frame.b)
            elif frame.is_message:
                subscription = self.delivery and self.delivery[:2]
                self.messages[subscription].append((self.delivery, frame))
            elif frame.type != HEARTBEAT:
                self.others.append(frame)

    def expect(self, data: bytes, said: Vector | None) -> None:
        self.receive()
        frame = Frame(*parse_frame(data if said is None else data + frames.DELIMITER))
        if frame.type == CONFIRM:
            self.was_told = frame.b
            assert self.confirmed == frame.b
        elif frame.type == DELIVER:
            self.expected = (frame.a, frame.c, frame.b)
        elif frame.is_message:
            waiting = self.messages[self.expected and self.expected[:2]]
            assert waiting, f"no message comes; {self.take_all()}"
            delivery, found = waiting.popleft()
            assert (delivery, found._replace(c=0)) == (self.expected, frame._replace(c=0))
        else:
            assert self.others, f"nothing comes; {self.take_all()}"
            found = self.others.popleft()
            assert found[:4] == frame[:4], found
            if said is None:
                assert found == frame
                return
            told = json.loads(found.content)
            assert {name: told.get(name) for name in said} == said

    def expect_nothing(self) -> None:
        self.receive()
        assert not self.take_all()
        assert self.confirmed == self.was_told

    def take_all(self) -> list[Any]:
        return [*self.others, *(one for waiting in self.messages.values() for one in waiting)]


class DialogueServer:
    """A bus and its peers by name. Its clock advances with its ticks."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self.bus = BrokerHarness(Settings(limits=Limits(**limits)))
        self.peers: dict[str, DialoguePeer] = {}

    def get_peer(self, name: str) -> DialoguePeer:
        if name not in self.peers:
            self.peers[name] = DialoguePeer(self)
        return self.peers[name]

    def cut(self, listener: DialoguePeer, error: RemoteProtocolError) -> None:
        """Send the error, then close the session, as the server does."""
        broker, session = self.bus.broker, listener.peer.session
        broker.send_fatal_error(session, error)
        listener.receive()
        broker.close_session(session)
        listener.is_closed = True

    def process(self) -> None:
        broker = self.bus.broker
        while (actions := broker.end_turn()) is not NO_ACTIONS:
            for session, _ in actions.close:
                self.peer_of(session).receive()
                self.peer_of(session).is_closed = True

    def peer_of(self, session: object) -> DialoguePeer:
        (found,) = [one for one in self.peers.values() if one.peer.session is session]
        return found

    def tick(self, times: int) -> None:
        broker = self.bus.broker
        for _ in range(times):
            broker.clock.now += broker.settings.tick_seconds
            for session, error in self.bus.tick():
                self.cut(self.peer_of(session), error)
            broker.run_due_wakeups()
            self.process()
            for listener in self.peers.values():
                if not listener.is_closed:
                    listener.receive()


@pytest.mark.parametrize("in_one", [True, False], ids=["in one", "in pieces"])
@vectors("v2-sessions", "sessions")
def test_dialogue_vectors(vector: Vector, in_one: bool) -> None:
    """The bytes of a line arrive in one read, or each frame in a read of its own."""
    server = DialogueServer(vector["limits"])
    for number, (who, verb, *rest) in enumerate(vector["lines"]):
        where = f"line {number}: {who} {verb} {rest}"
        if who == "server":
            assert verb == "ticks"
            server.tick(*rest)
            continue
        listener = server.get_peer(who)
        try:
            match verb:
                case "sends":
                    said = [bytes.fromhex(data) for data in rest]
                    listener.send(*([b"".join(said)] if in_one else said))
                case "gets":
                    listener.expect(bytes.fromhex(rest[0]), rest[1] if rest[1:] else None)
                case "gets nothing":
                    listener.expect_nothing()
                case "is closed":
                    assert listener.is_closed
                    listener.expect_nothing()
                case "leaves":
                    listener.disconnect()
                case _:
                    raise AssertionError("what is this line?")
        except AssertionError as error:
            raise AssertionError(f"{where}\n{error}") from error


# Bad input ---------------------------------------------------------------------------------------


def check_error(server: DialogueServer, listener: DialoguePeer, vector: Vector) -> None:
    server.tick(vector["silence_seconds"])
    listener.receive()
    frame = listener.others.popleft()
    assert frame[:4] == (ERROR, vector["a"], vector["b"], vector["c"])
    told = json.loads(frame.content)
    assert (told["code"], told["fatal"]) == (vector["code"], vector["fatal"])
    assert told["count"] == vector["count"]
    assert told["message"]
    assert listener.is_closed is vector["fatal"]
    assert not listener.take_all()
    if not vector["fatal"]:
        listener.send(build_frame(frames.CONNECT, message_id=99, content=b"{}"))
        listener.receive()
        assert [(one.type, one.b) for one in listener.others] == [(frames.CONNECT, 99)]


@vectors("v2-invalid", "connects")
def test_refused_first_connect_ends_the_session(vector: Vector) -> None:
    server = DialogueServer(vector["limits"])
    listener = server.get_peer("a")
    listener.send(vector_bytes(vector))
    check_error(server, listener, vector)
    assert server.bus.broker.classes == {}


@vectors("v2-invalid", "frames")
def test_malformed_frame_gets_an_error(vector: Vector) -> None:
    server = DialogueServer(vector["limits"])
    listener = server.get_peer("a")
    listener.send(build_frame(frames.CONNECT, message_id=1, content=b'{"classes":[1]}'))
    listener.receive()
    assert listener.others.popleft().type == frames.CONNECT
    listener.send(vector_bytes(vector))
    check_error(server, listener, vector)
