"""Incremental count of a position's backlog, against a full count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.limits import REDELIVERY_MESSAGES
from simplebus.core.subscription import selection
from simplebus.core.subscription.backlog import BacklogCounter
from simplebus.core.subscription.channel_filter import ChannelFilter
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    channel_envelope,
    connect_version2,
    publish,
    publish_envelopes,
    subscribe,
)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 12), st.sampled_from(["a", "b", "ab"])),
        st.tuples(st.just("reach"), st.integers(0, 12), st.just("")),
        st.tuples(st.just("look"), st.just(0), st.just("")),
    ),
    max_size=30,
)


@given(steps=steps, filtered=st.booleans(), part=st.sampled_from([1, 5, REDELIVERY_MESSAGES]))
def test_backlog_count_matches_full_count(
    steps: list[tuple[str, int, str]], filtered: bool, part: int
) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True  # The test moves the cursor itself.
    writer = connect_version2(bus, subscribe(1, 5, **({"channels": ["a"]} if filtered else {})))
    [position] = bus.broker.classes[1].positions
    ring, window, channel_filter = position.ring, position.window, position.channel_filter
    ahead, published = BacklogCounter(ring, window, channel_filter), 0
    for action, count, channels in steps:
        match action:
            case "publish":
                names = (channels * count)[:count]
                contents = [channel_envelope(name, b"") for name in names]
                writer.send(publish_envelopes(1, published, *contents))
                published += count
            case "reach":
                cursor = min(window.cursor + count, ring.head)
                ahead.advance_cursor(cursor)
                window.cursor = cursor
                window.ack_range(0, cursor)
            case _:
                ahead.count_more(part)
        counted = selection.matching_ranges(ring, window.cursor, ahead.counted_end, channel_filter)
        assert ahead.count == selection.count_sequences(counted)
    for _ in range(published + 1):
        ahead.count_more(part)
    assert ahead.counted_end == ring.head


def test_backlog_counts_each_message_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = BrokerHarness()
    options = {"max_pending": 1, "slow": "drop_oldest", "channels": ["x"]}
    for n in range(20):
        connect_version2(bus, subscribe(1, 5, durable=f"d{n}", **options)).disconnect()
    writer = connect_version2(bus, publish_envelopes(1, 0, *[channel_envelope("a", b"")] * 1500))
    looked, count = 0, selection.count_matching

    def counting(ring: object, first: int, last: int, *arguments: object) -> int:
        nonlocal looked
        looked += last - first
        return count(ring, first, last, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(selection, "count_matching", counting)
    for n in range(50):
        writer.send(publish(1, 1500 + n, b""))
    assert looked <= 20 * 50


def test_old_backlog_is_counted_in_parts_per_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("simplebus.core.store.notifier.REDELIVERY_MESSAGES", 100)
    bus = BrokerHarness()
    connect_version2(bus, subscribe(1, 5, durable="d", channels=["a"])).disconnect()
    writer = connect_version2(
        bus, publish_envelopes(1, 0, *[channel_envelope("ab"[n % 2], b"") for n in range(1000)])
    )
    options = {"max_pending": 7, "slow": "drop_oldest", "channels": ["a"], "max_in_flight": 1}
    connect_version2(bus, subscribe(1, 5, durable="d", **options)).disconnect()
    writer.send(publish(1, 1000, b""))
    [durable] = bus.broker.classes[1].positions
    assert 0 < durable.dropped_count < 100
    bus.tick(20)
    assert durable.count_pending() == 7
    assert durable.dropped_count == 493


def test_old_backlog_of_many_positions_is_counted_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("simplebus.core.store.notifier.REDELIVERY_MESSAGES", 100)
    monkeypatch.setattr("simplebus.core.store.notifier.SCAN_MESSAGES_MAX", 300)
    bus = BrokerHarness()
    connect_version2(bus, subscribe(1, 5, durable="keeps")).disconnect()
    writer = connect_version2(
        bus, publish_envelopes(1, 0, *[channel_envelope("ab"[n % 2], b"") for n in range(1000)])
    )
    for slow in ("drop_oldest", "drop_newest"):
        options = {"max_pending": 7, "slow": slow, "channels": ["a"], "start": "earliest"}
        for n in range(10):
            connect_version2(bus, subscribe(1, 5, durable=f"{slow} {n}", **options)).disconnect()
    looked, of = 0, ChannelFilter.match_numbers

    def counting(self: ChannelFilter, numbers: Any) -> Any:
        nonlocal looked
        looked += np.size(numbers)
        return of(self, numbers)

    monkeypatch.setattr(ChannelFilter, "match_numbers", counting)
    writer.send(publish(1, 1000, b""))
    positions = list(bus.broker.classes[1].limited_positions)
    assert looked <= 3 * 300 + 10 * len(positions)
    bus.tick(300)
    assert {position.count_pending() for position in positions} == {7}
