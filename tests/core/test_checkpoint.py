"""Checkpoints: few rows about messages, rare scans, and scans and snapshots in portions."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from simplebus.core import checkpoint
from simplebus.core.broker.broker import Broker
from simplebus.core.checkpoint import Checkpointer
from simplebus.core.commit_log import CommitLog
from simplebus.core.limits import (
    CHECKPOINT_PAUSE_SECONDS,
    CHECKPOINT_POSITIONS_PER_TURN,
    CHECKPOINT_SECONDS,
)
from simplebus.core.protocol import frames
from simplebus.core.protocol.durability import Durability
from simplebus.core.redelivery.handover import merge_adjacent
from simplebus.core.snapshot import (
    ClassSnapshot,
    PositionSnapshot,
    RecoveredState,
    StateChanges,
    decode_changes,
)
from tests.behaviour.wire_peer import BrokerHarness, advance_tick
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    connect_request,
    connect_version2,
    nack,
    publish,
    subscribe,
    unsubscribe,
)

T = TypeVar("T", ClassSnapshot, PositionSnapshot)
ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 9)), max_size=20)


@given(ROWS, st.integers(0, 4))
def test_merged_rows_differ_by_at_most_the_slack(
    steps: list[tuple[int, int, int]], slack: int
) -> None:
    sequence, rows, values = 0, [], {}
    for gap, count, value in steps:
        sequence += gap
        rows.append((sequence, sequence + count, value))
        values.update(dict.fromkeys(range(sequence, sequence + count), value))
        sequence += count
    merged = merge_adjacent(rows, slack)
    merged_values = {each: value for a, b, value in merged for each in range(a, b)}
    assert merged_values.keys() == values.keys()
    assert all(0 <= merged_values[key] - values[key] <= slack for key in values)
    assert len(merged) <= len(rows)
    assert slack or all(
        before[1] < after[0] or before[2] != after[2] for before, after in pairwise(merged)
    )


def test_individual_delays_are_merged_and_scanned_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, portion = 150, 50
    monkeypatch.setattr(checkpoint, "CHECKPOINT_POSITIONS", portion)
    bus = BrokerHarness()
    bus.broker = Broker(bus.broker.settings, commit_log=CommitLog(Durability.MEMORY))
    checkpointer = Checkpointer(bus.broker)
    checkpointer.build_write_batch()
    assert checkpointer.next_full_scan - bus.broker.clock.now == CHECKPOINT_SECONDS
    peer = connect_version2(bus)
    peer.send(subscribe(1, 1, durable="d", max_in_flight=count))
    batch = checkpointer.build_write_batch()
    assert batch is not None
    bus.broker.mark_durable(batch.number)
    peer.send(publish(1, 0, *[b"x"] * count))
    assert len(peer.receive_message_ids()) == count
    peer.send(*[nack(1, each, each + 1, 60_000) for each in range(count)])
    bus.broker.clock.now += CHECKPOINT_SECONDS
    batch = checkpointer.build_write_batch()
    assert batch is not None
    (snapshot,) = decode_changes(batch.changes).positions
    assert (len(snapshot.attempts), len(snapshot.delays)) == (0, 1)
    assert snapshot.delays[0][:2] == (0, count)
    assert (
        checkpointer.next_full_scan - bus.broker.clock.now >= CHECKPOINT_SECONDS * count / portion
    )


@pytest.mark.parametrize("delay_ms", [60_000, None])
def test_record_of_a_durable_has_bounded_attempts_and_delays(
    monkeypatch: pytest.MonkeyPatch, delay_ms: int | None
) -> None:
    count, bound = 70, 20
    monkeypatch.setattr(checkpoint, "CHECKPOINT_RANGES_MAX", bound)
    bus = BrokerHarness()
    bus.broker = Broker(bus.broker.settings, commit_log=CommitLog(Durability.MEMORY))
    checkpointer = Checkpointer(bus.broker)
    checkpointer.build_write_batch()
    peer = connect_version2(bus)
    peer.send(subscribe(1, 1, durable="d", max_in_flight=count))
    peer.send(publish(1, 0, *[b"x"] * count))
    for delay in (0, delay_ms):
        assert len(peer.receive_message_ids()) == (count if delay == 0 else count // 2)
        peer.send(*[nack(1, each, each + 1, delay) for each in range(0, count, 2)])
    (position,) = bus.broker.classes[1].positions
    attempts, delays = position.unacked.list_attempts(), position.list_delays(1.0)
    assert len(attempts) == len(delays) == count // 2
    bus.broker.clock.now += CHECKPOINT_SECONDS
    batch = checkpointer.build_write_batch()
    assert batch is not None
    (snapshot,) = decode_changes(batch.changes).positions
    assert len(snapshot.attempts) == len(snapshot.delays) == bound
    assert set(snapshot.attempts) < set(attempts)
    ranges = {delay[:2] for delay in delays}
    assert {delay[:2] for delay in snapshot.delays} < ranges
    last = checkpointer.build_write_batch(is_last=True)
    assert last is not None
    (snapshot,) = decode_changes(last.snapshot).positions
    assert snapshot.attempts == attempts
    assert {delay[:2] for delay in snapshot.delays} == ranges


ACTIONS = st.sampled_from(
    [
        *(("publish", 1), ("publish", 2), ("subscribe", 1), ("durable", 1), ("group", 2)),
        *(
            ("receive", 1),
            ("ack", 0),
            ("ack", 2),
            ("nack", 1),
            ("delay", 1),
            ("unsubscribe", 1),
            ("leave", 1),
            ("receive", 1),
        ),
        *(("tick", 1), ("tick", 3), ("purge", 1), ("name", 1), ("batch", 1), ("batch", 1)),
        *(("progress", 1), ("scan", 1), ("snapshot", 1)),
    ]
)


def perform(bus: BrokerHarness, peer: Version2Peer, action: str, class_id: int) -> None:
    first = peer.session.version2.next_number if peer.session.version2 else 0
    first_number = next(iter(peer.session.subscriptions), 1)
    match action:
        case "publish":
            peer.send(publish(class_id, first, b"x", b"y"))
        case "subscribe" | "durable" | "group":
            number = len(peer.session.subscriptions) + 10 * class_id
            options = {} if action == "subscribe" else {action: action}
            if number not in peer.session.subscriptions:
                peer.send(subscribe(class_id, number, **options))
        case "receive":
            peer.receive_message_ids()
        case "ack":
            peer.send(ack(first_number, class_id, class_id + 1))
        case "nack":
            peer.send(nack(first_number, 1, 2))
        case "delay":
            peer.send(nack(first_number, 0, 4, 60_000))
        case "unsubscribe":
            peer.send(unsubscribe(first_number))
        case "leave":
            peer.disconnect()
        case "tick":
            for _ in range(class_id):
                advance_tick(bus)
        case "purge":
            peer.send(frames.encode(frames.PURGE, class_id=class_id, content=b"{}"))
        case "name":
            peer.send(connect_request({"id": 3, "name": "three"}, {"id": 2, "last_values": True}))


@settings(max_examples=5 * settings().max_examples)
@given(st.lists(ACTIONS, min_size=10, max_size=40))
def test_snapshot_from_records_equals_one_from_the_state(
    actions: list[tuple[str, int]],
) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    bus.broker = Broker(bus.broker.settings, commit_log=CommitLog(Durability.MEMORY))
    checkpointer = Checkpointer(bus.broker)
    peer = connect_version2(bus, classes=[1, 2, 3])
    for action, class_id in [*actions, ("snapshot", 1)]:
        if peer.session.is_closed:
            peer = connect_version2(bus, classes=[1, 2])
        perform(bus, peer, action, class_id)
        if action == "scan":  # Without a change of the time, which delays in ticks depend on.
            checkpointer.next_full_scan = bus.broker.clock.now
        elif action == "progress" and bus.broker.commit_log is not None:
            bus.broker.commit_log.append_progress_request(1)
        elif action == "snapshot":
            checkpointer.is_snapshot_due = True
        if action in ("batch", "scan", "progress", "snapshot"):
            batch = checkpointer.build_write_batch()
            if batch is not None:
                bus.broker.mark_durable(batch.number)
    assert batch is not None
    full_batch = Checkpointer(bus.broker).build_write_batch()
    assert full_batch is not None
    assert comparable(decode_changes(batch.snapshot)) == comparable(
        decode_changes(full_batch.snapshot)
    )


def comparable(state: StateChanges, now: float = float("-inf")) -> object:
    """Return the content of a snapshot in a fixed order, with the times when delays end.

    Delays that have ended at `now` are left out.
    """
    classes = [with_absolute_delays(cls, now) for cls in state.classes]
    positions = [with_absolute_delays(position, now) for position in state.positions]
    return structs.replace(
        state,
        classes=sorted(classes, key=lambda each: each.class_id),
        positions=sorted(positions, key=lambda each: each.key),
    )


def with_absolute_delays(snapshot: T, now: float) -> T:
    delays = [
        (first, last, round(seconds + snapshot.taken_at, 6))
        for first, last, seconds in snapshot.delays
        if seconds + snapshot.taken_at > now
    ]
    return structs.replace(snapshot, delays=delays, taken_at=0.0)


class _PurgeRecorder(CommitLog):
    """Commit log that records all purged messages."""

    def __init__(self, durability: Durability) -> None:
        super().__init__(durability)
        self.purged_sequences: set[tuple[int, int]] = set()
        """Class and sequence of each."""

    def append_purge(self, class_id: int, first: int, last: int) -> None:
        super().append_purge(class_id, first, last)
        self.purged_sequences.update((class_id, sequence) for sequence in range(first, last))


def assert_purged(state: RecoveredState, purged_sequences: set[tuple[int, int]]) -> None:
    """Check that no durable and no backlog of a recovered state contains purged messages."""
    purged_again = {
        (class_id, sequence)
        for class_id, first, last in state.purged_ranges
        for sequence in range(first, last)
    }
    heads = {cls.class_id: cls.head for cls in state.classes.values()}
    windows = [(position.class_id, position.window) for position in state.positions.values()]
    windows += [(cls.class_id, cls.backlog_window) for cls in state.classes.values()]
    for class_id, snapshot in windows:
        head, floor = heads[class_id], state.classes[class_id].floor
        window = snapshot.to_window(floor=floor, head=head)
        missing = set(range(window.cursor, head))
        for first, last in window.unacked_ranges(window.floor, window.cursor):
            missing.update(range(first, last))
        found = {(class_id, sequence) for sequence in missing}
        assert not found & purged_sequences - purged_again


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, min_size=10, max_size=60), st.sampled_from([1, 2, 3]))
def test_snapshot_in_portions_and_later_changes_equal_the_state(
    actions: list[tuple[str, int]], portion: int
) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    commit_log = _PurgeRecorder(Durability.OS)
    bus.broker = Broker(bus.broker.settings, commit_log=commit_log)
    checkpointer, recovered = Checkpointer(bus.broker), RecoveredState()
    peer = connect_version2(bus, classes=[1, 2, 3])
    portion_count = 20  # Result of the last scan, which finds all changes.
    with mock.patch.object(checkpoint, "CHECKPOINT_POSITIONS_PER_TURN", portion):
        for action, class_id in [*actions, *[("scan", 1)] * portion_count, ("progress", 1)]:
            if peer.session.is_closed:
                peer = connect_version2(bus, classes=[1, 2])
            perform(bus, peer, action, class_id)
            if action == "scan":
                checkpointer.next_full_scan = bus.broker.clock.now
            elif action == "progress":
                commit_log.append_progress_request(1)
            elif action == "snapshot":
                checkpointer.is_snapshot_due = True
            if action not in ("batch", "scan", "progress", "snapshot"):
                continue
            if (batch := checkpointer.build_write_batch()) is not None:
                bus.broker.mark_durable(batch.number)
                if batch.snapshot:
                    recovered = RecoveredState()
                if batch.snapshot or batch.changes:
                    changes = decode_changes(batch.snapshot or batch.changes)
                    recovered.apply_changes(changes, batch.number)
                if batch.snapshot:
                    heads = {cls.class_id: cls.head for cls in changes.classes}
                    assert heads == {n: cls.ring.head for n, cls in bus.broker.classes.items()}
                assert_purged(recovered, commit_log.purged_sequences)
    assert not checkpointer.is_snapshot_begun
    full_batch = Checkpointer(bus.broker).build_write_batch()
    assert full_batch is not None
    state = decode_changes(full_batch.snapshot)
    expected = StateChanges(state.classes, state.positions, removed_classes=state.removed_classes)
    found = StateChanges(
        list(recovered.classes.values()),
        list(recovered.positions.values()),
        removed_classes=list(recovered.removed_classes.values()),
    )
    now = bus.broker.clock.now
    assert comparable(found, now) == comparable(expected, now)


@settings(max_examples=100, deadline=None)
@given(st.lists(ACTIONS, min_size=10, max_size=60))
def test_recorded_attempts_and_delays_are_those_of_a_handover(
    actions: list[tuple[str, int]],
) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = connect_version2(bus, classes=[1, 2, 3])
    for action, class_id in actions:
        if peer.session.is_closed:
            peer = connect_version2(bus, classes=[1, 2])
        perform(bus, peer, action, class_id)
        for cls in bus.broker.classes.values():
            for position in cls.positions:
                handover, unacked = position.build_handover(), position.unacked
                delays = handover.remaining_delays(bus.broker.clock, 1.0)
                assert position.list_delays(1.0) == delays
                spans = [*unacked.iter_spans(), *unacked.pending_dead_letters]
                rows = [(span.first, span.last, span.attempts) for span in spans]
                floor = position.window.floor
                expected = [
                    (max(first, floor), last, count)
                    for first, last, count in rows
                    if count != 1 and last > floor and first < last
                ]
                assert unacked.list_attempts() == sorted(expected)


def test_snapshot_is_collected_in_bounded_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    portion, count = 10, 35
    monkeypatch.setattr(checkpoint, "CHECKPOINT_POSITIONS_PER_TURN", portion)
    bus = BrokerHarness(durables=count)
    bus.broker = Broker(bus.broker.settings, commit_log=CommitLog(Durability.MEMORY))
    checkpointer = Checkpointer(bus.broker)
    peer = connect_version2(bus, classes=list(range(count)))
    peer.send(*[subscribe(n % 2, n, durable=f"d {n}") for n in range(1, count)])
    first = checkpointer.build_write_batch()
    assert first is not None
    checkpointer.is_snapshot_due = True
    turns = 0
    while (batch := checkpointer.build_write_batch()) is None:
        assert checkpointer.is_snapshot_begun
        bus.broker.clock.now += CHECKPOINT_PAUSE_SECONDS
        turns += 1
    assert turns == -(-(2 * count - 1) // portion)
    assert not checkpointer.is_snapshot_begun
    assert comparable(decode_changes(batch.snapshot)) == comparable(decode_changes(first.snapshot))


def test_last_batch_contains_a_complete_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHECKPOINT_POSITIONS_PER_TURN", 1)
    bus = BrokerHarness()
    bus.broker = Broker(bus.broker.settings, commit_log=CommitLog(Durability.MEMORY))
    checkpointer = Checkpointer(bus.broker)
    connect_version2(bus, classes=list(range(10)))
    checkpointer.build_write_batch()
    checkpointer.is_snapshot_due = True
    assert checkpointer.build_write_batch() is None
    batch = checkpointer.build_write_batch(is_last=True)
    assert batch is not None
    assert len(decode_changes(batch.snapshot).classes) == 10


def test_clock_set_back_delays_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHECKPOINT_POSITIONS_PER_TURN", 1)
    bus = BrokerHarness()
    bus.broker = Broker(bus.broker.settings, commit_log=CommitLog(Durability.MEMORY))
    checkpointer = Checkpointer(bus.broker)
    connect_version2(bus, classes=[1, 2])
    checkpointer.build_write_batch()
    checkpointer.is_snapshot_due = True
    for _ in range(2):
        assert checkpointer.build_write_batch() is None
        bus.broker.clock.now -= 3600
    batch = checkpointer.build_write_batch()
    assert batch is not None
    assert batch.snapshot


def test_scan_examines_a_bounded_number_of_classes_at_once() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    bus.broker = Broker(bus.broker.settings, commit_log=CommitLog(Durability.MEMORY))
    checkpointer, count = Checkpointer(bus.broker), 3 * CHECKPOINT_POSITIONS_PER_TURN
    peer = connect_version2(bus, classes=list(range(count)))
    checkpointer.build_write_batch()
    for class_id in range(count):
        peer.send(publish(class_id, class_id, b"x"))
    heads: dict[int, int] = {}
    turns = 0
    bus.broker.clock.now += 10 * CHECKPOINT_SECONDS
    while len(heads) < count:
        batch = checkpointer.build_write_batch()
        turns += 1
        if batch is None:
            break
        found = decode_changes(batch.changes).classes if batch.changes else []
        assert len(found) <= CHECKPOINT_POSITIONS_PER_TURN
        heads |= {each.class_id: each.head for each in found}
        bus.broker.clock.now += CHECKPOINT_PAUSE_SECONDS
    assert heads == dict.fromkeys(range(count), 1)
    assert turns == 3
    pause = checkpointer.next_full_scan - bus.broker.clock.now
    assert pause > CHECKPOINT_SECONDS - 2 * CHECKPOINT_PAUSE_SECONDS


def test_class_that_is_removed_during_a_scan_is_recorded_as_removed() -> None:
    bus = BrokerHarness()
    bus.broker = Broker(bus.broker.settings, commit_log=CommitLog(Durability.MEMORY))
    checkpointer, count = Checkpointer(bus.broker), 2 * CHECKPOINT_POSITIONS_PER_TURN
    connect_version2(bus, classes=list(range(count))).disconnect()
    checkpointer.build_write_batch()
    bus.broker.clock.now += 10 * CHECKPOINT_SECONDS
    checkpointer.build_write_batch()
    for class_id in (0, count - 1):
        bus.broker.store.class_registry.remove_class(class_id)
    bus.broker.clock.now += CHECKPOINT_PAUSE_SECONDS
    batch = checkpointer.build_write_batch()
    assert batch is not None
    removed = decode_changes(batch.changes).removed_classes
    assert [each.class_id for each in removed] == [0, count - 1]
