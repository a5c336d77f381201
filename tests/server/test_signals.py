"""Tests of the signal receiver."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import trio

from simplebus.server.signals import open_signal_receiver


@pytest.fixture
def outside() -> Iterator[list[int]]:
    """What comes to whoever had the signals before."""
    heard: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR2)
    before = {each: signal.signal(each, lambda number, _: heard.append(number)) for each in numbers}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


async def test_receives_signals(outside: list[int]) -> None:
    async with open_signal_receiver() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with trio.fail_after(60):
            assert await anext(signals) == signal.SIGTERM
    assert outside == []


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_unread_signals_are_ignored_afterwards(outside: list[int], turns: int) -> None:
    """However far it has come through the event loop."""
    async with open_signal_receiver():
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
    await trio.testing.wait_all_tasks_blocked()
    assert outside == []


async def test_former_signal_handlers_are_restored(outside: list[int]) -> None:
    async with open_signal_receiver():
        pass
    os.kill(os.getpid(), signal.SIGUSR2)
    with trio.fail_after(60):
        while not outside:
            await trio.lowlevel.checkpoint()
    assert outside == [signal.SIGUSR2]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
