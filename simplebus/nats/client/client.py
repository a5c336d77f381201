"""Protocol state of a client of NATS servers, over several connections.

`receive` returns events, `drain_output` returns bytes to send, `tick` checks the server.
Subscriptions survive a reconnect, requests do not. Each request has a unique number, the last token
of its inbox.

    start_connection ─► INFO ─► send_connect: CONNECT, SUB …, PING ─► PONG: ServerReady ─► … ─►
    end_connection
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.frames import Integers
from simplebus.nats.client import encode
from simplebus.nats.client.credentials import Credentials
from simplebus.nats.client.encode import Column
from simplebus.nats.client.events import (
    ReceivedMessages,
    ServerError,
    ServerInfo,
    ServerPing,
    ServerPong,
)
from simplebus.nats.client.parser import MESSAGE_BYTES_MAX, ClientParser
from simplebus.nats.numbers import parse_numbers

NUMBER_DIGITS = 12
_INBOX_SID = 1
_LANGUAGE = "python"


@dataclass(slots=True)
class ServerReady:
    """The server has processed CONNECT and all subscriptions."""

    info: ServerInfo


@dataclass(slots=True)
class RequestReplies:
    """Replies to requests."""

    numbers: Integers
    """Numbers of the requests, shape (n,)."""
    messages: ReceivedMessages
    """One reply per number. Without responders, the headers begin with `NATS/1.0 503`."""


NatsClientEvent = (
    ReceivedMessages | RequestReplies | ServerReady | ServerPong | ServerInfo | ServerError
)


class NatsClientCore:
    """Protocol state of one client."""

    def __init__(
        self,
        *,
        inbox: str,
        name: str = "simplebus",
        credentials: Credentials | None = None,
        echo: bool = True,
        ping_seconds: float = 20.0,
        pings_max: int = 2,
        max_message: int = MESSAGE_BYTES_MAX,
    ) -> None:
        """Create a client without a connection.

        Args:
            inbox: Unique subject prefix for replies.
            name: Client name in CONNECT.
            credentials: Credentials in CONNECT; None for none.
            echo: True to receive messages that this client publishes itself.
            ping_seconds: Silence after which a PING is sent.
            pings_max: Unanswered PINGs after which the connection is lost.
            max_message: Longest accepted message, in bytes.
        """
        self._inbox = inbox.encode() + b"."
        self._name = name
        self._credentials = credentials or Credentials()
        self._echo = echo
        self._ping_seconds = ping_seconds
        self._pings_max = pings_max
        self._max_message = max_message
        self._parser = ClientParser(max_message)
        self._subscriptions: dict[int, tuple[bytes, bytes]] = {}
        """Subject and queue group by subscription id."""
        self._next_sid = _INBOX_SID + 1
        self._next_number = 1
        self._output: list[bytes | memoryview] = []
        self.output_bytes = 0
        """Bytes that `drain_output` would return."""
        self.info: ServerInfo | None = None
        """Last INFO of the server; None before the first."""
        self.is_ready = False
        self._unanswered_ping_count = 0
        """PINGs sent since the last PONG."""
        self._ping_count = self._pong_count = 0
        """PINGs sent and PONGs received on this connection."""
        self.last_received_at = 0.0
        """Time of the last bytes from the server."""
        self._last_ping_at = 0.0

    # The connection ------------------------------------------------------------------------------

    def start_connection(self, now: float) -> None:
        """Reset the state for a new connection. The server sends INFO first."""
        self._parser = ClientParser(self._max_message)
        self._output.clear()
        self.output_bytes = 0
        self.info = None
        self.is_ready = False
        self._unanswered_ping_count = self._ping_count = self._pong_count = 0
        self.last_received_at = self._last_ping_at = now

    def end_connection(self) -> None:
        """Record the end of the connection and discard unsent output."""
        self.is_ready = False
        self._output.clear()
        self.output_bytes = 0

    def send_connect(self) -> None:
        """Send CONNECT, all subscriptions and PING. Called after INFO and the TLS handshake."""
        assert self.info is not None
        options: dict[str, object] = {
            "verbose": False,
            "pedantic": False,
            "echo": self._echo,
            "headers": True,
            "no_responders": True,
            "protocol": 1,
            "lang": _LANGUAGE,
            "version": "1",
            "name": self._name,
            "tls_required": self.info.tls_required,
            **self._credentials.connect_fields(self.info.nonce),
        }
        commands = [b"CONNECT " + msgspec.json.encode(options) + b"\r\n"]
        commands.append(encode.encode_sub(self._inbox + b"*", _INBOX_SID))
        commands += [
            encode.encode_sub(subject, sid, queue)
            for sid, (subject, queue) in self._subscriptions.items()
        ]
        self._write(b"".join(commands))
        self._ping()
        self._unanswered_ping_count += 1

    def receive(
        self, data: bytes | bytearray | memoryview, now: float
    ) -> Iterator[NatsClientEvent]:
        """Yield the events that these bytes complete. Exhaust the iterator, or drop the connection.

        After the first ServerInfo, start TLS if required and call `send_connect`. Raises
        RemoteProtocolError after the events before the violation.
        """
        self.last_received_at = now
        for event in self._parser.receive(data):
            match event:
                case ReceivedMessages():
                    yield from self._split_replies(event)
                case ServerPing():
                    self._write(encode.PONG)
                case ServerPong():
                    self._unanswered_ping_count = 0
                    self._pong_count += 1
                    if not self.is_ready and self.info is not None:
                        self.is_ready = True
                        yield ServerReady(self.info)
                    else:
                        yield event
                case ServerInfo():
                    self.info = event
                    yield event
                case ServerError():
                    yield event

    def tick(self, now: float) -> None:
        """Send a PING after silence. Call every second.

        Raises:
            RemoteProtocolError: heartbeat_timeout: the server does not answer.
        """
        if now - max(self.last_received_at, self._last_ping_at) < self._ping_seconds:
            return
        if self._unanswered_ping_count >= self._pings_max:
            raise RemoteProtocolError(
                Reason.HEARTBEAT_TIMEOUT,
                f"the NATS server did not answer {self._unanswered_ping_count} PINGs; its last "
                f"bytes arrived {now - self.last_received_at:.0f} s ago",
            )
        self._unanswered_ping_count += 1
        self._last_ping_at = now
        if self.info is not None:
            self._ping()

    def send_ping(self) -> int:
        """Send a PING and return its number, for `is_ping_answered`."""
        self._ping()
        return self._ping_count

    def is_ping_answered(self, ping_number: int) -> bool:
        """Return True if the server has processed everything sent before this PING, on the current
        connection.
        """
        return self._pong_count >= ping_number

    def drain_output(self) -> list[bytes | memoryview]:
        """Return the bytes to send, in order."""
        output, self._output = self._output, []
        self.output_bytes = 0
        return output

    # Subscriptions -------------------------------------------------------------------------------

    def subscribe(self, subject: str, queue: str = "") -> int:
        """Subscribe to a subject, which may have wildcards. Returns the subscription id."""
        sid = self._next_sid
        self._next_sid += 1
        self._subscriptions[sid] = (subject.encode(), queue.encode())
        if self.is_ready:
            self._write(encode.encode_sub(subject.encode(), sid, queue.encode()))
        return sid

    @property
    def next_sid(self) -> int:
        """Id of the next subscription."""
        return self._next_sid

    def unsubscribe(self, sid: int) -> None:
        """End a subscription. Messages in flight may still arrive."""
        if self._subscriptions.pop(sid, None) is not None and self.is_ready:
            self._write(encode.encode_unsub(sid))

    # Messages ------------------------------------------------------------------------------------

    def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: bytes = b""
    ) -> None:
        """Publish a message. It is dropped if the connection is not ready."""
        message = encode.encode_pub(
            subject.encode(), payload, reply=reply.encode(), headers=headers
        )
        self.write(message)

    def write(self, data: bytes | memoryview) -> None:
        """Send encoded commands. They are dropped if the connection is not ready."""
        if self.is_ready:
            self._write(data)

    def request(self, subject: str, payload: bytes = b"", *, headers: bytes = b"") -> int:
        """Send a request. Returns the number of its replies."""
        number = self.reserve_numbers(1)
        reply = self.reply_subject(number)
        self.write(encode.encode_pub(subject.encode(), payload, reply=reply, headers=headers))
        return number

    def reserve_numbers(self, count: int) -> int:
        """Reserve `count` consecutive request numbers. Returns the first."""
        first = self._next_number
        self._next_number += count
        return first

    def reply_subject(self, number: int) -> bytes:
        """Return the reply subject of a request number."""
        return b"%b%0*d" % (self._inbox, NUMBER_DIGITS, number)

    def reply_subjects(self, first: int, count: int) -> Sequence[Column]:
        """Return consecutive reply subjects, as columns for `encode_equal_messages`."""
        return self._inbox, encode.format_digits(np.arange(first, first + count), NUMBER_DIGITS)

    # Internals -----------------------------------------------------------------------------------

    def _ping(self) -> None:
        self._ping_count += 1
        self._write(encode.PING)

    def _write(self, data: bytes | memoryview) -> None:
        self._output.append(data)
        self.output_bytes += len(data)

    def _split_replies(
        self, messages: ReceivedMessages
    ) -> Iterator[ReceivedMessages | RequestReplies]:
        """Yield messages of subscriptions, then replies to requests.

        A requester therefore sees everything that was published before the reply.
        """
        are_replies = messages.sids == _INBOX_SID
        if not are_replies.any():
            yield messages
            return
        replies = messages
        if not are_replies.all():
            yield messages.pick(~are_replies)
            replies = messages.pick(are_replies)
        numbers, good = parse_numbers(
            replies.data, replies.subjects + len(self._inbox), replies.subject_ends
        )
        if not good.all():  # Another client published to the inbox.
            numbers, replies = numbers[good], replies.pick(good)
        yield RequestReplies(numbers, replies)
