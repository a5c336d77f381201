"""Key-ordered groups: assignment of keys to members, and order within a key."""

from __future__ import annotations

from collections import defaultdict

import pytest

from simplebus.core.errors import Reason
from simplebus.core.group import key_ordered_group
from simplebus.core.group.group import GroupMember
from simplebus.core.group.key_ordered_group import KeyOrderedGroup, KeyOrderedMember
from simplebus.core.limits import IN_FLIGHT_BYTES, KEY_ORDERED_MESSAGES_MAX, Limits
from simplebus.core.message_class.purge import purge_messages
from simplebus.core.settings import FullPolicy, Settings
from tests.behaviour.wire_peer import BrokerHarness, numbered
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    connect_version2,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    timed_envelope,
    unsubscribe,
    working,
)
from tests.models.key_order_model import KeyOrderModel, encode_with_key


def join_members(bus: BrokerHarness, count: int, **options: object) -> list[Version2Peer]:
    """Return `count` members, each with its own session, as subscription 5."""
    members = [
        connect_version2(bus, subscribe(1, 5, group="g", by_key=True, **options))
        for _ in range(count)
    ]
    for member in members:
        member.receive_replies()
    return members


def publish_keys(bus: BrokerHarness, *keys: bytes) -> None:
    """Publish one message for each of these keys, in order."""
    connect_version2(bus, publish_envelopes(1, 0, *map(encode_with_key, keys)))


def receive_by_id(members: list[Version2Peer]) -> dict[int, Version2Peer]:
    """Return which member receives which message now."""
    return {id_: member for member in members for id_ in member.receive_message_ids()}


def ack_in_rounds(members: list[Version2Peer]) -> list[list[tuple[int, int]]]:
    """Receive and acknowledge everything. Returns (attempt, id) of the messages of each round."""
    rounds = []
    while received := {m: m.receive_deliveries() for m in members if not m.session.is_closed}:
        if not any(received.values()):
            return rounds
        rounds.append(
            sorted(
                (g.attempt, g.message_id) for deliveries in received.values() for g in deliveries
            )
        )
        for member, deliveries in received.items():
            for delivery in deliveries:
                member.send(ack(5, delivery.message_id, delivery.message_id + 1))
    return rounds


def test_messages_of_a_key_go_to_one_member_in_order() -> None:
    bus = BrokerHarness()
    members = join_members(bus, 3)
    publish_keys(bus, *[b"key %d" % (number % 7) for number in range(70)])
    members_by_key = defaultdict(set)
    for first in range(0, 70, 7):
        received = receive_by_id(members)
        assert sorted(received) == list(range(first, first + 7))
        for id_, member in received.items():
            members_by_key[id_ % 7].add(member)
            member.send(ack(5, id_, id_ + 1))
    assert all(len(key_members) == 1 for key_members in members_by_key.values())
    assert len({member for key_members in members_by_key.values() for member in key_members}) > 1
    assert bus.statistics(1).ring.message_count == 0


def test_keyless_messages_go_to_any_member() -> None:
    bus = BrokerHarness()
    members = join_members(bus, 3)
    connect_version2(
        bus, publish(1, 0, *numbered(30)), publish_envelopes(1, 30, *[timed_envelope(b"")] * 30)
    )
    received = [member.receive_message_ids() for member in members]
    assert [len(ids) for ids in received] == [20, 20, 20]
    assert sorted(id_ for ids in received for id_ in ids) == list(range(60))


@pytest.mark.parametrize("delay_ms", [None, 3000])
def test_delayed_redelivery_blocks_only_its_key(delay_ms: int | None) -> None:
    bus = BrokerHarness()
    (only,) = join_members(bus, 1)
    publish_keys(bus, b"a", b"a", b"b", b"b")
    assert only.receive_message_ids() == [0, 2]
    only.send(nack(5, 0, 1, delay_ms), ack(5, 2, 3))
    assert only.receive_message_ids() == [3]
    bus.broker.clock.now += 4
    bus.tick(6)
    bus.broker.run_due_wakeups()
    assert sorted((m.message_id, m.attempt) for m in only.receive_deliveries()) == [(0, 2), (3, 2)]
    only.send(ack(5, 0, 1))
    assert [(m.message_id, m.attempt) for m in only.receive_deliveries()] == [(1, 1)]


def test_overdue_message_precedes_later_ones_of_its_key() -> None:
    bus = BrokerHarness()
    members = join_members(bus, 2)
    publish_keys(bus, b"a", b"a")
    ((_, owner),) = receive_by_id(members).items()
    bus.tick(5)
    owner.send(working(5, 0, 1))
    bus.tick(5)
    assert not receive_by_id(members)
    bus.tick(1)
    assert ack_in_rounds(members) == [[(2, 0)], [(1, 1)]]


