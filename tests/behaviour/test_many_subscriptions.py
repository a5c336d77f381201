"""Classes with very many subscriptions."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason
from simplebus.core.limits import (
    COUNTED_POSITIONS_PER_STEP,
    DROP_OLDEST_DIVISOR,
    DROPPED_SINGLY_POSITIONS_MAX,
    TICKED_CLASSES_PER_TURN,
    Limits,
)
from simplebus.core.settings import FullPolicy, Settings
from tests.behaviour.wire_peer import BrokerHarness, connect, publish, subscribe
from tests.behaviour.wire_peer_v2 import connect_version2, publish_envelopes, timed_envelope
from tests.behaviour.wire_peer_v2 import subscribe as subscribe_version2

MESSAGES = 10 * DROP_OLDEST_DIVISOR


@pytest.mark.parametrize(
    ("subscription_count", "dropped_count"),
    [
        (DROPPED_SINGLY_POSITIONS_MAX, 1),
        (DROPPED_SINGLY_POSITIONS_MAX + 1, 1 + MESSAGES // DROP_OLDEST_DIVISOR),
    ],
)
def test_full_class_with_many_subscriptions_drops_several_messages_together(
    subscription_count: int, dropped_count: int
) -> None:
    limits = Limits(class_messages=MESSAGES)
    bus = BrokerHarness(Settings(limits=limits, full_policy=FullPolicy.DROP_OLDEST))
    peers = [bus.peer(connect(1), subscribe(1)) for _ in range(subscription_count)]
    publisher = bus.peer(connect(1))
    publisher.send(publish(1, *[b"x"] * MESSAGES))
    publisher.send(publish(1, b"last"))
    assert len(bus.broker.classes[1].ring) == MESSAGES + 1 - dropped_count
    for peer in (peers[0], peers[-1]):
        payloads = peer.receive_payloads()
        assert len(payloads) == MESSAGES + 1 - dropped_count
        assert payloads[-1] == b"last"


def count_tick_parts(bus: BrokerHarness) -> int:
    return len(list(bus.broker.tick_in_parts()))


def test_ticks_expire_messages_of_a_bounded_number_of_positions_at_once() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    count = 3 * TICKED_CLASSES_PER_TURN
    for _ in range(count):
        bus.peer(connect(1), subscribe(1))
    publisher = connect_version2(bus)
    part_count = count_tick_parts(bus)
    publisher.send(publish_envelopes(1, 0, timed_envelope(b"x", expires_ms=60_000)))
    assert count_tick_parts(bus) == part_count + 3


def test_ticks_check_the_limits_of_a_bounded_number_of_positions_at_once() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    part_counts = []
    for options in ({}, {"max_pending": 10, "slow": "drop_oldest"}):
        bus = BrokerHarness()
        bus.skips_checks = True
        for _ in range(3 * TICKED_CLASSES_PER_TURN):
            connect_version2(bus).send(subscribe_version2(1, 1, **options))
        part_counts.append(count_tick_parts(bus))
    assert part_counts[1] == part_counts[0] + 2


def test_undelivered_messages_of_many_positions_are_counted_in_steps() -> None:
    bus = BrokerHarness(Settings(full_policy=FullPolicy.DROP_OLDEST))
    bus.skips_checks = True
    peers = [bus.peer(connect(1), subscribe(1)) for _ in range(COUNTED_POSITIONS_PER_STEP + 1)]
    cls = bus.broker.classes[1]
    for position in cls.positions:
        position.count_undelivered(Reason.EXPIRED, 1)
    steps = cls.count_undelivered_in_steps()
    next(steps)
    for peer in (peers[0], peers[-1]):  # They are counted once, whichever step counts them.
        peer.disconnect()
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value == {Reason.EXPIRED: len(peers)} == cls.count_undelivered()
