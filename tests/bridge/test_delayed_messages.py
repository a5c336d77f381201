"""Messages that are to come later, on their way over a bridge."""

from __future__ import annotations

import pytest
import trio

from simplebus.memory.bus import MemoryBus
from tests.bridge.memory_buses import (
    hold,
    lane,
    read,
    run,
    running,
    up,
)


@pytest.mark.parametrize("later", [None, 1.0])
def test_copies_delayed_message_in_sequence_order(later: float | None) -> None:
    """A bridge that waits is told of the one that is due first, which is not the first one."""

    async def main() -> None:
        near, far = MemoryBus(), MemoryBus()
        copying = lane(near, far)
        async with near as here, far as there, running(copying):
            await hold(here, there)
            await up(copying)
            for turn in range(3):
                await trio.sleep(30)  # It waits.
                begun = trio.current_time()
                await here.publish(b"late %d" % turn, class_id="orders", delay=5)
                await here.publish(b"soon %d" % turn, class_id="orders", delay=later)
                due = {}
                for _ in range(2):
                    (got,) = await read(there, "orders", 1)
                    due[got.payload] = trio.current_time() - begun
                assert list(due) == [b"soon %d" % turn, b"late %d" % turn]
                assert 4.9 < due[b"late %d" % turn] < 7
            assert copying.statistics().copied == 6

    run(main)