@pytest.mark.parametrize("action", ["leave", "unsubscribe"])
def test_keys_of_closed_member_continue_at_others(action: str) -> None:
    bus = BrokerHarness()
    members = join_members(bus, 4)
    keys = [b"key %d" % number for number in range(40)]
    publish_keys(bus, *keys, *keys)
    before = receive_by_id(members)
    closed_member, other_members = members[1], [members[0], *members[2:]]
    closed_ids = [id_ for id_, member in before.items() if member is closed_member]
    assert closed_ids
    closed_member.disconnect() if action == "leave" else closed_member.send(unsubscribe(5))
    redelivered = receive_by_id(other_members)
    assert sorted(redelivered) == closed_ids  # No later message was sent, of any key.
    for id_, member in [
        *redelivered.items(),
        *((i, m) for i, m in before.items() if m is not closed_member),
    ]:
        member.send(ack(5, id_, id_ + 1))
    after = receive_by_id(other_members)
    assert sorted(after) == list(range(40, 80))
    for id_ in range(40):
        assert after[id_ + 40] is (redelivered[id_] if id_ in closed_ids else before[id_])


def test_moved_key_waits_for_message_in_flight() -> None:
    bus = BrokerHarness()
    members = join_members(bus, 1)
    keys = [b"key %d" % number for number in range(40)]
    publish_keys(bus, *keys, *keys)
    assert len(receive_by_id(members)) == 40
    members += join_members(bus, 1)
    assert not receive_by_id(members)
    members[0].send(ack(5, 0, 40))
    after = receive_by_id(members)
    assert sorted(after) == list(range(40, 80))
    assert set(after.values()) == set(members)


def test_key_assignment_is_independent_of_join_order() -> None:
    assignments = []
    for names in (["x", "y", "z"], ["z", "q", "x", "y"]):
        bus = BrokerHarness()
        members = {
            name: connect_version2(bus, subscribe(1, 5, group="g", by_key=True), name=name)
            for name in names
        }
        if "q" in members:
            members.pop("q").disconnect()
        publish_keys(bus, *[b"key %d" % number for number in range(40)])
        assignments.append(
            {id_: name for name, member in members.items() for id_ in member.receive_message_ids()}
        )
    assert assignments[0] == assignments[1]
    assert len(assignments[0]) == 40


def test_full_member_blocks_only_its_keys() -> None:
    bus = BrokerHarness()
    members = join_members(bus, 2, max_in_flight=1)
    publish_keys(bus, *[b"key %d" % number for number in range(40)])
    first = receive_by_id(members)
    assert len(first) == 2
    (acked_id, member), (stuck, _) = first.items()
    delivered_count = 1
    while True:
        member.send(ack(5, acked_id, acked_id + 1))
        ids = member.receive_message_ids()
        if not ids:
            break
        (acked_id,) = ids
        delivered_count += 1
    for id_, holder in first.items():
        if holder is not member:
            assert stuck == id_ or acked_id == id_
    assert 5 < delivered_count < 35
    assert bus.statistics(1).subscriptions[0].waiting == 40 - delivered_count - 1
    assert bus.statistics(1).in_flight == 1


def test_unresponsive_member_loses_its_keys_until_it_reads() -> None:
    bus = BrokerHarness()
    stuck, reading = join_members(bus, 2)
    keys = [b"key %d" % number for number in range(40)]
    publish_keys(bus, *keys)
    member_ids = reading.receive_message_ids()
    reading.send(ack(5, 0, 40))
    bus.tick(7)
    assert len(member_ids) + len(other_ids := reading.receive_message_ids()) == 40
    reading.send(ack(5, 0, 40))
    assert stuck.receive_message_ids() == []
    bus.broker.run_due_wakeups()
    publish_keys(bus, *keys)
    assert stuck.receive_message_ids() == [id_ + 40 for id_ in other_ids]


def test_next_message_of_key_follows_given_up_one() -> None:
    bus = BrokerHarness()
    (only,) = join_members(bus, 1, max_deliveries=2)
    publish_keys(bus, b"a", b"a")
    assert only.receive_message_ids() == [0]
    only.send(nack(5, 0, 1, 0))
    assert only.receive_message_ids() == [0]
    only.send(nack(5, 0, 1, 0))
    bus.broker.run_due_wakeups()
    assert only.receive_message_ids() == [1]
    assert bus.statistics(1).dropped == {Reason.MAX_DELIVERIES: 1}


