"""A client's conversation with a NATS server, whichever of several it is connected to now.

Rule 1: nobody here waits: `receive` says what came, `take_output` what is to be sent, and `tick`
whether the server is still there.
Rule 2: subscriptions outlive connections: `greet` says them again. Requests do not: who waits for
an answer when `lose` is called asks again, or does not.
Rule 3: requests have numbers, which stand at the end of their inboxes; a number is used once.

    open ─► INFO ─► greet: CONNECT, SUB …, PING ─► PONG: Ready ─► … ─► lose ─► open
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
from simplebus.nats.client.events import Complaint, Info, Messages, Ping, Pong
from simplebus.nats.client.parser import MESSAGE_BYTES_MAX, Parser
from simplebus.nats.numbers import parse_numbers

NUMBER_DIGITS = 12
_INBOX_SID = 1
_LANGUAGE = "python"


@dataclass(slots=True)
class Ready:
    """The server has taken CONNECT and all subscriptions."""

    info: Info


@dataclass(slots=True)
class Replies:
    """Answers to requests."""

    numbers: Integers
    """Of the requests, shape (n,)."""
    messages: Messages
    """What was answered, one to each number. Where nobody was there to answer, the headers begin
    with `NATS/1.0 503`."""


Said = Messages | Replies | Ready | Pong | Info | Complaint


class ClientCore:
    """See the module's law."""

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
        """`inbox` is a subject that is nobody else's: answers come below it. Without `echo` one
        hears nothing of what one publishes."""
        self._inbox = inbox.encode() + b"."
        self._name = name
        self._credentials = credentials or Credentials()
        self._echo = echo
        self._ping_seconds = ping_seconds
        self._pings_max = pings_max
        self._max_message = max_message
        self._parser = Parser(max_message)
        self._subscriptions: dict[int, tuple[bytes, bytes]] = {}
        """By sid: subject and queue group."""
        self._next_sid = _INBOX_SID + 1
        self._next_number = 1
        self._output: list[bytes | memoryview] = []
        self.output_bytes = 0
        """How much waits to be taken."""
        self.info: Info | None = None
        """What the server said last; None before it did."""
        self.is_ready = False
        self._pings = 0
        """How many are unanswered."""
        self._pinged = self._ponged = 0
        """How many there were on this connection, and how many of these were answered."""
        self.heard_at = 0.0
        """When something came last."""
        self._pinged_at = 0.0

    # The connection ------------------------------------------------------------------------------

    def open(self, now: float) -> None:
        """There is a fresh connection. The server speaks first."""
        self._parser = Parser(self._max_message)
        self._output.clear()
        self.output_bytes = 0
        self.info = None
        self.is_ready = False
        self._pings = self._pinged = self._ponged = 0
        self.heard_at = self._pinged_at = now

    def lose(self) -> None:
        """It is gone, and with it what was not taken to be sent."""
        self.is_ready = False
        self._output.clear()
        self.output_bytes = 0

    def greet(self) -> None:
        """INFO has come, and TLS is there if it is to be: say who is there, and what to send."""
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
            **self._credentials.fields(self.info.nonce),
        }
        said = [b"CONNECT " + msgspec.json.encode(options) + b"\r\n"]
        said.append(encode.sub(self._inbox + b"*", _INBOX_SID))
        said += [encode.sub(s, sid, queue) for sid, (s, queue) in self._subscriptions.items()]
        self._write(b"".join(said))
        self._ping()
        self._pings += 1

    def receive(self, data: bytes | bytearray | memoryview, now: float) -> Iterator[Said]:
        """Yield what these bytes complete. Exhaust the iterator, or drop the connection.

        When an Info comes and `is_greeted` is not said of it, begin TLS if that is wanted, and
        `greet`. Raises RemoteProtocolError after the events before the offence.
        """
        self.heard_at = now
        for event in self._parser.receive(data):
            match event:
                case Messages():
                    yield from self._parted(event)
                case Ping():
                    self._write(encode.PONG)
                case Pong():
                    self._pings = 0
                    self._ponged += 1
                    if not self.is_ready and self.info is not None:
                        self.is_ready = True
                        yield Ready(self.info)
                    else:
                        yield event
                case Info():
                    self.info = event
                    yield event
                case Complaint():
                    yield event

    def tick(self, now: float) -> None:
        """To be called every second or so. Raises RemoteProtocolError (heartbeat_timeout) when the
        server does not answer."""
        if now - max(self.heard_at, self._pinged_at) < self._ping_seconds:
            return
        if self._pings >= self._pings_max:
            raise RemoteProtocolError(
                Reason.HEARTBEAT_TIMEOUT,
                f"the NATS server has answered none of {self._pings} PINGs for "
                f"{now - self.heard_at:.0f} s",
            )
        self._pings += 1
        self._pinged_at = now
        if self.info is not None:
            self._ping()

    def mark(self) -> int:
        """Ask the server to say when it has taken all that was said up to now. Returns what
        `has_passed` is asked with."""
        self._ping()
        return self._pinged

    def has_passed(self, mark: int) -> bool:
        """Whether it has taken all that was said before this, on the connection that there is."""
        return self._ponged >= mark

    def take_output(self) -> list[bytes | memoryview]:
        """What is to be sent, in order."""
        output, self._output = self._output, []
        self.output_bytes = 0
        return output

    # Subscriptions -------------------------------------------------------------------------------

    def subscribe(self, subject: str, queue: str = "") -> int:
        """Have what is published on a subject, which may have wildcards, sent here; each message to
        one member of a queue group. Returns what its messages are known by."""
        sid = self._next_sid
        self._next_sid += 1
        self._subscriptions[sid] = (subject.encode(), queue.encode())
        if self.is_ready:
            self._write(encode.sub(subject.encode(), sid, queue.encode()))
        return sid

    @property
    def next_sid(self) -> int:
        """What the next subscription is known by."""
        return self._next_sid

    def unsubscribe(self, sid: int) -> None:
        """No more of it. Some that are under way may still come."""
        if self._subscriptions.pop(sid, None) is not None and self.is_ready:
            self._write(encode.unsub(sid))

    # Messages ------------------------------------------------------------------------------------

    def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: bytes = b""
    ) -> None:
        """One message, while the connection is ready; else it is nowhere."""
        message = encode.pub(subject.encode(), payload, reply=reply.encode(), headers=headers)
        self.write(message)

    def write(self, said: bytes | memoryview) -> None:
        """What `writing` has made, while the connection is ready; else it is nowhere."""
        if self.is_ready:
            self._write(said)

    def request(self, subject: str, payload: bytes = b"", *, headers: bytes = b"") -> int:
        """Ask on a subject. Returns the number under which the answer, or several, will come."""
        number = self.take_numbers(1)
        reply = self.reply_to(number)
        self.write(encode.pub(subject.encode(), payload, reply=reply, headers=headers))
        return number

    def take_numbers(self, count: int) -> int:
        """The first of so many numbers in a row, for requests that `writing` writes."""
        first = self._next_number
        self._next_number += count
        return first

    def reply_to(self, number: int) -> bytes:
        """Where the answer to the request with this number is to go."""
        return b"%b%0*d" % (self._inbox, NUMBER_DIGITS, number)

    def replies_to(self, first: int, count: int) -> Sequence[Column]:
        """The same for numbers in a row, as `writing.alike` takes it."""
        return self._inbox, encode.digits(np.arange(first, first + count), NUMBER_DIGITS)

    # Within --------------------------------------------------------------------------------------

    def _ping(self) -> None:
        self._pinged += 1
        self._write(encode.PING)

    def _write(self, said: bytes | memoryview) -> None:
        self._output.append(said)
        self.output_bytes += len(said)

    def _parted(self, messages: Messages) -> Iterator[Messages | Replies]:
        """What answers nothing that was asked, and then answers; each in order. So whoever is
        answered has heard all that was said before."""
        answers = messages.sids == _INBOX_SID
        if not answers.any():
            yield messages
            return
        part = messages
        if not answers.all():
            yield messages.pick(~answers)
            part = messages.pick(answers)
        found, good = parse_numbers(part.data, part.subjects + len(self._inbox), part.subject_ends)
        if not good.all():  # Somebody guessed the inbox; nobody asked for that.
            found, part = found[good], part.pick(good)
        yield Replies(found, part)
