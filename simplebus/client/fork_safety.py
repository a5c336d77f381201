"""Protection of connections in forked processes.

A connection belongs to the process that opened it. A forked child closes its copy before its first
line of Python runs, so it can neither send on the connection nor read from it.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from simplebus.core.errors import BusConnectionError


class ForkedConnection(Protocol):
    """Connection of which a forked child has a copy."""

    def disown(self, end: BusConnectionError) -> None:
        """Close the socket without sending anything, and fail later calls with this error."""


_connections: WeakSet[ForkedConnection] = WeakSet()


def register(connection: ForkedConnection) -> None:
    """Close the child's copy of the connection in every forked process."""
    _connections.add(connection)


def _disown_connections() -> None:
    error = BusConnectionError(
        f"process {os.getppid()} opened this connection before it forked process {os.getpid()}; "
        "expected a connection of the forked process: connect after the fork"
    )
    for connection in list(_connections):
        connection.disown(error)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_connections)
