"""Checkpoints of many individually delayed messages: few rows, and rare scans."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core import checkpoint
from simplebus.core.broker.broker import Broker
from simplebus.core.checkpoint import Checkpointer
from simplebus.core.commit_log import CommitLog
from simplebus.core.limits import (
    CHECKPOINT_PAUSE_SECONDS,
    CHECKPOINT_POSITIONS_PER_TURN,
    CHECKPOINT_SECONDS,
)
from simplebus.core.protocol.durability import Durability
from simplebus.core.redelivery.handover import merge_adjacent
from simplebus.core.snapshot import decode_changes
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import connect_version2, nack, publish, subscribe

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
    assert all(0 <= merged_values[each] - values[each] <= slack for each in values)
    assert len(merged) <= len(rows)
    assert slack or all(
        before[1] < after[0] or before[2] != after[2] for before, after in pairwise(merged)
    )


def test_individual_delays_are_merged_and_scanned_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, few = 150, 50
    monkeypatch.setattr(checkpoint, "CHECKPOINT_POSITIONS", few)
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
    (kept,) = decode_changes(batch.changes).positions
    assert (len(kept.attempts), len(kept.delays)) == (0, 1)
    assert kept.delays[0][:2] == (0, count)
    assert checkpointer.next_full_scan - bus.broker.clock.now >= CHECKPOINT_SECONDS * count / few


def test_scan_examines_a_bounded_number_of_classes_at_once() -> None:
    bus = BrokerHarness()
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
