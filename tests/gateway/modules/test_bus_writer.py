"""What a bus has no room for is given to it again, until there is some."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from simplebus.client.aio.bus import Bus
from simplebus.core.errors import LocalProtocolError, Reason, RefusedError
from simplebus.core.limits import Limits
from simplebus.core.settings import FullPolicy, Settings
from simplebus.gateway.modules import intake as module
from simplebus.gateway.modules.intake import Intake
from simplebus.memory.bus import MemoryBus

log = logging.getLogger("test")
SMALL = Settings(
    limits=Limits(class_bytes=1 << 20, frame_bytes=1 << 17, dead_letter_bytes=1 << 20),
    full_policy=FullPolicy.DROP_NEWEST,
)
PATIENCE_S = 60


@asynccontextmanager
async def taking_in(bus: Bus, **options: Any) -> AsyncIterator[Intake]:
    intake = Intake(bus, "kept", **{"bytes_max": 1 << 17, "log": log, **options})
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(intake.run)
            yield intake
            nursery.cancel_scope.cancel()


async def test_what_finds_no_room_waits_for_it_and_comes_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.001)
    caplog.set_level("INFO")
    numbers, got = range(600), list[int]()
    async with (
        MemoryBus(SMALL) as bus,
        bus.subscribe("kept", max_in_flight=8) as messages,
        taking_in(bus) as intake,
        trio.open_nursery() as nursery,
    ):

        async def put() -> None:
            for number in numbers:
                await intake.put(b"%d" % number + bytes(10_000), {})

        nursery.start_soon(put)
        while not intake.problem:  # noqa: ASYNC110 - nobody has acknowledged anything yet.
            await trio.sleep(0.001)
        assert intake.problem.startswith("drop_newest")
        assert intake.kept < len(numbers)
        async for message in messages:
            got.append(int(message.payload[:-10_000]))
            if len(got) == len(numbers):
                break
        await intake.flushed()
        assert (intake.kept, intake.problem) == (len(numbers), "")
    assert got == list(numbers)
    assert "there is no room for what is heard: it waits (drop_newest" in caplog.text
    assert "there is room again" in caplog.text


async def test_what_is_under_way_is_bounded(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MESSAGES_MAX", 3)
    settings = Settings(limits=SMALL.limits, full_policy=FullPolicy.BLOCK)
    put = 0
    async with (
        MemoryBus(settings) as bus,
        bus.subscribe("kept", max_in_flight=1) as messages,
        taking_in(bus) as intake,
    ):
        with trio.move_on_after(PATIENCE_S / 2):
            while True:
                await intake.put(bytes(100_000), {})
                put += 1
        assert put <= intake.kept + 3
        for _ in range(put):
            await messages.get(PATIENCE_S)
        await intake.flushed()
        assert intake.kept == put


async def test_what_can_never_be_kept_is_told() -> None:
    async with MemoryBus(SMALL) as bus, taking_in(bus) as intake:
        with pytest.raises(LocalProtocolError):
            await intake.put(bytes(1 << 20), {})
        await intake.put(b"fine", {})
        await intake.flushed()
        assert intake.kept == 1


async def test_a_refusal_for_another_reason_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NO_ROOM", {Reason.DISK_FULL})
    with trio.fail_after(PATIENCE_S):
        async with MemoryBus(SMALL) as bus, trio.open_nursery() as nursery:
            intake = Intake(bus, "kept", bytes_max=1 << 17, log=log)

            async def put() -> None:
                while True:
                    await intake.put(bytes(10_000), {})

            nursery.start_soon(put)
            with pytest.raises(RefusedError, match="drop_newest"):
                await intake.run()
            nursery.cancel_scope.cancel()
