"""Cached snapshots of one program, and its rates of the last minutes.

A snapshot is reused for a short time, however many clients read it. Detailed snapshots are taken
only while a client reads them.

    tick ─► snapshot ─► rate history ───────────────┐
    request ─► snapshot, unless a recent one exists ┴─► /facts, /history, /metrics
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from simplebus.monitor import page
from simplebus.monitor.exposition import Exposition
from simplebus.monitor.rate_series import RateHistory, RateSeries
from simplebus.monitor.requests import (
    BadRequestError,
    Request,
    RequestHandler,
    Response,
    ResponseSteps,
    Routes,
    health_handlers,
    json_response,
)
from simplebus.monitor.snapshot import (
    Health,
    MonitorSnapshot,
    SnapshotSource,
    SnapshotSteps,
    take_snapshot,
)

TICK_SECONDS = 1.0
HISTORY_TICKS = 180
HISTORY_STEPS = {10: 360, 300: 288}
"""Ticks of the steps of the longer histories, and number of steps: an hour and a day."""
SNAPSHOT_MAX_AGE_SECONDS = 0.5
"""Time for which a snapshot is reused."""
READER_TIMEOUT_SECONDS = 5.0
"""Time for which a reader of detailed snapshots is expected to return."""
_PARTS_PER_STEP = 2


class Dashboard:
    """Monitoring data of one program."""

    def __init__(self, source: SnapshotSource, health: Callable[[], Health] | None = None) -> None:
        """`health` returns the current health; without it, that of the latest snapshot is used."""
        self._source = source
        self._get_health = health
        self._snapshot: MonitorSnapshot | None = None
        self._is_detailed = False
        self._last_read_at = float("-inf")
        self._exposition = Exposition()
        self._encoded_snapshot: tuple[MonitorSnapshot, bytes] | None = None
        self._recent_rates = RateSeries(tick_count=1, step_count_max=HISTORY_TICKS)
        self._averaged_rates = {
            ticks: RateSeries(tick_count=ticks, step_count_max=steps)
            for ticks, steps in HISTORY_STEPS.items()
        }
        self._previous: MonitorSnapshot | None = None
        """Snapshot of the previous tick."""
        self.now = 0.0
        """Current time in seconds. The caller sets it before each call and each step."""

    def tick(self) -> SnapshotSteps:
        """Take a snapshot in steps and record its rates. Called once per second."""
        has_reader = self.now - self._last_read_at < READER_TIMEOUT_SECONDS
        snapshot = yield from self._take_snapshot(detailed=has_reader)
        before, self._previous = self._previous, snapshot
        if before is not None and snapshot.taken_at > before.taken_at:
            seconds = snapshot.taken_at - before.taken_at
            rates = {
                name: max(0.0, value - before.flows[name]) / seconds
                for name, value in snapshot.flows.items()
                if name in before.flows
            }
            for series in (self._recent_rates, *self._averaged_rates.values()):
                series.append(seconds, rates)
        return snapshot

    def get_snapshot(self, *, detailed: bool) -> SnapshotSteps:
        """Return a recent snapshot, or take one in steps."""
        if detailed:
            self._last_read_at = self.now
        last = self._snapshot
        is_fresh = last is not None and self.now - last.taken_at < SNAPSHOT_MAX_AGE_SECONDS
        if last is not None and is_fresh and (self._is_detailed or not detailed):
            yield
            return last
        return (yield from self._take_snapshot(detailed=detailed))

    def _take_snapshot(self, *, detailed: bool) -> SnapshotSteps:
        taken_at = self.now
        snapshot = yield from take_snapshot(self._source, detailed=detailed)
        self._snapshot = msgspec.structs.replace(snapshot, taken_at=taken_at)
        self._is_detailed = detailed
        return self._snapshot

    def get_rate_history(self, since: int = 0) -> RateHistory:
        """Return the rates of the last minutes, from second number `since` on."""
        return self._recent_rates.read(since)

    def health(self) -> Health:
        """Return whether the program accepts work."""
        if self._get_health is not None:
            return self._get_health()
        return (
            self._snapshot.health
            if self._snapshot is not None
            else Health(ready=False, reason="starting")
        )

    # Answers -------------------------------------------------------------------------------------

    def build_routes(self, extra_handlers: Mapping[str, RequestHandler] | None = None) -> Routes:
        """Return the handlers of all paths, including `extra_handlers` of the program."""
        handlers: dict[str, RequestHandler] = {
            **page.build_handlers(),
            **health_handlers(self.health),
            "/facts": self._handle_facts,
            "/history": self._handle_history,
            "/metrics": self._handle_metrics,
        }
        return Routes({**handlers, **(extra_handlers or {})})

    def _handle_facts(self, request: Request) -> ResponseSteps:
        """Answer with the snapshot, and the rates since second number `since`."""
        since = request.get_int("since", 0, maximum=1 << 53)
        snapshot = yield from self.get_snapshot(detailed=True)
        if self._encoded_snapshot is None or self._encoded_snapshot[0] is not snapshot:
            self._encoded_snapshot = snapshot, msgspec.json.encode(_without_metrics(snapshot))
        body = {
            "facts": msgspec.Raw(self._encoded_snapshot[1]),
            "rates": self.get_rate_history(since),
        }
        return Response(msgspec.json.encode(body))

    def _handle_history(self, request: Request) -> ResponseSteps:
        """Answer with the rates of the last hour or day, in steps of `step` seconds.

        The last step may be shorter.
        """
        yield
        step = request.get_int("step", min(HISTORY_STEPS), maximum=max(HISTORY_STEPS))
        if step not in self._averaged_rates:
            expected = " or ".join(map(str, HISTORY_STEPS))
            raise BadRequestError(f"expected a step of {expected} seconds, got {step}")
        return json_response(self._averaged_rates[step].read(with_incomplete=True))

    def _handle_metrics(self, request: Request) -> ResponseSteps:
        snapshot = yield from self.get_snapshot(detailed=False)
        content_type, lines = self._exposition.encode(snapshot.metrics, request.accept)
        parts: list[bytes] = []
        for count, part in enumerate(lines):
            parts.append(part)
            if count % _PARTS_PER_STEP == _PARTS_PER_STEP - 1:
                yield
        return Response(b"".join(parts), content_type)


def _without_metrics(snapshot: MonitorSnapshot) -> MonitorSnapshot:
    return msgspec.structs.replace(snapshot, metrics=[])
