"""Writer of lines to a descriptor whose reader may be slow or stopped.

A thread writes, so the caller never waits. Lines that exceed the buffer are dropped and counted;
the count is written before the next line that fits. The end of the process waits a short time for
buffered lines.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import select
import threading
from collections.abc import Callable

BUFFER_BYTES_MAX = 4 << 20
"""Bytes of lines that are not written yet."""
FLUSH_SECONDS_MAX = 1.0
DROPPED_LINES_TEXT = "{} lines were dropped because they were not read in time"


class LineWriter:
    """Writes lines to one descriptor, which it does not close."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._buffered_bytes = 0
        """Bytes of the queued lines and of the line that is being written."""
        self._dropped_count = 0
        """Lines dropped since the last report."""
        self._lock = threading.Lock()
        self._is_empty = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread before the first line: short of memory, no thread can be started."""
        with self._lock:
            self._start_thread()

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="lines", daemon=True)
        with contextlib.suppress(RuntimeError):  # No thread available: the next line retries.
            thread.start()
            self._thread = thread
            atexit.register(self.flush)

    def write_line(
        self, line: str, format_dropped: Callable[[int], str] = DROPPED_LINES_TEXT.format
    ) -> None:
        """Queue a line, without its line end. `format_dropped` makes the text for a number of
        dropped lines.
        """
        with self._lock:
            if self._dropped_count:
                line = f"{format_dropped(self._dropped_count)}\n{line}"
            raw = line.encode("utf-8", "backslashreplace") + b"\n"
            if self._buffered_bytes and self._buffered_bytes + len(raw) > BUFFER_BYTES_MAX:
                self._dropped_count += 1
                return
            self._dropped_count = 0
            self._buffered_bytes += len(raw)
            self._is_empty.clear()
            self._lines.put(raw)
            self._start_thread()

    def flush(self) -> None:
        """Wait up to FLUSH_SECONDS_MAX until all lines are written."""
        if self._thread is not None:
            self._is_empty.wait(FLUSH_SECONDS_MAX)

    def _run(self) -> None:
        while True:
            raw = self._lines.get()
            self._write(raw)
            with self._lock:
                self._buffered_bytes -= len(raw)
                if not self._buffered_bytes:
                    self._is_empty.set()

    def _write(self, raw: bytes) -> None:
        with contextlib.suppress(OSError):  # The reader is gone.
            while raw:
                try:
                    raw = raw[os.write(self._descriptor, raw) :]
                except BlockingIOError:
                    room = select.poll()
                    room.register(self._descriptor, select.POLLOUT)
                    room.poll()
