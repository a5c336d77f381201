"""`MemoryBus` with a data directory: reopening, crashes, time and locking.

A crash is simulated by a copy of the directory while the bus is in use.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from simplebus.core.limits import Limits
from simplebus.core.settings import ClassSettings, FullPolicy, Settings
from simplebus.memory.bus import MemoryBus
from simplebus.storage.errors import JournalError
from tests.memory.conftest import Run


async def fill(memory: MemoryBus, count: int = 3) -> None:
    async with memory as bus:
        for number in range(count):
            await bus.publish(b"%d" % number, class_id=1)


async def waiting(memory: MemoryBus, count: int) -> list[bytes]:
    """Return the next `count` unacked payloads of a durable, and ack the first."""
    async with memory as bus, bus.subscribe(1, durable="d", auto_ack=False) as messages:
        messages_ = [await messages.get() for _ in range(count)]
        messages_[0].ack()
        return [message.payload for message in messages_]


def test_messages_are_kept_in_the_directory(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        await fill(MemoryBus(data_dir=tmp_path / "bus"))
        assert await waiting(MemoryBus(data_dir=tmp_path / "bus"), 3) == [b"0", b"1", b"2"]

    run(main)

    async def crash_later() -> None:
        assert await waiting(MemoryBus(data_dir=str(tmp_path / "bus")), 2) == [b"1", b"2"]

    run(crash_later)


def test_can_be_entered_again(run: Run, tmp_path: Path) -> None:
    memory = MemoryBus(data_dir=tmp_path)

    async def main() -> None:
        assert memory.statistics().published == 0
        await fill(memory)
        assert memory.statistics().published == 3
        async with memory.connect(), memory.connect() as second_client:
            await second_client.publish(b"3", class_id=1)
        assert await waiting(memory, 4) == [b"0", b"1", b"2", b"3"]

    run(main)
    run(lambda: fill(memory, 1))


def test_confirmed_messages_survive_a_crash(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with MemoryBus(data_dir=tmp_path / "a") as bus:
            await bus.publish(b"safe", class_id=1)
            shutil.copytree(tmp_path / "a", tmp_path / "b")
            assert await waiting(MemoryBus(data_dir=tmp_path / "b"), 1) == [b"safe"]

    run(main)


def test_position_of_an_idle_durable_is_written(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            MemoryBus(data_dir=tmp_path / "a") as bus,
            bus.subscribe(1, durable="d") as messages,
        ):
            await bus.publish(b"done", class_id=1)
            await bus.publish(b"new", class_id=1)
            await messages.get()
            await messages.get()  # Earlier messages are acknowledged with a delay.
            await trio.sleep(10)
            shutil.copytree(tmp_path / "a", tmp_path / "b")
            assert await waiting(MemoryBus(data_dir=tmp_path / "b"), 1) == [b"new"]

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_clock_does_not_jump_while_waiting_for_the_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            MemoryBus(data_dir=tmp_path) as bus,
            bus.subscribe(1, auto_ack=False, max_in_flight=100) as messages,
        ):
            started_at = trio.current_time()
            for _ in range(20):
                await bus.publish(b"", class_id=1)
                assert (await messages.get()).attempt == 1
            assert trio.current_time() - started_at < 1
            assert (await messages.get()).attempt == 2

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_directory_in_use_raises(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with MemoryBus(data_dir=tmp_path) as bus:
            with pytest.raises(JournalError, match="is used by another server"):
                await fill(MemoryBus(data_dir=tmp_path))
            await bus.publish(b"", class_id=1)
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "mine.txt").touch()
        with pytest.raises(JournalError, match=r"is not a journal: it contains 'mine.txt'"):
            await fill(MemoryBus(data_dir=tmp_path / "other"))

    run(main)


def test_publisher_numbers_continue(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        for _ in range(2):
            async with MemoryBus(data_dir=tmp_path, name="till", durability="os") as bus:
                await bus.publish(b"", class_id=1)
        memory = MemoryBus(data_dir=tmp_path)
        async with memory:
            (cls,) = memory.statistics().classes
            assert cls.ring.message_count == 2

    run(main)


def test_class_can_be_larger_than_memory(run: Run, tmp_path: Path) -> None:
    settings = Settings(
        limits=Limits(class_messages=64),
        classes={1: ClassSettings(full_policy=FullPolicy.SPILL)},
    )

    async def main() -> None:
        await fill(MemoryBus(settings, data_dir=tmp_path, durability="memory"), 300)
        async with (
            MemoryBus(settings, data_dir=tmp_path) as bus,
            bus.subscribe(1) as messages,
        ):
            assert [int((await messages.get()).payload) for _ in range(300)] == list(range(300))

    run(main)


def test_unknown_durability_raises() -> None:
    with pytest.raises(ValueError, match="must be one of disk, os, memory, got 'ram'"):
        MemoryBus(durability="ram")  # type: ignore[arg-type]
