"""Delivery policy: attempts, backoff, nack, terminate, and late acks."""

from __future__ import annotations

from typing import Any

import pytest

from simplebus.core.errors import Reason
from simplebus.core.limits import DEAD_LETTER_BATCH_MESSAGES
from simplebus.core.settings import ClassSettings, Settings
from tests.behaviour.wire_peer import BrokerHarness, advance_tick
from tests.behaviour.wire_peer import connect as connect1
from tests.behaviour.wire_peer import publish as publish1
from tests.behaviour.wire_peer import subscribe as subscribe1
from tests.behaviour.wire_peer_v2 import (
    ack,
    connect_version2,
    nack,
    publish,
    subscribe,
    unsubscribe,
    working,
)
from tests.core.test_dead_letters import dead_headers, fetch_dead_letters


def delivery_ticks(bus: BrokerHarness, peer: Any, *, until: int) -> list[tuple[int, int]]:
    """Return (tick, attempt) of each delivery of the only message."""
    found = []
    for tick in range(until):
        found += [(tick, message.attempt) for message in peer.receive_deliveries()]
        bus.tick()
    return found


# Number of deliveries -----------------------------------------------------------------------------


def test_default_max_deliveries_is_16_in_both_versions() -> None:
    bus = BrokerHarness()
    first = bus.peer(connect1(1), subscribe1(1))
    second = connect_version2(bus, subscribe(1, 5))
    bus.peer(connect1(1), publish1(1, b"x"))
    ticks: list[int] = []
    attempts = []
    for tick in range(900):
        ticks += [tick] * len(first.receive_messages())
        attempts += [(tick, message.attempt) for message in second.receive_deliveries()]
        bus.tick()
    at = [0, 6, 18, 42, *range(90, 811, 60)][:16]
    assert ticks == at
    assert attempts == list(zip(at, range(1, 17), strict=True))
    assert bus.statistics(1).dropped == {Reason.MAX_DELIVERIES: 2}
    assert bus.statistics(1).ring.message_count == 0
    assert [dead_headers(letter, "attempts") for letter, _ in fetch_dead_letters(bus)] == [
        "16",
        "16",
    ]


@pytest.mark.parametrize(
    ("settings", "options", "count"),
    [
        (Settings(deliveries_max=3), {}, 3),
        (Settings(deliveries_max=0), {}, 40),
        (Settings(deliveries_max=3), {"max_deliveries": 0}, 40),
        (Settings(classes={1: ClassSettings(deliveries_max=2)}), {}, 2),
        (Settings(classes={1: ClassSettings(deliveries_max=0)}), {}, 40),
        (Settings(classes={1: ClassSettings(deliveries_max=2)}), {"max_deliveries": 5}, 5),
        (Settings(classes={2: ClassSettings(deliveries_max=2)}), {}, 16),
    ],
)
@pytest.mark.parametrize("group", [None, "g"])
def test_max_deliveries_of_subscription_overrides_class_and_bus(
    settings: Settings, options: dict[str, object], count: int, group: str | None
) -> None:
    bus = BrokerHarness(settings)
    peer = connect_version2(bus, subscribe(1, 5, group=group, **options), publish(1, 0, b"x"))
    attempts = []
    for _ in range(40):
        attempts += [message.attempt for message in peer.receive_deliveries()]
        peer.send(nack(5, 0, 1, 0))
    assert attempts == list(range(1, count + 1))


# Backoff ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 6, 18, 42, 90]),
        ({"ack_seconds": 2}, [0, 2, 6, 14, 30, 62]),
        ({"backoff": [7, 30]}, [0, 7, 37, 67, 97]),
        ({"backoff": [1], "ack_seconds": 20}, [0, 20, 40, 60, 80]),
        ({"backoff": [0.1, 1.2], "ack_seconds": 0.5}, [0, 1, *range(3, 100, 2)]),
        ({"backoff": [90], "ack_seconds": 1}, [0, 90]),
    ],
)
def test_redelivers_after_backoff_but_not_before_ack_timeout(
    options: dict[str, object], expected: list[int], group: str | None
) -> None:
    bus = BrokerHarness(Settings(deliveries_max=0))
    peer = connect_version2(bus, subscribe(1, 5, group=group, **options), publish(1, 0, b"x"))
    assert [tick for tick, _ in delivery_ticks(bus, peer, until=100)] == expected


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 6, 18, 42]),
        ({"backoff": [1, 5, 30]}, [0, 1, 6, 36, 66]),
        ({"backoff": [90]}, [0]),
    ],
)
def test_nacked_message_is_redelivered_after_backoff(
    options: dict[str, object], expected: list[int], group: str | None
) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5, group=group, **options), publish(1, 0, b"x"))
    found = []
    for tick in range(80):
        for message in peer.receive_deliveries():
            found.append((tick, message.attempt))
            peer.send(nack(5, 0, 1))
        advance_tick(bus)
    assert found == list(zip(expected, range(1, 9), strict=False))


