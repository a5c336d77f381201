"""Durability levels of stored messages."""

from __future__ import annotations

import enum


class Durability(enum.IntEnum):
    """Durability level of a stored message (binary.md, "Durability").

    The value is the last field of a Confirm frame.
    """

    MEMORY = 0
    """In the memory of the server process."""
    OS = 1
    """Written to the operating system; survives the end of the process."""
    DISK = 2
    """Synced to disk; survives a power failure."""
