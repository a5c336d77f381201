"""The protocol's vectors of version 2 (protocol/vectors/v2-*.json), driven through the real engine.

What peers get is read by oracles.py and json alone. Compared apart, each in its order, as
`protocol/binary.md` says: Confirms, the messages of each subscription, everything else.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from simplebus.core.broker.broker import Settings
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import PLAIN_FRAMES_MAX, RECEIVE_PADDING_BYTES, Limits
from simplebus.core.protocol import envelope_batch, frames, inquiry, requests
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frame_splitter import SplitterScratch, split_frames
from tests.behaviour.wire_peer import BrokerHarness, WirePeer, build_batch
from tests.core.protocol.test_vectors import VECTORS, Vector, bytes_of
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


def vectors(file: str, name: str) -> pytest.MarkDecorator:
    """Parametrize a test with each vector of this list."""
    found = json.loads((VECTORS / f"v2-{file}.json").read_text())[name]
    return pytest.mark.parametrize("vector", found, ids=[vector["name"] for vector in found])


@pytest.mark.parametrize("path", sorted(VECTORS.glob("v2-*.json")), ids=lambda path: path.name)
def test_a_file_says_what_it_holds_and_names_every_vector_once(path: Path) -> None:
    file = json.loads(path.read_text())
    assert file.pop("protocol") == 2
    assert file.pop("about").endswith(".")
    for entries in file.values():
        names = [vector["name"] for vector in entries]
        assert len(set(names)) == len(names) > 0


# Frames ------------------------------------------------------------------------------------------


@vectors("frames", "frames")
def test_a_frame_reads_and_writes_as_its_fields(vector: Vector) -> None:
    frame, content = bytes_of(vector), bytes_of(vector, "content_")
    frame_type, a, b, c = (vector[name] for name in ("type", "a", "b", "c"))
    buffer = bytearray(frame + bytes(RECEIVE_PADDING_BYTES))
    batch = split_frames(buffer, 0, len(frame), SplitterScratch(len(buffer)))
    assert batch is not None
    assert (batch.count, batch.data.size) == (1, len(frame))
    assert parse_frame(frame) == (frame_type, a, b, c, content)
    assert frame_type == ord(KINDS[vector["kind"]])
    encoded = frames.encode(frame_type, class_id=a, message_id=b, timer_index=c, content=content)
    assert encoded == frame


@vectors("frames", "frames")
def test_a_frame_with_an_object_reads_and_writes_as_what_it_says(vector: Vector) -> None:
    content, said = bytes_of(vector, "content_"), vector.get("json")
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


def said_by(vector: Vector) -> tuple[Envelope, bytes]:
    about = Envelope(
        channel=vector["channel"],
        key=bytes_of(vector, "key_"),
        headers=tuple((name, value) for name, value in vector["headers"]),
        published=vector["published"],
        expires_ms=vector["expires"],
        not_before_ms=vector["not_before"],
    )
    return about, bytes_of(vector, "payload_")


@vectors("envelopes", "valid")
def test_an_envelope_says_what_it_says(vector: Vector) -> None:
    content = bytes_of(vector, "content_")
    about, payload = said_by(vector)
    assert envelope_batch.decode(content) == (about, payload)
    assert envelope_batch.extract_payload(content) == payload
    assert (envelope_batch.encode(about, payload) == content) is vector["shortest"]
    for count in (1, PLAIN_FRAMES_MAX + 1):
        found = envelope_batch.scan_envelopes(
            build_batch(*[build_frame(ENVELOPE, content=content)] * count)
        )
        assert (found.count, found.names) == (count, [vector["channel"]])


@vectors("envelopes", "invalid")
def test_a_content_that_is_no_envelope_is_refused(vector: Vector) -> None:
    content = bytes_of(vector, "content_")
    with pytest.raises(RemoteProtocolError) as caught:
        envelope_batch.decode(content)
    assert caught.value.reason == vector["reason"]
    for count in (1, PLAIN_FRAMES_MAX + 1):
        bad = build_frame(ENVELOPE, content=content)
        assert envelope_batch.scan_envelopes(build_batch(*[bad] * count)).count == 0


@vectors("stuffing", "stuffing")
def test_bytes_are_stuffed_and_come_back(vector: Vector) -> None:
    plain, stuffed = bytes_of(vector, "plain_"), bytes_of(vector, "stuffed_")
    assert envelope_batch.stuff(plain) == stuffed
    assert envelope_batch.unstuff(stuffed) == plain


@vectors("stuffing", "unstuffing")
def test_bytes_that_nobody_stuffed_stand_for_themselves(vector: Vector) -> None:
    plain, stuffed = bytes_of(vector, "plain_"), bytes_of(vector, "stuffed_")
    assert envelope_batch.unstuff(stuffed) == plain
    assert envelope_batch.stuff(plain) != stuffed


# Dialogues ---------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """What a peer gets, by its header and content."""

    type: int
    a: int
    b: int
    c: int
    content: bytes

    @property
    def is_message(self) -> bool:
        return self.type in (MESSAGE, ENVELOPE)


Delivery = tuple[int, int, int] | None
"""Class, subscription and attempt, as a Deliver says them; None where none came."""


class Listener:
    """One peer: everything it got and was not asked about yet."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.peer = WirePeer(server.bus, server.bus.broker.open_session())
        self.is_closed = False
        self.confirmed: int | None = None
        """What the last Confirm said."""
        self.was_told: int | None = None
        """What the last line about one said."""
        self.others: deque[Frame] = deque()
        self.messages: dict[Delivery, deque[tuple[Delivery, Frame]]] = defaultdict(deque)
        self.delivery: Delivery = None
        self.expected: Delivery = None
        """What the last line about a Deliver said."""

    def says(self, *said: bytes) -> None:
        assert not self.is_closed, "the server has closed the connection"
        for data in said:
            if not self.is_closed:
                self._say(data)

    def _say(self, data: bytes) -> None:
        try:
            self.peer.send(data)
        except RemoteProtocolError as error:
            self.server.cut(self, error)
        self.server.go_on()

    def leaves(self) -> None:
        self.peer.disconnect()
        self.is_closed = True
        self.server.go_on()

    def hear(self) -> None:
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

    def gets(self, data: bytes, said: Vector | None) -> None:
        self.hear()
        frame = Frame(*parse_frame(data if said is None else data + frames.DELIMITER))
        if frame.type == CONFIRM:
            self.was_told = frame.b
            assert self.confirmed == frame.b
        elif frame.type == DELIVER:
            self.expected = (frame.a, frame.c, frame.b)
        elif frame.is_message:
            waiting = self.messages[self.expected and self.expected[:2]]
            assert waiting, f"no message comes; {self.everything()}"
            delivery, found = waiting.popleft()
            assert (delivery, found._replace(c=0)) == (self.expected, frame._replace(c=0))
        else:
            assert self.others, f"nothing comes; {self.everything()}"
            found = self.others.popleft()
            assert found[:4] == frame[:4], found
            if said is None:
                assert found == frame
                return
            told = json.loads(found.content)
            assert {name: told.get(name) for name in said} == said

    def gets_nothing(self) -> None:
        self.hear()
        assert not self.everything()
        assert self.confirmed == self.was_told

    def everything(self) -> list[Any]:
        return [*self.others, *(one for waiting in self.messages.values() for one in waiting)]