@pytest.mark.parametrize("group", [None, "g"])
def test_backoff_below_one_tick_is_exact(group: str | None) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5, group=group, backoff=[0.2, 1.5]))
    peer.send(publish(1, 0, b"x"))
    for attempt, delay in ((1, 0.2), (2, 1.5), (3, 1.5)):
        assert [message.attempt for message in peer.receive_deliveries()] == [attempt]
        peer.send(nack(5, 0, 1))
        bus.broker.clock.now += delay - 0.01
        bus.broker.run_due_wakeups()
        assert peer.receive_deliveries() == []
        bus.broker.clock.now += 0.02
        bus.broker.run_due_wakeups()
    assert [message.attempt for message in peer.receive_deliveries()] == [4]


def test_class_backoff_applies_to_version_1() -> None:
    class_settings = ClassSettings(ack_seconds=2.0, backoff_seconds=(3.0, 5.0))
    bus = BrokerHarness(Settings(classes={"orders": class_settings}))
    second = connect_version2(bus, subscribe(1, 5), classes=[{"id": 1, "name": "orders"}])
    third = connect_version2(bus, subscribe(1, 5, ack_seconds=9, backoff=[1]))
    first = bus.peer(connect1(1), subscribe1(1), publish1(1, b"x"))
    first.receive_messages()
    bus.tick()
    found: dict[str, list[tuple[int, int]]] = {"one": [], "two": [], "other": []}
    for tick in range(1, 20):
        found["one"] += [(tick, m.timer_index) for m in first.receive_messages()]
        found["two"] += [(tick, m.attempt) for m in second.receive_deliveries()]
        found["other"] += [(tick, m.attempt) for m in third.receive_deliveries()]
        bus.tick()
    # Timer indexes are modulo the common modulus of all classes.
    assert found["one"] == [
        (3, 3),
        (8, 2),
        (13, 1),
        (18, 0),
    ]
    assert found["two"][:2] == [(1, 1), (4, 2)]
    assert found["other"] == [(1, 1), (10, 2), (19, 3)]


# Nack and messages in flight ----------------------------------------------------------------------


@pytest.mark.parametrize("delay", [None, 5000])
@pytest.mark.parametrize("group", [None, "g"])
def test_nacked_message_is_not_in_flight(delay: int | None, group: str | None) -> None:
    bus = BrokerHarness()
    subscribe_frame = subscribe(1, 5, max_in_flight=1, group=group)
    peer = connect_version2(bus, subscribe_frame, publish(1, 0, b"a", b"b", b"c"))
    for sequence in range(3):
        assert peer.receive_message_ids() == [sequence]
        assert peer.receive_message_ids() == []
        peer.send(nack(5, sequence, sequence + 1, delay))
    bus.tick(6)
    bus.broker.clock.now += 6
    bus.broker.run_due_wakeups()
    bus.check_invariants()
    assert [(m.message_id, m.attempt) for m in peer.receive_deliveries()] == [(0, 2)]


def test_nacked_message_can_be_acked_during_backoff() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5), publish(1, 0, b"a", b"b"))
    assert peer.receive_message_ids() == [0, 1]
    peer.send(nack(5, 0, 2), ack(5, 0, 1))
    bus.tick(6)
    assert peer.receive_message_ids() == [1]
    peer.send(nack(5, 1, 2), ack(5, 1, 2))
    assert bus.statistics(1).ring.message_count == 0


