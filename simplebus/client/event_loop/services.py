"""Services of an event loop: clock, waiters and readable sockets."""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable, Generator
from typing import Any, Protocol


class ReadResult(enum.Enum):
    """Result of one read from a socket."""

    WAIT = enum.auto()
    """Read again when the socket is readable."""
    READ_ON = enum.auto()
    """Read again after other tasks have run, because TLS holds bytes that it has received."""
    END = enum.auto()
    """The stream has ended."""


class Waiter(Protocol):
    """One wait of one task: `await waiter`. It can be cancelled like every other wait."""

    def wake(self) -> None:
        """End the wait, which may begin later. Further calls do nothing."""

    def __await__(self) -> Generator[Any, Any, None]: ...


class EventLoop(Protocol):
    """Services of an event loop that a bus uses."""

    def current_time(self) -> float:
        """Return the time in seconds, by the clock of the event loop."""

    def create_waiter(self) -> Waiter: ...

    async def read_socket(
        self, sock: socket.socket, read: Callable[[], ReadResult], *, has_unread: bool
    ) -> None:
        """Call `read` whenever the socket is readable, until it returns END or raises.

        If `has_unread`, the first call does not wait until the socket is readable.
        """
