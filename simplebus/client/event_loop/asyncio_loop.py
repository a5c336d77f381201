"""`EventLoop` of asyncio and of loops that replace it, such as uvloop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Generator
from typing import Any

from simplebus.client.event_loop.services import ReadResult


class AsyncioWaiter:
    """Wait for a future."""

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()

    def wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def __await__(self) -> Generator[Any, Any, None]:
        return self._future.__await__()


class AsyncioEventLoop:
    """Services of the running asyncio loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.current_time = self._loop.time

    def create_waiter(self) -> AsyncioWaiter:
        return AsyncioWaiter(self._loop)

    async def read_socket(
        self, sock: socket.socket, read: Callable[[], ReadResult], *, has_unread: bool
    ) -> None:
        """Read in a callback of the loop, without a task switch and a registration per read."""
        reader = _SocketReader(self._loop, sock, read)
        try:
            if has_unread:
                self._loop.call_soon(reader.read_once)
            await reader.ended
        finally:
            reader.stop()
        if reader.error is not None:
            raise reader.error


class _SocketReader:
    """Reads a socket in callbacks, one read in each."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, read: Callable[[], ReadResult]
    ) -> None:
        self.ended = AsyncioWaiter(loop)
        """Woken at the end of the stream and by an error."""
        self.error: BaseException | None = None
        self._loop = loop
        self._read = read
        self._fd: int | None = sock.fileno()
        """File descriptor; None when reading has ended. It is stored because a forked child closes
        the socket object.
        """
        loop.add_reader(self._fd, self.read_once)

    def read_once(self) -> None:
        if self._fd is None:  # Reading has ended before this callback.
            return
        try:
            result = self._read()
        except BaseException as error:  # Raised in the task that waits for the end.
            self.error, result = error, ReadResult.END
        if result is ReadResult.END:
            self.stop()
        elif result is ReadResult.READ_ON:
            self._loop.call_soon(self.read_once)

    def stop(self) -> None:
        if self._fd is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            self._fd = None
            self.ended.wake()