@pytest.mark.parametrize("group", [None, "g"])
def test_redeliveries_precede_new_messages(group: str | None) -> None:
    bus = BrokerHarness()
    subscribe_frame = subscribe(1, 5, max_in_flight=2, group=group)
    peer = connect_version2(bus, subscribe_frame, publish(1, 0, *[b"%d" % n for n in range(6)]))
    assert peer.receive_message_ids() == [0, 1]
    peer.send(nack(5, 0, 2, 0))
    assert peer.receive_message_ids() == [0, 1]
    bus.tick(12)
    assert peer.receive_message_ids() == [0, 1]
    peer.send(nack(5, 1, 2, 0), ack(5, 0, 1))
    assert peer.receive_message_ids() == [1, 2]


@pytest.mark.parametrize("group", [None, "g"])
def test_nacked_and_overdue_messages_are_redelivered_in_order(group: str | None) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5, group=group), publish(1, 0, b"a", b"b", b"c"))
    assert peer.receive_message_ids() == [0, 1, 2]
    peer.send(nack(5, 0, 1), nack(5, 2, 3))
    bus.tick(6)
    bus.broker.end_turn()
    assert peer.receive_message_ids() == [0, 1, 2]


# Crashing consumers -------------------------------------------------------------------------------


def test_crashing_consumer_uses_deliveries_no_faster_than_silent_one() -> None:
    bus = BrokerHarness()
    bus.peer(connect1(1), publish1(1, b"poison"))
    found = []
    for tick in range(900):
        for _ in range(3):  # The consumer restarts several times within a tick.
            peer = connect_version2(bus, subscribe(1, 5, durable="d"))
            found += [(tick, message.attempt) for message in peer.receive_deliveries()]
            peer.disconnect()
        bus.skips_checks = tick % 10 > 0
        bus.tick()
    ticks = [0, 0, 12, 36, 84, *range(144, 900, 60)]
    assert found == list(zip(ticks, range(1, 17), strict=False))
    assert dead_headers(fetch_dead_letters(bus)[0][0], "attempts") == "16"


def test_poison_message_crashes_two_members_before_backoff() -> None:
    bus = BrokerHarness()
    members = [connect_version2(bus, subscribe(1, 5, group="g", max_in_flight=1)) for _ in range(4)]
    connect_version2(bus, publish(1, 0, b"poison"))
    fallen = []
    for _ in range(4):
        for member in members:
            if member.receive_deliveries():
                fallen.append(member)
                member.disconnect()
        members = [member for member in members if member not in fallen]
    assert len(fallen) == 2
    bus.tick(12)
    assert [m.attempt for member in members for m in member.receive_deliveries()] == [3]


def test_assigned_unsent_messages_move_to_other_member_at_once() -> None:
    bus = BrokerHarness()
    first, second = (
        connect_version2(bus, subscribe(1, 5, group="g", max_in_flight=1)) for _ in range(2)
    )
    first.receive_replies(), second.receive_replies()
    connect_version2(bus, publish(1, 0, b"x"))
    first.disconnect() if not first.session.outbox.is_idle else second.disconnect()
    remaining_member = second if first.session.is_closed else first
    assert [message.attempt for message in remaining_member.receive_deliveries()] == [1]


def test_backoff_survives_reconnect() -> None:
    bus = BrokerHarness()
    first = connect_version2(bus, subscribe(1, 5, durable="d", backoff=[20]), publish(1, 0, b"x"))
    first.receive_deliveries()
    first.send(nack(5, 0, 1), unsubscribe(5))
    for _ in range(10):
        advance_tick(bus)
    second = connect_version2(bus, subscribe(1, 5, durable="d"))
    assert second.receive_message_ids() == []
    for _ in range(10):
        advance_tick(bus)
    assert second.receive_message_ids() == [0]


