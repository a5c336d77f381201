"""Bytes in flight with acknowledged messages in between."""

from __future__ import annotations

import random

import pytest

from simplebus.core.limits import IN_FLIGHT_BYTES
from simplebus.core.protocol.frames import Integers
from simplebus.core.redelivery import in_flight_bytes
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.in_flight_bytes import InFlightBytes
from simplebus.core.ring.ring import Ring
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    connect_version2,
    nack,
    publish,
    subscribe,
)

LONG = 900_000
FRAME = 13


def exchange(
    writer: Version2Peer, reader: Version2Peer, first: int, payloads: list[bytes]
) -> list[int]:
    for n, payload in enumerate(payloads):
        writer.send(publish(1, first + n, payload))
    return reader.receive_message_ids()


def test_acks_out_of_order_free_in_flight_bytes() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    reader, writer = connect_version2(bus, subscribe(1, 5)), connect_version2(bus)
    assert exchange(writer, reader, 0, [b"slow"]) == [0]
    for n in range(1, 60):
        assert exchange(writer, reader, n, [b"x" * LONG]) == [n]
        reader.send(ack(5, n, n + 1))
    for n in range(60, 160):
        assert exchange(writer, reader, n, [b"small"]) == [n]


def test_long_unacked_messages_count_in_full() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    reader, writer = connect_version2(bus, subscribe(1, 5)), connect_version2(bus)
    writer.send(publish(1, 0, *[b""] * 10_000))
    assert len(reader.receive_message_ids()) == 10_000
    reader.send(ack(5, 1, 10_000))
    received_ids = exchange(writer, reader, 10_000, [b"x" * LONG] * (3 * IN_FLIGHT_BYTES // LONG))
    assert IN_FLIGHT_BYTES <= len(received_ids) * LONG < IN_FLIGHT_BYTES + 3 * LONG
    reader.send(nack(5, received_ids[0], received_ids[4], 3_600_000))
    assert len(reader.receive_message_ids()) in (3, 4)


def test_messages_are_measured_again_after_many_acks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    reader, writer = connect_version2(bus, subscribe(1, 5)), connect_version2(bus)
    count, size = 4000, 8 * 1024
    writer.send(*[publish(1, n, b"x" * size) for n in range(count)])
    received_ids = reader.receive_message_ids()
    assert len(received_ids) < count
    looks = 0
    gaps = AckWindow.unacked_flags

    def counted(self: AckWindow) -> object:
        nonlocal looks
        looks += 1
        return gaps(self)

    monkeypatch.setattr(AckWindow, "unacked_flags", counted)
    for n in received_ids[1::2]:
        reader.send(ack(5, n, n + 1))
    assert 0 < looks < 40


@pytest.mark.parametrize("portion", [3, 65_536])
def test_bytes_equal_the_sum_of_unacked_messages(
    portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight_bytes, "MEASURED_MESSAGES_PER_TURN", portion)
    chance = random.Random(1)
    for _ in range(20):
        bus = BrokerHarness()
        reader, writer = connect_version2(bus, subscribe(1, 5)), connect_version2(bus)
        sizes: list[int] = []
        for _ in range(8):  # Around the ends of the ring and of its columns.
            more = [chance.randrange(1, 4000) for _ in range(chance.randrange(20))]
            writer.send(*[publish(1, len(sizes) + n, b"x" * size) for n, size in enumerate(more)])
            sizes += more
            reader.receive_message_ids()
            ring, window = bus.broker.classes[1].ring, reader.session.subscriptions[5].window
            for n in chance.sample(
                range(window.floor, window.cursor), k=window.in_flight_count // 3
            ):
                reader.send(ack(5, n, n + 1))
            unacked = [
                n
                for a, b in window.unacked_ranges(window.floor, window.cursor)
                for n in range(a, b)
            ]
            expected_bytes = sum(sizes[n] + FRAME for n in unacked)
            with monkeypatch.context() as patch:
                patch.setattr(in_flight_bytes, "IN_FLIGHT_BYTES", 0)
                measured = InFlightBytes(ring)
                measured.estimate(len(unacked), window)
                while measured.is_measuring:
                    measured.continue_measuring()
                assert measured.estimate(len(unacked), window) == expected_bytes


def test_many_messages_are_measured_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_counts: list[int] = []
    sequences_bytes = Ring.sequences_bytes

    def counted(self: Ring, sequences: Integers) -> int:
        measured_counts.append(sequences.size)
        return sequences_bytes(self, sequences)

    monkeypatch.setattr(Ring, "sequences_bytes", counted)
    monkeypatch.setattr(in_flight_bytes, "MEASURED_MESSAGES_PER_TURN", 100)
    bus = BrokerHarness()
    bus.skips_checks = True
    reader, writer = connect_version2(bus, subscribe(1, 5)), connect_version2(bus)
    count, size = 4000, 8 * 1024
    writer.send(*[publish(1, n, b"x" * size) for n in range(count)])
    received = reader.receive_message_ids()
    assert len(received) < count
    for n in received[1::2]:
        reader.send(ack(5, n, n + 1))
        received += reader.receive_message_ids()
        while bus.broker.next_wakeup <= bus.broker.clock.now:
            bus.broker.run_due_wakeups()
            received += reader.receive_message_ids()
    assert 0 < max(measured_counts) <= 100
    assert len(received) * size > IN_FLIGHT_BYTES + IN_FLIGHT_BYTES // 4
