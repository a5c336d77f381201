"""A bus that speaks version 2 to one program, as simple as can be, and checks what it is told.

Rule 1: it works on bytes with the oracles alone; of the package it uses the JSON objects.
Rule 2: nothing happens by itself: it confirms, delivers and refuses when a test says so.
Rule 3: what a client must not do is an AssertionError here.
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
from tests.support.oracles import (
    ID_COUNT,
    build_frame,
    parse_frame,
    split_frames,
)

HEARTBEAT, MESSAGE, SUBSCRIBE, ACK, CONNECT = b"01234"
ENVELOPE, CONFIRM, DELIVER, NACK, WORKING, UNSUBSCRIBE, FETCH, ERROR = b"56789UFE"

Frame = tuple[int, int, int, int, bytes]
"""Type, class or subscription, number, third number, content."""


@dataclass
class Told:
    """A subscriber's word about messages."""

    kind: int
    number: int
    first: int
    last: int
    argument: bytes = b""


@dataclass
class ModelServer:
    """The bus's side of one program's connections. Its memory outlives them."""

    credit: int = 1 << 20
    bus: str = "bus"
    heartbeat: float = 0.0
    frame_bytes: int = 0
    next: int = 0
    """The number that the next message is to carry."""
    resumes: bool = True
    """Whether durables and groups are there when they are asked for again."""
    answers: bool = True
    """Whether requests are answered by themselves."""
    stored: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Class, frame type and content of what was published, once."""
    duplicates: int = 0
    frames: list[Frame] = field(default_factory=list)
    """Everything that came on this connection."""
    told: list[Told] = field(default_factory=list)
    """What was said about messages, ever."""
    subscriptions: dict[int, SubscribeRequest] = field(default_factory=dict)
    cursor: int = 0
    """What is answered to a Subscribe."""
    out: bytearray = field(default_factory=bytearray)
    """What the client has yet to read."""
    sessions: int = 0
    greeted: bool = False
    classes: set[int] = field(default_factory=set)
    unconfirmed: list[tuple[int, int]] = field(default_factory=list)
    """Number and bytes of the frames that are not confirmed, on this connection."""
    rest: bytes = b""

    def connect(self) -> None:
        """A fresh connection."""
        self.rest = b""
        self.out.clear()
        self.frames.clear()
        self.unconfirmed.clear()
        self.subscriptions.clear()
        self.greeted = False

    def hear(self, data: bytes) -> None:
        """Bytes have come."""
        found, self.rest = split_frames(self.rest + data)
        for frame in found:
            parsed = parse_frame(frame)
            self.frames.append(parsed)
            self._take(parsed, len(frame))

    def _take(self, frame: Frame, size: int) -> None:
        kind, subject, number, detail, content = frame
        assert self.greeted or kind == CONNECT, f"{frame} came before the Connect"
        if kind == CONNECT:
            self._name(number, msgspec.json.decode(content, type=ConnectRequest))
        elif kind in (MESSAGE, ENVELOPE):
            assert detail == 0
            self._store(subject, kind, number, content, size)
        elif kind == SUBSCRIBE:
            assert detail not in self.subscriptions, f"{detail} is in use"
            self.subscriptions[detail] = msgspec.json.decode(content, type=SubscribeRequest)
            if self.answers:
                self.begin(frame)
        elif kind in (ACK, NACK, WORKING):
            assert subject in self.subscriptions, f"{frame} is for no subscription"
            ids, *argument = content.split(b" ")
            first, last = map(int, ids.split(b"-"))
            assert 0 <= first < last <= ID_COUNT
            self.told.append(Told(kind, subject, first, last, b"".join(argument)))
        elif kind == UNSUBSCRIBE:
            del self.subscriptions[subject]
            self.say(UNSUBSCRIBE, subject, number)
        elif kind == FETCH:
            assert msgspec.json.decode(content, type=FetchRequest)
        else:
            assert kind == HEARTBEAT, frame

    def _name(self, number: int, request: ConnectRequest) -> None:
        if not self.greeted:
            self.greeted = True
            self.sessions += 1
        names = {}
        for one in request.classes:
            class_id = one.id if isinstance(one, NamedClass) else one
            name = one.name if isinstance(one, NamedClass) else one
            if not isinstance(class_id, int):
                class_id = 1000 + len(str(name))
            if isinstance(name, str):
                names[name] = class_id
            self.classes.add(class_id)
        if self.answers:
            self.reply(number, names)

    def reply(self, number: int, names: dict[str, int] | None = None) -> None:
        """Answer a Connect."""
        reply = ConnectReply(
            session=self.sessions,
            bus=self.bus,
            classes=names or {},
            next=self.next,
            credit=self.credit,
            heartbeat=self.heartbeat,
            frame_bytes=self.frame_bytes,
        )
        self.say(CONNECT, 0, number, 0, reply.encode())

    def begin(self, subscribe: Frame) -> None:
        """Answer a Subscribe."""
        _, class_id, number, detail, content = subscribe
        asked = msgspec.json.decode(content, type=SubscribeRequest)
        lasting = asked.durable is not None or asked.group is not None
        reply = SubscribeReply(
            cursor=self.cursor, floor=self.cursor, resumed=lasting and self.resumes
        )
        self.say(SUBSCRIBE, class_id, number, detail, reply.encode())

    def _store(self, class_id: int, kind: int, number: int, content: bytes, size: int) -> None:
        assert class_id in self.classes, f"class {class_id} was not named"
        ahead = (number - self.next) % ID_COUNT
        if ahead:
            assert ahead > ID_COUNT // 2, f"number {number} is ahead of {self.next}"
            self.duplicates += 1
        else:
            self.stored.append((class_id, kind, content))
            self.next = (self.next + 1) % ID_COUNT
        self.unconfirmed.append((number, size))
        total = sum(size for _, size in self.unconfirmed)
        assert total <= self.credit or len(self.unconfirmed) == 1, "over the credit"

    # What a test has it do -----------------------------------------------------------------------

    def confirm(self, back: int = 0) -> None:
        """Confirm all but the last so many."""
        confirmed = (self.next - back) % ID_COUNT
        self.unconfirmed = self.unconfirmed[len(self.unconfirmed) - back :] if back else []
        self.say(CONFIRM, 0, confirmed)

    def deliver(
        self, number: int, *messages: tuple[int, bytes], class_id: int = 1, attempt: int = 1
    ) -> None:
        """Messages (sequence, payload) for a subscription."""
        self.say(DELIVER, class_id, attempt, number)
        for sequence, payload in messages:
            self.say(MESSAGE, class_id, sequence % ID_COUNT, 7, payload)

    def refuse(
        self, code: str, *, kind: int = 0, number: int = 0, count: int = 1, fatal: bool = False
    ) -> None:
        reply = ErrorReply(code=code, message="no", fatal=fatal, count=count)
        self.say(ERROR, 0, number, kind, reply.encode())

    def fetched(self, request: int, reply: FetchReply, class_id: int = 1) -> None:
        self.say(FETCH, class_id, request, 0, reply.encode())

    def say(
        self, kind: int, subject: int = 0, number: int = 0, detail: int = 0, content: bytes = b""
    ) -> None:
        self.out += build_frame(
            kind, class_id=subject, message_id=number, timer_index=detail, content=content
        )

    def acked(self, number: int = 1) -> list[tuple[int, int]]:
        """The ranges of this subscription that were acknowledged, in order."""
        return [(t.first, t.last) for t in self.told if (t.kind, t.number) == (ACK, number)]

    def kinds(self) -> bytes:
        """The types of the frames that came on this connection."""
        return bytes(kind for kind, *_ in self.frames)


class Line:
    """A client core and a model server, connected as a test says."""

    def __init__(self, core: ClientCore | None = None, server: ModelServer | None = None) -> None:
        self.core = core or ClientCore(name="tester", instance="one")
        self.server = server or ModelServer()
        self.now = 0.0
        self._buffer = ReceiveBuffer(1 << 16)

    def connect(self) -> None:
        self.server.connect()
        self.core.connection_made(self.now)

    def say(self, most: int = 1 << 40) -> int:
        """The client writes up to so many bytes."""
        written = 0
        while written < most and (data := self.core.send_queue.peek()):
            count = min(len(data), most - written)
            self.server.hear(bytes(data[:count]))
            self.core.send_queue.mark_sent(count)
            written += count
        return written

    def hear(self, most: int = 1 << 16) -> list[Inbox]:
        """The client reads up to so many bytes."""
        out = self.server.out
        data = bytes(out[:most])
        del out[:most]
        return self.core.receive(self._buffer, self._buffer.fill(data), self.now) if data else []

    def exchange(self) -> list[Inbox]:
        """Until both are quiet."""
        woken: dict[Inbox, None] = {}
        while self.say() or self.server.out:
            woken.update(dict.fromkeys(self.hear()))
        self.core.check_invariants()
        return list(woken)

    def lose(self) -> None:
        self.core.connection_lost()
        self.core.check_invariants()


def connected(**options: object) -> Line:
    """A line whose server has answered. Options are the server's."""
    line = Line(server=ModelServer(**options))  # type: ignore[arg-type]
    line.connect()
    line.exchange()
    return line


def subscribed(line: Line, options: SubscribeRequest | None = None, **keys: bool) -> Inbox:
    """A subscription to class 1 that the bus has begun."""
    inbox = line.core.subscribe(1, options or SubscribeRequest(), **keys)
    line.exchange()
    assert inbox.subscribe_request.is_done
    return inbox


def settle(line: Line, inbox: Inbox) -> None:
    """All that was handed out is processed, and said to be."""
    inbox.settle(include_last=True)
    line.exchange()


def numbered(*sequences: int) -> list[tuple[int, bytes]]:
    """Messages of these sequences: what `ModelServer.deliver` takes."""
    return [(sequence, b"%d" % sequence) for sequence in sequences]
