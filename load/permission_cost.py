"""Cost of permissions in the broker's core: equal batches through brokers with and without rules.

Without sockets and other processes the figures are steady, and they are the worst case: in a whole
server the share of permissions is smaller. Run by the scenario `permissions`. Deliveries are
compared with the unrestricted broker's before their time counts. A time is the median of RUNS
batches; a ratio is taken within a round.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from statistics import median

from load.measure import RunOptions
from load.report import Row
from simplebus.core.broker.broker import Broker
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.session.session import Session
from simplebus.core.settings import Settings
from simplebus.core.users.permissions import Grants, PermissionRule, PermissionRules, Permissions

CLASS, NUMBER = 1, 7
SIZE_BYTES = 128
CHANNEL, DENIED = "load.f.1", "secret.x"
BATCHES = (100, 1000)
"""Messages per read."""
RUNS = 200
"""Batches per round."""
RULES = {
    "by class": PermissionRules(
        (PermissionRule("1"), PermissionRule("6*")),
        (PermissionRule("7"), PermissionRule("secret*")),
    ),
    "by channel": PermissionRules(
        (PermissionRule("1", "#"), PermissionRule("6*")),
        (PermissionRule("1", "secret.#"), PermissionRule("1", "other.*")),
    ),
}


def core_cost(run_options: RunOptions) -> list[Row]:
    """Return the rows with ratios to an unrestricted broker."""
    rows = []
    for batch in BATCHES:
        for has_denied in (False, True):
            found = _ratios(batch, run_options.rounds, has_denied=has_denied)
            for name, ratios in found.items():
                title = f"core's time, batches of {batch}, {name}"
                if has_denied:
                    title += ", with denied messages"
                # Messages are then filtered, as for subscriptions with channels.
                target = None if has_denied and "channel" in name else 1.05
                rows.append(Row("permissions", title, ratios, "x", target, less_is_better=True))
    return rows


def _ratios(batch: int, rounds: int, *, has_denied: bool) -> dict[str, list[float]]:
    unrestricted = _PermissionCase(None, has_denied=has_denied)
    restricted = {
        name: _PermissionCase(rules, has_denied=has_denied) for name, rules in RULES.items()
    }
    found: dict[str, list[float]] = {name: [] for name in RULES}
    for _ in range(rounds):
        times: dict[str, list[int]] = {name: [] for name in ("", *RULES)}
        for _ in range(RUNS):
            expected, elapsed_ns = unrestricted.deliver_batch(batch)
            times[""].append(elapsed_ns)
            for name, bus in restricted.items():
                delivered, elapsed_ns = bus.deliver_batch(batch)
                assert delivered == expected, name
                times[name].append(elapsed_ns)
        for name, ratios in found.items():
            ratios.append(median(times[name]) / median(times[""]))
    return found


@dataclass
class _PermissionCase:
    """Broker with one publisher and one subscriber with the same permissions."""

    rules: PermissionRules | None
    has_denied: bool
    """True if the class has a message that the subscriber must not read."""

    def __post_init__(self) -> None:
        self._broker, self._buffer = Broker(Settings()), ReceiveBuffer()
        grants = None
        if self.rules is not None:
            grants = Grants(Permissions(publish=self.rules, subscribe=self.rules))
        self._publisher, self._subscriber = self._connect(grants), self._connect(grants)
        request = json.dumps({}).encode()
        self._send(
            self._subscriber,
            frames.encode(
                frames.SUBSCRIBE, class_id=CLASS, message_id=2, timer_index=NUMBER, content=request
            ),
        )
        self._stored = 0
        """Messages in the class."""
        self._published = 0
        """Messages of the publisher."""
        if self.has_denied:
            self._send(self._connect(None), _messages(0, 1, DENIED))
            self._stored = 1
        self._receive(self._subscriber)
        self._acknowledge(0)
        self.deliver_batch(1)  # The first Deliver frame is larger.

    def _connect(self, grants: Grants | None) -> Session:
        session = self._broker.open_session()
        session.user, session.grants = "load" if grants else "", grants
        content = json.dumps({"version": 2, "classes": [CLASS]}).encode()
        self._send(session, frames.encode(frames.CONNECT, message_id=1, content=content))
        self._receive(session)
        return session

    def deliver_batch(self, count: int) -> tuple[bytes, int]:
        """Publish, deliver and ack `count` messages.

        Returns the delivered bytes, and nanoseconds of CPU time.
        """
        first = self._stored
        messages = _messages(self._published, count, CHANNEL)
        self._published += count
        started_at = time.process_time_ns()
        self._send(self._publisher, messages)
        received = self._receive(self._subscriber)
        self._stored += count
        self._acknowledge(first)
        self._receive(self._publisher)
        return received, time.process_time_ns() - started_at

    def _acknowledge(self, first: int) -> None:
        if first < self._stored:
            data = frames.encode_ack(class_id=NUMBER, timer_index=0, first=first, last=self._stored)
            self._send(self._subscriber, data)

    def _send(self, session: Session, data: bytes) -> None:
        self._broker.receive(session, self._buffer, self._buffer.fill(data))

    def _receive(self, session: Session) -> bytes:
        received = []
        self._broker.end_turn()
        while not session.outbox.is_idle:
            piece = session.outbox.peek(self._broker.tick_number)
            received.append(bytes(piece))
            session.outbox.mark_sent(len(piece), self._broker.tick_number)
        return b"".join(received)


def _messages(first: int, count: int, channel: str) -> bytes:
    content = envelope_batch.encode(Envelope(channel), b"x" * SIZE_BYTES)
    return b"".join(
        frames.encode(frames.ENVELOPE, class_id=CLASS, message_id=number, content=content)
        for number in range(first, first + count)
    )
