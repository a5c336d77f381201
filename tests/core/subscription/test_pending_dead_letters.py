"""Messages to dead-letter that wait for space in the class of dead letters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.errors import Reason
from simplebus.core.limits import DEAD_LETTER_BATCH_MESSAGES
from simplebus.core.settings import ClassSettings, FullPolicy, Settings
from simplebus.core.subscription.pending_dead_letters import PendingDeadLetters
from simplebus.core.subscription.selection import Ranges
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
)
from tests.core.broker.test_inquire import position_report
from tests.core.broker.test_purge import purge, send_and_expect_purge
from tests.core.test_dead_letters import DEAD_1, dead_headers, fetch_dead_letters
from tests.models.key_order_model import encode_with_key

KINDS: list[dict[str, Any]] = [
    {},
    {"max_in_flight": 100},
    {"durable": "d"},
    {"group": "g"},
    {"group": "g", "by_key": True},
]
BLOCKS = ClassSettings(full_policy=FullPolicy.BLOCK, messages_max=2)


def two_dead_letters_settings() -> Settings:
    """Return settings for a bus that keeps two dead letters of class 1."""
    return Settings(classes={"dead.1": BLOCKS})


def dead_letter_sequences(bus: BrokerHarness) -> list[str]:
    return [dead_headers(letter, "sequence") for letter, _ in fetch_dead_letters(bus)]


def tick_and_receive(bus: BrokerHarness, *peers: Version2Peer, times: int = 1) -> list[int]:
    """Advance the clock by `times` ticks. Returns the ids that the peers receive."""
    received = []
    for _ in range(times):
        bus.broker.clock.now += 1
        bus.tick()
        bus.broker.run_due_wakeups()
        for peer in peers:
            received += peer.receive_message_ids()
    return received


def purge_dead_letters(bus: BrokerHarness) -> list[str]:
    """Purge all dead letters. Returns the sequences that they had."""
    found = dead_letter_sequences(bus)
    send_and_expect_purge(connect_version2(bus), purge(class_id=DEAD_1))
    bus.tick()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outcome", ["terminate", "deliveries"])
def test_pending_dead_letter_waits_for_space_without_redelivery(
    kind: dict[str, Any], outcome: str
) -> None:
    bus = BrokerHarness(two_dead_letters_settings())
    peer = connect_version2(
        bus, subscribe(1, 5, max_deliveries=1, **kind), publish(1, 0, *numbered(7))
    )
    assert peer.receive_message_ids() == list(range(7))
    peer.send(ack(5, 1, 2), nack(5, 0, 7, "terminate" if outcome == "terminate" else 0))
    assert tick_and_receive(bus, peer, times=20) == []
    reason = Reason.TERMINATED if outcome == "terminate" else Reason.MAX_DELIVERIES
    assert bus.statistics(1).dropped == {reason: 6}
    report = position_report(bus)
    assert (report.waits, report.waiting_dead_letters, report.in_flight, report.dead_letters) == (
        "space",
        4,
        0,
        2,
    )
    assert report.waits_for == "space in 'dead.1' for 4 dead letters"
    peer.send(publish(1, 7, b"new"))
    assert tick_and_receive(bus, peer) == [7], "nobody else waits for that"
    peer.send(ack(5, 7, 8))
    assert [purge_dead_letters(bus) for _ in range(4)] == [["0", "2"], ["3", "4"], ["5", "6"], []]
    assert bus.statistics(1).dropped == {reason: 6}, "each is counted once"
    assert bus.statistics(1).acknowledged == 2
    assert bus.statistics(1).ring.message_count == 0
    assert position_report(bus).waits == "nothing"
    assert not bus.broker.store.positions_with_pending_dead_letters


def test_pending_dead_letter_can_still_be_acknowledged() -> None:
    bus = BrokerHarness(two_dead_letters_settings())
    peer = connect_version2(bus, subscribe(1, 5, durable="d"), publish(1, 0, *numbered(6)))
    peer.receive_message_ids()
    peer.send(nack(5, 0, 6, "terminate"), ack(5, 3, 5))
    assert purge_dead_letters(bus) == ["0", "1"]
    assert dead_letter_sequences(bus) == ["2", "5"]
    assert bus.statistics(1).ring.message_count == 0


def test_pending_dead_letter_does_not_block_its_key() -> None:
    bus = BrokerHarness(two_dead_letters_settings())
    peer = connect_version2(bus, subscribe(1, 5, group="g", by_key=True))
    peer.send(publish_envelopes(1, 0, *map(encode_with_key, [b"a", b"b", b"c", b"c", b"c"])))
    assert peer.receive_message_ids() == [0, 1, 2]
    peer.send(nack(5, 0, 3, "terminate"))
    assert peer.receive_message_ids() == [3]
    peer.send(nack(5, 3, 4, "terminate"))
    assert peer.receive_message_ids() == [4]
    peer.send(ack(5, 4, 5))
    assert [purge_dead_letters(bus) for _ in range(2)] == [["0", "1"], ["2", "3"]]


def test_pending_dead_letter_does_not_expire() -> None:
    bus = BrokerHarness(two_dead_letters_settings())
    peer = connect_version2(bus, subscribe(1, 5, durable="d"))
    peer.send(publish_envelopes(1, 0, *[timed_envelope(b"x", expires_ms=5000)] * 5))
    assert peer.receive_message_ids() == [0, 1, 2, 3, 4]
    peer.send(nack(5, 0, 4, "terminate"))
    peer.disconnect()
    tick_and_receive(bus, times=20)
    assert bus.statistics(1).dropped == {Reason.TERMINATED: 4}
    assert [purge_dead_letters(bus) for _ in range(2)] == [["0", "1"], ["2", "3"]]
    tick_and_receive(bus)
    assert bus.statistics(1).dropped == {Reason.TERMINATED: 4, Reason.EXPIRED: 1}


@pytest.mark.parametrize("kind", KINDS)
def test_purge_and_drop_remove_pending_dead_letters(kind: dict[str, Any]) -> None:
    bus = BrokerHarness(two_dead_letters_settings())
    peer = connect_version2(bus, subscribe(1, 5, **kind), publish(1, 0, *numbered(6)))
    peer.receive_message_ids()
    peer.send(nack(5, 0, 6, "terminate"))
    send_and_expect_purge(connect_version2(bus), purge(3, 5))
    assert position_report(bus).waiting_dead_letters == 2
    [position] = bus.broker.classes[1].positions
    position.skip_to(3)
    bus.broker.store.trim_class(bus.broker.classes[1])
    bus.check_invariants()
    assert position_report(bus).waiting_dead_letters == 1
    purge_dead_letters(bus)
    assert dead_letter_sequences(bus) == ["5"]


def test_removed_position_hands_pending_dead_letters_to_next() -> None:
    bus = BrokerHarness(two_dead_letters_settings())
    peer = connect_version2(bus, subscribe(1, 5, max_deliveries=1), publish(1, 0, *numbered(4)))
    peer.receive_message_ids()
    peer.send(nack(5, 0, 4, 0))
    peer.receive_message_ids()
    peer.disconnect()
    assert bus.statistics(1).ring.message_count == 2
    purge_dead_letters(bus)
    assert not bus.broker.store.positions_with_pending_dead_letters
    peer = connect_version2(bus, subscribe(1, 5, max_deliveries=1))
    peer.receive_all()
    assert tick_and_receive(bus, peer, times=10) == [], (
        "the next one is not sent it: its deliveries are spent"
    )
    assert dead_letter_sequences(bus) == ["2", "3"]


def test_dead_letters_survive_memory_exhaustion() -> None:
    bus = BrokerHarness(class_bytes=1 << 20, total_bytes=1 << 20, frame_bytes=10_000)
    peer = connect_version2(bus, subscribe(1, 5), publish(1, 0, *numbered(200, size=9000)))
    found: list[str] = []
    for _ in range(100):
        peer.send(nack(5, 0, 200, "terminate"))
        found += purge_dead_letters(bus)
        peer.receive_message_ids()
        bus.broker.end_turn()
        if len(found) == 200:
            break
    assert [int(sequence) for sequence in found] == list(range(200))
    assert bus.statistics(1).dropped == {Reason.TERMINATED: 200}
    assert bus.statistics(DEAD_1).dropped == {Reason.PURGED: 200}


def test_dead_letters_of_other_classes_are_kept_without_memory() -> None:
    bus = BrokerHarness(frame_bytes=10_000, class_bytes=1 << 20, total_bytes=1 << 22)
    for class_id in range(1, 5):
        peer = connect_version2(bus, subscribe(class_id, 5, durable="d"), classes=[class_id])
        peer.send(publish(class_id, 0, *numbered(100, size=5000)))
        peer.receive_deliveries()
        peer.send(nack(5, 0, 100, "terminate"))
        while not peer.session.outbox.is_idle:
            peer.receive_deliveries()
        bus.broker.end_turn()
    store = bus.broker.store
    assert store.class_registry.dead_letter_budget.used_bytes <= 1 << 20
    for class_id in range(1, 5):
        dead = bus.statistics(store.class_id_by_name[f"dead.{class_id}"])
        alive = bus.statistics(class_id)
        assert dead.ring.message_count + alive.ring.message_count >= 100
        assert (dead.dropped, alive.dropped) == ({}, {Reason.TERMINATED: 100})
    assert [cls.class_id for cls in store.positions_with_pending_dead_letters][:1] != [1]
    assert store.positions_with_pending_dead_letters


# PendingDeadLetters alone -------------------------------------------------------------------------

REASONS = (Reason.TERMINATED, Reason.MAX_DELIVERIES)
spans = st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda at: (at[0], at[0] + at[1]))
changes = st.one_of(
    st.tuples(st.just("add"), spans, st.sampled_from(REASONS), st.integers(0, 2)),
    st.tuples(st.just("remove"), spans, st.just(None), st.just(0)),
)


@given(st.lists(changes, max_size=20), spans)
@settings(max_examples=100)
def test_ranges_match_model_of_single_messages(
    steps: list[tuple[str, tuple[int, int], Reason, int]], requested: tuple[int, int]
) -> None:
    dead_letters, oracle = PendingDeadLetters(), dict[int, tuple[Reason, int]]()
    for action, (first, last), reason, attempts in steps:
        if action == "add":
            dead_letters.add([(first, last)], reason, attempts)
            for sequence in range(first, last):
                oracle.setdefault(sequence, (reason, attempts))
        else:
            dead_letters.remove(first, last)
            for sequence in range(first, last):
                oracle.pop(sequence, None)
        dead_letters.check_invariants()
    assert len(dead_letters) == len(oracle)
    found = {
        s: (span.give_up_reason, span.attempts)
        for span in dead_letters
        for s in range(*_span_range(span))
    }
    assert found == oracle
    copy = PendingDeadLetters()
    for first, last, attempts, reason_ in dead_letters.to_rows():
        copy.add([(first, last)], Reason(reason_), attempts)
    assert copy.to_rows() == dead_letters.to_rows()
    assert list(_expand_ranges(dead_letters.subtract_from([requested]))) == [
        s for s in range(*requested) if s not in oracle
    ]
    inside = [s for s in range(*requested) if s in oracle]
    front = dead_letters.next_batch(*requested)
    assert (front is None) == (not inside)
    if front is not None:
        ranges, reason, attempts = front
        assert ranges[0][0] == inside[0]
        expected = [s for s in inside if oracle[s] == (reason, attempts)]
        assert list(_expand_ranges(ranges)) == expected
    if oracle:
        assert dead_letters.first_sequence == min(oracle)


def _span_range(span: Any) -> tuple[int, int]:
    return span.first, span.last


def _expand_ranges(ranges: Ranges) -> list[int]:
    return [sequence for first, last in ranges for sequence in range(first, last)]


def test_next_batch_inspects_bounded_number_of_ranges() -> None:
    pending = PendingDeadLetters()
    pending.add([(at, at + 1) for at in range(0, 4_000, 2)], Reason.TERMINATED, 1)
    pending.add([(at, at + 1) for at in range(1, 4_000, 2)], Reason.MAX_DELIVERIES, 2)
    found = pending.next_batch(1_001, 4_000)
    expected = [(at, at + 1) for at in range(1_001, 1_001 + 2 * DEAD_LETTER_BATCH_MESSAGES, 2)]
    assert found == (expected, Reason.MAX_DELIVERIES, 2)
    assert pending.next_batch(3_998, 3_999) == ([(3_998, 3_999)], Reason.TERMINATED, 1)
