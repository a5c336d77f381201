"""Queue groups: assignment of messages to members, acks, and redelivery to others."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason
from simplebus.core.limits import IN_FLIGHT_BYTES, REDELIVERY_MESSAGES, SCAN_MESSAGES_MAX
from tests.behaviour.wire_peer import BrokerHarness, numbered
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    channel_envelope,
    connect_version2,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    timed_envelope,
    unsubscribe,
    working,
)
from tests.support.call_counter import count_calls


def join_members(bus: BrokerHarness, count: int, **options: object) -> list[Version2Peer]:
    """Return `count` members, each with its own session, as subscription 5."""
    members = [connect_version2(bus, subscribe(1, 5, group="g", **options)) for _ in range(count)]
    for member in members:
        member.receive_replies()
    return members


def test_each_message_goes_to_one_member_evenly() -> None:
    bus = BrokerHarness()
    members = join_members(bus, 3)
    connect_version2(bus, publish(1, 0, *numbered(300)))
    received = [member.receive_message_ids() for member in members]
    assert sorted(id_ for ids in received for id_ in ids) == list(range(300))
    assert [len(ids) for ids in received] == [100, 100, 100]


def test_faster_member_receives_more() -> None:
    bus = BrokerHarness()
    fast, slow = join_members(bus, 2, max_in_flight=10)
    connect_version2(bus, publish(1, 0, *numbered(100)))
    received, slow_ids = [], slow.receive_message_ids()
    while ids := fast.receive_message_ids():
        received += ids
        for sequence in ids:
            fast.send(ack(5, sequence, sequence + 1))
    assert (len(slow_ids), len(received)) == (10, 90)


@pytest.mark.parametrize("by_key", [False, True])
def test_messages_are_assigned_in_portions(by_key: bool) -> None:
    counts = []
    for message_count in (1000, 4000):
        bus = BrokerHarness()
        bus.skips_checks = True
        members = join_members(bus, 100, by_key=by_key, max_in_flight=message_count)
        writer, frames = connect_version2(bus), publish(1, 0, *numbered(message_count))
        steps = [count_calls(lambda writer=writer, frames=frames: writer.send(frames))]
        while bus.broker.next_wakeup <= bus.broker.clock.now:
            steps.append(count_calls(bus.broker.run_due_wakeups))
        counts.append(max(steps))
        bus.broker.check_invariants()
        assert sum(len(member.receive_message_ids()) for member in members) == message_count
    assert counts[1] <= 1.2 * counts[0]


def test_messages_that_the_last_subscription_of_a_session_has_not_acked_wait() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5, group="g"), subscribe(1, 6))
    connect_version2(bus, publish(1, 0, *numbered(10)))
    peer.receive_deliveries()
    peer.send(ack(5, 0, 10), ack(6, 0, 4))
    peer.disconnect()
    assert connect_version2(bus, subscribe(1, 5)).receive_message_ids() == list(range(4, 10))


def test_one_session_can_have_several_members() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5, group="g"), subscribe(1, 6, group="g"))
    connect_version2(bus, publish(1, 0, *numbered(10)))
    received = [(m.number, m.message_id) for m in peer.receive_deliveries()]
    assert sorted(i for _, i in received) == list(range(10))
    assert {number for number, _ in received} == {5, 6}
    first_ids = [i for number, i in received if number == 5]
    peer.send(unsubscribe(5))
    redelivered = [(m.number, m.message_id, m.attempt) for m in peer.receive_deliveries()]
    assert sorted(redelivered) == [(6, i, 2) for i in first_ids]


@pytest.mark.parametrize("action", ["leave", "unsubscribe"])
def test_messages_of_closed_member_go_to_others(action: str) -> None:
    bus = BrokerHarness()
    first, second = join_members(bus, 2, max_in_flight=4)
    connect_version2(bus, publish(1, 0, *numbered(8)))
    first_ids, second_ids = first.receive_message_ids(), second.receive_message_ids()
    for sequence in second_ids:
        second.send(ack(5, sequence, sequence + 1))
    first.send(
        ack(5, first_ids[0], first_ids[0] + 1), nack(5, first_ids[1], first_ids[1] + 1, 60_000)
    )
    first.disconnect() if action == "leave" else first.send(unsubscribe(5))
    assert [(m.message_id, m.attempt) for m in second.receive_deliveries()] == [
        (i, 2) for i in first_ids[2:]
    ]
    bus.broker.clock.now += 61
    bus.broker.run_due_wakeups()
    assert second.receive_message_ids() == [first_ids[1]]


def test_assigned_unsent_messages_are_not_counted_as_delivered() -> None:
    bus = BrokerHarness()
    first, second = join_members(bus, 2, max_deliveries=1)
    connect_version2(bus, publish(1, 0, b"a", b"b"))
    assert second.receive_message_ids() == [1]
    second.send(ack(5, 1, 2))
    first.disconnect()  # Message 0 was assigned but not written.
    assert [(m.message_id, m.attempt) for m in second.receive_deliveries()] == [(0, 1)]


def test_unread_assignments_are_reclaimed_after_ack_timeout() -> None:
    bus = BrokerHarness()
    stuck, reading = join_members(bus, 2, max_deliveries=1)
    connect_version2(bus, publish(1, 0, *numbered(4)))
    assert len(reading.receive_message_ids()) == 2
    reading.send(ack(5, 0, 4))
    bus.tick(7)
    assert len(delivered := reading.receive_deliveries()) == 2
    assert {m.attempt for m in delivered} == {1}
    assert stuck.receive_message_ids() == []
    reading.send(ack(5, 0, 4))
    assert bus.statistics(1).ring.message_count == 0


def test_single_slow_member_receives_messages_once() -> None:
    bus = BrokerHarness()
    [only] = join_members(bus, 1)
    connect_version2(bus, publish(1, 0, *numbered(4)))
    bus.tick(20)
    first = only.receive_message_ids()
    bus.tick()
    assert first + only.receive_message_ids() == [0, 1, 2, 3]


def test_only_receiving_member_can_settle_a_message() -> None:
    bus = BrokerHarness()
    first, second = join_members(bus, 2)
    connect_version2(bus, publish(1, 0, *numbered(10)))
    first_ids, second_ids = first.receive_message_ids(), second.receive_message_ids()
    second.send(ack(5, 0, 10), nack(5, 0, 10, 0), working(5, 0, 10))
    assert bus.statistics(1).in_flight == len(first_ids)
    assert second.receive_message_ids() == []
    bus.tick(6)
    redelivered = [*first.receive_deliveries(), *second.receive_deliveries()]
    assert sorted(m.message_id for m in redelivered) == first_ids
    assert {m.attempt for m in redelivered} == {2}
    assert not set(first_ids) & set(second_ids)


def test_ack_of_unsent_message_has_no_effect() -> None:
    bus = BrokerHarness()
    first, second = join_members(bus, 2, max_in_flight=3)
    connect_version2(bus, publish(1, 0, *numbered(3)))
    first_ids = first.receive_message_ids()
    second_ids = second.receive_message_ids()
    first.disconnect()  # Its messages are assigned to the other member, which reads nothing.
    between = [i for i in first_ids if second_ids[0] < i < second_ids[-1]] or first_ids
    second.send(ack(5, 0, 3))
    assert second.receive_message_ids() == first_ids
    assert set(between) <= set(first_ids)


def test_overdue_message_moves_to_other_member_and_late_ack_is_ignored() -> None:
    bus = BrokerHarness()
    first, second = join_members(bus, 2, max_in_flight=1)
    connect_version2(bus, publish(1, 0, b"a", b"b"))
    assert (first.receive_message_ids(), second.receive_message_ids()) == ([0], [1])
    second.send(ack(5, 1, 2))
    bus.tick(6)
    (new_holder, former_holder) = (
        (first, second) if first.receive_message_ids() else (second, first)
    )
    former_holder.send(ack(5, 0, 1))
    assert bus.statistics(1).in_flight == 1
    new_holder.send(ack(5, 0, 1))
    assert bus.statistics(1).in_flight == 0


def test_group_gives_up_after_max_deliveries() -> None:
    bus = BrokerHarness()
    first, second = join_members(bus, 2, max_deliveries=2, max_in_flight=1)
    connect_version2(bus, publish(1, 0, b"a"))
    received = 0
    for _ in range(40):
        received += len(first.receive_message_ids()) + len(second.receive_message_ids())
        bus.tick()
    assert received == 2
    assert bus.statistics(1).dropped == {Reason.MAX_DELIVERIES: 1}
    assert bus.statistics(1).ring.message_count == 0


def test_working_prevents_redelivery_to_others() -> None:
    bus = BrokerHarness()
    first, second = join_members(bus, 2)
    connect_version2(bus, publish(1, 0, b"a"))
    assert first.receive_message_ids() == [0]
    for _ in range(20):
        first.send(working(5, 0, 1))
        bus.tick(5)
        assert first.receive_message_ids() == second.receive_message_ids() == []
    bus.tick()
    assert first.receive_message_ids() + second.receive_message_ids() == [0]


def test_message_expired_after_assignment_is_not_sent() -> None:
    bus = BrokerHarness()
    bus.broker.clock.now = 50.0
    [only] = join_members(bus, 1)
    connect_version2(
        bus, publish_envelopes(1, 0, timed_envelope(b"a", expires_ms=1000), timed_envelope(b"b"))
    )
    bus.broker.clock.now = 51.0
    assert only.receive_message_ids() == [1]
    only.send(ack(5, 1, 2))
    bus.broker.end_turn()
    assert bus.statistics(1).dropped == {Reason.EXPIRED: 1}
    assert bus.statistics(1).ring.message_count == 0


def test_delayed_message_goes_to_one_member() -> None:
    bus = BrokerHarness()
    bus.broker.clock.now = 50.0
    first, second = join_members(bus, 2)
    connect_version2(
        bus, publish_envelopes(1, 0, timed_envelope(b"a", not_before_ms=1000), timed_envelope(b"b"))
    )
    assert first.receive_message_ids() + second.receive_message_ids() == [1]
    bus.broker.clock.now = bus.broker.next_wakeup
    assert bus.broker.next_wakeup == 51.0
    bus.broker.run_due_wakeups()
    assert first.receive_message_ids() + second.receive_message_ids() == [0]
    assert bus.broker.next_wakeup == float("inf")


def test_filtered_group_skips_unmatched_messages() -> None:
    bus = BrokerHarness()
    first, second = join_members(bus, 2, channels=["a"])
    contents = [channel_envelope("ab"[n % 2], b"%d" % n) for n in range(100)]
    connect_version2(bus, publish_envelopes(1, 0, *contents))
    assert sorted(first.receive_message_ids() + second.receive_message_ids()) == list(
        range(0, 100, 2)
    )
    for member in (first, second):
        member.send(ack(5, 0, 100))
    bus.broker.end_turn()
    assert bus.statistics(1).ring.message_count == 0


def test_group_ends_with_its_last_member() -> None:
    bus = BrokerHarness()
    first, second = join_members(bus, 2)
    connect_version2(bus, publish(1, 0, *numbered(4)))
    first.disconnect()
    second.disconnect()
    assert bus.statistics(1).subscriptions == ()
    assert connect_version2(bus, subscribe(1, 5)).receive_message_ids() == [0, 1, 2, 3]


def test_durable_group_survives_all_members() -> None:
    bus = BrokerHarness()
    first, second = join_members(bus, 2, durable="d")
    writer = connect_version2(bus, publish(1, 0, *numbered(4)))
    assert sorted(first.receive_message_ids() + second.receive_message_ids()) == [0, 1, 2, 3]
    first.disconnect()
    second.disconnect()
    writer.send(publish(1, 4, b"x"))
    reader = connect_version2(bus, subscribe(1, 7, group="g", durable="d"))
    received = reader.receive_deliveries()
    assert [(m.message_id, m.attempt) for m in received] == [*((i, 2) for i in range(4)), (4, 1)]
    reader.send(unsubscribe(7, forget=True))
    assert bus.statistics(1).subscriptions == ()


def test_group_with_different_channels_is_refused() -> None:
    bus = BrokerHarness()
    join_members(bus, 1, channels=["a"])
    second = connect_version2(bus, subscribe(1, 5, group="g", channels=["b"]))
    assert second.receive_error_codes() == ["subscription_mismatch"]


def test_nacked_message_goes_to_available_member() -> None:
    bus = BrokerHarness()
    first, second = join_members(bus, 2, max_in_flight=1)
    connect_version2(bus, publish(1, 0, b"a", b"b"))
    assert (first.receive_message_ids(), second.receive_message_ids()) == ([0], [1])
    second.send(ack(5, 1, 2))
    first.send(nack(5, 0, 1, 0))
    assert [
        (m.message_id, m.attempt) for m in first.receive_deliveries() + second.receive_deliveries()
    ] == [(0, 2)]


def test_group_drop_newest_keeps_order() -> None:
    bus = BrokerHarness()
    [only] = join_members(bus, 1, max_in_flight=2, slow="drop_newest", max_pending=5)
    connect_version2(bus, publish(1, 0, *numbered(20)))
    received: list[int] = []
    while ids := only.receive_message_ids():
        received += ids
        only.send(ack(5, ids[0], ids[-1] + 1))
    assert received == [0, 1, 2, 3, 4]
    assert bus.statistics(1).dropped == {Reason.SLOW_CONSUMER: 15}


def test_member_acks_only_its_own_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = BrokerHarness()
    first, second = join_members(bus, 2, max_in_flight=1000)
    connect_version2(bus, publish(1, 0, *numbered(1000)))
    first_ids = first.receive_message_ids()
    group = next(iter(bus.broker.classes[1].groups.values()))
    holder, other_member = group.members
    assert (holder.assigned_count, other_member.assigned_count) == (500, 500)
    second.receive_message_ids()
    # Calls of `second` must not use the timer of `first`.
    monkeypatch.setattr(holder, "_ack_timer", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bus, "skips_checks", True)
        second.send(working(5, 0, 1000), ack(5, 0, 1000), nack(5, 0, 1000))
    monkeypatch.undo()
    bus.check_invariants()
    assert bus.statistics(1).in_flight == len(first_ids)
    first.send(ack(5, 0, 1000))
    assert bus.statistics(1).in_flight == 0


def test_group_scans_backlog_in_turns() -> None:
    bus = BrokerHarness()
    count = 10 * REDELIVERY_MESSAGES
    writer = connect_version2(
        bus, publish(1, 0, *[b""] * count), publish_envelopes(1, count, channel_envelope("x", b"!"))
    )
    peer = connect_version2(bus, subscribe(1, 5, group="g", channels=["x"], start="earliest"))
    group = next(iter(bus.broker.classes[1].groups.values()))
    turns, before = 0, 0
    while bus.broker.next_wakeup <= bus.broker.clock.now:
        assert 0 < group.window.cursor - before <= 2 * REDELIVERY_MESSAGES
        before = group.window.cursor
        writer.send(publish(1, count + 1 + turns, b"does not make it look more"))
        assert group.window.cursor == before
        bus.broker.run_due_wakeups()
        bus.check_invariants()
        turns += 1
    assert turns >= 5
    assert peer.receive_message_ids() == [count]


def test_group_scans_are_limited_per_turn_and_all_finish() -> None:
    bus = BrokerHarness()
    writer = connect_version2(bus, publish(1, 0, *[b""] * (3 * REDELIVERY_MESSAGES)))
    most = SCAN_MESSAGES_MAX // REDELIVERY_MESSAGES
    number = 2 * most
    options = {"channels": ["x"], "start": "earliest"}
    peer = connect_version2(
        bus, *[subscribe(1, n, group=f"g{n}", **options) for n in range(1, number + 1)]
    )
    groups = list(bus.broker.classes[1].groups.values())
    for _ in range(2):
        before = [group.window.cursor for group in groups]
        bus.broker.run_due_wakeups()
        moved = sum(group.window.cursor > at for group, at in zip(groups, before, strict=True))
        assert 0 < moved <= most
    while bus.broker.next_wakeup <= bus.broker.clock.now:
        bus.broker.run_due_wakeups()
    assert {group.window.cursor for group in groups} == {groups[0].position.ring.head}
    writer.send(publish_envelopes(1, 3 * REDELIVERY_MESSAGES, channel_envelope("x", b"")))
    assert len(peer.receive_deliveries()) == number


def test_member_in_flight_bytes_are_limited() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    size = 900_000
    member, second = join_members(bus, 2, max_in_flight=1_000_000)
    writer = connect_version2(bus)
    for n in range(3 * IN_FLIGHT_BYTES // size):
        writer.send(publish(1, n, b"x" * size))
    first_ids, second_ids = member.receive_message_ids(), second.receive_message_ids()
    for ids in (first_ids, second_ids):
        assert IN_FLIGHT_BYTES <= len(ids) * size + len(ids) * 13 < IN_FLIGHT_BYTES + size
    member.send(nack(5, first_ids[0], first_ids[0] + 1, 3_600_000))
    member.send(*[ack(5, n, n + 1) for n in first_ids[1:3]])
    bus.check_invariants()
    assert len(member.receive_message_ids()) == 3
    assert second.receive_message_ids() == []
    second.disconnect()
    member.send(*[ack(5, n, n + 1) for n in range(3 * IN_FLIGHT_BYTES // size)])
    assert set(second_ids) & set(member.receive_message_ids())
    bus.check_invariants()
