"""Signs of life on connections whose program is busy elsewhere.

A query may work on one batch for longer than a bus waits to hear from it, and the bus would then
take the query for dead, and let go of what it keeps for it.

Rule 1: connections belong to one thread at a time: who uses them holds the lock.
"""

from __future__ import annotations

import contextlib
import threading

from simplebus.core.errors import BusConnectionError
from simplebus.spark.buses import Buses

# A third of what servers ask for unless told otherwise, who wait for three times as long as that.
_PAUSE_SECONDS = 10.0


class Awake:
    """A thread that has connections read and write now and then, from `start` to `stop`."""

    def __init__(self, buses: Buses, *, pause: float = _PAUSE_SECONDS) -> None:
        self.lock = threading.RLock()
        self._buses, self._pause = buses, pause
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="simplebus awake", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End; returns when the thread has ended."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            with self.lock:
                for bus in self._buses.connected():
                    with contextlib.suppress(BusConnectionError):  # Who needs it hears of it.
                        bus.blocking.wire.poll()
