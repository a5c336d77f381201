"""Handover of attempts and delays when the last subscription of a class ends.

A message that kills every consumer becomes a dead letter after its backoff, not sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.redelivery import handover
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.handover import PositionHandover, highest_values
from simplebus.core.settings import Settings
from simplebus.core.subscription import position
from tests.behaviour import wire_peer
from tests.behaviour.wire_peer import BrokerHarness, advance_tick, numbered
from tests.behaviour.wire_peer_v2 import (
    ack,
    connect_version2,
    nack,
    publish,
    publish_envelopes,
    subscribe,
)
from tests.core.broker.test_inquire import position_report
from tests.core.test_dead_letters import dead_headers, fetch_dead_letters
from tests.models.key_order_model import encode_with_key

KINDS: list[dict[str, Any]] = [{}, {"group": "g"}, {"group": "g", "by_key": True}]


def crash_repeatedly(
    bus: BrokerHarness, come: Callable[[], list[int]], ticks: int
) -> list[tuple[int, int]]:
    """Crash a consumer at every delivery and reconnect it three times per tick.

    Returns the deliveries by tick.
    """
    found = []
    for tick in range(ticks):
        for _ in range(3):
            found += [(tick, sequence) for sequence in come()]
        advance_tick(bus)
    return found


def reconnect_version1(bus: BrokerHarness) -> list[int]:
    peer = bus.peer(wire_peer.connect(1), wire_peer.subscribe(1))
    found = [message.message_id for message in peer.receive_messages()]
    peer.disconnect()
    return found


def reconnect_version2(bus: BrokerHarness, **options: Any) -> list[int]:
    peer = connect_version2(bus, subscribe(1, 5, **options))
    found = [message.message_id for message in peer.receive_deliveries()]
    peer.disconnect()
    return found


@pytest.mark.parametrize("kind", [None, *KINDS, {"durable": "d"}])
def test_message_that_kills_its_consumer_backs_off_and_becomes_a_dead_letter(
    kind: dict[str, Any] | None,
) -> None:
    bus = BrokerHarness(Settings(deliveries_max=4))
    connect_version2(bus, publish_envelopes(1, 0, encode_with_key(b"k")))
    found = crash_repeatedly(
        bus,
        lambda: reconnect_version1(bus) if kind is None else reconnect_version2(bus, **kind),
        60,
    )
    assert found == [(0, 0), (0, 0), (12, 0), (36, 0)]
    advance_tick(bus)
    for _ in range(30):
        advance_tick(bus)
        assert (reconnect_version1(bus) if kind is None else reconnect_version2(bus, **kind)) == []
    [(letter, _)] = fetch_dead_letters(bus)
    assert dead_headers(letter, "reason", "attempts") == ("max_deliveries", "4")
    assert bus.statistics(1).ring.message_count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_other_messages_are_not_delayed_in_version_2(kind: dict[str, Any]) -> None:
    bus = BrokerHarness()
    connect_version2(bus, publish_envelopes(1, 0, encode_with_key(b"a")))
    for _ in range(2):
        assert reconnect_version2(bus, **kind) == [0]
    peer = connect_version2(
        bus, subscribe(1, 5, **kind), publish_envelopes(1, 0, encode_with_key(b"b"))
    )
    assert [(m.message_id, m.attempt) for m in peer.receive_deliveries()] == [(1, 1)]
    peer.send(ack(5, 1, 2))
    for _ in range(12):
        advance_tick(bus)
    assert [(m.message_id, m.attempt) for m in peer.receive_deliveries()] == [(0, 3)]


def test_version_1_gets_everything_in_order_after_the_delay() -> None:
    bus = BrokerHarness()
    writer = connect_version2(bus, publish(1, 0, *numbered(3)))
    assert reconnect_version1(bus) == [0, 1, 2]
    assert reconnect_version1(bus) == [0, 1, 2]
    heir = bus.peer(wire_peer.connect(1), wire_peer.subscribe(1))
    writer.send(publish(1, 3, *numbered(2)))
    assert heir.receive_messages() == []
    heir.send(wire_peer.ack(1, 1, 2))  # Deliveries to the predecessor count.
    for _ in range(11):
        advance_tick(bus)
        assert heir.receive_messages() == []
    advance_tick(bus)
    assert heir.receive_ids(1) == [0, 2, 3, 4]


def test_delayed_version_1_subscription_does_not_hold_back_others() -> None:
    bus = BrokerHarness()
    writer = connect_version2(bus, publish(1, 0, b"a"))
    reconnect_version1(bus)
    reconnect_version1(bus)
    heir = bus.peer(wire_peer.connect(1), wire_peer.subscribe(1))
    heir.receive_messages(), writer.read_bytes(1 << 20), bus.broker.end_turn().flush
    writer.send(publish(1, 1, b"b"))
    assert bus.broker.end_turn().flush == [writer.session.session_id]


def test_reconnecting_during_the_delay_changes_nothing() -> None:
    bus = BrokerHarness()
    connect_version2(bus, publish(1, 0, b"a"))
    reconnect_version1(bus)
    reconnect_version1(bus)
    found = [
        tick
        for tick in range(30)
        if (advance_tick(bus), reconnect_version1(bus), reconnect_version2(bus))[1:] != ([], [])
    ]
    assert found == [11], "twelve ticks after it was sent the second time"


def test_delayed_messages_stay_delayed() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5), publish(1, 0, *numbered(3)))
    peer.receive_message_ids()
    peer.send(nack(5, 0, 1, 20_000), nack(5, 1, 2))
    peer.disconnect()
    peer = connect_version2(bus, subscribe(1, 5))
    received = [(0, m.message_id, m.attempt) for m in peer.receive_deliveries()]
    for tick in range(1, 25):
        advance_tick(bus)
        received += [(tick, m.message_id, m.attempt) for m in peer.receive_deliveries()]
        peer.send(ack(5, 0, 3))
    assert received == [(0, 2, 2)], "and may be acknowledged"
    assert bus.statistics(1).ring.message_count == 0


def test_unsent_messages_start_with_attempt_1() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5, max_in_flight=1), publish(1, 0, *numbered(3)))
    assert peer.receive_message_ids() == [0]
    peer.disconnect()
    peer = connect_version2(bus, subscribe(1, 5))
    assert [(m.message_id, m.attempt) for m in peer.receive_deliveries()] == [
        (0, 2),
        (1, 1),
        (2, 1),
    ]


def test_handover_of_a_large_backlog_is_small() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = connect_version2(bus, subscribe(1, 5, max_in_flight=1 << 20))
    writer = connect_version2(bus)
    for at in range(0, 100_000, 20_000):
        writer.send(publish(1, at, *[b""] * 20_000))
        peer.receive_all()
    peer.send(*[ack(5, at, at + 1) for at in range(1, 1000, 2)])
    peer.disconnect()
    handover = bus.broker.classes[1].backlog_handover
    assert len(handover.attempts) < 10
    assert handover.passed_spans(bus.broker.classes[1].backlog_window)


@pytest.mark.parametrize("delay", [None, 3_600_000])
def test_repeated_handover_stores_each_message_once(delay: int | None) -> None:
    bus = BrokerHarness()
    connect_version2(bus, publish(1, 0, *numbered(9)))
    for _ in range(5):
        peer = connect_version2(bus, subscribe(1, 5, start="earliest", backoff=[3_600]))
        assert len(peer.receive_message_ids()) == 9
        peer.send(*[nack(5, at, at + 1, delay) for at in range(0, 9, 2)])
        peer.disconnect()
    handover = bus.broker.classes[1].backlog_handover
    assert len(handover.not_before_ticks) + len(handover.not_before_times) == 5
    assert [
        (first, last) for first, last, _ in handover.not_before_ticks + handover.not_before_times
    ] == [(at, at + 1) for at in range(0, 9, 2)]
    peer = connect_version2(bus, subscribe(1, 5), ack(5, 0, 9))
    peer.disconnect()
    assert bus.broker.classes[1].backlog_handover == PositionHandover()


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize("heir", ["version 1", "key-ordered", "after earliest"])
def test_many_delays_are_not_passed_on(
    heir: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (handover, position):
        monkeypatch.setattr(module, "HANDOVER_RANGES_MAX", 8)
    bus = BrokerHarness()
    options = {"group": "g", "by_key": True} if heir == "key-ordered" else {}
    peer = connect_version2(bus, subscribe(1, 5, **options))
    connect_version2(bus, publish_envelopes(1, 0, *[encode_with_key(b"%d" % n) for n in range(9)]))
    assert len(peer.receive_message_ids()) == 9
    peer.send(*[nack(5, at, at + 1, 3_000) for at in range(0, 2 * count, 2)])
    peer.disconnect()
    if heir == "after earliest":
        reconnect_version2(bus, start="earliest")
    if heir == "version 1":
        last = bus.peer(wire_peer.connect(1), wire_peer.subscribe(1))
        received = {message.message_id for message in last.receive_messages()}
    else:
        reader = connect_version2(bus, subscribe(1, 5, **options))
        messages = reader.receive_deliveries()
        received = {message.message_id for message in messages}
        assert all(message.attempt > 1 for message in messages)
    is_passed_on = count == 4
    assert received == set(range(9)) - (set(range(0, 8, 2)) if is_passed_on else set())


# Version 1, after others whose pauses are longer -----------------------------------------------


@pytest.mark.parametrize("seconds", [3_600, 5])
def test_inherited_delay_of_version_1_is_limited_to_its_own_delay(
    seconds: int,
) -> None:
    bus = BrokerHarness()
    writer = connect_version2(bus, publish(1, 0, b"a"))
    peer = connect_version2(bus, subscribe(1, 5, backoff=[seconds]))
    peer.receive_message_ids()
    peer.send(nack(5, 0, 1))
    peer.disconnect()
    heir = bus.peer(wire_peer.connect(1), wire_peer.subscribe(1))
    writer.send(publish(1, 1, b"b"))
    report, waited = position_report(bus), min(seconds, 6)
    assert report.session == heir.session.session_id
    assert (report.waits, report.delayed, report.delayed_seconds) == ("time", 1, waited)
    assert report.waits_for.startswith("a delay: 2 messages are delayed"), "and what is behind it"
    assert (report.unsent, report.to_redeliver, report.idle_seconds) == (1, 0, 0)
    received = []
    for tick in range(1, 10):
        advance_tick(bus)
        received += [(tick, id_) for id_ in heir.receive_ids(1)]
    assert received == [(waited, 0), (waited, 1)]


def test_reconnecting_version_1_does_not_restart_the_delay() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, publish(1, 0, b"a"), subscribe(1, 5, backoff=[3_600]))
    peer.receive_message_ids()
    peer.send(nack(5, 0, 1))
    peer.disconnect()
    found = [tick for tick in range(30) if (advance_tick(bus), reconnect_version1(bus))[1]]
    assert found == [6, 18], "six ticks after the first one came, and twelve after that"


def test_version_1_does_not_wait_for_acknowledged_messages() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5, backoff=[3_600]), publish(1, 0, *numbered(3)))
    peer.receive_message_ids()
    peer.send(nack(5, 1, 2), ack(5, 1, 2))
    peer.disconnect()
    assert bus.peer(wire_peer.connect(1), wire_peer.subscribe(1)).receive_ids(1) == [0, 2]


# The rows ----------------------------------------------------------------------------------------

rows = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(1, 4)).map(
        lambda row: (row[0], row[0] + row[1], row[2])
    ),
    max_size=8,
)


@given(rows, rows, st.integers(0, 10), st.integers(0, 30))
@settings(max_examples=100)
def test_merge_equals_merging_single_messages(
    first_rows: list[tuple[int, int, int]],
    second_rows: list[tuple[int, int, int]],
    floor: int,
    size: int,
) -> None:
    oracle: dict[int, int] = {}
    for first, last, count in first_rows + second_rows:
        for sequence in range(first, last):
            oracle[sequence] = max(count, oracle.get(sequence, 0))
    window = AckWindow(floor=floor)
    window.cursor = floor + size
    first_handover, second_handover = (
        PositionHandover().merge(PositionHandover(sorted(first_rows))),
        PositionHandover(sorted(second_rows)),
    )
    joined = (
        PositionHandover(first_handover.attempts + second_handover.attempts)
        .merge(PositionHandover([(99, 100, 1)]))
        .merge(PositionHandover())
    )
    found = {
        sequence: span.attempts
        for span in joined.restrict_to(0, 99).passed_spans(window)
        for sequence in range(span.first, span.last)
    }
    assert found == {s: oracle.get(s, 0) for s in range(floor, floor + size)}
    one_row_each = highest_values(first_rows + second_rows)
    assert all(a[1] < b[0] or (a[1] == b[0] and a[2] != b[2]) for a, b in pairwise(one_row_each)), (
        "ascending and disjoint, and in one piece where they say the same"
    )
    assert {s: n for first, last, n in one_row_each for s in range(first, last)} == oracle
