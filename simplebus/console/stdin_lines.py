"""Reader of lines from a byte stream, such as standard input."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self

import trio

_READ_BYTES = 256 * 1024


class LineReader:
    """Lines of a byte stream. Iterate for one line as text at a time, or call `read_lines`."""

    def __init__(self, receive: Callable[[], Awaitable[bytes | bytearray]]) -> None:
        """`receive` waits for more bytes and returns none at the end."""
        self._receive = receive
        self._ready: deque[bytes] = deque()
        self._partial_line = b""
        self._is_ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if not self._ready:
            self._ready.extend(await self.read_lines())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft().decode()

    async def read_lines(self) -> list[bytes]:
        """Return the complete lines received so far, at least one; none at the end of the stream.

        The last line needs no line end.
        """
        while not self._is_ended:
            data = await self._receive()
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            if not data:
                self._is_ended = True
                if self._partial_line:
                    lines.append(self._partial_line)
            if lines:
                return lines
        return []


def read_stdin_lines() -> LineReader:
    """Return a reader of standard input."""

    async def receive() -> bytes:
        return await trio.to_thread.run_sync(
            os.read, sys.stdin.fileno(), _READ_BYTES, abandon_on_cancel=True
        )

    return LineReader(receive)
