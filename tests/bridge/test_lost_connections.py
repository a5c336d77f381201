"""Connections to source or target that are lost at any moment, with or without notice."""

from __future__ import annotations

import itertools

import pytest
import trio

from simplebus.bridge.interfaces import Refusal, TargetBatch
from simplebus.bridge.target import bus as bus_module
from simplebus.bridge.target.bus import BusTarget, TargetSettings
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.core.inbox import Inbox
from simplebus.memory.bus import MemoryBus
from tests.bridge.memory_buses import (
    SilentEndpoint,
    create_copier,
    create_test_durable,
    numbered_payloads,
    payloads,
    run,
    running,
)


@pytest.mark.parametrize("cut_at", [1, 2])
def test_resumes_after_source_is_lost_while_target_stores(
    cut_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request to the source uses a lost connection."""
    settle = BusTarget.settle_oldest
    settled = 0

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()

        async def settle_late(end: BusTarget) -> list[Refusal]:
            nonlocal settled
            settled += 1
            if settled == cut_at:
                source.hang_up()
                await trio.sleep(1)
            return await settle(end)

        async with (
            source as source_bus,
            target as target_bus,
            running(create_copier(source, target)),
        ):
            await source_bus.publish_many(numbered_payloads(0, 10), class_id="orders")
            assert await payloads(target_bus, "orders", 10) == numbered_payloads(0, 10)
            await trio.sleep(1)
            monkeypatch.setattr(BusTarget, "settle_oldest", settle_late)
            for first in (10, 20):
                await source_bus.publish_many(
                    numbered_payloads(first, first + 10), class_id="orders"
                )
                assert await payloads(target_bus, "orders", 10) == numbered_payloads(
                    first, first + 10
                )

    run(main)


ENDS = ("source", "target")
LOST_SECONDS = 30.0
"""Three heartbeats of `TargetSettings`."""


async def copy_over_cut_line(cut: str, call_number: int, seconds: float) -> bool:
    """Copy while the connection to one or both ends is cut at call number `at` for `seconds`.

    Returns False if there were fewer calls.
    """
    source, target = MemoryBus(), MemoryBus()
    lines = {"source": SilentEndpoint(source), "target": SilentEndpoint(target)}
    async with source as source_bus, target as target_bus:
        await create_test_durable(target_bus)
        async with running(create_copier(source, target)):  # Leaves a bridge record.
            await source_bus.publish_many(numbered_payloads(0, 5), class_id="orders")
            assert await payloads(target_bus, "orders", 5) == numbered_payloads(0, 5)
            await trio.sleep(1)
        for end in ENDS if cut == "both" else (cut,):
            lines[end].cut_at = call_number
        copying = create_copier(
            source, target, source_endpoint=lines["source"], target_endpoint=lines["target"]
        )
        async with running(copying):
            count = 5
            while count < 35 and not any(line.is_cut for line in lines.values()):
                count += 10
                await source_bus.publish_many(
                    numbered_payloads(count - 10, count), class_id="orders"
                )
                await trio.sleep(0.15)
            was_cut = any(line.is_cut for line in lines.values())
            if was_cut:
                await trio.sleep(seconds)
                if seconds > LOST_SECONDS:
                    assert not copying.statistics().is_up
                    assert copying.statistics().losses
            for line in lines.values():
                line.restore()
            await source_bus.publish_many(numbered_payloads(count, count + 10), class_id="orders")
            assert await payloads(target_bus, "orders", count + 5) == numbered_payloads(
                5, count + 10
            )
            await trio.sleep(60)  # Wait for duplicates.
            orders = next(k for k in target.statistics().classes if k.ring.head > count)
            assert orders.ring.head == count + 10
            assert copying.statistics().lag == 0
    return was_cut


STEP = 12


@pytest.mark.long
@pytest.mark.parametrize("cut", [*ENDS, "both"])
@pytest.mark.parametrize(("seconds", "first"), [(LOST_SECONDS + 5, 1), (11.0, 5)])
def test_reconnects_to_silent_end(cut: str, seconds: float, first: int) -> None:
    """Cuts at one call after the other, which covers handshake, record, messages and confirms."""
    for call_number in itertools.count(first, STEP):
        was_cut: list[bool] = []

        async def main(was_cut: list[bool] = was_cut, call_number: int = call_number) -> None:
            was_cut.append(await copy_over_cut_line(cut, call_number, seconds))

        run(main)
        if was_cut == [False]:
            break
    assert call_number > 40, "lines have fewer calls than a lane has phases"


def test_lost_connection_is_not_a_missing_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the messages in flight would be stored twice."""
    settle, subscribed = BusTarget.settle_oldest, bus_module._subscribe_records

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        line = SilentEndpoint(target, read_bytes_max=16)

        async def wait_forever(end: BusTarget) -> list[Refusal]:
            if not end._sent[-1][1]:  # A record.
                return await settle(end)
            await trio.sleep_forever()
            raise AssertionError

        async def cut_behind(
            connection: ClientConnection, target_settings: TargetSettings, *, seek: bool
        ) -> Inbox:
            found = await subscribed(connection, target_settings, seek=seek)
            line.cut()
            return found

        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            monkeypatch.setattr(BusTarget, "settle_oldest", wait_forever)
            await source_bus.publish_many(numbered_payloads(0, 5), class_id="orders")
            async with running(create_copier(source, target)):
                await trio.sleep(1)
            monkeypatch.setattr(BusTarget, "settle_oldest", settle)
            monkeypatch.setattr(bus_module, "_subscribe_records", cut_behind)
            async with running(create_copier(source, target, target_endpoint=line)):
                await trio.sleep(1)
                assert line.is_cut
                monkeypatch.setattr(bus_module, "_subscribe_records", subscribed)
                await trio.sleep(11)
                line.restore()
                await trio.sleep(60)
                await source_bus.publish_many(numbered_payloads(5, 7), class_id="orders")
                assert await payloads(target_bus, "orders", 7) == numbered_payloads(0, 7)
        assert "no valid bridge record" not in caplog.text

    run(main)


def test_reports_age_of_oldest_message(monkeypatch: pytest.MonkeyPatch) -> None:
    send = BusTarget.send

    async def main() -> None:
        monkeypatch.setattr("time.monotonic", trio.current_time)
        source, target = MemoryBus(), MemoryBus()
        line = SilentEndpoint(target)
        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            await source_bus.publish(b"0", class_id="orders")
            await trio.sleep(100)
            copying = create_copier(source, target, target_endpoint=line)

            def cut_first(end: BusTarget, batch: TargetBatch) -> None:
                line.cut()
                send(end, batch)

            monkeypatch.setattr(BusTarget, "send", cut_first)
            async with running(copying):
                await trio.sleep(5)
                assert round(copying.statistics().lag_seconds) == 105
                await trio.sleep(60)
                assert not copying.statistics().is_up
                assert round(copying.statistics().lag_seconds) == 165
                monkeypatch.setattr(BusTarget, "send", send)
                line.restore()
                assert await payloads(target_bus, "orders", 1) == [b"0"]
                await trio.sleep(30)
                assert (copying.statistics().lag, copying.statistics().lag_seconds) == (0, 0.0)

    run(main)
