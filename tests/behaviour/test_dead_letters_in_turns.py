"""Dead letters of many messages, which a server appends in several turns."""

from __future__ import annotations

from itertools import pairwise

import pytest

from simplebus.core.errors import Reason
from simplebus.core.limits import DEAD_LETTER_BATCH_MESSAGES
from simplebus.core.protocol.envelope import decode
from simplebus.core.protocol.frames import FETCH
from simplebus.core.settings import ClassSettings, FullPolicy, Settings
from tests.behaviour.wire_peer import BrokerHarness, disconnect, numbered, run_all_turns, run_turn
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    connect_version2,
    json_request,
    nack,
    publish,
    subscribe,
    unsubscribe,
)
from tests.core.broker.test_purge import purge, send_and_expect_purge
from tests.core.test_dead_letters import DEAD_1, dead_headers, fetch_dead_letters

COUNT = 3 * DEAD_LETTER_BATCH_MESSAGES


def start_with_messages(
    *, settings: Settings | None = None, **options: object
) -> tuple[BrokerHarness, Version2Peer]:
    """Return a bus with limited turns, and a subscriber that was sent `COUNT` messages."""
    bus = BrokerHarness(settings)
    bus.skips_checks = True
    bus.broker.store.limit_turns(100)
    peer = connect_version2(bus, subscribe(1, 5, max_in_flight=COUNT, **options))
    peer.send(publish(1, 0, *numbered(COUNT)))
    assert len(peer.receive_message_ids()) == COUNT
    return bus, peer


def give_up_all(*peers: Version2Peer) -> None:
    """Terminate all messages of the peers without a request, so that no turn appends all dead
    letters.
    """
    for peer in peers:
        peer.session.subscriptions[5].terminate(0, COUNT, attempt=0, error="")


def terminate_each(*messages: int) -> bytes:
    return b"".join(nack(5, n, n + 1, "terminate") for n in messages)


def count_dead_letters(bus: BrokerHarness) -> int:
    dead_letter_class = bus.broker.classes.get(DEAD_1)
    return 0 if dead_letter_class is None else len(dead_letter_class.ring)


def purge_dead_letters(bus: BrokerHarness) -> int:
    """Purge all dead letters. Returns how many there were."""
    count = count_dead_letters(bus)
    send_and_expect_purge(connect_version2(bus), purge(class_id=DEAD_1))
    return count


def continue_work(bus: BrokerHarness) -> list[int]:
    """Do all deferred work. Returns the number of dead letters that each turn appended."""
    counts = [count_dead_letters(bus)]
    while bus.broker.store.has_deferred_work:
        bus.broker.store.continue_deferred_work()
        bus.broker.end_turn()
        counts.append(count_dead_letters(bus))
    return [after - before for before, after in pairwise(counts)]


@pytest.mark.parametrize("is_one_by_one", [True, False])
def test_dead_letters_of_terminated_messages_precede_the_next_request(is_one_by_one: bool) -> None:
    bus, peer = start_with_messages()
    peer.session.allow_split_reads()
    terminate = terminate_each(*range(COUNT)) if is_one_by_one else nack(5, 0, COUNT, "terminate")
    peer.send(terminate + json_request(FETCH, DEAD_1, 1, count=COUNT))
    counts = [count_dead_letters(bus)]
    while run_turn(peer):
        counts.append(count_dead_letters(bus))
    assert max(after - before for before, after in pairwise(counts)) <= DEAD_LETTER_BATCH_MESSAGES
    letters, _ = peer.receive_all()
    assert [decode(m.content)[1] for m in letters] == numbered(COUNT)


def test_each_turn_appends_few_dead_letters() -> None:
    bus, peer = start_with_messages()
    give_up_all(peer)
    assert count_dead_letters(bus) == 0
    assert bus.statistics(1).dropped == {Reason.TERMINATED: COUNT}
    assert sum(appended := continue_work(bus)) == COUNT
    assert max(appended) <= DEAD_LETTER_BATCH_MESSAGES
    assert bus.statistics(1).ring.message_count == 0
    bus.broker.check_invariants()


def test_positions_take_turns() -> None:
    bus, peer = start_with_messages()
    other = connect_version2(bus, subscribe(1, 5, start="earliest", max_in_flight=COUNT))
    assert len(other.receive_message_ids()) == COUNT
    give_up_all(peer, other)
    for _ in range(2):
        bus.broker.store.continue_deferred_work()
    sessions = {dead_headers(letter, "session") for letter, _ in fetch_dead_letters(bus)}
    assert sessions == {str(peer.session.session_id), str(other.session.session_id)}
    continue_work(bus)
    assert count_dead_letters(bus) == 2 * COUNT


