"""Who was told why it goes, and has not hung up: of all doors of one bus.

Closing a socket with bytes unread would take back what was just sent: it stays open for a moment.
Rule 1: no more than a few of them take a descriptor, however many are told to go. The one that was
told first is closed for one more, and where somebody else needs its descriptor: it is of no use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

CLOSING_CONNECTIONS_MAX = 64

Close = Callable[[], object]
"""Closes a socket, at once."""


class ClosingConnections:
    """Invariant: no more of them than FAREWELLS_MAX."""

    def __init__(self) -> None:
        self._closers: OrderedDict[Close, None] = OrderedDict()
        """Who was told first comes first."""

    def __len__(self) -> int:
        return len(self._closers)

    def add(self, close: Close) -> None:
        """One more has been told. `go` when it has hung up, or has had its time."""
        if len(self._closers) >= CLOSING_CONNECTIONS_MAX:
            self.close_oldest()
        self._closers[close] = None

    def discard(self, close: Close) -> None:
        """It is closed, perhaps by us."""
        self._closers.pop(close, None)

    def close_oldest(self) -> bool:
        """Close one. Returns whether there was any: its descriptor is free then."""
        if not self._closers:
            return False
        close, _ = self._closers.popitem(last=False)
        close()
        return True
