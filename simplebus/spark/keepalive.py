"""Heartbeats on connections whose program is busy.

A query may process one batch for longer than the bus waits for a heartbeat. The bus would then
drop the connection and release the messages that it retains for the query. A sink task may wait
equally long for rows. Connections belong to one thread at a time: their user holds the lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from time import monotonic

from simplebus.client.blocking.connection import BlockingClientConnection
from simplebus.core.errors import BusConnectionError

# A third of the servers' default heartbeat interval; servers wait for three of those intervals.
_INTERVAL_SECONDS = 10.0
# A lost connection reconnects only while `wait_until` runs. Each wait is short because it holds the
# lock, and is repeated soon.
_RECONNECT_POLL_SECONDS = 0.1


class ConnectionKeepalive:
    """Thread that reads and writes connections regularly between `start` and `stop`."""

    def __init__(
        self,
        connections: Callable[[], Iterable[BlockingClientConnection]],
        *,
        interval_seconds: float | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self._connections, self._interval_seconds = (
            connections,
            _INTERVAL_SECONDS if interval_seconds is None else interval_seconds,
        )
        self._stop_requested = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="simplebus keepalive", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._stop_requested.set()
        if self._thread is not None:
            self._thread.join()

    @contextlib.contextmanager
    def running(self) -> Iterator[threading.RLock]:
        """Run the thread for the duration of a block, and yield its lock."""
        self.start()
        try:
            yield self.lock
        finally:
            self.stop()

    def _run(self) -> None:
        interval_seconds = self._interval_seconds
        while not self._stop_requested.wait(interval_seconds):
            interval_seconds = self._interval_seconds
            with self.lock:
                for connection in self._connections():
                    # The connection's user sees the error.
                    with contextlib.suppress(BusConnectionError):
                        connection.poll()
                        if connection.is_disconnected:
                            interval_seconds = min(interval_seconds, _RECONNECT_POLL_SECONDS)
                            connection.wait_until(
                                lambda: False, monotonic() + _RECONNECT_POLL_SECONDS
                            )