def test_dead_letters_without_space_wait_for_a_tick() -> None:
    dead_letters = ClassSettings(full_policy=FullPolicy.BLOCK, messages_max=COUNT // 2)
    bus, peer = start_with_messages(settings=Settings(classes={"dead.1": dead_letters}))
    other = connect_version2(bus, subscribe(1, 5, start="earliest", max_in_flight=COUNT))
    assert len(other.receive_message_ids()) == COUNT
    for each in (peer, other):
        each.send(terminate_each(*range(COUNT)))
    assert count_dead_letters(bus) == COUNT // 2
    bus.tick()
    assert sum(continue_work(bus)) == 0
    for _ in range(3):
        assert purge_dead_letters(bus) == COUNT // 2
        bus.tick()
        continue_work(bus)
    assert purge_dead_letters(bus) == COUNT // 2
    assert bus.statistics(1).ring.message_count == 0
    bus.broker.check_invariants()


@pytest.mark.parametrize("options", [{}, {"durable": "d"}, {"group": "g"}])
@pytest.mark.parametrize("is_session_closed", [True, False])
def test_dead_letters_are_appended_before_the_subscription_ends(
    options: dict[str, str], is_session_closed: bool
) -> None:
    bus, peer = start_with_messages(**options)
    connect_version2(bus, subscribe(1, 1, start="new"))  # So the backlog need not wait for one.
    session_id = str(peer.session.session_id)
    give_up_all(peer)
    if is_session_closed:
        disconnect(peer)
    else:
        peer.session.allow_split_reads()
        peer.send(unsubscribe(5))
        assert peer.session.is_request_pending
        run_all_turns(peer)
    assert not bus.broker.store.has_deferred_work
    letters = fetch_dead_letters(bus)
    assert [dead_headers(letter, "sequence") for letter, _ in letters] == [
        str(n) for n in range(COUNT)
    ]
    if "group" not in options:
        assert {dead_headers(letter, "session") for letter, _ in letters} == {session_id}
    successor = connect_version2(bus, subscribe(1, 5, **options))
    assert successor.receive_message_ids() == []
    bus.broker.check_invariants()


def dead_sequences(bus: BrokerHarness) -> list[str]:
    """Return the source sequences of the dead letters."""
    return [str(dead_headers(letter, "sequence")) for letter, _ in fetch_dead_letters(bus)]


ALL_SEQUENCES = [str(n) for n in range(COUNT)]


def test_dead_letters_are_appended_before_a_seek() -> None:
    bus, peer = start_with_messages(durable="d")
    subscription = peer.session.subscriptions[5]
    disconnect(peer)
    subscription.terminate(0, COUNT, attempt=0, error="")
    successor = connect_version2(bus)
    successor.session.allow_split_reads()
    successor.send(subscribe(1, 5, durable="d", start="new", seek=True))
    counts = [count_dead_letters(bus)]
    while run_turn(successor):
        counts.append(count_dead_letters(bus))
    assert max(after - before for before, after in pairwise(counts)) <= DEAD_LETTER_BATCH_MESSAGES
    assert dead_sequences(bus) == ALL_SEQUENCES
    bus.broker.check_invariants()


def test_dead_letters_are_appended_before_a_slow_subscription_ends() -> None:
    bus, peer = start_with_messages(slow="disconnect", max_pending=COUNT)
    connect_version2(bus, subscribe(1, 1, start="new"))  # So the backlog need not wait for one.
    give_up_all(peer)
    publisher = connect_version2(bus, classes=[1])
    publisher.send(publish(1, 0, *numbered(COUNT + 1)))
    assert 5 in peer.session.subscriptions
    assert max(continue_work(bus)) <= DEAD_LETTER_BATCH_MESSAGES
    assert 5 not in peer.session.subscriptions
    assert dead_sequences(bus) == ALL_SEQUENCES
    bus.broker.check_invariants()


def test_dead_letters_are_appended_before_an_idle_durable_ends() -> None:
    bus, peer = start_with_messages(durable="d", idle_seconds=10)
    connect_version2(bus, subscribe(1, 1, start="new"))  # So the backlog need not wait for one.
    subscription = peer.session.subscriptions[5]
    disconnect(peer)
    subscription.terminate(0, COUNT, attempt=0, error="")
    assert len(bus.broker.classes[1].positions) == 2
    bus.broker.clock.now += 11
    bus.tick()
    assert len(bus.broker.classes[1].positions) == 2
    assert max(continue_work(bus)) <= DEAD_LETTER_BATCH_MESSAGES
    bus.tick()
    assert len(bus.broker.classes[1].positions) == 1
    assert dead_sequences(bus) == ALL_SEQUENCES
    bus.broker.check_invariants()


@pytest.mark.parametrize("has_space", [False, True])
def test_idle_durable_ends_although_its_dead_letters_have_no_space(has_space: bool) -> None:
    dead_letters = ClassSettings(full_policy=FullPolicy.BLOCK, messages_max=COUNT // 2)
    bus, peer = start_with_messages(
        settings=Settings(classes={"dead.1": dead_letters}), durable="d", idle_seconds=10
    )
    connect_version2(bus, subscribe(1, 1, start="new"))  # So the backlog need not wait for one.
    subscription = peer.session.subscriptions[5]
    disconnect(peer)
    subscription.terminate(0, COUNT, attempt=0, error="")
    continue_work(bus)
    stored_count = purge_dead_letters(bus) if has_space else 0
    bus.broker.clock.now += 11
    bus.tick()
    assert len(bus.broker.classes[1].positions) == (2 if has_space else 1)
    for _ in range(5):
        continue_work(bus)
        stored_count += purge_dead_letters(bus)
        bus.tick()
    assert len(bus.broker.classes[1].positions) == 1
    assert stored_count == (COUNT if has_space else COUNT // 2)
    bus.broker.check_invariants()


def test_position_that_is_not_slow_any_more_stays() -> None:
    bus, peer = start_with_messages(slow="disconnect", max_pending=COUNT)
    give_up_all(peer)
    publisher = connect_version2(bus, classes=[1])
    publisher.send(publish(1, 0, *numbered(10)))
    continue_work(bus)
    assert 5 in peer.session.subscriptions
    assert dead_sequences(bus) == ALL_SEQUENCES
    bus.broker.check_invariants()
