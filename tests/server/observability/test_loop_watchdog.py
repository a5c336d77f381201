"""Tests of the event loop watchdog."""

from __future__ import annotations

import logging
import threading

import pytest
import trio

from simplebus.server.observability.loop_watchdog import LoopWatchdog


class Clock:
    """Clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def log_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_stall_is_logged_once_at_its_start_and_once_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    stalls = LoopWatchdog(
        threshold_seconds=1.0, clock=clock, describe_stack=lambda: "compute (app.py:7)"
    )
    for _ in range(20):
        clock.now += 0.2
        stalls.check()
    assert log_messages(caplog) == [
        "the event loop is stalled for 1.0 s: it is in compute (app.py:7)"
    ]
    assert (stalls.stall_count, stalls.stalled_seconds) == (1, 0.0)
    stalls.record_heartbeat()
    assert stalls.stalled_seconds == pytest.approx(4.0)
    assert log_messages(caplog)[1:] == ["the event loop runs again after a stall of 4.0 s"]
    clock.now += 0.9
    stalls.check()
    stalls.record_heartbeat()
    assert stalls.stall_count == 1


def test_stopped_process_is_reported_as_stalled_process(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stalls = LoopWatchdog(
        threshold_seconds=1.0, clock=clock, describe_stack=lambda: "wait (trio.py:1)"
    )
    clock.now += 60
    stalls.check()
    assert log_messages(caplog)[0].startswith(
        "the whole process was stalled for 60.0 s: stopped by"
    )
    assert stalls.stall_count == 1


async def test_stall_log_names_the_blocking_function(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    stalls = LoopWatchdog(threshold_seconds=0.0)

    def a_greedy_computation() -> None:
        looker = threading.Thread(target=stalls.check)
        looker.start()
        looker.join()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stalls.run)
        await trio.testing.wait_all_tasks_blocked()
        a_greedy_computation()
        nursery.cancel_scope.cancel()
    (line,) = log_messages(caplog)
    assert "a_greedy_computation (observability/test_loop_watchdog.py:" in line
    assert "\n" not in line


def test_watchdog_thread_ends_with_its_context() -> None:
    before = threading.active_count()
    with LoopWatchdog().watch_in_thread():
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
