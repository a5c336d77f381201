"""A Connect with many classes is applied in several turns, completely or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.broker import broker as broker_module
from simplebus.core.broker import subscription_manager
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    CREATED_CLASSES_PER_TURN,
    DECLARED_CLASSES_ENDED_PER_TURN,
    SUBSCRIPTIONS_ENDED_PER_TURN,
)
from simplebus.core.message_class import class_registry, subject_bindings
from simplebus.core.message_class.class_ids import preferred_id
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import PermissionRule, PermissionRules, Permissions
from simplebus.core.users.users import User, Users
from tests.behaviour import wire_peer
from tests.behaviour.wire_peer import BrokerHarness, WirePeer, disconnect, run_all_turns, run_turn
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    connect_request,
    connect_version2,
    publish,
    subscribe,
)

MANY = 5 * CREATED_CLASSES_PER_TURN
NAMES = [f"class {n}" for n in range(MANY)]


def open_peer(bus: BrokerHarness, *, address: str = "") -> Version2Peer:
    """Return a peer that has not connected yet, and whose requests are processed in turns."""
    peer = Version2Peer(bus, bus.broker.open_session(address=address))
    peer.session.allow_split_reads()
    return peer


def test_each_turn_creates_few_classes_and_nothing_behind_is_processed() -> None:
    bus = BrokerHarness()
    idle_peer = connect_version2(bus, classes=[1])
    peer = open_peer(bus)
    peer.send(connect_request(*NAMES, 1, name="p", client="c") + publish(1, 0, b"behind"))
    counts, registry = [], bus.broker.store.class_registry
    while peer.session.is_request_pending:
        before = registry.created_count
        assert not peer.receive_replies()
        run_turn(peer)
        counts.append(registry.created_count - before)
        assert bus.statistics(1).ring.message_count == 0
    assert max(counts) <= CREATED_CLASSES_PER_TURN
    assert sum(counts) == MANY
    (reply,) = peer.receive_replies()
    assert list(reply.content["classes"]) == NAMES
    run_all_turns(peer)
    assert bus.statistics(1).ring.message_count == 1
    created_by = {cls.created_by for cls in bus.broker.classes.values() if cls.name}
    assert created_by == {"session 1 'p' (session 1 ('c'))"}
    assert idle_peer.session.created_class_count == 1
    assert peer.session.created_class_count == MANY


def test_version_1_connect_with_many_classes_is_applied_in_several_turns() -> None:
    bus = BrokerHarness()
    peer = WirePeer(bus, bus.broker.open_session())
    peer.session.allow_split_reads()
    peer.send(wire_peer.connect(*range(MANY)) + wire_peer.publish(7, b"behind"))
    turns = 0
    while run_turn(peer):
        turns += 1
    assert turns >= MANY // CREATED_CLASSES_PER_TURN
    assert set(bus.broker.classes) == set(range(MANY))
    assert bus.statistics(7).ring.message_count == 1


def test_refused_connect_changes_nothing() -> None:
    bus = BrokerHarness(classes=MANY - 1)
    peer = open_peer(bus)
    peer.send(connect_request(*NAMES))
    with pytest.raises(RemoteProtocolError) as caught:
        run_turn(peer)
    assert caught.value.reason is Reason.TOO_MANY_CLASSES
    assert not peer.session.is_request_pending
    assert not bus.broker.classes
    assert bus.broker.store.class_registry.class_count == 0


def test_reserved_classes_count_for_limits_and_quotas() -> None:
    bus = BrokerHarness(classes=MANY + 1, classes_per_address=MANY, classes_per_connection=0)
    peer = open_peer(bus, address="192.0.2.1")
    peer.send(connect_request(*NAMES))
    run_turn(peer)
    neighbor = open_peer(bus, address="192.0.2.1")
    assert neighbor.send_refused(connect_request("one more")) is Reason.TOO_MANY_CLASSES
    assert connect_version2(bus, classes=["other"]).session.created_class_count == 1
    refused = Version2Peer(bus, bus.broker.open_session())
    assert refused.send_refused(connect_request("another")) is Reason.TOO_MANY_CLASSES
    run_all_turns(peer)
    assert len(bus.broker.classes) == MANY + 1
    assert bus.broker.store.class_registry.class_count == MANY + 1


def test_reserved_name_is_refused_with_another_id_and_used_with_its_own() -> None:
    bus = BrokerHarness()
    peer = open_peer(bus)
    peer.send(connect_request(*NAMES, {"id": 5, "name": "five"}))
    run_turn(peer)
    other_peer = connect_version2(bus, classes=[])
    other_peer.send(
        connect_request({"id": 6, "name": "five"}), connect_request({"id": 5, "name": "x"})
    )
    assert other_peer.receive_error_codes() == ["class_name_conflict"] * 2
    other_peer.send(connect_request("five"), subscribe(5, 1))
    assert [reply.kind for reply in other_peer.receive_replies()] == ["connect", "subscribe"]
    run_all_turns(peer)
    (reply,) = peer.receive_replies()
    assert reply.content["classes"]["five"] == 5
    assert bus.broker.classes[5].session_count == 2


def test_reserved_id_is_not_assigned_to_another_name() -> None:
    bus = BrokerHarness()
    peer = open_peer(bus)
    peer.send(connect_request(*NAMES, preferred_id("orders")))
    run_turn(peer)
    connect_version2(bus, classes=["orders"])
    assert bus.broker.store.class_id_by_name["orders"] != preferred_id("orders")
    run_all_turns(peer)
    assert bus.broker.classes[preferred_id("orders")].name == ""


def test_connection_that_ends_meanwhile_leaves_complete_unused_classes() -> None:
    bus = BrokerHarness()
    peer = open_peer(bus)
    peer.send(connect_request(*NAMES, name="p", instance="i"))
    run_turn(peer)
    run_turn(peer)
    disconnect(peer)
    assert len(bus.broker.classes) == MANY
    assert all(cls.is_unused for cls in bus.broker.classes.values())
    assert bus.broker.store.class_registry.class_count == MANY
    successor = connect_version2(bus, classes=NAMES, name="p", instance="i")
    assert successor.session.created_class_count == 0


def test_publisher_name_that_is_taken_over_meanwhile_belongs_to_the_new_session() -> None:
    bus = BrokerHarness()
    peer = open_peer(bus)
    peer.send(connect_request(*NAMES, name="p", instance="i"))
    run_turn(peer)
    run_turn(peer)
    newer = connect_version2(bus, classes=[1], name="p", instance="i")
    assert peer.session.is_closed
    run_all_turns(peer)
    assert len(bus.broker.classes) == MANY + 1
    assert bus.broker.classes[1].session_count == 1
    assert sum(cls.session_count for cls in bus.broker.classes.values()) == 1
    newer.send(publish(1, 0, b"message"))
    assert bus.statistics(1).ring.message_count == 1


def test_session_that_is_taken_over_ends_its_subscriptions_in_several_turns() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    count = 3 * SUBSCRIPTIONS_ENDED_PER_TURN
    durables = [subscribe(1, n, durable=f"d{n}") for n in range(1, count + 1)]
    peer = connect_version2(bus, *durables, publish(1, 0, b"message"), name="p", instance="i")
    newer = open_peer(bus)
    newer.send(connect_request(name="p", instance="i") + b"".join(durables) + publish(1, 1, b"x"))
    [(closing, error)] = bus.broker.end_turn().close
    assert (closing, error.reason) == (peer.session, Reason.TAKEN_OVER)
    subscription_counts = [len(peer.session.subscriptions)]
    while newer.session.is_request_pending:
        run_turn(newer)
        subscription_counts.append(len(peer.session.subscriptions))
    assert subscription_counts == [2 * count // 3, count // 3, 0]
    assert peer.session.is_closed
    run_all_turns(newer)
    assert len(newer.session.subscriptions) == count
    assert bus.statistics(1).published == 2


def test_session_that_takes_over_while_another_one_does_gets_the_durables() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    count = 3 * SUBSCRIPTIONS_ENDED_PER_TURN
    durables = [subscribe(1, n, durable=f"d{n}") for n in range(1, count + 1)]
    first = connect_version2(bus, *durables, name="p", instance="i")
    second, third = open_peer(bus), open_peer(bus)
    second.send(connect_request(name="p", instance="i"))
    assert second.session.is_request_pending
    third.send(connect_request(name="p", instance="i") + b"".join(durables))
    run_all_turns(third)
    assert first.session.is_closed
    assert second.session.is_closed
    assert len(third.session.subscriptions) == count
    assert {reply.kind for reply in third.receive_replies()} == {"connect", "subscribe"}


@pytest.mark.parametrize("is_new_session_first", [True, False])
def test_connect_succeeds_if_the_former_session_disconnects_meanwhile(
    is_new_session_first: bool,
) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    requests = [subscribe(1, n) for n in range(1, 2 * SUBSCRIPTIONS_ENDED_PER_TURN + 1)]
    peer = connect_version2(bus, *requests, name="p", instance="i")
    newer = open_peer(bus)
    newer.send(connect_request(name="p", instance="i"))
    if is_new_session_first:
        run_all_turns(newer)
    disconnect(peer)
    run_all_turns(newer)
    assert [reply.kind for reply in newer.receive_replies()] == ["connect"]
    assert bus.broker.sessions == {newer.session.session_id: newer.session}


def test_use_of_many_classes_ends_in_several_turns() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    count = 2 * DECLARED_CLASSES_ENDED_PER_TURN + 1
    peer = connect_version2(bus, classes=[f"class {n}" for n in range(count)])
    turns = [bus.broker.end_some_subscriptions(peer.session) for _ in range(4)]
    assert turns == [True, True, False, False]
    peer.disconnect()
    assert all(cls.is_unused for cls in bus.broker.classes.values())


def test_subject_that_is_reserved_is_bound_by_the_first_connect_that_completes() -> None:
    bus = BrokerHarness()
    seen: list[tuple[int, str, bool]] = []
    bus.broker.store.subject_bindings.add_observer(lambda *change: seen.append(change))
    peer = open_peer(bus)
    peer.send(connect_request(*NAMES, {"id": 5, "subjects": ["a", "b"]}))
    run_turn(peer)
    run_turn(peer)
    assert seen == []
    connect_version2(bus, classes=[{"id": 5, "subjects": ["a"]}])
    assert seen == [(5, "a", True)]
    run_all_turns(peer)
    assert sorted(seen) == [(5, "a", True), (5, "b", True)]


@pytest.mark.parametrize("conflict", ["name", "id", "limit"])
def test_class_that_another_client_creates_during_the_check_is_respected(conflict: str) -> None:
    """Whichever part of the check has already passed when the other Connect arrives."""
    references = [*NAMES[:6], {"id": 5, "name": "five"}]
    for turn_count in range(1, 30):
        with tiny_turns(1):
            bus = BrokerHarness(classes=7 if conflict == "limit" else 8)
            peer = open_peer(bus)
            peer.send(connect_request(*references))
            for _ in range(turn_count):
                run_turn(peer)
            if bus.broker.store.class_registry.class_count:
                return
            conflicting_reference = {
                "name": NAMES[2],
                "id": {"id": preferred_id(NAMES[2])},
                "limit": "other",
            }[conflict]
            connect_version2(bus, classes=[conflicting_reference])
            if conflict == "limit":
                with pytest.raises(RemoteProtocolError) as caught:
                    run_all_turns(peer)
                assert caught.value.reason is Reason.TOO_MANY_CLASSES
                assert set(bus.broker.store.class_id_by_name) == {"other"}
                continue
            run_all_turns(peer)
            (reply,) = peer.receive_replies()
            ids = reply.content["classes"]
            assert len(set(ids.values())) == 7
            assert ids == bus.broker.store.class_id_by_name
            assert (ids[NAMES[2]] == preferred_id(NAMES[2])) == (conflict == "name")
    pytest.fail("the check never ended")


def test_check_ends_even_if_every_turn_of_others_creates_a_class() -> None:
    bus = BrokerHarness()
    peer = open_peer(bus)
    with tiny_turns(1):
        peer.send(connect_request(*NAMES[:10]))
        other_peer = connect_version2(bus, classes=[])
        for number in range(300):
            run_turn(peer)
            if not peer.session.is_request_pending:
                break
            other_peer.send(connect_request(f"other {number}"))
        (reply,) = peer.receive_replies()
    assert list(reply.content["classes"]) == NAMES[:10]


def test_class_without_permission_refuses_the_connect_at_any_place() -> None:
    rules = PermissionRules((PermissionRule("class*"),))
    permissions = Permissions(rules, PermissionRules(()), wildcards=True)
    user = User("ada", token=hash_token("t"), permissions=permissions)
    for place in range(6):
        bus = BrokerHarness(classes=100)
        bus.broker.user_directory.replace_users(Users([user]))
        names = NAMES[:5]
        names.insert(place, "other")
        peer = open_peer(bus)
        with tiny_turns(2):
            peer.send(connect_request(*names, auth={"token": "t"}))
            with pytest.raises(RemoteProtocolError) as caught:
                run_all_turns(peer)
        assert caught.value.reason is Reason.UNAUTHORIZED
        assert bus.broker.store.class_registry.class_count == 0


def test_connection_that_is_closed_during_the_check_creates_nothing() -> None:
    bus = BrokerHarness()
    with tiny_turns(1):
        for turn_count in range(1, 8):
            peer = open_peer(bus)
            peer.send(connect_request(*NAMES[:8], {"id": 5, "subjects": ["a"]}, name="p"))
            for _ in range(turn_count):
                run_turn(peer)
            bus.broker.close_session(peer.session)
            while peer.session.is_request_pending:
                bus.broker.continue_request(peer.session)
    assert not bus.broker.classes
    assert bus.broker.store.class_registry.class_count == 0
    assert len(bus.broker.store.subject_bindings) == 0
    assert connect_version2(bus, classes=["a"], name="p").session.created_class_count == 1


IDS = st.sampled_from([1, 2, preferred_id("a")])
NAMES_OF_TWO = st.sampled_from(["a", "b"])
REFERENCES = st.one_of(
    IDS,
    NAMES_OF_TWO,
    st.builds(lambda number, name: {"id": number, "name": name}, IDS, NAMES_OF_TWO),
    st.builds(
        lambda name, subject: {"name": name, "subjects": [subject], "last_values": True},
        NAMES_OF_TWO,
        st.sampled_from(["x.*", "y"]),
    ),
)


@contextmanager
def tiny_turns(checked_count: int) -> Iterator[None]:
    """Create one class per turn, in every Connect, and check `checked_count`."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (class_registry, subject_bindings):
            patch.setattr(module, "CHECKED_CLASSES_PER_TURN", checked_count)
        patch.setattr(subscription_manager, "PERMISSION_CHECKS_PER_TURN", checked_count)
        patch.setattr(class_registry, "CREATED_CLASSES_PER_TURN", 1)
        patch.setattr(broker_module, "CREATED_CLASSES_PER_TURN", 1)
        yield


