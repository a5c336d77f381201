"""Tests of the dashboard: cached snapshots and rate history."""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator
from typing import Any, TypeVar

import pytest

from simplebus.monitor import dashboard as dashboard_module
from simplebus.monitor.dashboard import Dashboard
from simplebus.monitor.metrics_builder import MetricsBuilder
from simplebus.monitor.requests import BadRequestError, Request, Response
from simplebus.monitor.snapshot import Health, MonitorSnapshot, SnapshotSteps, merge_snapshots

T = TypeVar("T")


def run_steps(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


class FakeProgram:
    """Source of snapshots with one counter; records how detailed each request was."""

    def __init__(self) -> None:
        self.count = 0
        self.requested_details: list[bool] = []
        self.flow = "sent"

    def take_snapshot(self, detailed: bool) -> MonitorSnapshot:
        self.requested_details.append(detailed)
        metrics_builder = MetricsBuilder()
        metrics_builder.counter(self.flow, "Sent.", self.count)
        return MonitorSnapshot(
            title="it", flows={self.flow: self.count}, metrics=metrics_builder.build()
        )


def get(dashboard: Dashboard, target: str, accept: str = "") -> Response:
    return run_steps(dashboard.build_routes().handle(Request.parse(target, accept)))


def ask_json(dashboard: Dashboard, target: str) -> Any:
    return json.loads(get(dashboard, target).body)


def test_rates_are_differences_per_second() -> None:
    program = FakeProgram()
    dashboard = Dashboard(program.take_snapshot)
    for second, count in enumerate((0, 10, 10, 40)):
        dashboard.now, program.count = float(second * 2), count
        run_steps(dashboard.tick())
    rates = dashboard.get_rate_history()
    assert rates.first == 0
    assert rates.seconds == [2.0, 2.0, 2.0]
    assert rates.flows == {"sent": [5.0, 0.0, 15.0]}
    assert dashboard.get_rate_history(since=2).flows == {"sent": [15.0]}
    assert dashboard.get_rate_history(since=3).flows == {}
    assert dashboard.get_rate_history(since=99).first == 3


def test_rates_cover_the_time_between_the_snapshots() -> None:
    """Rates use the time between snapshots, because a snapshot may be late after its tick."""
    dashboard = Dashboard(lambda detailed: MonitorSnapshot("it", flows={"a": 30.0 * dashboard.now}))
    for requested_at, taken_at in ((1.0, 1.0), (2.0, 2.5), (3.0, 3.0)):
        dashboard.now = requested_at
        steps = dashboard.tick()
        dashboard.now = taken_at
        run_steps(steps)
    assert dashboard.get_rate_history().seconds == [1.5, 0.5]
    assert dashboard.get_rate_history().flows == {"a": [30.0, 30.0]}


def test_rate_history_is_bounded_and_keeps_its_numbering() -> None:
    program = FakeProgram()
    dashboard = Dashboard(program.take_snapshot)
    for second in range(dashboard_module.HISTORY_TICKS + 11):
        dashboard.now = float(second)
        run_steps(dashboard.tick())
    rates = dashboard.get_rate_history(since=3)
    assert rates.first == 10
    assert len(rates.seconds) == dashboard_module.HISTORY_TICKS


def test_longer_histories_are_averages_and_bounded() -> None:
    program = FakeProgram()
    dashboard = Dashboard(program.take_snapshot)
    for second in range(10 * 360 + 25):
        dashboard.now, program.count = float(second), second * (second // 10)
        run_steps(dashboard.tick())
    hour = ask_json(dashboard, "/history?step=10")
    assert (hour["first"], len(hour["seconds"])) == (2, 361)
    assert set(hour["seconds"][:-1]) == {10.0}
    assert hour["seconds"][-1] == 4.0
    totals = [second * (second // 10) for second in range(20, 3630, 10)]
    expected = [(upper - lower) / 10 for lower, upper in itertools.pairwise(totals)]
    assert hour["flows"]["sent"][:-1] == expected
    assert hour["flows"]["sent"][-1] == 362.0
    day = ask_json(dashboard, "/history?step=300")
    assert (day["first"], len(day["seconds"])) == (0, 13)
    assert get(dashboard, "/history?step=11").status == 400


def test_flow_has_no_rates_before_its_first_snapshot() -> None:
    program = FakeProgram()
    dashboard = Dashboard(program.take_snapshot)
    for second, flow in enumerate(("sent", "sent", "received", "received")):
        dashboard.now, program.flow = float(second), flow
        run_steps(dashboard.tick())
    assert dashboard.get_rate_history().flows == {
        "sent": [0.0, None, None],
        "received": [None, None, 0.0],
    }


def test_counter_reset_is_no_negative_rate() -> None:
    program = FakeProgram()
    dashboard = Dashboard(program.take_snapshot)
    for second, count in enumerate((10, 5)):
        dashboard.now, program.count = float(second), count
        run_steps(dashboard.tick())
    assert dashboard.get_rate_history().flows == {"sent": [0.0]}


def test_recent_snapshot_is_reused() -> None:
    program = FakeProgram()
    dashboard = Dashboard(program.take_snapshot)
    for _ in range(5):
        get(dashboard, "/metrics")
        get(dashboard, "/facts")
        get(dashboard, "/facts")
    assert program.requested_details == [False, True]
    dashboard.now = dashboard_module.SNAPSHOT_MAX_AGE_SECONDS
    get(dashboard, "/metrics")
    assert program.requested_details == [False, True, False]


def test_detailed_snapshots_are_taken_only_for_readers() -> None:
    program = FakeProgram()
    dashboard = Dashboard(program.take_snapshot)
    run_steps(dashboard.tick())
    dashboard.now = 1.0
    get(dashboard, "/facts")
    for second in range(2, 10):
        dashboard.now = float(second)
        run_steps(dashboard.tick())
    assert program.requested_details == [False, True, *[True] * 4, *[False] * 4]


def test_snapshot_can_be_taken_in_steps() -> None:
    def take_snapshot(detailed: bool) -> SnapshotSteps:
        yield
        yield
        return MonitorSnapshot(title="slowly")

    assert ask_json(Dashboard(take_snapshot), "/facts")["facts"]["title"] == "slowly"


def test_reader_gets_only_new_rates() -> None:
    program = FakeProgram()
    dashboard = Dashboard(program.take_snapshot)
    for second in range(5):
        dashboard.now = float(second)
        run_steps(dashboard.tick())
    assert ask_json(dashboard, "/facts?since=2")["rates"]["first"] == 2
    assert get(dashboard, "/facts?since=-1").status == 400
    assert get(dashboard, f"/facts?since={'9' * 30}").status == 400


def test_health_comes_from_the_callback_or_the_last_snapshot() -> None:
    dashboard = Dashboard(
        lambda detailed: MonitorSnapshot(title="it", health=Health(ready=False, reason="a reason"))
    )
    assert get(dashboard, "/healthz").status == 503
    run_steps(dashboard.tick())
    assert ask_json(dashboard, "/healthz") == {
        "status": "unavailable",
        "live": True,
        "ready": False,
        "draining": False,
        "why": "a reason",
    }
    assert get(Dashboard(lambda detailed: MonitorSnapshot("it"), Health), "/healthz").status == 200


def test_metrics_format_follows_the_accept_header() -> None:
    dashboard = Dashboard(FakeProgram().take_snapshot)
    plain = get(dashboard, "/metrics")
    assert plain.content_type.startswith("text/plain; version=0.0.4")
    assert plain.body.endswith(b"simplebus_sent_total 0.0\n")
    opened = get(dashboard, "/metrics", "application/openmetrics-text; version=1.0.0")
    assert opened.content_type.startswith("application/openmetrics-text")
    assert opened.body.endswith(b"# EOF\n")


def test_merged_snapshots_keep_the_health_of_the_program() -> None:
    main_snapshot = MonitorSnapshot("it", flows={"a": 1}, health=Health())
    part_snapshot = MonitorSnapshot(
        "part", flows={"b": 2}, health=Health(ready=False, reason="it is down")
    )
    merged = merge_snapshots(main_snapshot, [part_snapshot])
    assert (merged.title, merged.flows, merged.health) == ("it", {"a": 1, "b": 2}, Health())


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "²", "1" * 20])
def test_invalid_query_number_is_rejected(text: str) -> None:
    request = Request("/connz", {"limit": text})
    with pytest.raises(BadRequestError, match="expected limit to be a whole number, got"):
        request.get_int("limit", 1, maximum=10)


def test_query_number_is_bounded() -> None:
    assert Request("/connz", {"limit": "5000"}).get_int("limit", 1, maximum=10) == 10
    assert Request("/connz", {}).get_int("limit", 3, maximum=10) == 3
