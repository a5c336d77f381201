"""Model of a version 2 server for one client, which checks everything that it receives.

It encodes and decodes frames with the test oracles only. It confirms, delivers and refuses only
when a test asks for it. A protocol violation of the client is an AssertionError.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from simplebus.client.core.client import ClientCore
from simplebus.client.core.inbox import Inbox
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.protocol.requests import (
    ConnectReply,
    ConnectRequest,
    ErrorReply,
    FetchReply,
    FetchRequest,
    NamedClass,
    SubscribeReply,
    SubscribeRequest,
)
from tests.support.oracles import ID_COUNT, build_frame, parse_frame, split_frames

HEARTBEAT, MESSAGE, SUBSCRIBE, ACK, CONNECT = b"01234"
ENVELOPE, CONFIRM, DELIVER, NACK, WORKING, UNSUBSCRIBE, FETCH, ERROR = b"56789UFE"

Frame = tuple[int, int, int, int, bytes]
"""Frame type, class id or subscription number, message id, timer index, content."""


@dataclass
class ReceivedOutcome:
    """An ack, nack or working notice that the server received."""

    kind: int
    number: int
    first: int
    last: int
    argument: bytes = b""


@dataclass
class ModelServer:
    """Server side of the connections of one client. Its state survives a reconnect."""

    credit: int = 1 << 20
    bus: str = "bus"
    heartbeat: float = 0.0
    frame_bytes: int = 0
    next: int = 0
    """The next message number that is expected."""
    can_resume: bool = True
    """True if durables and groups still exist when they are subscribed again."""
    is_replying: bool = True
    """True if Connect and Subscribe requests are answered automatically."""
    stored: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Class, frame type and content of each stored message."""
    duplicates: int = 0
    frames: list[Frame] = field(default_factory=list)
    """Frames received on this connection."""
    outcomes: list[ReceivedOutcome] = field(default_factory=list)
    """All received outcomes."""
    subscriptions: dict[int, SubscribeRequest] = field(default_factory=dict)
    cursor: int = 0
    """Cursor in Subscribe replies."""
    outgoing: bytearray = field(default_factory=bytearray)
    """Bytes that the client has not read yet."""
    sessions: int = 0
    is_connected: bool = False
    classes: set[int] = field(default_factory=set)
    unconfirmed: list[tuple[int, int]] = field(default_factory=list)
    """Number and bytes of the unconfirmed frames of this connection."""
    partial_frame: bytes = b""
    allows_late_confirms: bool = False
    """True if the client may let Confirms wait."""
    is_confirm_late: bool = False
    """True if the Confirm of the last message may wait, and no other frame has arrived since."""

    def connect(self) -> None:
        """Start a new connection."""
        self.partial_frame = b""
        self.outgoing.clear()
        self.frames.clear()
        self.unconfirmed.clear()
        self.subscriptions.clear()
        self.is_connected = self.is_confirm_late = False

    def receive(self, data: bytes) -> None:
        """Process received bytes."""
        found, self.partial_frame = split_frames(self.partial_frame + data)
        for frame in found:
            parsed = parse_frame(frame)
            self.frames.append(parsed)
            self._handle_frame(parsed, len(frame))

    def _handle_frame(self, frame: Frame, size: int) -> None:
        kind, subject, number, detail, content = frame
        assert self.is_connected or kind == CONNECT, f"{frame} before the Connect"
        self.is_confirm_late = kind in (MESSAGE, ENVELOPE) and detail == 1
        if kind == CONNECT:
            self._handle_connect(number, msgspec.json.decode(content, type=ConnectRequest))
        elif kind in (MESSAGE, ENVELOPE):
            assert detail <= self.allows_late_confirms
            self._store(subject, kind, number, content, size)
        elif kind == SUBSCRIBE:
            assert detail not in self.subscriptions, f"{detail} is in use"
            self.subscriptions[detail] = msgspec.json.decode(content, type=SubscribeRequest)
            if self.is_replying:
                self.reply_to_subscribe(frame)
        elif kind in (ACK, NACK, WORKING):
            assert subject in self.subscriptions, f"no subscription for {frame}"
            ids, *argument = content.split(b" ")
            first, last = map(int, ids.split(b"-"))
            assert 0 <= first < last <= ID_COUNT
            self.outcomes.append(ReceivedOutcome(kind, subject, first, last, b"".join(argument)))
        elif kind == UNSUBSCRIBE:
            del self.subscriptions[subject]
            self.send_frame(UNSUBSCRIBE, subject, number)
        elif kind == FETCH:
            assert msgspec.json.decode(content, type=FetchRequest)
        else:
            assert kind == HEARTBEAT, frame

    def _handle_connect(self, number: int, request: ConnectRequest) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.sessions += 1
        names = {}
        for class_reference in request.classes:
            class_id = (
                class_reference.id if isinstance(class_reference, NamedClass) else class_reference
            )
            name = (
                class_reference.name if isinstance(class_reference, NamedClass) else class_reference
            )
            if not isinstance(class_id, int):
                class_id = 1000 + len(str(name))
            if isinstance(name, str):
                names[name] = class_id
            self.classes.add(class_id)
        if self.is_replying:
            self.reply_to_connect(number, names)

    def reply_to_connect(self, number: int, names: dict[str, int] | None = None) -> None:
        reply = ConnectReply(
            session=self.sessions,
            bus=self.bus,
            classes=names or {},
            next=self.next,
            credit=self.credit,
            heartbeat=self.heartbeat,
            frame_bytes=self.frame_bytes,
        )
        self.send_frame(CONNECT, 0, number, 0, reply.encode())

    def reply_to_subscribe(self, subscribe: Frame) -> None:
        _, class_id, number, detail, content = subscribe
        request = msgspec.json.decode(content, type=SubscribeRequest)
        has_kept_position = request.durable is not None or request.group is not None
        reply = SubscribeReply(
            cursor=self.cursor, floor=self.cursor, resumed=has_kept_position and self.can_resume
        )
        self.send_frame(SUBSCRIBE, class_id, number, detail, reply.encode())

    def _store(self, class_id: int, kind: int, number: int, content: bytes, size: int) -> None:
        assert class_id in self.classes, f"class {class_id} was not named"
        distance = (number - self.next) % ID_COUNT
        if distance:
            assert distance > ID_COUNT // 2, f"number {number} is ahead of {self.next}"
            self.duplicates += 1
        else:
            self.stored.append((class_id, kind, content))
            self.next = (self.next + 1) % ID_COUNT
        self.unconfirmed.append((number, size))
        total = sum(size for _, size in self.unconfirmed)
        assert total <= self.credit or len(self.unconfirmed) == 1, "over the credit"

    # Actions of a test ---------------------------------------------------------------------------

    def confirm(self, unconfirmed_count: int = 0) -> None:
        """Confirm all messages except the last `back` ones."""
        confirmed = (self.next - unconfirmed_count) % ID_COUNT
        self.unconfirmed = (
            self.unconfirmed[len(self.unconfirmed) - unconfirmed_count :]
            if unconfirmed_count
            else []
        )
        self.send_frame(CONFIRM, 0, confirmed)

    def deliver(
        self, number: int, *messages: tuple[int, bytes], class_id: int = 1, attempt: int = 1
    ) -> None:
        """Send messages, as pairs of sequence and payload, to a subscription."""
        self.send_frame(DELIVER, class_id, attempt, number)
        for sequence, payload in messages:
            self.send_frame(MESSAGE, class_id, sequence % ID_COUNT, 7, payload)

    def send_error(
        self, code: str, *, kind: int = 0, number: int = 0, count: int = 1, fatal: bool = False
    ) -> None:
        reply = ErrorReply(code=code, message="no", fatal=fatal, count=count)
        self.send_frame(ERROR, 0, number, kind, reply.encode())

    def reply_to_fetch(self, request: int, reply: FetchReply, class_id: int = 1) -> None:
        self.send_frame(FETCH, class_id, request, 0, reply.encode())

    def send_frame(
        self, kind: int, subject: int = 0, number: int = 0, detail: int = 0, content: bytes = b""
    ) -> None:
        self.outgoing += build_frame(
            kind, class_id=subject, message_id=number, timer_index=detail, content=content
        )

    def acked_ranges(self, number: int = 1) -> list[tuple[int, int]]:
        """Return the acked ranges of a subscription, in order."""
        return [(t.first, t.last) for t in self.outcomes if (t.kind, t.number) == (ACK, number)]

    def frame_types(self) -> bytes:
        """Return the types of the frames received on this connection."""
        return bytes(kind for kind, *_ in self.frames)