def test_expired_message_unblocks_its_key() -> None:
    bus = BrokerHarness()
    bus.broker.clock.now = 50.0
    (only,) = join_members(bus, 1, max_in_flight=2)
    contents = [encode_with_key(b"a", expires_ms=None if n % 3 else 1000) for n in range(6)]
    connect_version2(bus, publish_envelopes(1, 0, encode_with_key(b"b"), *contents))
    bus.broker.clock.now = 51.0  # The assigned message expires before it is written.
    assert only.receive_message_ids() == [0]
    bus.broker.run_due_wakeups()
    assert only.receive_message_ids() == [2]
    only.send(ack(5, 2, 3))
    assert only.receive_message_ids() == [3]
    only.send(ack(5, 3, 4))
    bus.broker.run_due_wakeups()
    assert only.receive_message_ids() == [5]
    only.send(ack(5, 5, 6))
    assert only.receive_message_ids() == [6]
    assert bus.statistics(1).dropped == {Reason.EXPIRED: 2}


def test_expired_waiting_message_frees_space() -> None:
    bus = BrokerHarness()
    bus.broker.clock.now = 50.0
    (only,) = join_members(bus, 1)
    connect_version2(
        bus,
        publish_envelopes(
            1, 0, encode_with_key(b"a"), *[encode_with_key(b"a", expires_ms=1000)] * 50
        ),
    )
    assert only.receive_message_ids() == [0]
    bus.broker.clock.now = 51.0
    bus.tick()
    assert bus.statistics(1).dropped == {Reason.EXPIRED: 50}
    assert bus.statistics(1).subscriptions[0].waiting == 0


def test_delayed_message_does_not_block_its_key() -> None:
    bus = BrokerHarness()
    bus.broker.clock.now = 50.0
    (only,) = join_members(bus, 1)
    connect_version2(
        bus,
        publish_envelopes(
            1, 0, encode_with_key(b"a", not_before_ms=1000), *[encode_with_key(b"a")] * 3
        ),
    )
    assert only.receive_message_ids() == [1]
    only.send(ack(5, 1, 2))
    assert only.receive_message_ids() == [2]
    bus.broker.clock.now = 51.0
    bus.broker.run_due_wakeups()
    assert only.receive_message_ids() == []
    only.send(ack(5, 2, 3))
    assert only.receive_message_ids() == [0]
    only.send(ack(5, 0, 1))
    assert only.receive_message_ids() == [3]


def test_hot_key_does_not_block_other_keys() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    (only,) = join_members(bus, 1)
    publish_keys(bus, *[b"hot"] * 3000, b"cold")
    while bus.broker.next_wakeup <= bus.broker.clock.now:  # The group scans in portions.
        bus.broker.run_due_wakeups()
    assert only.receive_message_ids() == [0, 3000]


def test_key_ordered_group_limits_messages_behind_cursor() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    (only,) = join_members(bus, 1)
    count = KEY_ORDERED_MESSAGES_MAX + 2000
    publish_keys(bus, *[b"hot"] * count, b"cold")
    for _ in range(40):
        bus.broker.run_due_wakeups()
    (position,) = bus.broker.classes[1].groups
    assert position.window.cursor == KEY_ORDERED_MESSAGES_MAX
    assert only.receive_message_ids() == [0]
    bus.broker.check_invariants()
    only.send(ack(5, 0, 1))
    assert only.receive_message_ids() == [1]
    assert position.window.cursor == KEY_ORDERED_MESSAGES_MAX + 1


def test_key_ordered_group_limits_all_unfinished_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 50
    monkeypatch.setattr(key_ordered_group, "KEY_ORDERED_MESSAGES_MAX", limit)
    bus = BrokerHarness()
    first, second = join_members(bus, 2)
    publish_keys(bus, *[b"key %d" % (n % 40) for n in range(200)])
    received: list[int] = []
    (position,) = bus.broker.classes[1].groups
    while position.window.floor < 200:
        bus.broker.run_due_wakeups()
        assert position.window.in_flight_count <= limit
        for peer in (first, second):
            numbers = peer.receive_message_ids()
            received += numbers
            peer.send(*[ack(5, number, number + 1) for number in numbers])
    assert sorted(received) == list(range(200))


def test_key_ordered_member_in_flight_bytes_are_limited() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    (only,) = join_members(bus, 1)
    payload = bytes(900_000)
    for number in range(24):
        connect_version2(bus, publish_envelopes(1, 0, encode_with_key(b"%d" % number, payload)))
    bus.broker.check_invariants()
    (group,) = bus.broker.classes[1].groups.values()
    (member,) = group.members
    assert IN_FLIGHT_BYTES <= member.assigned_bytes < IN_FLIGHT_BYTES + 1_000_000
    assert [m.message_id for m in only.receive_deliveries()] == list(range(member.assigned_count))
    only.send(ack(5, 0, 24))
    assert only.receive_message_ids()[-1] == 23


