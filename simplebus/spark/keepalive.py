"""Signs of life on connections whose program is busy elsewhere.

A query may work on one batch for longer than a bus waits to hear from it, and the bus would then
take the query for dead, and let go of what it keeps for it. A task of a sink may wait as long for
its rows.

Rule 1: connections belong to one thread at a time: who uses them holds the lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from time import monotonic

from simplebus.client.blocking.connection import BlockingWire
from simplebus.core.errors import BusConnectionError

# A third of what servers ask for unless told otherwise, who wait for three times as long as that.
_PAUSE_SECONDS = 10.0
# For a connection that was lost to be replaced: it comes about only while somebody waits for it.
# Short, for the program may want the others; and again very soon.
_AGAIN_SECONDS = 0.1


class Awake:
    """A thread that has connections read and write now and then, from `start` to `stop`."""

    def __init__(
        self, wires: Callable[[], Iterable[BlockingWire]], *, pause: float | None = None
    ) -> None:
        self.lock = threading.RLock()
        self._wires, self._pause = wires, _PAUSE_SECONDS if pause is None else pause
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

    @contextlib.contextmanager
    def kept(self) -> Iterator[threading.RLock]:
        """From the beginning to the end of a block, which is given the lock."""
        self.start()
        try:
            yield self.lock
        finally:
            self.stop()

    def _run(self) -> None:
        pause = self._pause
        while not self._over.wait(pause):
            pause = self._pause
            with self.lock:
                for wire in self._wires():
                    with contextlib.suppress(BusConnectionError):  # Who needs it hears of it.
                        wire.poll()
                        if wire.is_away:
                            pause = min(pause, _AGAIN_SECONDS)
                            wire.wait_until(lambda: False, monotonic() + _AGAIN_SECONDS)
