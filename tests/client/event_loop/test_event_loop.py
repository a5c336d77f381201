"""Tests of waiters and readable sockets under trio and asyncio."""

from __future__ import annotations

import socket

import anyio
import anyio.lowlevel
import pytest

from simplebus.client.event_loop.find import find_event_loop
from simplebus.client.event_loop.services import ReadResult
from simplebus.client.event_loop.wakeup_event import WakeupEvent
from tests.client.conftest import Run


def test_waiter_that_was_woken_before_does_not_wait(run: Run) -> None:
    async def main() -> None:
        waiter = find_event_loop().create_waiter()
        waiter.wake()
        waiter.wake()
        await waiter

    run(main)


def test_waiter_is_woken_by_another_task(run: Run) -> None:
    async def main() -> None:
        waiter = find_event_loop().create_waiter()
        async with anyio.create_task_group() as tasks:

            async def wake() -> None:
                await anyio.lowlevel.checkpoint()
                waiter.wake()
                waiter.wake()

            tasks.start_soon(wake)
            await waiter

    run(main)


def test_cancelled_waiter_may_be_woken(run: Run) -> None:
    async def main() -> None:
        waiter = find_event_loop().create_waiter()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await waiter
        assert scope.cancelled_caught
        waiter.wake()

    run(main)


def test_event_wakes_every_waiting_task_and_no_later_one(run: Run) -> None:
    async def main() -> None:
        event, woken = WakeupEvent(), list[int]()

        async def wait(number: int) -> None:
            await event.wait()
            woken.append(number)

        event.set()
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(wait, number)
            await anyio.wait_all_tasks_blocked()
            with anyio.CancelScope() as scope:
                scope.cancel()
                await event.wait()
            event.set()
            await anyio.wait_all_tasks_blocked()
            assert sorted(woken) == [0, 1, 2]
            tasks.start_soon(wait, 3)
            await anyio.wait_all_tasks_blocked()
            assert len(woken) == 3
            event.set()

    run(main)


def test_socket_is_read_once_whenever_it_is_readable(run: Run) -> None:
    async def main() -> None:
        reading, writing = socket.socketpair()
        with reading, writing:
            reading.setblocking(False)
            received = bytearray()

            def read() -> ReadResult:
                data = reading.recv(2)
                received.extend(data)
                return ReadResult.WAIT if data else ReadResult.END

            async with anyio.create_task_group() as tasks:

                async def send() -> None:
                    for _ in range(3):
                        writing.send(b"abc")
                        await anyio.wait_all_tasks_blocked()
                    writing.shutdown(socket.SHUT_WR)

                tasks.start_soon(send)
                await find_event_loop().read_socket(reading, read, has_unread=False)
            assert received == b"abc" * 3

    run(main)


def test_unread_data_is_read_although_the_socket_is_not_readable(run: Run) -> None:
    async def main() -> None:
        reading, writing = socket.socketpair()
        with reading, writing:
            results = [ReadResult.END, ReadResult.READ_ON, ReadResult.READ_ON]
            await find_event_loop().read_socket(reading, results.pop, has_unread=True)
            assert not results

    run(main)


@pytest.mark.parametrize("error", [OSError("broken"), ValueError("a mistake")])
def test_error_of_a_read_is_raised_and_ends_reading(run: Run, error: Exception) -> None:
    async def main() -> None:
        reading, writing = socket.socketpair()
        with reading, writing:
            calls = 0

            def read() -> ReadResult:
                nonlocal calls
                calls += 1
                raise error

            writing.send(b"abc")
            with pytest.raises(type(error), match=str(error)):
                await find_event_loop().read_socket(reading, read, has_unread=False)
            await anyio.wait_all_tasks_blocked()
            assert calls == 1

    run(main)


def test_cancelled_reading_calls_no_more(run: Run) -> None:
    async def main() -> None:
        reading, writing = socket.socketpair()
        with reading, writing:
            calls = 0

            def read() -> ReadResult:
                nonlocal calls
                calls += 1
                return ReadResult.READ_ON

            with anyio.CancelScope() as scope:
                scope.cancel()
                await find_event_loop().read_socket(reading, read, has_unread=True)
            writing.send(b"abc")
            calls = 0
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            assert calls == 0

    run(main)
