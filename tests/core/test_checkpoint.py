"""What the keeper tells of messages that wait singly: few rows, and rarely."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core import checkpoint as keeper_module
from simplebus.core.broker.broker import Broker
from simplebus.core.checkpoint import Checkpointer
from simplebus.core.commit_log import CommitLog
from simplebus.core.limits import CHECKPOINT_SECONDS
from simplebus.core.protocol.durability import Durability
from simplebus.core.redelivery.handover import merge_adjacent
from simplebus.core.snapshot import decode_changes
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    connect_version2,
    nack,
    publish,
    subscribe,
)

ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 9)), max_size=20)


@given(ROWS, st.integers(0, 4))
def test_merged_rows_say_the_same_to_within_the_slack(
    steps: list[tuple[int, int, int]], slack: int
) -> None:
    at, rows, said = 0, [], {}
    for gap, count, value in steps:
        at += gap
        rows.append((at, at + count, value))
        said.update(dict.fromkeys(range(at, at + count), value))
        at += count
    found = merge_adjacent(rows, slack)
    now = {each: value for a, b, value in found for each in range(a, b)}
    assert now.keys() == said.keys()
    assert all(0 <= now[each] - said[each] <= slack for each in said)
    assert len(found) <= len(rows)
    assert slack or all(
        before[1] < after[0] or before[2] != after[2] for before, after in pairwise(found)
    )


def test_what_waits_singly_is_told_in_few_rows_and_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, few = 150, 50
    monkeypatch.setattr(keeper_module, "CHECKPOINT_POSITIONS", few)
    bus = BrokerHarness()
    bus.broker = Broker(bus.broker.settings, commit_log=CommitLog(Durability.MEMORY))
    keeper = Checkpointer(bus.broker)
    keeper.build_write_batch()
    assert keeper.next_full_scan - bus.broker.clock.now == CHECKPOINT_SECONDS
    peer = connect_version2(bus)
    peer.send(subscribe(1, 1, durable="d", max_in_flight=count))
    lot = keeper.build_write_batch()
    assert lot is not None
    bus.broker.mark_durable(lot.number)
    peer.send(publish(1, 0, *[b"x"] * count))
    assert len(peer.receive_message_ids()) == count
    peer.send(*[nack(1, each, each + 1, 60_000) for each in range(count)])
    bus.broker.clock.now += CHECKPOINT_SECONDS
    lot = keeper.build_write_batch()
    assert lot is not None
    (kept,) = decode_changes(lot.changes).positions
    assert (len(kept.attempts), len(kept.delays)) == (0, 1)
    assert kept.delays[0][:2] == (0, count)
    assert keeper.next_full_scan - bus.broker.clock.now >= CHECKPOINT_SECONDS * count / few
