"""A near bus that comes back from an old copy of its directory: its sequences mean others then."""

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
    hold,
    lane,
    numbered,
    payloads,
    run,
    running,
)

COPIED, LOST, NEW = 10, 10, 15


@pytest.mark.parametrize("are_alike", [False, True])
def test_restored_source_messages_are_copied(
    are_alike: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """More of it than was lost, so that the sequences say nothing; with other contents, or long
    after."""

    def some(first: int, count: int) -> list[bytes]:
        return [b"same"] * count if are_alike else numbered(first, first + count)

    async def main() -> None:
        far = MemoryBus()
        async with far as there:
            await hold(there)
            for first, count in (0, COPIED), (COPIED, LOST):
                near = MemoryBus(data_dir=tmp_path / "near")
                async with near as here, running(lane(near, far)):
                    await here.publish_many(some(first, count), class_id="orders")
                    assert await payloads(there, "orders", count) == some(first, count)
                    await trio.sleep(5)
                if not first:
                    shutil.copytree(tmp_path / "near", tmp_path / "copy")
            restored = MemoryBus(data_dir=tmp_path / "copy")
            async with restored as here:
                await trio.sleep(400)
                await here.publish_many(some(1000, NEW), class_id="orders")
                copying = lane(restored, far)
                async with running(copying):
                    assert await payloads(there, "orders", NEW) == some(1000, NEW)
                assert copying.statistics().discarded_records == 1
        assert "was restored from an old copy" in caplog.text

    run(main)


def test_skips_removed_messages_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the far bus has been told of messages that the near bus has let go of since."""
    count, gone = 100, set(range(100)) - set(range(7, 100, 10))
    send, find = BusTarget.send, BusSource.read
    folder, copy = tmp_path / "far", tmp_path / "copy"
    asked: list[int] = []

    def copied_first(end: BusTarget, made: TargetBatch) -> None:
        if not copy.exists():
            shutil.copytree(folder, copy)
        send(end, made)

    async def counted(end: BusSource, at: int) -> SourceBatch:
        asked.append(at)
        return await find(end, at)

    async def main() -> None:
        near, far = MemoryBus(), MemoryBus(data_dir=folder)
        async with near as here, here.subscribe("orders", durable="another"):
            await here.publish_many(numbered(0, count), class_id="orders")
            monkeypatch.setattr(BusTarget, "send", copied_first)
            async with far as there, running(lane(near, far)):
                assert await payloads(there, "orders", count) == numbered(0, count)
                await trio.sleep(5)
            monkeypatch.setattr(BusTarget, "send", send)
            monkeypatch.setattr(BusSource, "read", counted)
            for each in gone:
                await here.purge("orders", each, each + 1)
            again = MemoryBus(data_dir=copy)
            async with again as there, running(lane(near, again)):
                await here.publish(b"last", class_id="orders")
                left = [b"%d" % n for n in range(count) if n not in gone]
                got = await payloads(there, "orders", len(left) + 1)
                assert got == [*left, b"last"]
            assert len(asked) < count // 4

    run(main)


def test_fingerprint_identifies_message() -> None:
    there = MessageFingerprint.from_frame(b"\x02headers.content<\r\n>", 1000.0)
    assert MessageFingerprint.from_frame(b"\x02HEADERS.content<\r\n>", 1001.0).may_match(there)
    assert not MessageFingerprint.from_frame(b"\x02headers.Content<\r\n>", 1000.0).may_match(there)
    assert not MessageFingerprint.from_frame(b"\x03headers.content<\r\n>", 1000.0).may_match(there)
    assert not MessageFingerprint.from_frame(b"\x02headers.content<\r\n>", 600.0).may_match(
        there
    )  # It came later.
    assert MessageFingerprint.from_frame(b"\x02headers.content<\r\n>", 0.0).may_match(
        there
    )  # Nobody knows.
    assert SourceBatch([], 0, 0, 0).fingerprint(0) is None