class Server:
    """A bus, and its peers by name. Its clock goes on with its ticks."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self.bus = BrokerHarness(Settings(limits=Limits(**limits)))
        self.peers: dict[str, Listener] = {}

    def listener(self, name: str) -> Listener:
        if name not in self.peers:
            self.peers[name] = Listener(self)
        return self.peers[name]

    def cut(self, listener: Listener, error: RemoteProtocolError) -> None:
        """Do as a driver does: say why, then close."""
        broker, session = self.bus.broker, listener.peer.session
        broker.send_fatal_error(session, error)
        listener.hear()
        broker.close_session(session)
        listener.is_closed = True

    def go_on(self) -> None:
        broker = self.bus.broker
        while broker.drain_writable():
            pass
        for session, _ in broker.drain_closing():
            self.of(session).hear()
            self.of(session).is_closed = True

    def of(self, session: object) -> Listener:
        (found,) = [one for one in self.peers.values() if one.peer.session is session]
        return found

    def tick(self, times: int) -> None:
        broker = self.bus.broker
        for _ in range(times):
            broker.clock.now += broker.settings.tick_seconds
            for session, error in self.bus.tick():
                self.cut(self.of(session), error)
            broker.run_due_wakeups()
            self.go_on()
            for listener in self.peers.values():
                if not listener.is_closed:
                    listener.hear()


@pytest.mark.parametrize("in_one", [True, False], ids=["in one", "in pieces"])
@vectors("sessions", "sessions")
def test_a_dialogue_goes_as_it_is_written(vector: Vector, in_one: bool) -> None:
    """What one line sends comes to the server in one read, or each frame in one of its own."""
    server = Server(vector["limits"])
    for number, (who, verb, *rest) in enumerate(vector["lines"]):
        where = f"line {number}: {who} {verb} {rest}"
        if who == "server":
            assert verb == "ticks"
            server.tick(*rest)
            continue
        listener = server.listener(who)
        try:
            match verb:
                case "sends":
                    said = [bytes.fromhex(data) for data in rest]
                    listener.says(*([b"".join(said)] if in_one else said))
                case "gets":
                    listener.gets(bytes.fromhex(rest[0]), rest[1] if rest[1:] else None)
                case "gets nothing":
                    listener.gets_nothing()
                case "is closed":
                    assert listener.is_closed
                    listener.gets_nothing()
                case "leaves":
                    listener.leaves()
                case _:
                    raise AssertionError("what is this line?")
        except AssertionError as error:
            raise AssertionError(f"{where}\n{error}") from error


# Bad input ---------------------------------------------------------------------------------------


def check_error(server: Server, listener: Listener, vector: Vector) -> None:
    server.tick(vector["silence_seconds"])
    listener.hear()
    frame = listener.others.popleft()
    assert frame[:4] == (ERROR, vector["a"], vector["b"], vector["c"])
    told = json.loads(frame.content)
    assert (told["code"], told["fatal"]) == (vector["code"], vector["fatal"])
    assert told["count"] == vector["count"]
    assert told["message"]
    assert listener.is_closed is vector["fatal"]
    assert not listener.everything()
    if not vector["fatal"]:
        listener.says(build_frame(frames.CONNECT, message_id=99, content=b"{}"))
        listener.hear()
        assert [(one.type, one.b) for one in listener.others] == [(frames.CONNECT, 99)]


@vectors("invalid", "connects")
def test_a_first_connect_that_is_refused_ends_the_session(vector: Vector) -> None:
    server = Server(vector["limits"])
    listener = server.listener("a")
    listener.says(bytes_of(vector))
    check_error(server, listener, vector)
    assert server.bus.broker.classes == {}


@vectors("invalid", "frames")
def test_a_bad_frame_is_answered_by_an_error(vector: Vector) -> None:
    server = Server(vector["limits"])
    listener = server.listener("a")
    listener.says(build_frame(frames.CONNECT, message_id=1, content=b'{"classes":[1]}'))
    listener.hear()
    assert listener.others.popleft().type == frames.CONNECT
    listener.says(bytes_of(vector))
    check_error(server, listener, vector)
