"""`EventLoop` of trio."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator
from typing import Any

import trio

from simplebus.client.event_loop.services import ReadResult


class TrioWaiter:
    """Wait of a task that is rescheduled directly."""

    __slots__ = ("_is_awake", "_task")

    def __init__(self) -> None:
        self._is_awake = False
        self._task: trio.lowlevel.Task | None = None
        """The waiting task."""

    def wake(self) -> None:
        self._is_awake = True
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def __await__(self) -> Generator[Any, Any, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        if self._is_awake:
            await trio.lowlevel.checkpoint()
            return
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class TrioEventLoop:
    """Services of trio."""

    def __init__(self) -> None:
        self.current_time = trio.current_time
        self.create_waiter = TrioWaiter

    async def read_socket(
        self, sock: socket.socket, read: Callable[[], ReadResult], *, has_unread: bool
    ) -> None:
        """Read in the current task, with one wait for each read."""
        result = ReadResult.READ_ON if has_unread else ReadResult.WAIT
        while result is not ReadResult.END:
            if result is ReadResult.WAIT:
                await trio.lowlevel.wait_readable(sock)
            else:
                await trio.lowlevel.checkpoint()
            result = read()
