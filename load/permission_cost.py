"""What permissions cost the broker's core: the same batches through brokers that differ in nothing
else, in one process, in turn. No socket and no other program is in these figures, so they are
steady where those of whole programs are not; and they are the worst case, since whatever a server
does besides makes the share of permissions smaller.

Rule 1: what is delivered is compared, byte by byte, with what the broker delivers that asks nobody,
before its time counts.
Rule 2: a time is the median of some batches; a ratio is taken within a round.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from statistics import median

from load.measure import Manner
from load.report import Row
from simplebus.core.broker.broker import Broker
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.session.session import Session
from simplebus.core.settings import Settings
from simplebus.core.users.permissions import Grants, Permissions, Rule, Rules

CLASS, NUMBER = 1, 7
SIZE_BYTES = 128
CHANNEL, DENIED = "load.f.1", "secret.x"
BATCHES = (100, 1000)
"""Messages that come in one read."""
RUNS = 200
"""Batches a round."""
RULES = {
    "by class": Rules((Rule("1"), Rule("6*")), (Rule("7"), Rule("secret*"))),
    "by channel": Rules(
        (Rule("1", "#"), Rule("6*")), (Rule("1", "secret.#"), Rule("1", "other.*"))
    ),
}


def core(manner: Manner) -> list[Row]:
    """Rows of ratios to a broker that asks nobody."""
    rows = []
    for batch in BATCHES:
        for others in (False, True):
            found = _ratios(batch, manner.rounds, others=others)
            for name, ratios in found.items():
                title = f"core's time, batches of {batch}, {name}"
                if others:
                    title += ", and some is denied"
                # Then messages are looked at, as for who subscribes to some channels only.
                wish = None if others and "channel" in name else 1.05
                rows.append(Row("permissions", title, ratios, "x", wish, less_is_better=True))
    return rows


def _ratios(batch: int, rounds: int, *, others: bool) -> dict[str, list[float]]:
    asking_nobody = _Bus(None, others=others)
    judging = {name: _Bus(rules, others=others) for name, rules in RULES.items()}
    found: dict[str, list[float]] = {name: [] for name in RULES}
    for _ in range(rounds):
        times: dict[str, list[int]] = {name: [] for name in ("", *RULES)}
        for _ in range(RUNS):
            expected, taken = asking_nobody.carry(batch)
            times[""].append(taken)
            for name, bus in judging.items():
                delivered, taken = bus.carry(batch)
                assert delivered == expected, name
                times[name].append(taken)
        for name, ratios in found.items():
            ratios.append(median(times[name]) / median(times[""]))
    return found


@dataclass
class _Bus:
    """A broker, one who publishes and one who subscribes to all that he may see."""

    rules: Rules | None
    others: bool
    """Whether a message is stored in the class that the subscriber may not see."""

    def __post_init__(self) -> None:
        self._broker, self._buffer = Broker(Settings()), ReceiveBuffer()
        grants = None
        if self.rules is not None:
            grants = Grants(Permissions(publish=self.rules, subscribe=self.rules))
        self._publisher, self._subscriber = self._enter(grants), self._enter(grants)
        request = json.dumps({}).encode()
        self._say(
            self._subscriber,
            frames.encode(
                frames.SUBSCRIBE, class_id=CLASS, message_id=2, timer_index=NUMBER, content=request
            ),
        )
        self._stored = 0
        """Messages in the class."""
        self._published = 0
        """Those of the publisher."""
        if self.others:
            self._say(self._enter(None), _messages(0, 1, DENIED))
            self._stored = 1
        self._hear(self._subscriber)
        self._acknowledge(0)
        self.carry(1)  # Whose messages follow is said in front of the first one.

    def _enter(self, grants: Grants | None) -> Session:
        session = self._broker.open_session()
        session.user, session.subject_grants = "load" if grants else "", grants
        content = json.dumps({"version": 2, "classes": [CLASS]}).encode()
        self._say(session, frames.encode(frames.CONNECT, message_id=1, content=content))
        self._hear(session)
        return session

    def carry(self, count: int) -> tuple[bytes, int]:
        """Have so many messages published, delivered and acknowledged. Returns what the subscriber
        heard, and nanoseconds of this process."""
        first = self._stored
        messages = _messages(self._published, count, CHANNEL)
        self._published += count
        begun = time.process_time_ns()
        self._say(self._publisher, messages)
        heard = self._hear(self._subscriber)
        self._stored += count
        self._acknowledge(first)
        self._hear(self._publisher)
        return heard, time.process_time_ns() - begun

    def _acknowledge(self, first: int) -> None:
        if first < self._stored:
            data = frames.encode_ack(class_id=NUMBER, timer_index=0, first=first, last=self._stored)
            self._say(self._subscriber, data)

    def _say(self, session: Session, data: bytes) -> None:
        self._broker.receive(session, self._buffer, self._buffer.fill(data))

    def _hear(self, session: Session) -> bytes:
        heard = []
        self._broker.drain_writable()
        while not session.outbox.is_idle:
            piece = session.outbox.peek(self._broker.tick_number)
            heard.append(bytes(piece))
            session.outbox.mark_sent(len(piece), self._broker.tick_number)
        return b"".join(heard)


def _messages(first: int, count: int, channel: str) -> bytes:
    content = envelope_batch.encode(Envelope(channel), b"x" * SIZE_BYTES)
    return b"".join(
        frames.encode(frames.ENVELOPE, class_id=CLASS, message_id=number, content=content)
        for number in range(first, first + count)
    )
