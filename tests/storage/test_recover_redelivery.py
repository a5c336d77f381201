"""Attempts and backoff after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.redelivery.timer_wheel import Span, split_spans
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    connect_version2,
    nack,
    publish,
    publish_envelopes,
    subscribe,
)
from tests.models.key_order_model import encode_with_key
from tests.storage.journaled_broker import START, KeptBus

KINDS: list[dict[str, Any]] = [{}, {"group": "g"}, {"group": "g", "by_key": True}]


def reader_of(bus: KeptBus, **options: Any) -> Version2Peer:
    reader = connect_version2(bus, subscribe(1, 5, durable="d", **options))
    bus.sync()
    return reader


def receive_attempts(peer: Version2Peer) -> list[tuple[int, int]]:
    return [(delivery.message_id, delivery.attempt) for delivery in peer.receive_deliveries()]


def receive_attempts_during(
    bus: KeptBus, reader: Version2Peer, seconds: int
) -> list[tuple[int, int]]:
    """Advance the clock by `seconds`. Return the messages received meanwhile."""
    received = []
    for _ in range(seconds):
        bus.broker.clock.now += 1
        bus.tick()
        bus.broker.run_due_wakeups()
        bus.check_invariants()
        received += receive_attempts(reader)
    return received


def crash_and_recover(bus: KeptBus, path: Path, *, down: float = 0) -> KeptBus:
    """Crash the bus and recover it `down` seconds later."""
    # The next checkpoint includes all changes.
    now = bus.broker.clock.now = bus.broker.clock.now + 1
    bus.sync()
    bus.crash()
    return KeptBus(path, now=now + down)


@pytest.mark.parametrize("kind", KINDS)
def test_nacked_message_keeps_backoff(tmp_path: Path, kind: dict[str, Any]) -> None:
    bus = KeptBus(tmp_path)
    options = {**kind, "backoff": [30, 50]}
    reader = reader_of(bus, **options)
    connect_version2(bus, publish(1, 0, b"a", b"b", b"c", b"d"))
    assert receive_attempts(reader) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    bus.sync()
    reader.send(nack(5, 0, 1, 3_600_000), nack(5, 1, 2), ack(5, 3, 4))
    bus = crash_and_recover(bus, tmp_path, down=5)
    reader = reader_of(bus, **options)
    assert receive_attempts(reader) == [(2, 2)], "only the message in flight is delivered at once"
    reader.send(nack(5, 2, 3))
    bus = crash_and_recover(bus, tmp_path, down=10)
    bus = crash_and_recover(bus, tmp_path)
    reader = reader_of(bus, **options)
    assert not receive_attempts_during(bus, reader, 10)
    assert receive_attempts_during(bus, reader, 4) == [(1, 2)]
    reader.send(ack(5, 1, 2))
    assert not receive_attempts_during(bus, reader, 22)
    assert receive_attempts_during(bus, reader, 4) == [(2, 3)]
    reader.send(ack(5, 2, 3))
    bus.broker.clock.now += 3_600 - 60
    assert receive_attempts_during(bus, reader, 12) == [(0, 2)]
    reader.send(ack(5, 0, 1))
    assert bus.broker.classes[1].ring.statistics().message_count == 0
    bus.close()


@pytest.mark.parametrize("kind", KINDS)
def test_restart_does_not_shorten_redelivery(tmp_path: Path, kind: dict[str, Any]) -> None:
    bus = KeptBus(tmp_path)
    options = {**kind, "ack_seconds": 5, "max_deliveries": 3}
    reader = reader_of(bus, **options)
    connect_version2(bus, publish(1, 0, b"a"))
    assert receive_attempts(reader) == [(0, 1)]
    bus = crash_and_recover(bus, tmp_path)
    received = []
    for _ in range(20):  # Repeated crashes do not use up deliveries.
        reader = reader_of(bus, **options)
        received += [
            (bus.broker.clock.now - START, *attempt) for attempt in receive_attempts(reader)
        ]
        bus = crash_and_recover(bus, tmp_path, down=1)
        bus.broker.run_due_wakeups()
        bus.check_invariants()
    assert received == [(1.0, 0, 2), (13.0, 0, 3)], "the backoff is 10 s, checked every 2 s"
    bus.close()


def test_clock_set_back_does_not_extend_backoff(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = reader_of(bus)
    connect_version2(bus, publish(1, 0, b"a"))
    assert receive_attempts(reader) == [(0, 1)]
    bus.broker.clock.now += 1
    bus.sync()
    reader.send(nack(5, 0, 1, 10_000))  # The only change.
    for down in (-86_400, -3_600):
        bus = crash_and_recover(bus, tmp_path, down=down)
    assert receive_attempts_during(bus, reader_of(bus), 7) == []
    reader = reader_of(crash_and_recover(bus, tmp_path))
    assert receive_attempts(reader) == [(0, 2)]


def test_key_ordered_group_keeps_blocked_keys(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = reader_of(bus, **KINDS[2])
    keys = (b"x", b"y", b"x", b"y", b"x", b"z")
    connect_version2(bus, publish_envelopes(1, 0, *map(encode_with_key, keys)))
    assert receive_attempts(reader) == [(0, 1), (1, 1), (5, 1)]
    reader.send(nack(5, 0, 1, 60_000), nack(5, 5, 6, 20_000), ack(5, 1, 2))
    assert receive_attempts(reader) == [(3, 1)]
    bus = crash_and_recover(bus, tmp_path)
    reader = reader_of(bus, **KINDS[2])
    connect_version2(bus, publish_envelopes(1, 0, *map(encode_with_key, (b"x", b"z", b"n"))))
    assert receive_attempts(reader) == [(3, 2), (8, 1)]
    reader.send(ack(5, 3, 4), ack(5, 8, 9))
    assert receive_attempts_during(bus, reader, 21) == [(5, 2)]
    reader.send(ack(5, 5, 6))
    assert receive_attempts(reader) == [(7, 1)]
    reader.send(ack(5, 7, 8))
    assert receive_attempts_during(bus, reader, 39) == [(0, 2)]
    for next_id in (2, 4, 6):
        reader.send(ack(5, 0, 7))
        assert receive_attempts(reader) == [(next_id, 1)]
    bus.close()


ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(-1, 3)), max_size=8)


@given(ROWS, ROWS)
def test_ranges_are_split_at_rows(
    spans: list[tuple[int, int, int]], rows: list[tuple[int, int, int]]
) -> None:
    def lay_out(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        position, laid_out_spans = 0, []
        for gap, count, value in pieces:
            laid_out_spans.append((position + gap, position + gap + count, value))
            position += gap + count
        return laid_out_spans

    spans, rows = lay_out(spans), lay_out(rows)
    due_times = {n: float(value) for a, b, value in rows for n in range(a, b)}
    expected = [(n, attempts, due_times.get(n)) for a, b, attempts in spans for n in range(a, b)]
    received = list(
        split_spans([Span(*span) for span in spans], [(a, b, float(v)) for a, b, v in rows])
    )
    assert [(n, s.attempts, v) for s, v in received for n in range(s.first, s.last)] == expected
    assert all(span.first < span.last for span, _ in received)


@pytest.mark.parametrize(("kind", "reader_count"), [({}, 0), ({"group": "g"}, 0), ({}, 20)])
def test_plain_subscription_keeps_attempts_and_backoff(
    tmp_path: Path, kind: dict[str, Any], reader_count: int
) -> None:
    bus = KeptBus(tmp_path)
    options = {**kind, "ack_seconds": 5, "max_deliveries": 3}
    connect_version2(bus, publish(1, 0, b"a"))
    received = []
    for _ in range(20):
        reader = connect_version2(bus, subscribe(1, 5, **options))
        received += [
            (bus.broker.clock.now - START, *attempt) for attempt in receive_attempts(reader)
        ]
        for _ in range(reader_count):
            connect_version2(bus, subscribe(1, 5, start="earliest")).receive_deliveries()
        bus = crash_and_recover(bus, tmp_path)
        bus.broker.run_due_wakeups()
        bus.check_invariants()
    assert received == [(0.0, 0, 1), (1.0, 0, 2), (12.0, 0, 3)]
    bus.close()


def test_counts_attempts_between_two_checkpoints(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    connect_version2(bus, publish(1, 0, b"a"))
    for attempt in (1, 2):
        reader = connect_version2(bus, subscribe(1, 5))
        assert receive_attempts(reader) == [(0, attempt)]
        reader.disconnect()
        bus.broker.clock.now += 1
        bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    reader = connect_version2(bus, subscribe(1, 5))
    assert receive_attempts(reader) == []
    assert receive_attempts_during(bus, reader, 13) == [(0, 3)]
