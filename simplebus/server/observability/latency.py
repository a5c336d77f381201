"""How long things take on the event loop, measured now and then.

Rule 1: what is measured costs a comparison where it is not: of all turns that publish only some are
timed, of all messages of a class one at a time.
Rule 2: times are the loop's, but for the stalls: who stands still cannot tell.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import trio

from simplebus.core.broker.broker import Broker
from simplebus.core.histogram import Histogram, HistogramSnapshot

if TYPE_CHECKING:
    from simplebus.core.session.session import Session

_SAMPLE_SECONDS = 0.01
"""So far apart are the turns that are timed."""
_ASKED_MAX = 64
_BEAT_SECONDS = 0.1
_RECENT_SECONDS = 60.0
_RECENT_STEP_SECONDS = 5.0

Snapshots: TypeAlias = tuple[HistogramSnapshot, HistogramSnapshot, HistogramSnapshot]


class Recent:
    """What was observed in about the last minute."""

    def __init__(self) -> None:
        self._before: deque[tuple[float, Snapshots]] = deque()

    def look(self, timing: Timing) -> Snapshots:
        """Of confirms, acknowledgements and the loop's delay."""
        now, seen = trio.current_time(), timing.snapshots()
        before = self._before
        if not before or now - before[-1][0] >= _RECENT_STEP_SECONDS:
            before.append((now, seen))
        while len(before) > 1 and now - before[1][0] >= _RECENT_SECONDS:
            before.popleft()
        first, second, third = (a.since(b) for a, b in zip(seen, before[0][1], strict=True))
        return first, second, third


class Timing:
    """Of one engine."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.confirmed_after = Histogram()
        """From reading what was published until it is confirmed."""
        self.acknowledged_after = Histogram()
        """From accepting a message until every subscription has acknowledged it."""
        self.late = Histogram()
        """How much later than it could the loop had time for something."""
        self.asked: deque[tuple[int, float]] = deque(maxlen=_ASKED_MAX)
        """Lots that have not reached what is promised, and since when there is something in
        them."""
        self._lot = 0
        self._sampled_at = float("-inf")
        broker.store.class_registry.enable_ack_latency(self.acknowledged_after)

    def noted(self, now: float) -> None:
        """A turn has been applied, and nothing of it sent yet."""
        ledger = self._broker.commit_log
        if ledger is not None and ledger.taken >= self._lot and ledger.noted_bytes:
            self._lot = ledger.taken + 1
            self.asked.append((self._lot, now))

    def sent(self, now: float, session: Session) -> None:
        """The same turn is over: what it made ready is sent, as far as sockets take it."""
        if now - self._sampled_at < _SAMPLE_SECONDS or self._broker.commit_log is not None:
            return
        if session.last_publish_tick == self._broker.clock.tick:
            self._sampled_at = now
            self.confirmed_after.observe(trio.current_time() - now)

    def reached(self) -> None:
        """Lots may have reached what is promised."""
        ledger = self._broker.commit_log
        assert ledger is not None
        if self.asked[0][0] > ledger.reached:
            return
        now = trio.current_time()
        while self.asked and self.asked[0][0] <= ledger.reached:
            self.confirmed_after.observe(now - self.asked.popleft()[1])

    def snapshots(self) -> Snapshots:
        """Of all three."""
        return (
            self.confirmed_after.snapshot(),
            self.acknowledged_after.snapshot(),
            self.late.snapshot(),
        )

    async def beat(self) -> None:
        """Measure how late the loop is, until cancelled."""
        while True:
            due = trio.current_time() + _BEAT_SECONDS
            await trio.sleep_until(due)
            self.late.observe(max(0.0, trio.current_time() - due))
