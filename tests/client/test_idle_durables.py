"""Tests of durables that expire while no subscription is connected."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from simplebus import MemoryBus
from simplebus.client.subscribe_options import subscribe_request
from simplebus.core.errors import Reason


def test_durable_expires_after_durable_seconds() -> None:
    async def main() -> None:
        memory = MemoryBus()
        async with memory as bus:
            async with bus.subscribe(1, durable="reader", durable_seconds=60):
                pass
            await bus.publish(b"kept", class_id=1)
            await trio.sleep(50)
            async with bus.subscribe(1, durable="reader") as messages:
                assert await messages.take(9, timeout=1)
            await bus.publish(b"not kept", class_id=1)
            await trio.sleep(70)
            async with bus.subscribe(1, durable="reader") as messages:
                assert await messages.take(9, timeout=1) == []
            assert memory.statistics().classes[0].dropped == {Reason.IDLE_DURABLE: 1}

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("seconds", [0, -1, 365 * 86_400 + 1, float("nan")])
def test_rejects_durable_seconds_out_of_range(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"durable_seconds .* from 0\.001 to 3\.1536e\+07, got"):
        subscribe_request(durable="d", durable_seconds=seconds)


def test_durable_seconds_needs_a_durable() -> None:
    with pytest.raises(ValueError, match="durable_seconds is 60, so durable must be given"):
        subscribe_request(group="g", durable_seconds=60)
    assert subscribe_request(durable="d", durable_seconds=60).idle_seconds == 60
