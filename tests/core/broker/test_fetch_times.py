"""Fetch and time: where it begins, and what it says of when messages were accepted."""

from __future__ import annotations

from typing import Any

import pytest

from simplebus.core.broker import fetch
from simplebus.core.limits import FETCH_BYTES_MAX, FETCH_TIMES_MAX, MESSAGES_MAX
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    FETCH,
    connect_version2,
    json_request,
    publish,
)


def bus_with(*times: float) -> BrokerHarness:
    """A message of class 1 at each of these times, all of them kept."""
    bus = BrokerHarness()
    writer = connect_version2(bus)
    for number, time in enumerate(times):
        bus.broker.clock.now = time
        writer.send(publish(1, number, b"x"))
    return bus


def answer(bus: BrokerHarness, **wish: Any) -> dict[str, Any]:
    peer = connect_version2(bus, json_request(FETCH, 1, 3, **wish))
    (said,) = [said for said in peer.receive_replies() if said.kind == "fetch"]
    found: dict[str, Any] = said.content
    return found


@pytest.mark.parametrize(
    ("time", "first"), [(0, 0), (10, 0), (10.5, 1), (20, 1), (20.02, 2), (30, 2), (31, 3)]
)
def test_a_fetch_begins_with_the_first_message_at_a_time(time: float, first: int) -> None:
    found = answer(bus_with(10, 20, 30), first=1, time=time)
    assert found == {"first": first, "next": 3, "floor": 0, "head": 3}


def test_a_fetch_tells_when_its_messages_were_accepted_and_nothing_of_others() -> None:
    bus = bus_with(10, 10.001, 20, 20.002, 30)
    everything = [[0, 10.0], [2, 20.0], [4, 30.0]]
    assert answer(bus, times=True)["times"] == everything
    assert answer(bus, first=1, count=3, times=True)["times"] == everything[:2]
    assert answer(bus, first=3, times=True)["times"] == everything[1:]
    assert answer(bus, time=30.0, times=True)["times"] == everything[2:]
    assert "times" not in answer(bus, first=5, times=True)
    assert "times" not in answer(bus)
    bus.broker.clock.now = 45.5
    assert answer(bus, first=5, times=True)["now"] == 45.5
    assert "now" not in answer(bus)


def test_an_answer_ends_where_its_times_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FETCH_TIMES_MAX", 2)
    bus = bus_with(10, 10.001, 20, 20.002, 30)
    found = answer(bus, first=1, times=True)
    assert (found["first"], found["next"], found["times"]) == (1, 4, [[0, 10.0], [2, 20.0]])
    assert answer(bus, first=4, times=True)["times"] == [[4, 30.0]]
    assert answer(bus, first=1)["next"] == 5


def test_times_of_what_did_not_fit_are_not_told() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    writer = connect_version2(bus)
    for time in range(4):
        bus.broker.clock.now = float(time)
        writer.send(publish(1, time, b"x" * (FETCH_BYTES_MAX // 2)))
    found = answer(bus, times=True)
    assert found["next"] < 4
    assert found["times"] == [[n, float(n)] for n in range(found["next"])]


def test_times_stay_when_what_lies_before_them_is_gone() -> None:
    bus = bus_with(10, 10.001, 20)
    before = answer(bus, first=1, times=True)["times"]
    bus.skips_checks = True  # This goes round the broker.
    bus.broker.classes[1].ring.release(1)
    bus.broker.classes[1].time_index.trim(1)
    assert answer(bus, first=1, times=True)["times"] == before


def test_times_never_make_an_answer_too_long() -> None:
    longest = len(f"[{MESSAGES_MAX},{1e10 + 1 / 3!r}],")
    assert longest * FETCH_TIMES_MAX < FETCH_BYTES_MAX // 2
