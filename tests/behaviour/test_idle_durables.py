"""Idle durables that expire after a time without a connection."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason
from tests.behaviour.wire_peer import BrokerHarness, numbered
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    channel_envelope,
    connect_version2,
    publish,
    publish_envelopes,
    subscribe,
    unsubscribe,
)


def advance_time(bus: BrokerHarness, seconds: float) -> None:
    """Advance the clock and run one tick."""
    bus.broker.clock.now += seconds
    bus.tick()


def durable_names(bus: BrokerHarness) -> list[str]:
    return [s.durable for s in bus.statistics(1).subscriptions]


def connect_holder(bus: BrokerHarness, **options: object) -> Version2Peer:
    """Connect a durable that has received six messages and acknowledged two of them."""
    peer = connect_version2(
        bus, subscribe(1, 5, durable="d", **options), publish(1, 0, *numbered(6))
    )
    peer.receive_deliveries()
    peer.send(ack(5, 0, 2))
    return peer


def test_idle_durable_expires() -> None:
    bus = BrokerHarness()
    connect_holder(bus, idle_seconds=10).disconnect()
    advance_time(bus, 9.9)
    assert durable_names(bus) == ["d"]
    advance_time(bus, 0.1)
    assert durable_names(bus) == []
    statistics = bus.statistics(1)
    assert statistics.dropped == {Reason.IDLE_DURABLE: 4}
    assert (statistics.acknowledged, statistics.ring.message_count) == (2, 0)
    successor = connect_version2(bus, subscribe(1, 5, durable="d"), publish(1, 0, b"new"))
    messages, replies = successor.receive_all()
    assert replies[0].content == {"cursor": 6, "floor": 6, "resumed": False}
    assert [(m.message_id, m.attempt) for m in messages] == [(6, 1)]


def test_durable_without_idle_seconds_never_expires() -> None:
    bus = BrokerHarness()
    connect_holder(bus).disconnect()
    advance_time(bus, 1e9)
    assert durable_names(bus) == ["d"]
    assert bus.statistics(1).dropped == {}


def test_idle_time_counts_only_while_disconnected() -> None:
    bus = BrokerHarness()
    peer = connect_holder(bus, idle_seconds=10)
    advance_time(bus, 100)
    peer.disconnect()
    advance_time(bus, 6)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    advance_time(bus, 6)
    assert durable_names(bus) == ["d"]
    advance_time(bus, 4)
    assert durable_names(bus) == []


def test_idle_time_starts_at_unsubscribe() -> None:
    bus = BrokerHarness()
    peer = connect_holder(bus, idle_seconds=10)
    peer.send(unsubscribe(5))
    advance_time(bus, 10)
    assert durable_names(bus) == []
    peer.send(subscribe(1, 5, durable="d", idle_seconds=10), unsubscribe(5, forget=True))
    assert not bus.broker.subscription_manager._idle_since


@pytest.mark.parametrize(
    ("idle_values", "idle_seconds"),
    [([10, 30], 30), ([30, 10], 10), ([10, None], 10), ([None, 10], 10)],
)
def test_last_idle_seconds_wins(idle_values: list[int | None], idle_seconds: int) -> None:
    bus = BrokerHarness()
    for seconds in idle_values:
        connect_version2(bus, subscribe(1, 5, durable="d", idle_seconds=seconds)).disconnect()
    advance_time(bus, idle_seconds - 1)
    assert durable_names(bus) == ["d"]
    advance_time(bus, 1)
    assert durable_names(bus) == []


@pytest.mark.parametrize(("more", "expected_seconds"), [({}, 10), ({"idle_seconds": 30}, 30)])
def test_seek_keeps_idle_seconds(more: dict[str, object], expected_seconds: int) -> None:
    bus = BrokerHarness()
    connect_holder(bus, idle_seconds=10).disconnect()
    at = {"sequence": 3}
    connect_version2(bus, subscribe(1, 5, durable="d", start=at, seek=True, **more)).disconnect()
    advance_time(bus, expected_seconds - 1)
    assert durable_names(bus) == ["d"]
    advance_time(bus, 1)
    assert bus.statistics(1).dropped == {Reason.IDLE_DURABLE: 3}


def test_durable_group_is_idle_after_last_member() -> None:
    bus = BrokerHarness()
    group = {"durable": "d", "group": "g"}
    first = connect_version2(
        bus, subscribe(1, 5, idle_seconds=10, **group), publish(1, 0, *numbered(4))
    )
    second = connect_version2(bus, subscribe(1, 5, idle_seconds=20, **group))
    first.receive_deliveries()
    first.disconnect()
    advance_time(bus, 100)
    assert durable_names(bus) == ["d"]
    second.disconnect()
    advance_time(bus, 19)
    assert durable_names(bus) == ["d"]
    advance_time(bus, 1)
    assert durable_names(bus) == []
    assert bus.statistics(1).dropped == {Reason.IDLE_DURABLE: 4}


def test_expired_durable_keeps_messages_of_others() -> None:
    bus = BrokerHarness()
    connect_version2(bus, subscribe(1, 1, durable="other")).disconnect()
    connect_holder(bus, idle_seconds=10).disconnect()
    advance_time(bus, 10)
    assert durable_names(bus) == ["other"]
    assert connect_version2(bus, subscribe(1, 1, durable="other")).receive_message_ids() == list(
        range(6)
    )


def test_expired_durable_keeps_backlog() -> None:
    bus = BrokerHarness()
    writer = connect_version2(bus, publish(1, 0, b"a", b"b"))
    reader = connect_version2(bus, subscribe(1, 1, durable="d", start="earliest", idle_seconds=10))
    writer.send(publish(1, 2, b"c"))
    assert reader.receive_message_ids() == [0, 1, 2]
    reader.disconnect()
    advance_time(bus, 10)
    assert bus.statistics(1).dropped == {Reason.IDLE_DURABLE: 3}
    writer.send(publish(1, 3, b"d"))
    assert connect_version2(bus, subscribe(1, 1)).receive_message_ids() == [0, 1, 3]


def test_expired_durable_counts_only_matching_messages() -> None:
    bus = BrokerHarness()
    options = {"durable": "d", "channels": ["a"], "idle_seconds": 10}
    connect_version2(bus, subscribe(1, 5, **options)).disconnect()
    contents = [channel_envelope("ab"[n % 2], b"") for n in range(5)]
    connect_version2(bus, publish_envelopes(1, 0, *contents))
    advance_time(bus, 10)
    assert bus.statistics(1).dropped == {Reason.IDLE_DURABLE: 3}
    assert bus.statistics(1).ring.message_count == 0
    assert durable_names(bus) == []


def test_expired_durable_unblocks_publishers() -> None:
    bus = BrokerHarness(class_messages=4)
    connect_version2(bus, subscribe(1, 5, durable="d", idle_seconds=10)).disconnect()
    writer = connect_version2(bus, publish(1, 0, *numbered(6)))
    assert writer.session.parked_messages
    advance_time(bus, 10)
    assert not writer.session.parked_messages
    assert bus.statistics(1).dropped == {Reason.IDLE_DURABLE: 4}
    assert connect_version2(bus, subscribe(1, 1)).receive_message_ids() == [4, 5]


def test_idle_seconds_requires_durable_and_is_limited() -> None:
    bus = BrokerHarness()
    asker = connect_version2(
        bus, subscribe(1, 5, idle_seconds=10), subscribe(1, 6, group="g", idle_seconds=1)
    )
    assert asker.receive_error_codes() == ["bad_request", "bad_request"]
    for seconds in (0, -1, 365 * 86_400 + 1, "10", True):
        asker.send(subscribe(1, 5, durable="d", idle_seconds=seconds))
        assert asker.receive_error_codes() == ["bad_request"]
    assert durable_names(bus) == []
    asker.send(subscribe(1, 5, durable="d", idle_seconds=365 * 86_400))
    assert asker.receive_error_codes() == []
