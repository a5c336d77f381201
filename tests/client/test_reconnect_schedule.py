"""Tests of the reconnect schedule, without a clock or random numbers."""

from __future__ import annotations

import pytest

from simplebus.client.reconnect import (
    RETRY_DELAY_MAX_SECONDS,
    RETRY_DELAY_MIN_SECONDS,
    STABLE_CONNECTION_SECONDS,
    ConnectAttempt,
    ReconnectSchedule,
    is_worth_retrying,
)
from simplebus.core.errors import BusConnectionError, Reason, RefusedError, RemoteProtocolError


def create_schedule(
    addresses: int = 1, *, reconnect: float | None = 1000.0, random_fraction: float = 0.0
) -> ReconnectSchedule:
    return ReconnectSchedule(
        addresses, timeout=6, reconnect=reconnect, now=100, random_fraction=lambda: random_fraction
    )


def next_attempts(schedule: ReconnectSchedule, count: int, now: float) -> list[tuple[float, int]]:
    """Return delay and address of the next attempts, each of which fails at once."""
    found = []
    for _ in range(count):
        attempt = schedule.next_attempt(now)
        assert attempt is not None
        now += attempt.delay_seconds
        found.append((attempt.delay_seconds, attempt.address_index))
    return found


def test_first_connection_tries_each_address_once_and_shares_the_timeout() -> None:
    schedule = create_schedule(3)
    assert schedule.next_attempt(100) == ConnectAttempt(
        delay_seconds=0, address_index=0, timeout_seconds=2
    )
    assert schedule.next_attempt(101) == ConnectAttempt(
        delay_seconds=0, address_index=1, timeout_seconds=2.5
    )
    assert schedule.next_attempt(105.5) == ConnectAttempt(
        delay_seconds=0, address_index=2, timeout_seconds=0.5
    )
    assert schedule.next_attempt(105.6) is None


def test_first_connection_times_out() -> None:
    schedule = create_schedule(3)
    assert schedule.next_attempt(106) is None


def test_reconnect_starts_with_lost_address_and_backs_off_per_round() -> None:
    schedule = create_schedule(2)
    schedule.mark_connected(1, 101)
    schedule.mark_lost(101 + STABLE_CONNECTION_SECONDS)
    pauses = next_attempts(schedule, 8, 101 + STABLE_CONNECTION_SECONDS)
    assert [address for _, address in pauses] == [1, 0] * 4
    assert [pause for pause, _ in pauses] == pytest.approx([0, 0, 0.05, 0, 0.1, 0, 0.2, 0])


def test_backoff_is_limited_and_randomized() -> None:
    for random_fraction, factor in ((0.0, 1.0), (0.5, 0.75), (1.0, 0.5)):
        schedule = create_schedule(random_fraction=random_fraction)
        schedule.mark_connected(0, 0)
        schedule.mark_lost(10)
        pauses = [pause for pause, _ in next_attempts(schedule, 50, 10)]
        assert pauses[1] == pytest.approx(RETRY_DELAY_MIN_SECONDS * factor)
        assert pauses[-1] == pytest.approx(RETRY_DELAY_MAX_SECONDS * factor)


def test_short_connection_does_not_reset_the_backoff() -> None:
    schedule = create_schedule()
    now = 100.0
    paused = []
    for _ in range(6):
        schedule.mark_connected(0, now)
        schedule.mark_lost(now)
        attempt = schedule.next_attempt(now)
        assert attempt is not None
        paused.append(attempt.delay_seconds)
        now += attempt.delay_seconds
    assert paused == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6])
    schedule.mark_connected(0, now)
    schedule.mark_lost(now + STABLE_CONNECTION_SECONDS)
    assert next_attempts(schedule, 1, now + STABLE_CONNECTION_SECONDS) == [(0, 0)]


def test_reconnect_ends_and_limits_the_last_attempt() -> None:
    schedule = create_schedule(reconnect=10)
    schedule.mark_connected(0, 100)
    schedule.mark_lost(200)
    assert schedule.next_attempt(203) == ConnectAttempt(
        delay_seconds=0, address_index=0, timeout_seconds=6
    )
    last = schedule.next_attempt(209)
    assert last is not None
    assert last.delay_seconds + last.timeout_seconds == pytest.approx(1)
    assert schedule.next_attempt(210) is None


@pytest.mark.parametrize("reconnect", [0, None])
def test_reconnect_can_be_disabled(reconnect: float | None) -> None:
    schedule = create_schedule(reconnect=reconnect)
    assert schedule.reconnect_seconds == 0
    schedule.mark_connected(0, 100)
    schedule.mark_lost(200)
    assert schedule.next_attempt(200) is None


def refusal(reason: Reason) -> BusConnectionError:
    problem = BusConnectionError(f"refused: {reason}")
    problem.__cause__ = RemoteProtocolError(reason, "no")
    return problem


def test_skips_address_with_permanent_refusal() -> None:
    schedule = create_schedule(3)
    schedule.mark_connected(1, 100)
    schedule.mark_lost(200)
    conflict = refusal(Reason.CLASS_NAME_CONFLICT)
    assert next_attempts(schedule, 1, 200) == [(0, 1)]
    assert schedule.mark_failed(1, conflict)
    assert next_attempts(schedule, 1, 200) == [(0, 2)]
    assert schedule.mark_failed(2, BusConnectionError("no server"))
    assert schedule.last_error is conflict
    assert [address for _, address in next_attempts(schedule, 5, 200)] == [0, 2, 0, 2, 0]
    assert schedule.mark_failed(0, conflict)
    assert not schedule.mark_failed(2, conflict)
    assert schedule.next_attempt(200) is None
    schedule.mark_lost(300)
    assert (schedule.last_error, schedule.has_permanent_refusal) == (None, False)
    assert [address for _, address in next_attempts(schedule, 3, 300)] == [1, 2, 0]


def test_refusal_of_the_program_stops_all_attempts() -> None:
    schedule = create_schedule(2)
    assert schedule.next_attempt(100) is not None
    assert not schedule.mark_failed(0, refusal(Reason.NAME_IN_USE))
    assert schedule.has_permanent_refusal


def test_is_worth_retrying() -> None:
    assert is_worth_retrying(None)
    assert is_worth_retrying(ConnectionResetError())
    assert is_worth_retrying(RemoteProtocolError(Reason.HEARTBEAT_TIMEOUT, "silence"))
    assert not is_worth_retrying(RemoteProtocolError(Reason.NAME_IN_USE, "taken"))
    assert not is_worth_retrying(RefusedError("class_name_conflict", "two ids"))
