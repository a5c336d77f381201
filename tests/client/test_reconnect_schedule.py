"""When it is tried again to reach a bus: arithmetic, without a clock and without chance."""

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


def schedule(
    addresses: int = 1, *, reconnect: float | None = 1000.0, chance: float = 0.0
) -> ReconnectSchedule:
    return ReconnectSchedule(addresses, timeout=6, reconnect=reconnect, now=100, random_fraction=lambda: chance)


def attempts(made: ReconnectSchedule, count: int, now: float) -> list[tuple[float, int]]:
    """Pause and address of so many attempts, each of which fails at once."""
    found = []
    for _ in range(count):
        attempt = made.next_attempt(now)
        assert attempt is not None
        now += attempt.delay_seconds
        found.append((attempt.delay_seconds, attempt.address_index))
    return found


def test_first_every_address_is_tried_once_and_they_share_the_time() -> None:
    made = schedule(3)
    assert made.next_attempt(100) == ConnectAttempt(delay_seconds=0, address_index=0, timeout_seconds=2)
    assert made.next_attempt(101) == ConnectAttempt(delay_seconds=0, address_index=1, timeout_seconds=2.5)
    assert made.next_attempt(105.5) == ConnectAttempt(delay_seconds=0, address_index=2, timeout_seconds=0.5)
    assert made.next_attempt(105.6) is None


def test_the_time_for_the_first_connection_ends() -> None:
    made = schedule(3)
    assert made.next_attempt(106) is None


def test_after_a_loss_the_lost_one_is_first_and_every_turn_waits_longer() -> None:
    made = schedule(2)
    made.mark_connected(1, 101)
    made.mark_lost(101 + STABLE_CONNECTION_SECONDS)
    pauses = attempts(made, 8, 101 + STABLE_CONNECTION_SECONDS)
    assert [address for _, address in pauses] == [1, 0] * 4
    assert [pause for pause, _ in pauses] == pytest.approx([0, 0, 0.05, 0, 0.1, 0, 0.2, 0])


def test_pauses_stop_growing_and_are_shortened_by_chance() -> None:
    for chance, least in ((0.0, 1.0), (0.5, 0.75), (1.0, 0.5)):
        made = schedule(chance=chance)
        made.mark_connected(0, 0)
        made.mark_lost(10)
        pauses = [pause for pause, _ in attempts(made, 50, 10)]
        assert pauses[1] == pytest.approx(RETRY_DELAY_MIN_SECONDS * least)
        assert pauses[-1] == pytest.approx(RETRY_DELAY_MAX_SECONDS * least)


def test_a_connection_that_did_not_last_does_not_begin_the_pauses_anew() -> None:
    made = schedule()
    now = 100.0
    paused = []
    for _ in range(6):
        made.mark_connected(0, now)
        made.mark_lost(now)
        attempt = made.next_attempt(now)
        assert attempt is not None
        paused.append(attempt.delay_seconds)
        now += attempt.delay_seconds
    assert paused == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6])
    made.mark_connected(0, now)
    made.mark_lost(now + STABLE_CONNECTION_SECONDS)
    assert attempts(made, 1, now + STABLE_CONNECTION_SECONDS) == [(0, 0)]


def test_trying_again_ends_and_an_attempt_may_not_outlast_it() -> None:
    made = schedule(reconnect=10)
    made.mark_connected(0, 100)
    made.mark_lost(200)
    assert made.next_attempt(203) == ConnectAttempt(delay_seconds=0, address_index=0, timeout_seconds=6)
    last = made.next_attempt(209)
    assert last is not None
    assert last.delay_seconds + last.timeout_seconds == pytest.approx(1)
    assert made.next_attempt(210) is None


@pytest.mark.parametrize("reconnect", [0, None])
def test_nothing_is_tried_again_where_that_was_not_wanted(reconnect: float | None) -> None:
    made = schedule(reconnect=reconnect)
    assert made.reconnect_seconds == 0
    made.mark_connected(0, 100)
    made.mark_lost(200)
    assert made.next_attempt(200) is None


def refused(reason: Reason) -> BusConnectionError:
    problem = BusConnectionError(f"not with you: {reason}")
    problem.__cause__ = RemoteProtocolError(reason, "no")
    return problem


def test_an_address_whose_bus_cannot_serve_us_is_passed_over_and_the_others_are_tried() -> None:
    made = schedule(3)
    made.mark_connected(1, 100)
    made.mark_lost(200)
    conflict = refused(Reason.CLASS_NAME_CONFLICT)
    assert attempts(made, 1, 200) == [(0, 1)]
    assert made.mark_failed(1, conflict)
    assert attempts(made, 1, 200) == [(0, 2)]
    assert made.mark_failed(2, BusConnectionError("nobody there"))
    assert made.last_error is conflict
    assert [address for _, address in attempts(made, 5, 200)] == [0, 2, 0, 2, 0]
    assert made.mark_failed(0, conflict)
    assert not made.mark_failed(2, conflict)
    assert made.next_attempt(200) is None
    made.mark_lost(300)
    assert (made.last_error, made.has_permanent_refusal) == (None, False)
    assert [address for _, address in attempts(made, 3, 300)] == [1, 2, 0]


def test_what_a_bus_refuses_because_of_the_program_is_refused_by_all() -> None:
    made = schedule(2)
    assert made.next_attempt(100) is not None
    assert not made.mark_failed(0, refused(Reason.NAME_IN_USE))
    assert made.has_permanent_refusal


def test_what_would_only_happen_again_is_not_worth_it() -> None:
    assert is_worth_retrying(None)
    assert is_worth_retrying(ConnectionResetError())
    assert is_worth_retrying(RemoteProtocolError(Reason.HEARTBEAT_TIMEOUT, "silence"))
    assert not is_worth_retrying(RemoteProtocolError(Reason.NAME_IN_USE, "taken"))
    assert not is_worth_retrying(RefusedError("class_name_conflict", "two ids"))
