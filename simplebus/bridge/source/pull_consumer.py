"""What one consumer of a stream sends, as it is asked for it.

Rule 1: more is asked for when little is under way, and not while much waits to be taken. That is
bounded in bytes, too: a server ends a connection on which more of them wait than it holds.
Rule 2: a consumer counts what it sends. Where that does not go up by one each time, something was
lost on the way, or another leader knows no better: nothing more of it counts.
"""

from __future__ import annotations

import numpy as np

from simplebus.bridge.nats_connection import NatsWire
from simplebus.core.errors import BusConnectionError
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.events import Messages
from simplebus.nats.client.jetstream_codec import Deliveries
from simplebus.net.nats_connection import new_inbox

PULL_MESSAGES = 8192
PULL_BYTES = 8 * 1024 * 1024
"""Half as much more may be under way, and more where a message is longer; servers hold 64 MiB for
each connection, unless told otherwise."""
_PULL_SECONDS = 30.0
_HEARTBEAT, _NO_MESSAGES, _TIMED_OUT = 100, 404, 408
_TOO_LONG = "message size exceeds maxbytes"
"""What is said where the next message has no room in what was asked for."""


class Pulled:
    """One consumer, for as long as nobody else asks it for anything."""

    def __init__(
        self,
        wire: NatsWire,
        stream: str,
        consumer: str,
        *,
        sent: int,
        pending: int,
        beat: float,
        most: int = 0,
    ) -> None:
        """It has `sent` so many messages before, and so many more are `pending`. `beat`: seconds
        after which it says that it is there. `most` is how many it may be asked for at once; 0 for
        any number."""
        self._core = wire.core
        self._stream, self._consumer = stream, consumer
        self._sent = sent
        self.pending = pending
        """How many there are behind what has come."""
        self._beat = beat
        self._most = min(most or PULL_MESSAGES, PULL_MESSAGES)
        self._most_bytes = PULL_BYTES
        self._asked = self._asked_bytes = 0
        """So much is under way, as far as that is known: in bytes it is not to the last one."""
        self._last_bytes = 0
        """How many the last request was for."""
        self._over = ""
        """Why nothing of it counts any more; empty while it does."""
        self._inbox = new_inbox()
        self._sid = wire.core.subscribe(self._inbox)

    def close(self) -> None:
        """What it still sends goes nowhere."""
        self._core.unsubscribe(self._sid)

    def ask(self) -> None:
        """Ask for more, if little is under way. `flush` the link."""
        if self._asked * 2 > self._most and self._asked_bytes * 2 > self._most_bytes:
            return
        count = max(self._most - self._asked, self._most // 2, 1)
        size = max(self._most_bytes - self._asked_bytes, self._most_bytes // 2)
        request = jetstream_codec.next_request(
            batch=count,
            expires_seconds=_PULL_SECONDS,
            idle_seconds=min(self._beat, _PULL_SECONDS / 2),
            max_bytes=size,
        )
        subject = f"{jetstream_codec.API}CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        self._core.publish(subject, request, reply=self._inbox)
        self._asked += count
        self._asked_bytes += size
        self._last_bytes = size

    def take(self, messages: Messages) -> Deliveries:
        """What of these it has sent, in its order."""
        told = jetstream_codec.deliveries(messages.pick(messages.sids == self._sid))
        if not told.good.all():
            for row in np.flatnonzero(~told.good).tolist():
                self._hear(told.messages.headers(row))
            told = told.pick(told.good)
        count = told.messages.count
        if count:
            self._has_come(count, _size_of(told.messages))
            last = np.arange(count) == count - 1
            self.pending = int(told.pick(last).pending[0])
            if (told.counts != np.arange(self._sent + 1, self._sent + count + 1)).any():
                self._over = self._over or "something of what it sent has not come"
            self._sent += count
        return told.pick(np.zeros(count, np.bool_)) if self._over else told

    def _hear(self, headers: bytes) -> None:
        """What is said of a request: that it is over, but for a heartbeat."""
        code, words = jetstream_codec.status(headers)
        is_too_long = words.lower() == _TOO_LONG
        if code in (_HEARTBEAT, _NO_MESSAGES, _TIMED_OUT):
            self.pending = 0  # What was told to be behind the last one is gone.
        elif code and not is_too_long and not jetstream_codec.has_ended_well(code, words):
            self._over = f"{code} {words}".strip()
        if code != _HEARTBEAT:
            count, size = jetstream_codec.pending(headers), jetstream_codec.pending_bytes(headers)
            self._has_come(count, size)
            if is_too_long and size >= self._last_bytes:  # It would never come.
                self._most_bytes *= 2

    def _has_come(self, count: int, size: int) -> None:
        """So much is under way no more. A request for messages that have all come ends in silence:
        nobody says how many of its bytes are left."""
        self._asked = max(0, self._asked - count)
        self._asked_bytes = max(0, self._asked_bytes - size) if self._asked else 0

    def check(self) -> None:
        """Raise BusConnectionError where nothing will come any more: who reads begins anew."""
        if self._over:
            raise BusConnectionError(
                f"the consumer {self._consumer!r} of stream {self._stream!r} has ended: "
                f"{self._over}"
            )


def _size_of(messages: Messages) -> int:
    """As a server counts: with less, or more, what is under way would be known ever worse."""
    subjects = messages.subject_ends - messages.subjects
    replies = np.maximum(messages.reply_ends - messages.replies, 0)
    return int((subjects + replies + messages.ends - messages.bodies).sum())
