"""A broker with both doors and no socket: peers of the binary protocol, and NATS clients.

Rule 1: what is said is bytes, what is heard is read here, by the words of the protocol alone.
Rule 2: after everything that happens the broker's own invariants are checked.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import NamedTuple

from simplebus.core.broker.broker import Settings
from simplebus.core.protocol.envelope_batch import Envelope, decode
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.nats.nats_server import NatsServer
from simplebus.nats.server.session import NatsSession
from simplebus.nats.settings import NatsSettings
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer import connect as connect1
from tests.behaviour.wire_peer import publish as publish1

DEAD_1 = 0x8000 + zlib.crc32(b"dead.1") % 0x8000
"""Where the dead letters of class 1 are."""

_PLAIN = re.compile(rb"MSG (\S+) (\S+) (?:(\S+) )?(\d+)")
_WITH_HEADERS = re.compile(rb"HMSG (\S+) (\S+) (?:(\S+) )?(\d+) (\d+)")


class Msg(NamedTuple):
    """One message as a NATS client sees it."""

    subject: str
    sid: str
    reply: str
    headers: bytes
    payload: bytes


class Doors(BrokerHarness):
    """Both doors of one broker."""

    def __init__(
        self, settings: Settings | None = None, nats: NatsSettings | None = None, **limits: float
    ) -> None:
        super().__init__(settings, **limits)
        self.front = NatsServer(nats, broker=self.broker)
        self.nats_buffer = ReceiveBuffer()

    def client(self, *said: bytes, headers: bool = True, **options: bool | str) -> Client:
        """A NATS client connects and says this."""
        client = Client(self, self.front.open_session("a client"))
        told = {"verbose": False, "pedantic": False, "headers": headers}
        words = json.dumps({**told, "no_responders": headers, **options})
        client.say(b"CONNECT %s\r\nPING\r\n" % words.encode())
        client.lines()
        client.say(*said)
        return client

    def wait(self, seconds: float) -> None:
        """Time goes by."""
        self.broker.clock.now += seconds
        self.broker.run_due_wakeups()
        self.check_invariants()


class Client:
    """One NATS connection."""

    def __init__(self, doors: Doors, session: NatsSession) -> None:
        self.doors = doors
        self.session = session
        self._heard = b""

    def say(self, *said: bytes) -> None:
        """Send these bytes, each argument as one read of the server."""
        for data in said:
            buffer = self.doors.nats_buffer
            self.doors.front.receive(self.session, buffer, buffer.fill(data))
            self.doors.check_invariants()
            self.doors.broker.drain_writable()
            self.doors.check_invariants()

    def pub(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: bytes = b""
    ) -> None:
        """Publish one message. `headers` is the whole block."""
        words = " ".join(filter(None, [subject, reply]))
        if headers:
            line = f"HPUB {words} {len(headers)} {len(headers) + len(payload)}\r\n"
        else:
            line = f"PUB {words} {len(payload)}\r\n"
        self.say(line.encode() + headers + payload + b"\r\n")

    def sub(self, subject: str, sid: str = "1", queue: str = "") -> None:
        self.say(" ".join(filter(None, ["SUB", subject, queue, sid])).encode() + b"\r\n")

    def leave(self) -> None:
        self.doors.front.close_session(self.session)
        self.doors.check_invariants()

    def take(self, pieces: int = 1 << 30) -> bytes:
        """What waits, or so many pieces of it."""
        assert self.doors.front.drain_errors() == []
        outbox, tick, taken = self.session.outbox, self.doors.broker.tick_number, b""
        while pieces and (piece := outbox.peek(tick)):
            taken += piece
            outbox.mark_sent(len(piece), tick)
            self.doors.check_invariants()
            pieces -= 1
        return taken

    def hear(self) -> tuple[list[Msg], list[bytes]]:
        """Everything there is to hear: messages, and other lines."""
        data = self._heard + self.take()
        messages, lines, at = [], [], 0
        while at < len(data):
            end = data.index(b"\r\n", at)
            line, at = data[at:end], end + 2
            if match := _WITH_HEADERS.fullmatch(line):
                subject, sid, reply, ahead, total = match.groups()
            elif match := _PLAIN.fullmatch(line):
                (subject, sid, reply, total), ahead = match.groups(), b"0"
            else:
                lines.append(line)
                continue
            body = data[at : at + int(total)]
            assert len(body) == int(total)
            assert data[at + int(total) : at + int(total) + 2] == b"\r\n"
            at += int(total) + 2
            words = [
                (word or b"").decode("utf-8", "surrogateescape") for word in (subject, sid, reply)
            ]
            messages.append(Msg(*words, body[: int(ahead)], body[int(ahead) :]))
        return messages, lines

    def messages(self) -> list[Msg]:
        messages, lines = self.hear()
        assert lines == [], lines
        return messages

    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages()]

    def lines(self) -> list[bytes]:
        messages, lines = self.hear()
        assert messages == [], messages
        return lines


def stored(doors: Doors, class_id: int) -> list[tuple[Envelope, bytes]]:
    """What a class holds."""
    ring = doors.broker.classes[class_id].ring
    found = []
    for sequence in range(ring.floor, ring.head):
        frame = ring.copy_frame(sequence)
        content = frame[9:-4]
        found.append(decode(content) if frame[:1] == b"5" else (Envelope(), content))
    return found


def holding(*payloads: bytes, **settings: object) -> Doors:
    """Class 1 holds these."""
    doors = Doors(Settings(**settings))  # type: ignore[arg-type]
    doors.peer(connect1(1), publish1(1, *payloads) if payloads else b"")
    return doors


def fields(message: Msg) -> list[str]:
    """What its reply says: class, consumer, delivery, sequence, count, time, pending."""
    tokens = message.reply.split(".")
    assert tokens[:2] == ["$JS", "ACK"]
    assert len(tokens) == 9
    return tokens[2:]


def deliveries(messages: list[Msg]) -> list[tuple[bytes, int]]:
    """Payloads, and the how manieth delivery each is."""
    return [(message.payload, int(fields(message)[2])) for message in messages]
