"""Ends that are lost: in whatever moment, and without a word."""

from __future__ import annotations

import itertools

import pytest
import trio

from simplebus.bridge.interfaces import Refusal, TargetBatch
from simplebus.bridge.target import bus as far_module
from simplebus.bridge.target.bus import BusTarget, TargetSettings
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.core.inbox import Inbox
from simplebus.memory.bus import MemoryBus
from tests.bridge.memory_buses import (
    Silent,
    hold,
    lane,
    numbered,
    payloads,
    run,
    running,
)


@pytest.mark.parametrize("when", [1, 2])
def test_resumes_after_source_is_lost_while_target_stores(
    when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of the near bus then is asked of a connection that is gone."""
    settle = BusTarget.settle_oldest
    settled = 0

    async def main() -> None:
        near, far = MemoryBus(), MemoryBus()

        async def settle_late(end: BusTarget) -> list[Refusal]:
            nonlocal settled
            settled += 1
            if settled == when:
                near.hang_up()
                await trio.sleep(1)
            return await settle(end)

        async with near as here, far as there, running(lane(near, far)):
            await here.publish_many(numbered(0, 10), class_id="orders")
            assert await payloads(there, "orders", 10) == numbered(0, 10)
            await trio.sleep(1)
            monkeypatch.setattr(BusTarget, "settle_oldest", settle_late)
            for first in (10, 20):
                await here.publish_many(numbered(first, first + 10), class_id="orders")
                assert await payloads(there, "orders", 10) == numbered(first, first + 10)

    run(main)


ENDS = ("near", "far")
LOST_SECONDS = 30.0
"""Three heartbeats, as `FarTerms` has them."""


async def cut_and_mended(cut: str, at: int, seconds: float) -> bool:
    """A lane whose line to one end, or to both, is cut at so many-th call, for so long. False where
    there were not so many calls."""
    near, far = MemoryBus(), MemoryBus()
    lines = {"near": Silent(near), "far": Silent(far)}
    async with near as here, far as there:
        await hold(there)
        async with running(lane(near, far)):  # One that leaves a record.
            await here.publish_many(numbered(0, 5), class_id="orders")
            assert await payloads(there, "orders", 5) == numbered(0, 5)
            await trio.sleep(1)
        for end in ENDS if cut == "both" else (cut,):
            lines[end].cut_at = at
        copying = lane(near, far, near_place=lines["near"], far_place=lines["far"])
        async with running(copying):
            count = 5
            while count < 35 and not any(line.is_cut for line in lines.values()):
                count += 10
                await here.publish_many(numbered(count - 10, count), class_id="orders")
                await trio.sleep(0.15)
            was_cut = any(line.is_cut for line in lines.values())
            if was_cut:
                await trio.sleep(seconds)
                if seconds > LOST_SECONDS:
                    assert not copying.statistics().is_up
                    assert copying.statistics().losses
            for line in lines.values():
                line.mend()
            await here.publish_many(numbered(count, count + 10), class_id="orders")
            assert await payloads(there, "orders", count + 5) == numbered(5, count + 10)
            await trio.sleep(60)  # What comes twice would come now.
            orders = next(k for k in far.statistics().classes if k.ring.head > count)
            assert orders.ring.head == count + 10
            assert copying.statistics().lag == 0
    return was_cut


STEP = 8


@pytest.mark.long
@pytest.mark.parametrize("cut", [*ENDS, "both"])
@pytest.mark.parametrize(("seconds", "first"), [(LOST_SECONDS + 5, 1), (11.0, 5)])
def test_reconnects_to_silent_end(cut: str, seconds: float, first: int) -> None:
    """Whatever the lane is about then: one call of the line after the other is the one at which it
    is cut, from connecting over the record to messages and confirms."""
    for at in itertools.count(first, STEP):
        was_cut: list[bool] = []

        async def main(was_cut: list[bool] = was_cut, at: int = at) -> None:
            was_cut.append(await cut_and_mended(cut, at, seconds))

        run(main)
        if was_cut == [False]:
            break
    assert at > 40, "lines have fewer calls than a lane has phases"


def test_lost_connection_is_not_a_missing_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise what was under way would come twice."""
    settle, subscribed = BusTarget.settle_oldest, far_module._subscribed

    async def main() -> None:
        near, far = MemoryBus(), MemoryBus()
        line = Silent(far, piece_bytes=16)

        async def never(end: BusTarget) -> list[Refusal]:
            if not end._sent[-1][1]:  # A record.
                return await settle(end)
            await trio.sleep_forever()
            raise AssertionError

        async def cut_behind(
            connection: ClientConnection, terms: TargetSettings, *, seek: bool
        ) -> Inbox:
            found = await subscribed(connection, terms, seek=seek)
            line.slice_frames()
            return found

        async with near as here, far as there:
            await hold(there)
            monkeypatch.setattr(BusTarget, "settle_oldest", never)
            await here.publish_many(numbered(0, 5), class_id="orders")
            async with running(lane(near, far)):
                await trio.sleep(1)
            monkeypatch.setattr(BusTarget, "settle_oldest", settle)
            monkeypatch.setattr(far_module, "_subscribe_records", cut_behind)
            async with running(lane(near, far, far_place=line)):
                await trio.sleep(1)
                assert line.is_cut
                monkeypatch.setattr(far_module, "_subscribe_records", subscribed)
                await trio.sleep(11)
                line.mend()
                await trio.sleep(60)
                await here.publish_many(numbered(5, 7), class_id="orders")
                assert await payloads(there, "orders", 7) == numbered(0, 7)
        assert "no valid bridge record" not in caplog.text

    run(main)


def test_reports_age_of_oldest_message(monkeypatch: pytest.MonkeyPatch) -> None:
    send = BusTarget.send

    async def main() -> None:
        monkeypatch.setattr("time.monotonic", trio.current_time)
        near, far = MemoryBus(), MemoryBus()
        line = Silent(far)
        async with near as here, far as there:
            await hold(there)
            await here.publish(b"0", class_id="orders")
            await trio.sleep(100)
            copying = lane(near, far, far_place=line)

            def cut_first(end: BusTarget, made: TargetBatch) -> None:
                line.slice_frames()
                send(end, made)

            monkeypatch.setattr(BusTarget, "send", cut_first)
            async with running(copying):
                await trio.sleep(5)
                assert round(copying.statistics().lag_seconds) == 105
                await trio.sleep(60)
                assert not copying.statistics().is_up
                assert round(copying.statistics().lag_seconds) == 165
                monkeypatch.setattr(BusTarget, "send", send)
                line.mend()
                assert await payloads(there, "orders", 1) == [b"0"]
                await trio.sleep(30)
                assert (copying.statistics().lag, copying.statistics().lag_seconds) == (0, 0.0)

    run(main)