@pytest.mark.parametrize("slow", ["drop_oldest", "drop_newest"])
def test_waiting_messages_of_a_key_can_be_dropped(slow: str) -> None:
    bus = BrokerHarness()
    (only,) = join_members(bus, 1, slow=slow, max_pending=4)
    for _ in range(200):
        publish_keys(bus, b"a")
    assert only.receive_message_ids() == [0]
    received = []
    for _ in range(3):
        only.send(ack(5, 0, 1 << 20))
        received += only.receive_message_ids()
    assert received == ([197, 198, 199] if slow == "drop_oldest" else [1, 2, 3])
    assert bus.statistics(1).dropped == {Reason.SLOW_CONSUMER: 196}


def test_group_cannot_mix_key_order() -> None:
    bus = BrokerHarness()
    join_members(bus, 1)
    plain = connect_version2(bus, subscribe(1, 5, group="g"), subscribe(1, 6, group="h"))
    assert plain.receive_error_codes() == ["subscription_mismatch"]
    plain.send(subscribe(1, 7, group="h", by_key=True), subscribe(1, 8, by_key=True))
    assert plain.receive_error_codes() == ["subscription_mismatch", "bad_request"]
    plain.send(subscribe(1, 9, group="g", by_key="yes"))
    assert plain.receive_error_codes() == ["bad_request"]


def test_resumed_member_settles_only_sent_messages() -> None:
    bus = BrokerHarness()
    (only,) = join_members(bus, 1, durable="d")
    publish_keys(bus, b"a", b"a", b"b", b"b")
    assert only.receive_message_ids() == [0, 2]
    only.disconnect()
    (position,) = bus.broker.classes[1].groups
    position.unacked.ack(0, 2)
    assert position.terminate_released(2, "")
    assert position.terminate_released(3, "")  # It was not sent, so nothing happens.
    bus.check_invariants()
    assert position.window.unacked_ranges(0, 4) == [(1, 2), (3, 4)]
    next_one = connect_version2(bus, subscribe(1, 5, group="g", by_key=True, durable="d"))
    assert ack_in_rounds([next_one]) == [[(1, 1), (1, 3)]]
    assert bus.statistics(1).ring.message_count == 0


def test_redelivery_stays_first_in_partition_after_partial_purge() -> None:
    bus = BrokerHarness()
    only = connect_version2(bus, subscribe(1, 5, group="g", by_key=True, durable="d"))
    publish_keys(bus, b"a", b"b", b"b")
    assert only.receive_message_ids() == [0, 1]
    cls = bus.broker.classes[1]
    only.disconnect()
    purge_messages(cls, 0, 1, None)
    bus.broker.store.trim_class(cls)
    bus.check_invariants()
    next_one = connect_version2(bus, subscribe(1, 5, group="g", by_key=True, durable="d"))
    assert ack_in_rounds([next_one]) == [[(2, 1)], [(1, 2)]]


def test_purged_message_unblocks_its_key() -> None:
    bus = BrokerHarness()
    (only,) = join_members(bus, 1)
    publish_keys(bus, b"a", b"a", b"a")
    assert only.receive_message_ids() == [0]
    cls = bus.broker.classes[1]
    purge_messages(cls, 0, 2, None)
    bus.broker.store.trim_class(cls)
    bus.broker.run_due_wakeups()
    assert only.receive_message_ids() == [2]


def test_dropped_message_unblocks_its_key() -> None:
    bus = BrokerHarness(
        Settings(limits=Limits(class_messages=4), full_policy=FullPolicy.DROP_OLDEST)
    )
    (only,) = join_members(bus, 1)
    publish_keys(bus, *[b"a"] * 4)
    assert only.receive_message_ids() == [0]
    publish_keys(bus, b"a", b"a")
    assert only.receive_message_ids() == [2]
    only.send(ack(5, 0, 3))
    assert only.receive_message_ids() == [3]


def test_sent_messages_precede_due_ones_after_restart() -> None:
    world = KeyOrderModel()
    world.publish((b"a", "", None, 1000), (b"a", "", None, None))
    world.receive(world.members[0])
    world.pass_time(1.5)
    world.restart()  # The model checks what may be sent.
    assert [message.sent for message in world.messages] == [0, 2]
    world.finish()


def test_leaving_member_releases_only_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = BrokerHarness()
    requests = [subscribe(1, number, group="g", by_key=True) for number in range(1, 21)]
    sessions = [connect_version2(bus, *requests) for _ in range(4)]
    (group,) = bus.broker.classes[1].groups.values()
    chosen: list[GroupMember] = []
    take = KeyOrderedGroup._reclaim_ready

    def noted(self: KeyOrderedGroup, member: KeyOrderedMember) -> None:
        chosen.append(member)
        take(self, member)

    monkeypatch.setattr(KeyOrderedGroup, "_reclaim_ready", noted)
    closed_members = list(group.members)[:20]
    bus.broker.close_session(sessions[0].session)
    assert chosen == closed_members
    assert len(group.members) == 60
    bus.broker.check_invariants()