@settings(max_examples=3 * settings().max_examples)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(REFERENCES, max_size=4)), max_size=5),
    st.sampled_from([1, 2, 3, 512]),
    st.data(),
)
def test_connects_in_turns_end_as_those_at_once(
    requests: list[tuple[int, list[object]]], checked_count: int, data: st.DataObject
) -> None:
    """The ends of the checks determine the order; the order of the other parts does not matter."""
    unchecked: dict[int, list[object]] = {}  # Requests by index of the peer.
    order: list[tuple[int, list[object]]] = []
    with tiny_turns(checked_count):
        split = BrokerHarness(classes=4)
        registry = split.broker.store.class_registry
        peers = [connect_version2(split, classes=[]) for _ in range(3)]
        for peer in peers:
            peer.session.allow_split_reads()

        def run_turns(index: int, *, most: int = 1000) -> None:
            session = peers[index].session
            while most and (session.is_request_pending or session.unprocessed):
                most -= 1
                with count_calls(registry, "reserve") as reserved:
                    run_turn(peers[index])
                if index in unchecked and (reserved or not session.is_request_pending):
                    order.append((index, unchecked.pop(index)))

        for index, references in requests:
            run_turns(index)
            unchecked[index] = references
            with count_calls(registry, "reserve") as reserved:
                peers[index].send(connect_request(*references))
            if reserved or not peers[index].session.is_request_pending:
                order.append((index, unchecked.pop(index)))
            for peer_index in data.draw(st.lists(st.integers(0, 2), max_size=12)):
                run_turns(peer_index, most=1)
        for index in range(len(peers)):
            run_turns(index)
        replies = [[reply.content for reply in peer.receive_replies()] for peer in peers]
    whole = BrokerHarness(classes=4)
    expected_peers = [connect_version2(whole, classes=[]) for _ in range(3)]
    for index, references in order:
        expected_peers[index].send(connect_request(*references))
    expected = [[reply.content for reply in peer.receive_replies()] for peer in expected_peers]
    assert replies == expected
    assert describe(split) == describe(whole)
    for peer in (*peers, *expected_peers):
        disconnect(peer)
    assert all(cls.session_count == 0 for cls in split.broker.classes.values())


@contextmanager
def count_calls(target: object, method: str) -> Iterator[list[None]]:
    """Record the calls of a method of an object."""
    calls: list[None] = []
    function = getattr(target, method)

    def record_and_call(*arguments: object, **keywords: object) -> object:
        calls.append(None)
        return function(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, method, record_and_call)
        yield calls


def describe(bus: BrokerHarness) -> object:
    store = bus.broker.store
    registry = store.class_registry
    assert registry.class_count == len(registry.classes)
    return (
        registry.class_id_by_name,
        len(store.subject_bindings),
        {
            class_id: (
                cls.name,
                cls.session_count,
                cls.has_last_values,
                cls.created_by,
                store.subject_bindings.subjects_of(class_id),
            )
            for class_id, cls in sorted(registry.classes.items())
        },
    )
