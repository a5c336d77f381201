"""Refused connections that their clients have not closed yet.

Closing a socket with unread input would reset the connection, and the client would lose the error
that was just sent. So the socket stays open for a moment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

CLOSING_CONNECTIONS_MAX = 64

CloseSocket = Callable[[], object]
"""Closes a socket at once."""


class ClosingConnections:
    """Sockets that stay open until their clients close; at most CLOSING_CONNECTIONS_MAX."""

    def __init__(self) -> None:
        self._closers: OrderedDict[CloseSocket, None] = OrderedDict()
        """Close functions, oldest first."""

    def __len__(self) -> int:
        return len(self._closers)

    def add(self, close: CloseSocket) -> None:
        """Add a socket; closes the oldest one if there are too many."""
        if len(self._closers) >= CLOSING_CONNECTIONS_MAX:
            self.close_oldest()
        self._closers[close] = None

    def discard(self, close: CloseSocket) -> None:
        """Remove a socket that is closed."""
        self._closers.pop(close, None)

    def close_oldest(self) -> bool:
        """Close the oldest socket to free its descriptor. Returns False if no socket is closing."""
        if not self._closers:
            return False
        close, _ = self._closers.popitem(last=False)
        close()
        return True
