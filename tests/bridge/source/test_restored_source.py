"""A source bus that was restored from an old copy of its directory: its sequences are reused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

from simplebus.bridge.checkpoint import MessageFingerprint
from simplebus.bridge.interfaces import SourceBatch, TargetBatch
from simplebus.bridge.source.bus import BusSource
from simplebus.bridge.target.bus import BusTarget
from simplebus.memory.bus import MemoryBus
from tests.bridge.memory_buses import (
    create_copier,
    create_test_durable,
    numbered_payloads,
    payloads,
    run,
    running,
)

COPIED, LOST, NEW = 10, 10, 15


@pytest.mark.parametrize("are_alike", [False, True])
def test_restored_source_messages_are_copied(
    are_alike: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """More new messages follow than were lost, so the sequences alone do not show the loss. The
    new messages have other payloads or later times.
    """

    def payload_range(first: int, count: int) -> list[bytes]:
        return [b"same"] * count if are_alike else numbered_payloads(first, first + count)

    async def main() -> None:
        target = MemoryBus()
        async with target as target_bus:
            await create_test_durable(target_bus)
            for first, count in (0, COPIED), (COPIED, LOST):
                source = MemoryBus(data_dir=tmp_path / "source")
                async with source as source_bus, running(create_copier(source, target)):
                    await source_bus.publish_many(payload_range(first, count), class_id="orders")
                    assert await payloads(target_bus, "orders", count) == payload_range(
                        first, count
                    )
                    await trio.sleep(5)
                if not first:
                    shutil.copytree(tmp_path / "source", tmp_path / "copy")
            restored = MemoryBus(data_dir=tmp_path / "copy")
            async with restored as source_bus:
                await trio.sleep(400)
                await source_bus.publish_many(payload_range(1000, NEW), class_id="orders")
                copying = create_copier(restored, target)
                async with running(copying):
                    assert await payloads(target_bus, "orders", NEW) == payload_range(1000, NEW)
                assert copying.statistics().discarded_records == 1
        assert "was restored from an old copy" in caplog.text

    run(main)


def test_skips_removed_messages_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restored target has a record of messages that the source has removed since."""
    count, removed = 100, set(range(100)) - set(range(7, 100, 10))
    send, read = BusTarget.send, BusSource.read
    folder, copy = tmp_path / "target", tmp_path / "copy"
    read_positions: list[int] = []

    def copied_first(end: BusTarget, batch: TargetBatch) -> None:
        if not copy.exists():
            shutil.copytree(folder, copy)
        send(end, batch)

    async def counted(end: BusSource, position: int) -> SourceBatch:
        read_positions.append(position)
        return await read(end, position)

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(data_dir=folder)
        async with source as source_bus, source_bus.subscribe("orders", durable="another"):
            await source_bus.publish_many(numbered_payloads(0, count), class_id="orders")
            monkeypatch.setattr(BusTarget, "send", copied_first)
            async with target as target_bus, running(create_copier(source, target)):
                assert await payloads(target_bus, "orders", count) == numbered_payloads(0, count)
                await trio.sleep(5)
            monkeypatch.setattr(BusTarget, "send", send)
            monkeypatch.setattr(BusSource, "read", counted)
            for each in removed:
                await source_bus.purge("orders", each, each + 1)
            restored = MemoryBus(data_dir=copy)
            async with restored as target_bus, running(create_copier(source, restored)):
                await source_bus.publish(b"last", class_id="orders")
                expected = [b"%d" % n for n in range(count) if n not in removed]
                received = await payloads(target_bus, "orders", len(expected) + 1)
                assert received == [*expected, b"last"]
            assert len(read_positions) < count // 4

    run(main)


def test_fingerprint_identifies_message() -> None:
    target_bus = MessageFingerprint.from_frame(b"\x02headers.content<\r\n>", 1000.0)
    assert MessageFingerprint.from_frame(b"\x02HEADERS.content<\r\n>", 1001.0).may_match(target_bus)
    assert not MessageFingerprint.from_frame(b"\x02headers.Content<\r\n>", 1000.0).may_match(
        target_bus
    )
    assert not MessageFingerprint.from_frame(b"\x03headers.content<\r\n>", 1000.0).may_match(
        target_bus
    )
    assert not MessageFingerprint.from_frame(b"\x02headers.content<\r\n>", 600.0).may_match(
        target_bus
    )  # It was accepted later.
    assert MessageFingerprint.from_frame(b"\x02headers.content<\r\n>", 0.0).may_match(
        target_bus
    )  # The time is unknown.
    assert SourceBatch([], 0, 0, 0).fingerprint(0) is None