class ModelConnection:
    """A client core and a model server."""

    def __init__(self, core: ClientCore | None = None, server: ModelServer | None = None) -> None:
        self.core = core or ClientCore(name="tester", instance="one")
        self.server = server or ModelServer()
        self.now = 0.0
        self._buffer = ReceiveBuffer(1 << 16)

    def connect(self) -> None:
        self.server.connect()
        self.core.connection_made(self.now)

    def send(self, max_bytes: int = 1 << 40) -> int:
        """Transfer up to `max_bytes` bytes to the server."""
        written = 0
        while written < max_bytes and (data := self.core.send_queue.peek()):
            count = min(len(data), max_bytes - written)
            self.server.receive(bytes(data[:count]))
            self.core.send_queue.mark_sent(count)
            written += count
        return written

    def receive(self, max_bytes: int = 1 << 16) -> list[Inbox]:
        """Transfer up to `max_bytes` bytes to the client."""
        outgoing = self.server.outgoing
        data = bytes(outgoing[:max_bytes])
        del outgoing[:max_bytes]
        return self.core.receive(self._buffer, self._buffer.fill(data), self.now) if data else []

    def exchange(self) -> list[Inbox]:
        """Transfer bytes until both sides are idle."""
        inboxes_to_wake: dict[Inbox, None] = {}
        while self.send() or self.server.outgoing:
            inboxes_to_wake.update(dict.fromkeys(self.receive()))
        self.core.check_invariants()
        return list(inboxes_to_wake)

    def disconnect(self) -> None:
        self.core.connection_lost()
        self.core.check_invariants()


def open_connection(**options: object) -> ModelConnection:
    """Return a connection whose Connect was accepted. Passes the options to ModelServer."""
    connection = ModelConnection(server=ModelServer(**options))  # type: ignore[arg-type]
    connection.connect()
    connection.exchange()
    return connection


def subscribe_confirmed(
    connection: ModelConnection, options: SubscribeRequest | None = None, **keys: bool
) -> Inbox:
    """Return a confirmed subscription to class 1."""
    inbox = connection.core.subscribe(1, options or SubscribeRequest(), **keys)
    connection.exchange()
    assert inbox.subscribe_request.is_done
    return inbox


def settle(connection: ModelConnection, inbox: Inbox) -> None:
    """Acknowledge everything that was handed out."""
    inbox.settle(include_last=True)
    connection.exchange()


def numbered_messages(*sequences: int) -> list[tuple[int, bytes]]:
    """Return messages with these sequences for `ModelServer.deliver`."""
    return [(sequence, b"%d" % sequence) for sequence in sequences]
