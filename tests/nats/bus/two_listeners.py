"""A broker with binary peers and NATS clients, without sockets.

Clients send and receive bytes of the protocol. The broker's invariants are checked after each step.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import NamedTuple

from simplebus.core.broker.broker import Settings
from simplebus.core.checkpoint import Checkpointer
from simplebus.core.commit_log import CommitLog
from simplebus.core.protocol.envelope_batch import Envelope, decode
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.session.session import Session
from simplebus.nats.nats_server import NatsServer
from simplebus.nats.server.session import NatsSession
from simplebus.nats.settings import NatsSettings
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer import connect as connect1
from tests.behaviour.wire_peer import publish as publish1

DEAD_1 = 0x8000 + zlib.crc32(b"dead.1") % 0x8000
"""Id of the class with the dead letters of class 1."""

_PLAIN = re.compile(rb"MSG (\S+) (\S+) (?:(\S+) )?(\d+)")
_WITH_HEADERS = re.compile(rb"HMSG (\S+) (\S+) (?:(\S+) )?(\d+) (\d+)")


class Msg(NamedTuple):
    """Message as received by a NATS client."""

    subject: str
    sid: str
    reply: str
    headers: bytes
    payload: bytes


class NatsBrokerHarness(BrokerHarness):
    """Broker with a NATS server."""

    def __init__(
        self,
        settings: Settings | None = None,
        nats: NatsSettings | None = None,
        *,
        commit_log: CommitLog | None = None,
        **limits: float,
    ) -> None:
        super().__init__(settings, commit_log=commit_log, **limits)
        self.nats_server = NatsServer(nats, broker=self.broker, on_pending=self._request_flush)
        self.nats_buffer = ReceiveBuffer()
        self.resumed: list[Session] = []
        """Sessions that the driver was told to resume."""
        self.is_flush_requested = False
        """True if the NATS server has asked its driver to send something."""

    def _request_flush(self) -> None:
        self.is_flush_requested = True

    def check_invariants(self) -> None:
        super().check_invariants()
        if not self.is_flush_requested:
            assert self.nats_server.drain_ready() == []
            assert self.nats_server.drain_disconnecting() == []

    def flush(self) -> list[NatsSession]:
        """Drain the NATS server like its driver. Returns the sessions that have new output."""
        self.is_flush_requested = False
        return self.nats_server.drain_ready()

    def client(self, *data: bytes, headers: bool = True, **options: bool | str) -> Client:
        """Connect a NATS client and send these bytes."""
        client = Client(self, self.nats_server.open_session("a client"))
        connect_options = {"verbose": False, "pedantic": False, "headers": headers}
        connect_json = json.dumps({**connect_options, "no_responders": headers, **options})
        client.send(b"CONNECT %s\r\nPING\r\n" % connect_json.encode())
        client.lines()
        client.send(*data)
        return client

    def write_journal(self) -> None:
        """Record that everything stored so far is durable."""
        if (batch := Checkpointer(self.broker).build_write_batch()) is not None:
            self.broker.mark_durable(batch.number)
        self.flush()

    def wait(self, seconds: float) -> None:
        """Advance the clock."""
        self.broker.clock.now += seconds
        self.broker.run_due_wakeups()
        self.check_invariants()

    def wait_for_all_due(self, seconds: float) -> None:
        """Advance the clock, and deliver all messages that are due."""
        self.wait(seconds)
        while self.broker.next_wakeup <= self.broker.clock.now:
            self.wait(0)


class Client:
    """NATS client."""

    def __init__(self, harness: NatsBrokerHarness, session: NatsSession) -> None:
        self.harness = harness
        self.session = session
        self._received = b""

    def send(self, *chunks: bytes) -> None:
        """Send these bytes, each argument as one read of the server."""
        for data in chunks:
            buffer = self.harness.nats_buffer
            self.harness.nats_server.receive(self.session, buffer, buffer.fill(data))
            self._end_turn()

    def continue_read(self) -> None:
        """Let the server process the next part of the sent bytes; some must be unprocessed."""
        server, buffer = self.harness.nats_server, self.harness.nats_buffer
        if self.session.is_request_pending:
            server.continue_request(self.session)
        else:
            server.receive(self.session, buffer, self.session.refill(buffer))
        self._end_turn()

    def _end_turn(self) -> None:
        self.harness.check_invariants()
        self.harness.resumed += self.harness.broker.end_turn().resume
        self.harness.check_invariants()
        self.harness.flush()

    def pub(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: bytes = b""
    ) -> None:
        """Publish one message. `headers` is the whole block."""
        arguments = " ".join(filter(None, [subject, reply]))
        if headers:
            line = f"HPUB {arguments} {len(headers)} {len(headers) + len(payload)}\r\n"
        else:
            line = f"PUB {arguments} {len(payload)}\r\n"
        self.send(line.encode() + headers + payload + b"\r\n")

    def sub(self, subject: str, sid: str = "1", queue: str = "") -> None:
        self.send(" ".join(filter(None, ["SUB", subject, queue, sid])).encode() + b"\r\n")

    def close(self) -> None:
        self.harness.nats_server.close_session(self.session)
        self.harness.check_invariants()

    def drain(self, max_pieces: int = 1 << 30) -> bytes:
        """Return the pending output, or up to `pieces` pieces of it."""
        assert self.harness.nats_server.drain_errors() == []
        outbox, tick_number, output = self.session.outbox, self.harness.broker.tick_number, b""
        while max_pieces and (data := outbox.peek(tick_number)):
            output += data
            outbox.mark_sent(len(data), tick_number)
            self.harness.check_invariants()
            max_pieces -= 1
        self.harness.broker.apply_position_changes()  # Every driver flushes after sending.
        return output

    def receive(self, max_pieces: int = 1 << 30) -> tuple[list[Msg], list[bytes]]:
        """Return the received messages and the other lines, of up to `max_pieces` pieces."""
        data = self._received + self.drain(max_pieces)
        messages, lines, offset = [], [], 0
        while offset < len(data):
            end = data.index(b"\r\n", offset)
            line, offset = data[offset:end], end + 2
            if match := _WITH_HEADERS.fullmatch(line):
                subject, sid, reply, header_size, total = match.groups()
            elif match := _PLAIN.fullmatch(line):
                (subject, sid, reply, total), header_size = match.groups(), b"0"
            else:
                lines.append(line)
                continue
            body = data[offset : offset + int(total)]
            assert len(body) == int(total)
            assert data[offset + int(total) : offset + int(total) + 2] == b"\r\n"
            offset += int(total) + 2
            tokens = [
                (token or b"").decode("utf-8", "surrogateescape") for token in (subject, sid, reply)
            ]
            messages.append(Msg(*tokens, body[: int(header_size)], body[int(header_size) :]))
        return messages, lines

    def messages(self, max_pieces: int = 1 << 30) -> list[Msg]:
        messages, lines = self.receive(max_pieces)
        assert lines == [], lines
        return messages

    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages()]

    def lines(self) -> list[bytes]:
        messages, lines = self.receive()
        assert messages == [], messages
        return lines


def stored(harness: NatsBrokerHarness, class_id: int) -> list[tuple[Envelope, bytes]]:
    """Return the stored messages of a class."""
    ring = harness.broker.classes[class_id].ring
    found = []
    for sequence in range(ring.floor, ring.head):
        frame = ring.copy_frame(sequence)
        content = frame[9:-4]
        found.append(decode(content) if frame[:1] == b"5" else (Envelope(), content))
    return found


def holding(*payloads: bytes, **settings: object) -> NatsBrokerHarness:
    """Return a harness with these messages in class 1."""
    harness = NatsBrokerHarness(Settings(**settings))  # type: ignore[arg-type]
    harness.peer(connect1(1), publish1(1, *payloads) if payloads else b"")
    return harness


def fields(message: Msg) -> list[str]:
    """Return the tokens of an ack subject from the class on."""
    tokens = message.reply.split(".")
    assert tokens[:2] == ["$JS", "ACK"]
    assert len(tokens) == 9
    return tokens[2:]


def deliveries(messages: list[Msg]) -> list[tuple[bytes, int]]:
    """Return payload and delivery count of each message."""
    return [(message.payload, int(fields(message)[2])) for message in messages]