# Failure reasons and terminate --------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, "g"])
def test_dead_letter_has_last_failure_reason(group: str | None) -> None:
    bus = BrokerHarness()
    bus.broker.clock.now = 1000.5
    first = connect_version2(bus, subscribe(1, 5, group=group, durable="d", max_deliveries=3))
    connect_version2(bus, publish(1, 0, b"x", b"y"))
    bus.broker.clock.now = 1001.0
    first.receive_deliveries()
    first.send(nack(5, 0, 1, 0, b"the first"), nack(5, 1, 2, 0))
    first.receive_deliveries()
    first.send(nack(5, 0, 1, 0, "<\r\n\0>, sa\u00df".encode()))
    first.disconnect()
    second = connect_version2(bus, subscribe(1, 5, group=group, durable="d", max_deliveries=3))
    assert second.receive_message_ids() == [0]
    second.send(nack(5, 0, 1, 0))
    assert second.receive_message_ids() == []
    bus.tick(12)
    assert second.receive_message_ids() == [1]
    second.send(nack(5, 1, 2, 0))
    assert second.receive_message_ids() == []
    (x, _), (y, _) = fetch_dead_letters(bus)
    assert dead_headers(x, "error", "attempts", "accepted") == (
        "<\r\n>, sa\u00df",
        "3",
        "1000.500000",
    )
    assert "dead-error" not in dict(y.headers)
    bus.tick()
    assert len(bus.broker.store.failure_reasons) == 0


@pytest.mark.parametrize("group", [None, "g"])
def test_terminate_dead_letters_at_once(group: str | None) -> None:
    bus = BrokerHarness()
    peer = connect_version2(
        bus, subscribe(1, 5, group=group), publish(1, 0, b"a", b"b", b"c", b"d")
    )
    assert peer.receive_message_ids() == [0, 1, 2, 3]
    peer.send(ack(5, 1, 2), nack(5, 0, 3, "terminate", b"no JSON"), nack(5, 3, 4, "terminate"))
    assert bus.statistics(1).dropped == {Reason.TERMINATED: 3}
    assert bus.statistics(1).ring.message_count == 0
    found = [(p, dict(letter.headers).get("dead-error")) for letter, p in fetch_dead_letters(bus)]
    assert found == [(b"a", "no JSON"), (b"c", "no JSON"), (b"d", None)]
    reasons = {dead_headers(letter, "reason", "attempts") for letter, _ in fetch_dead_letters(bus)}
    assert reasons == {("terminated", "1")}


@pytest.mark.parametrize("group", [None, "g"])
def test_terminating_many_messages_keeps_the_error_of_each(group: str | None) -> None:
    bus = BrokerHarness()
    count = 3 * DEAD_LETTER_BATCH_MESSAGES
    peer = connect_version2(bus, subscribe(1, 5, group=group, max_in_flight=count), classes=[1])
    peer.send(publish(1, 0, *[b"x"] * count))
    assert len(peer.receive_message_ids()) == count
    peer.send(nack(5, 0, count, "terminate", b"none of them"))
    assert peer.receive_message_ids() == []
    assert bus.statistics(1).dropped == {Reason.TERMINATED: count}
    assert bus.statistics(1).ring.message_count == 0
    assert {dead_headers(letter, "error") for letter, _ in fetch_dead_letters(bus)} == {
        "none of them"
    }


def test_terminating_many_ranges_gives_up_only_unacknowledged_messages() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True  # Saves time; the invariants are checked at the end.
    count = 4 * DEAD_LETTER_BATCH_MESSAGES
    peer = connect_version2(bus, subscribe(1, 5, group="g", max_in_flight=count))
    peer.send(publish(1, 0, *[b"x"] * count))
    assert len(peer.receive_message_ids()) == count
    peer.send(*[ack(5, sequence, sequence + 1) for sequence in range(0, count, 2)])
    peer.send(nack(5, 0, count, "terminate"))
    assert bus.statistics(1).dropped == {Reason.TERMINATED: count // 2}
    assert peer.receive_message_ids() == []
    bus.broker.check_invariants()
    assert bus.statistics(1).dropped == {Reason.TERMINATED: count // 2}


# Delivery attempts --------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize(
    "late",
    [
        nack(5, 0, 1, 0, attempt=1),
        nack(5, 0, 1, attempt=1),
        nack(5, 0, 1, 60_000, attempt=1),
        nack(5, 0, 1, "terminate", attempt=1),
        working(5, 0, 1, attempt=1),
        nack(5, 0, 1, 0, attempt=7),
    ],
    ids=["at once", "after the pause", "later", "terminate", "working", "of one to come"],
)
def test_late_nack_of_earlier_attempt_is_ignored_and_counted(
    late: bytes, group: str | None
) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5, group=group), publish(1, 0, b"x"))
    peer.receive_deliveries()
    bus.tick(6)
    assert [message.attempt for message in peer.receive_deliveries()] == [2]
    bus.tick()
    peer.send(late)
    bus.broker.clock.now += 100
    bus.broker.run_due_wakeups()
    assert peer.receive_deliveries() == []
    assert bus.broker.refusal_counts == {Reason.ACK_LATE: 1}
    bus.tick(11)
    assert [message.attempt for message in peer.receive_deliveries()] == [3]
    peer.send(nack(5, 0, 1, 0, attempt=3))
    assert [message.attempt for message in peer.receive_deliveries()] == [4]


