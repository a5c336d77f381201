"""Copying of delayed messages."""

from __future__ import annotations

import pytest
import trio

from simplebus.memory.bus import MemoryBus
from tests.bridge.memory_buses import (
    create_copier,
    create_test_durable,
    read,
    run,
    running,
    wait_until_up,
)


@pytest.mark.parametrize("delay_seconds", [None, 1.0])
def test_copies_delayed_message_in_sequence_order(delay_seconds: float | None) -> None:
    """The copier is woken by the message that is due first, which is not the first one."""

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        copying = create_copier(source, target)
        async with source as source_bus, target as target_bus, running(copying):
            await create_test_durable(source_bus, target_bus)
            await wait_until_up(copying)
            for round_ in range(3):
                await trio.sleep(30)  # The copier waits for a message.
                started_at = trio.current_time()
                await source_bus.publish(b"late %d" % round_, class_id="orders", delay=5)
                await source_bus.publish(
                    b"soon %d" % round_, class_id="orders", delay=delay_seconds
                )
                due = {}
                for _ in range(2):
                    (received,) = await read(target_bus, "orders", 1)
                    due[received.payload] = trio.current_time() - started_at
                assert list(due) == [b"soon %d" % round_, b"late %d" % round_]
                assert 4.9 < due[b"late %d" % round_] < 7
            assert copying.statistics().copied == 6

    run(main)
