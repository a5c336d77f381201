"""Fetch by time, and the acceptance times in Fetch replies."""

from __future__ import annotations

from typing import Any

import pytest

from simplebus.core.broker import fetch
from simplebus.core.limits import FETCH_BYTES_MAX, FETCH_TIMES_MAX, MESSAGES_MAX
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import FETCH, connect_version2, json_request, publish


def bus_with_messages_at(*times: float) -> BrokerHarness:
    """Return a bus with one message of class 1 per time."""
    bus = BrokerHarness()
    writer = connect_version2(bus)
    for number, time in enumerate(times):
        bus.broker.clock.now = time
        writer.send(publish(1, number, b"x"))
    return bus


def fetch_reply(bus: BrokerHarness, **request: Any) -> dict[str, Any]:
    peer = connect_version2(bus, json_request(FETCH, 1, 3, **request))
    (reply,) = [reply for reply in peer.receive_replies() if reply.kind == "fetch"]
    content: dict[str, Any] = reply.content
    return content


@pytest.mark.parametrize(
    ("time", "first"), [(0, 0), (10, 0), (10.5, 1), (20, 1), (20.02, 2), (30, 2), (31, 3)]
)
def test_fetch_starts_at_the_first_message_at_a_time(time: float, first: int) -> None:
    reply = fetch_reply(bus_with_messages_at(10, 20, 30), first=1, time=time)
    assert reply == {"first": first, "next": 3, "floor": 0, "head": 3}


def test_fetch_returns_the_times_of_its_messages_only() -> None:
    bus = bus_with_messages_at(10, 10.001, 20, 20.002, 30)
    all_times = [[0, 10.0], [2, 20.0], [4, 30.0]]
    assert fetch_reply(bus, times=True)["times"] == all_times
    assert fetch_reply(bus, first=1, count=3, times=True)["times"] == all_times[:2]
    assert fetch_reply(bus, first=3, times=True)["times"] == all_times[1:]
    assert fetch_reply(bus, time=30.0, times=True)["times"] == all_times[2:]
    assert "times" not in fetch_reply(bus, first=5, times=True)
    assert "times" not in fetch_reply(bus)
    bus.broker.clock.now = 45.5
    assert fetch_reply(bus, first=5, times=True)["now"] == 45.5
    assert "now" not in fetch_reply(bus)


def test_reply_ends_at_the_maximum_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FETCH_TIMES_MAX", 2)
    bus = bus_with_messages_at(10, 10.001, 20, 20.002, 30)
    reply = fetch_reply(bus, first=1, times=True)
    assert (reply["first"], reply["next"], reply["times"]) == (1, 4, [[0, 10.0], [2, 20.0]])
    assert fetch_reply(bus, first=4, times=True)["times"] == [[4, 30.0]]
    assert fetch_reply(bus, first=1)["next"] == 5


def test_reply_has_no_times_of_messages_that_did_not_fit() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    writer = connect_version2(bus)
    for time in range(4):
        bus.broker.clock.now = float(time)
        writer.send(publish(1, time, b"x" * (FETCH_BYTES_MAX // 2)))
    reply = fetch_reply(bus, times=True)
    assert reply["next"] < 4
    assert reply["times"] == [[n, float(n)] for n in range(reply["next"])]


def test_times_survive_the_release_of_earlier_messages() -> None:
    bus = bus_with_messages_at(10, 10.001, 20)
    before = fetch_reply(bus, first=1, times=True)["times"]
    bus.skips_checks = True  # The ring is changed behind the broker's back.
    bus.broker.classes[1].ring.release(1)
    bus.broker.classes[1].time_index.trim(1)
    assert fetch_reply(bus, first=1, times=True)["times"] == before


def test_times_fit_into_a_reply() -> None:
    longest = len(f"[{MESSAGES_MAX},{1e10 + 1 / 3!r}],")
    assert longest * FETCH_TIMES_MAX < FETCH_BYTES_MAX // 2