@pytest.mark.parametrize("delay", [None, 3000])
def test_terminate_during_backoff_requires_last_attempt(delay: int | None) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5), publish(1, 0, b"x"))
    for attempt in (1, 2):
        assert [message.attempt for message in peer.receive_deliveries()] == [attempt]
        peer.send(nack(5, 0, 1, 0, attempt=attempt))
    assert [message.attempt for message in peer.receive_deliveries()] == [3]
    peer.send(nack(5, 0, 1, delay, attempt=3), nack(5, 0, 1, "terminate", b"stale", attempt=1))
    peer.send(nack(5, 0, 1, "terminate", b"stale", attempt=2))
    assert bus.broker.refusal_counts == {Reason.ACK_LATE: 2}
    assert bus.statistics(1).ring.message_count == 1
    peer.send(nack(5, 0, 1, "terminate", b"it is", attempt=3))
    [(letter, _)] = fetch_dead_letters(bus)
    assert (dead_headers(letter, "attempts"), dead_headers(letter, "error")) == ("3", "it is")
    assert bus.broker.refusal_counts == {Reason.ACK_LATE: 2}


def test_ack_of_any_attempt_counts() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5), publish(1, 0, b"x"))
    peer.receive_deliveries()
    bus.tick(6)
    peer.receive_deliveries()
    named = bytearray(ack(5, 0, 1))
    named[6] = 1
    peer.send(bytes(named))
    assert bus.statistics(1).ring.message_count == 0
    assert not bus.broker.refusal_counts


@pytest.mark.parametrize(
    "late",
    [
        ack(5, 0, 1),
        nack(5, 0, 1, 0),
        nack(5, 0, 1, "terminate", b"late"),
        working(5, 0, 1),
        ack(5, 0, 1) * 60,
    ],
    ids=["ack", "nack", "terminate", "working", "many acks"],
)
@pytest.mark.parametrize("by_key", [False, True])
def test_member_cannot_settle_messages_of_another(late: bytes, by_key: bool) -> None:
    bus = BrokerHarness()
    options = {"group": "g", "max_in_flight": 1, "by_key": by_key}
    first = connect_version2(bus, subscribe(1, 5, **options), publish(1, 0, b"x"))
    assert first.receive_message_ids() == [0]
    second = connect_version2(bus, subscribe(1, 5, **options))
    bus.tick(5)
    connect_version2(bus, publish(1, 0, b"y"))
    assert second.receive_message_ids() == [1]
    second.send(ack(5, 1, 2))
    first.send(unsubscribe(5), subscribe(1, 5, **options))
    assert [m.attempt for m in second.receive_deliveries()] == [2]
    first.send(late)
    assert (first.receive_message_ids(), second.receive_message_ids()) == ([], [])
    assert set(bus.broker.refusal_counts) == {Reason.ACK_LATE}
    assert bus.statistics(1).in_flight == 1
    second.send(ack(5, 0, 1))
    assert bus.statistics(1).ring.message_count == 0


def test_range_across_other_members_is_not_counted_as_late() -> None:
    bus = BrokerHarness()
    first, second = (connect_version2(bus, subscribe(1, 5, group="g")) for _ in range(2))
    connect_version2(bus, publish(1, 0, b"a", b"b", b"c", b"d"))
    first_ids, second_ids = first.receive_message_ids(), second.receive_message_ids()
    first.send(
        ack(5, min(first_ids), max(first_ids) + 1), ack(5, min(first_ids), max(first_ids) + 1)
    )
    second.send(ack(5, second_ids[0], second_ids[0] + 1), ack(5, second_ids[0], second_ids[0] + 1))
    # The second range may include messages of `second`.
    assert bus.broker.refusal_counts.get(Reason.ACK_LATE, 0) <= 1
    assert second.receive_message_ids() == []
