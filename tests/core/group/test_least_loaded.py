"""Least-loaded selection of group members, against a linear search."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from simplebus.core.group.group import Group, GroupMember
from simplebus.core.group.least_loaded import LeastLoadedMembers, _LoadHeap
from tests.behaviour.wire_peer import BrokerHarness, numbered
from tests.behaviour.wire_peer_v2 import ack, connect_version2, publish, subscribe


class FakeMember:
    """Member with the attributes that determine its load."""

    assigned_count = last_assigned_turn = 0


class LeastLoadedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.available, self.members, self.turns = LeastLoadedMembers(), list[Any](), 0

    @rule(assigned_count=st.integers(0, 3))
    def add_member(self, assigned_count: int) -> None:
        member = FakeMember()
        self.turns += 1
        member.assigned_count, member.last_assigned_turn = assigned_count, self.turns
        self.members.append(member)
        self.available.update(member)  # type: ignore[arg-type]

    @precondition(lambda self: self.members)
    @rule(
        member_index=st.integers(0, 1000), assigned_count=st.integers(0, 5), is_handed=st.booleans()
    )
    def change_load(self, member_index: int, assigned_count: int, is_handed: bool) -> None:
        member = self.members[member_index % len(self.members)]
        member.assigned_count = assigned_count
        if is_handed:
            self.turns += 1
            member.last_assigned_turn = self.turns
        self.available.update(member)

    @precondition(lambda self: self.members)
    @rule(member_index=st.integers(0, 1000))
    def remove_member(self, member_index: int) -> None:
        self.available.remove(self.members.pop(member_index % len(self.members)))

    @invariant()
    def matches_linear_search(self) -> None:
        self.available.check_invariants()
        assert len(self.available) == len(self.members)
        if self.members:
            assert self.available.least_loaded() is min(
                self.members, key=lambda member: (member.assigned_count, member.last_assigned_turn)
            )


TestLeastLoaded = LeastLoadedMachine.TestCase


def test_members_of_several_heaps_match_linear_search() -> None:
    random, available, members = Random(1), LeastLoadedMembers(), list[Any]()
    for turn in range(30_000):
        if len(members) < 3000 and random.random() < 0.9:
            members.append(member := FakeMember())
        else:
            member = random.choice(members)
        member.assigned_count, member.last_assigned_turn = random.randrange(50), turn
        available.update(member)  # type: ignore[arg-type]
        if random.random() < 0.1:
            available.remove(members.pop(random.randrange(len(members))))
        if turn % 1000 == 0 and members:
            available.check_invariants()
            assert available.least_loaded() is min(
                members, key=lambda member: (member.assigned_count, member.last_assigned_turn)
            )
    for member in members:
        available.remove(member)
    assert not available


def test_stale_heap_entries_are_dropped() -> None:
    heap, member = _LoadHeap(), FakeMember()
    for n in range(1000):
        member.assigned_count = n
        heap.update(member)  # type: ignore[arg-type]
        assert len(heap._entries) <= 65


def test_assignment_cost_is_independent_of_member_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus, member_count, room = BrokerHarness(), 300, GroupMember.free_count
    bus.skips_checks = True
    peer = connect_version2(bus, *[subscribe(1, n, group="g") for n in range(1, member_count + 1)])
    looks = 0

    def look(self: GroupMember) -> int:
        nonlocal looks
        looks += 1
        return room.fget(self)  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(GroupMember, "free_count", property(look))
    writer = connect_version2(bus, publish(1, 0, *numbered(member_count)))
    while bus.broker.next_wakeup <= bus.broker.clock.now:
        bus.broker.run_due_wakeups()
    assert looks <= 5 * member_count
    got = peer.receive_deliveries()
    assert len({message.number for message in got}) == member_count
    looks = 0
    peer.send(*[ack(message.number, message.message_id, message.message_id + 1) for message in got])
    writer.send(*[publish(1, member_count + n, b"x") for n in range(member_count)])
    assert looks <= 10 * member_count


def test_messages_of_a_closed_session_are_redistributed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = BrokerHarness()
    goes = connect_version2(bus, *[subscribe(1, n, group="g") for n in range(1, 41)])
    stays = connect_version2(bus, subscribe(1, 5, group="g"))
    connect_version2(bus, publish(1, 0, *numbered(82)))
    received = stays.receive_message_ids()
    goes.receive_deliveries()
    shares, share = 0, Group.distribute_messages

    def counting(self: Group) -> list[GroupMember]:
        nonlocal shares
        shares += 1
        return share(self)

    monkeypatch.setattr(Group, "distribute_messages", counting)
    goes.disconnect()
    assert shares == 1
    while bus.broker.next_wakeup <= bus.broker.clock.now:
        bus.broker.run_due_wakeups()
    assert sorted(received + stays.receive_message_ids()) == list(range(82))
