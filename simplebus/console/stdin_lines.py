"""Bytes that come in pieces, as lines.

Rule 1: nothing is kept back: every line that is whole is there to be had.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self

import trio

_READ_BYTES = 256 * 1024


class Lines:
    """Iterate for one line after the other, as text, or take `some` of them at a time."""

    def __init__(self, receive: Callable[[], Awaitable[bytes | bytearray]]) -> None:
        """`receive` waits for more bytes; none at all are the end."""
        self._receive = receive
        self._ready: deque[bytes] = deque()
        self._rest = b""
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if not self._ready:
            self._ready.extend(await self.some())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft().decode()

    async def some(self) -> list[bytes]:
        """The lines that have come meanwhile, at least one; none at the end. A last line counts
        without a line end too."""
        while not self._ended:
            data = await self._receive()
            *lines, self._rest = (self._rest + data).split(b"\n")
            if not data:
                self._ended = True
                if self._rest:
                    lines.append(self._rest)
            if lines:
                return lines
        return []


def standard_input() -> Lines:
    """The lines of standard input, as soon as they are there."""

    async def receive() -> bytes:
        return await trio.to_thread.run_sync(
            os.read, sys.stdin.fileno(), _READ_BYTES, abandon_on_cancel=True
        )

    return Lines(receive)
