"""Latency measurement: publish to confirm, publish to ack, and event loop delay.

To keep the cost low, only some reads of published messages are timed, and one message per class
at a time. Times come from the event loop's clock.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import trio

from simplebus.core.broker.broker import Broker
from simplebus.core.histogram import Histogram, HistogramSnapshot

if TYPE_CHECKING:
    from simplebus.core.message_class.message_class import MessageClass
    from simplebus.core.session.session import Session
    from simplebus.server.observability.message_spans import MessageSpans

_SAMPLE_INTERVAL_SECONDS = 0.01
"""Minimum time between two timed reads."""
_PENDING_BATCHES_MAX = 64
_LOOP_CHECK_SECONDS = 0.1
_RECENT_SECONDS = 60.0
_RECENT_STEP_SECONDS = 5.0


class Latencies(NamedTuple):
    """Histograms of latencies."""

    confirm: HistogramSnapshot
    """Time from reading published messages until they are confirmed."""
    ack: HistogramSnapshot
    """Time from accepting a message until every subscription has acknowledged it."""
    loop_delay: HistogramSnapshot
    """Delay of timers in the event loop."""


class RecentLatencies:
    """Latencies of about the last minute."""

    def __init__(self) -> None:
        self._history: deque[tuple[float, Latencies]] = deque()

    def snapshot(self, latency: LatencyRecorder) -> Latencies:
        """Return the latencies of about the last minute."""
        now, current = trio.current_time(), latency.snapshots()
        history = self._history
        if not history or now - history[-1][0] >= _RECENT_STEP_SECONDS:
            history.append((now, current))
        while len(history) > 1 and now - history[1][0] >= _RECENT_SECONDS:
            history.popleft()
        pairs = zip(current, history[0][1], strict=True)
        return Latencies(*(after.difference(before) for after, before in pairs))


class LatencyRecorder:
    """Latency histograms of one server. Times are in seconds by the clock of the event loop."""

    def __init__(self, broker: Broker, spans: MessageSpans | None = None) -> None:
        """`spans` records spans of sampled messages; None records no spans."""
        self._broker = broker
        self._spans = spans
        self.confirm_latency = Histogram()
        """Time from reading published messages until they are confirmed."""
        self.ack_latency = Histogram()
        """Time from accepting a message until every subscription has acknowledged it."""
        self.loop_delay = Histogram()
        """Delay of timers in the event loop."""
        self.pending_batches: deque[tuple[int, float]] = deque(maxlen=_PENDING_BATCHES_MAX)
        """Write batches that are not durable yet, with the time of their first entry."""
        self._last_batch = 0
        self._last_sample_at = float("-inf")
        broker.store.class_registry.set_probe_observer(self)

    def observe_probe(self, cls: MessageClass, now: float) -> None:
        """Record that all positions have acknowledged the probe of a class."""
        self.ack_latency.observe(now - cls.probe_accepted_at)
        if self._spans is not None:
            self._spans.record(cls, now)

    def record_applied(self, now: float) -> None:
        """Record that input was processed, before replies are sent."""
        commit_log = self._broker.commit_log
        if (
            commit_log is not None
            and commit_log.last_batch_number >= self._last_batch
            and commit_log.next_batch_bytes
        ):
            self._last_batch = commit_log.last_batch_number + 1
            self.pending_batches.append((self._last_batch, now))

    def record_sent(self, now: float, session: Session) -> None:
        """Record that the replies to the same input were sent."""
        if (
            now - self._last_sample_at < _SAMPLE_INTERVAL_SECONDS
            or self._broker.commit_log is not None
        ):
            return
        if session.last_publish_tick == self._broker.clock.tick:
            self._last_sample_at = now
            self.confirm_latency.observe(trio.current_time() - now)

    def record_durable(self) -> None:
        """Record the confirm latency of write batches that are durable now."""
        commit_log = self._broker.commit_log
        assert commit_log is not None
        if self.pending_batches[0][0] > commit_log.durable_position:
            return
        now = trio.current_time()
        while self.pending_batches and self.pending_batches[0][0] <= commit_log.durable_position:
            self.confirm_latency.observe(now - self.pending_batches.popleft()[1])

    def snapshots(self) -> Latencies:
        """Return snapshots of the histograms."""
        return Latencies(
            self.confirm_latency.snapshot(),
            self.ack_latency.snapshot(),
            self.loop_delay.snapshot(),
        )

    async def measure_loop_delay(self) -> None:
        """Measure the event loop delay until cancelled."""
        while True:
            due = trio.current_time() + _LOOP_CHECK_SECONDS
            await trio.sleep_until(due)
            self.loop_delay.observe(max(0.0, trio.current_time() - due))
