"""What becomes of connections in a process that is forked from the one that made them.

Rule 1: a connection belongs to the process that made it. In a child its copy is over before the
child's first line runs: nothing that the child does gets into its parent's conversation with a bus,
nor takes away what the bus says to the parent.
Rule 2: that costs nothing per message. The wires that there are, are known here.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from simplebus.core.errors import BusConnectionError


class ForkedConnection(Protocol):
    """What a child has got a copy of."""

    def disown(self, end: BusConnectionError) -> None:
        """Let go of the connection without a word to the bus, and have this as the reason."""


_wires: WeakSet[Inherited] = WeakSet()


def register(wire: ForkedConnection) -> None:
    """From now on it is disowned in every child."""
    _wires.add(wire)


def _disown_all() -> None:
    end = BusConnectionError(
        f"this bus was connected by another process, {os.getppid()}, from which this one, "
        f"{os.getpid()}, was forked; expected a bus of its own: connect here"
    )
    for wire in list(_wires):
        wire.disown(end)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)
