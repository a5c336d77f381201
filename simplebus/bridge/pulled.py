"""What one consumer of a stream sends, as it is asked for it.

Rule 1: more is asked for when little is under way, and not while much waits to be taken.
Rule 2: a consumer counts what it sends. Where that does not go up by one each time, something was
lost on the way, or another leader knows no better: nothing more of it counts.
"""

from __future__ import annotations

import numpy as np

from simplebus.bridge.nats_wire import NatsWire
from simplebus.core.errors import BusConnectionError
from simplebus.engine.link import new_inbox
from simplebus.nats.client import jetstream
from simplebus.nats.client.events import Messages
from simplebus.nats.client.jetstream import Deliveries

PULL_MESSAGES = 8192
_PULL_SECONDS = 30.0
_HEARTBEAT, _NO_MESSAGES, _TIMED_OUT = 100, 404, 408


class Pulled:
    """One consumer, for as long as nobody else asks it for anything."""

    def __init__(
        self, wire: NatsWire, stream: str, consumer: str, *, sent: int, pending: int, beat: float
    ) -> None:
        """It has `sent` so many messages before, and so many more are `pending`. `beat`: seconds
        after which it says that it is there."""
        self._core = wire.core
        self._stream, self._consumer = stream, consumer
        self._sent = sent
        self.pending = pending
        """How many there are behind what has come."""
        self._beat = beat
        self._asked = 0
        self._over = ""
        """Why nothing of it counts any more; empty while it does."""
        self._inbox = new_inbox()
        self._sid = wire.core.subscribe(self._inbox)

    def close(self) -> None:
        """What it still sends goes nowhere."""
        self._core.unsubscribe(self._sid)

    def ask(self) -> None:
        """Ask for more, if little is under way. `flush` the link."""
        if self._asked * 2 > PULL_MESSAGES:
            return
        count = PULL_MESSAGES - self._asked
        request = jetstream.next_request(
            batch=count,
            expires_seconds=_PULL_SECONDS,
            idle_seconds=min(self._beat, _PULL_SECONDS / 2),
        )
        subject = f"{jetstream.API}CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        self._core.publish(subject, request, reply=self._inbox)
        self._asked += count

    def take(self, messages: Messages) -> Deliveries:
        """What of these it has sent, in its order."""
        told = jetstream.deliveries(messages.pick(messages.sids == self._sid))
        if not told.good.all():
            for row in np.flatnonzero(~told.good).tolist():
                self._hear(*jetstream.status(told.messages.headers(row)))
            told = told.pick(told.good)
        count = told.messages.count
        self._asked = max(0, self._asked - count)
        if count:
            last = np.arange(count) == count - 1
            self.pending = int(told.pick(last).pending[0])
            if (told.counts != np.arange(self._sent + 1, self._sent + count + 1)).any():
                self._over = self._over or "something of what it sent has not come"
            self._sent += count
        return told.pick(np.zeros(count, np.bool_)) if self._over else told

    def _hear(self, code: int, words: str) -> None:
        if code:  # There is nothing now: what was told to be behind the last one is gone.
            self.pending = 0
        if code != _HEARTBEAT:
            self._asked = 0  # What was asked for is over.
        if code not in (0, _HEARTBEAT, _NO_MESSAGES, _TIMED_OUT):
            self._over = f"{code} {words}".strip()

    def check(self) -> None:
        """Raise BusConnectionError where nothing will come any more: who reads begins anew."""
        if self._over:
            raise BusConnectionError(
                f"the consumer {self._consumer!r} of stream {self._stream!r} has ended: "
                f"{self._over}"
            )
