"""Durables that are kept only so long while nobody is connected to them."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason
from tests.behaviour.wire_peer import BrokerHarness, numbered
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    publish_envelopes,
    channel_envelope,
    connect_version2,
    publish,
    subscribe,
    unsubscribe,
)


def go_on(bus: BrokerHarness, seconds: float) -> None:
    """Time passes, and a beat comes."""
    bus.broker.clock.now += seconds
    bus.tick()


def durables(bus: BrokerHarness) -> list[str]:
    return [s.durable for s in bus.statistics(1).subscriptions]


def holder(bus: BrokerHarness, **options: object) -> Version2Peer:
    """Somebody who has been sent six messages and acknowledged two of them."""
    peer = connect_version2(bus, subscribe(1, 5, durable="d", **options), publish(1, 0, *numbered(6)))
    peer.receive_deliveries()
    peer.send(ack(5, 0, 2))
    return peer


def test_a_durable_is_forgotten_when_nobody_was_connected_to_it_for_so_long() -> None:
    bus = BrokerHarness()
    holder(bus, idle_seconds=10).disconnect()
    go_on(bus, 9.9)
    assert durables(bus) == ["d"]
    go_on(bus, 0.1)
    assert durables(bus) == []
    statistics = bus.statistics(1)
    assert statistics.dropped == {Reason.IDLE_DURABLE: 4}
    assert (statistics.acknowledged, statistics.ring.messages) == (2, 0)
    again = connect_version2(bus, subscribe(1, 5, durable="d"), publish(1, 0, b"new"))
    messages, told = again.receive_all()
    assert told[0].content == {"cursor": 6, "floor": 6, "resumed": False}
    assert [(m.message_id, m.attempt) for m in messages] == [(6, 1)]


def test_without_idle_seconds_a_durable_is_kept_for_ever() -> None:
    bus = BrokerHarness()
    holder(bus).disconnect()
    go_on(bus, 1e9)
    assert durables(bus) == ["d"]
    assert bus.statistics(1).dropped == {}


def test_time_counts_only_while_nobody_is_connected() -> None:
    bus = BrokerHarness()
    peer = holder(bus, idle_seconds=10)
    go_on(bus, 100)
    peer.disconnect()
    go_on(bus, 6)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    go_on(bus, 6)
    assert durables(bus) == ["d"]
    go_on(bus, 4)
    assert durables(bus) == []


def test_unsubscribing_leaves_it_alone_as_well() -> None:
    bus = BrokerHarness()
    peer = holder(bus, idle_seconds=10)
    peer.send(unsubscribe(5))
    go_on(bus, 10)
    assert durables(bus) == []
    peer.send(subscribe(1, 5, durable="d", idle_seconds=10), unsubscribe(5, forget=True))
    assert not bus.broker.connection_requests._idle_since


@pytest.mark.parametrize(
    ("said", "kept"), [([10, 30], 30), ([30, 10], 10), ([10, None], 10), ([None, 10], 10)]
)
def test_the_last_who_says_how_long_decides(said: list[int | None], kept: int) -> None:
    bus = BrokerHarness()
    for seconds in said:
        connect_version2(bus, subscribe(1, 5, durable="d", idle_seconds=seconds)).disconnect()
    go_on(bus, kept - 1)
    assert durables(bus) == ["d"]
    go_on(bus, 1)
    assert durables(bus) == []


@pytest.mark.parametrize(("more", "kept"), [({}, 10), ({"idle_seconds": 30}, 30)])
def test_a_durable_that_is_moved_is_kept_as_long(more: dict[str, object], kept: int) -> None:
    bus = BrokerHarness()
    holder(bus, idle_seconds=10).disconnect()
    at = {"sequence": 3}
    connect_version2(bus, subscribe(1, 5, durable="d", start=at, seek=True, **more)).disconnect()
    go_on(bus, kept - 1)
    assert durables(bus) == ["d"]
    go_on(bus, 1)
    assert bus.statistics(1).dropped == {Reason.IDLE_DURABLE: 3}


def test_a_durable_group_is_alone_when_its_last_member_is_gone() -> None:
    bus = BrokerHarness()
    group = {"durable": "d", "group": "g"}
    one = connect_version2(bus, subscribe(1, 5, idle_seconds=10, **group), publish(1, 0, *numbered(4)))
    other = connect_version2(bus, subscribe(1, 5, idle_seconds=20, **group))
    one.receive_deliveries()
    one.disconnect()
    go_on(bus, 100)
    assert durables(bus) == ["d"]
    other.disconnect()
    go_on(bus, 19)
    assert durables(bus) == ["d"]
    go_on(bus, 1)
    assert durables(bus) == []
    assert bus.statistics(1).dropped == {Reason.IDLE_DURABLE: 4}


def test_what_others_need_stays() -> None:
    bus = BrokerHarness()
    connect_version2(bus, subscribe(1, 1, durable="other")).disconnect()
    holder(bus, idle_seconds=10).disconnect()
    go_on(bus, 10)
    assert durables(bus) == ["other"]
    assert connect_version2(bus, subscribe(1, 1, durable="other")).receive_message_ids() == list(range(6))


def test_what_waits_for_a_first_subscription_goes_on_waiting() -> None:
    bus = BrokerHarness()
    writer = connect_version2(bus, publish(1, 0, b"a", b"b"))
    reader = connect_version2(bus, subscribe(1, 1, durable="d", start="earliest", idle_seconds=10))
    writer.send(publish(1, 2, b"c"))
    assert reader.receive_message_ids() == [0, 1, 2]
    reader.disconnect()
    go_on(bus, 10)
    assert bus.statistics(1).dropped == {Reason.IDLE_DURABLE: 3}
    writer.send(publish(1, 3, b"d"))
    assert connect_version2(bus, subscribe(1, 1)).receive_message_ids() == [0, 1, 3]


def test_only_what_was_for_it_is_counted() -> None:
    bus = BrokerHarness()
    wish = {"durable": "d", "channels": ["a"], "idle_seconds": 10}
    connect_version2(bus, subscribe(1, 5, **wish)).disconnect()
    contents = [channel_envelope("ab"[n % 2], b"") for n in range(5)]
    connect_version2(bus, publish_envelopes(1, 0, *contents))
    go_on(bus, 10)
    assert bus.statistics(1).dropped == {Reason.IDLE_DURABLE: 3}
    assert bus.statistics(1).ring.messages == 0
    assert durables(bus) == []


def test_who_waits_for_room_finds_what_it_has_left() -> None:
    bus = BrokerHarness(class_messages=4)
    connect_version2(bus, subscribe(1, 5, durable="d", idle_seconds=10)).disconnect()
    writer = connect_version2(bus, publish(1, 0, *numbered(6)))
    assert writer.session.parked_messages
    go_on(bus, 10)
    assert not writer.session.parked_messages
    assert bus.statistics(1).dropped == {Reason.IDLE_DURABLE: 4}
    assert connect_version2(bus, subscribe(1, 1)).receive_message_ids() == [4, 5]


def test_it_is_for_durables_and_at_most_a_year() -> None:
    bus = BrokerHarness()
    asker = connect_version2(bus, subscribe(1, 5, idle_seconds=10), subscribe(1, 6, group="g", idle_seconds=1))
    assert asker.receive_error_codes() == ["bad_request", "bad_request"]
    for seconds in (0, -1, 365 * 86_400 + 1, "10", True):
        asker.send(subscribe(1, 5, durable="d", idle_seconds=seconds))
        assert asker.receive_error_codes() == ["bad_request"]
    assert durables(bus) == []
    asker.send(subscribe(1, 5, durable="d", idle_seconds=365 * 86_400))
    assert asker.receive_error_codes() == []
