"""Tests of the signal receiver."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import trio

from simplebus.server.signals import open_signal_receiver


@pytest.fixture
def former_handler_signals() -> Iterator[list[int]]:
    """Signals that reach the handlers that were installed before."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR2)
    before = {
        each: signal.signal(each, lambda number, _: received.append(number)) for each in numbers
    }
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


async def test_receives_signals(former_handler_signals: list[int]) -> None:
    async with open_signal_receiver() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with trio.fail_after(240):
            assert await anext(signals) == signal.SIGTERM
    assert former_handler_signals == []


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_unread_signals_are_ignored_afterwards(
    former_handler_signals: list[int], turns: int
) -> None:
    """Regardless of how many loop turns have passed since."""
    async with open_signal_receiver():
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
    await trio.testing.wait_all_tasks_blocked()
    assert former_handler_signals == []


async def test_former_signal_handlers_are_restored(former_handler_signals: list[int]) -> None:
    async with open_signal_receiver():
        pass
    os.kill(os.getpid(), signal.SIGUSR2)
    with trio.fail_after(240):
        while not former_handler_signals:
            await trio.lowlevel.checkpoint()
    assert former_handler_signals == [signal.SIGUSR2]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
