"""Reading a class of a bus, without a copier."""

from __future__ import annotations

import random

import pytest

from simplebus.bridge.bus_connection import connect_source
from simplebus.bridge.interfaces import SourceBatch
from simplebus.bridge.source.bus import BusSource
from simplebus.memory.bus import MemoryBus
from tests.bridge.memory_buses import endpoint_of, run

COUNT = 2000


def frames_by_sequence(found: SourceBatch) -> list[tuple[int, bytes]]:
    """Return sequence and frame of each message."""
    read = []
    for piece in found.runs:
        raw, bounds = bytes(piece.raw), piece.bounds.tolist()
        for row, sequence in enumerate(piece.sequences.tolist()):
            read.append((sequence, raw[bounds[row] : bounds[row + 1]]))
    return read


@pytest.mark.parametrize("seed", range(3))
def test_combined_replies_equal_single_replies(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths make prefetch estimates wrong, some messages are purged, and a reply has about
    twenty messages.
    """
    monkeypatch.setattr("simplebus.core.broker.fetch.FETCH_BYTES_MAX", 1024)
    monkeypatch.setattr("simplebus.bridge.source.bus._PREFETCH_BYTES", 768)
    rng = random.Random(seed)

    async def read(source: MemoryBus, max_bytes: int) -> tuple[list[tuple[int, bytes]], int]:
        """Return all messages, and the number of reads."""
        monkeypatch.setattr("simplebus.bridge.source.bus._REPLIES_PER_READ_MAX", max_bytes)
        received: list[tuple[int, bytes]] = []
        call_count = position = 0
        name = f"by {max_bytes}"
        async with connect_source(
            endpoint_of(source), name, target_id="x", heartbeat=10, auth=None
        ) as connection:
            end = BusSource(connection, class_="orders", durable=name, start="earliest")
            await end.open()
            while position < COUNT:
                found = await end.read(position)
                assert (found.first_sequence, found.missed_count) == (position, 0)
                received += frames_by_sequence(found)
                position, call_count = found.next_sequence, call_count + 1
                await connection.wait_answered(
                    connection.core.sync()
                )  # Prefetched replies have arrived now.
            assert end.head == COUNT
        return received, call_count

    async def main() -> None:
        source = MemoryBus()
        async with source as bus:
            for first in range(0, COUNT, 100):
                size = rng.choice([3, 30, 300])
                payloads = [b"%d" % (first + n) + bytes(size) for n in range(100)]
                await bus.publish_many(payloads, class_id="orders")
            for _ in range(20):
                position = rng.randrange(1, COUNT)
                await bus.purge("orders", position, min(COUNT, position + rng.randrange(1, 30)))
            single_replies, single_read_count = await read(source, 1)
            combined_replies, combined_read_count = await read(source, 3)
        assert combined_replies == single_replies
        assert 0 < len(combined_replies) < COUNT
        assert combined_read_count < 0.6 * single_read_count

    run(main)
