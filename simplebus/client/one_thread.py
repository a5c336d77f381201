"""A blocking bus belongs to one thread at a time.

Rule 1: a thread that comes while another one uses the bus is refused before anything is touched:
the other one notices nothing. It is not kept waiting, for that could be for ever.
"""

from __future__ import annotations

import threading

from simplebus.core.errors import LocalProtocolError


class OneThread:
    """Held by a call while it lasts."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise LocalProtocolError(
                "another thread is using this bus; a blocking bus belongs to one thread at a time: "
                "connect once in each"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()
