"""Lines to a descriptor that nobody may read: a journal that stalls, a terminal that was stopped.

Rule 1: who says a line never waits: a thread writes it. What is more than fits while nobody reads
is counted, and that is said when somebody does.
Rule 2: the end of the process waits for what was said, and not for long.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import select
import threading
from collections.abc import Callable

WAITING_BYTES_MAX = 4 << 20
"""Of lines that nobody has read yet."""
FAREWELL_SECONDS_MAX = 1.0
LEFT_OUT = "{} lines were left out: nobody read them in time"


class LineWriter:
    """Of one descriptor, which is somebody else's."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._waiting = 0
        """Bytes of these, and of the one that is being written."""
        self._left = 0
        """How many did not fit since that was said last."""
        self._lock = threading.Lock()
        self._is_empty = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Have the thread there before there is anything to be said: when that is that memory is
        short, none can be made."""
        with self._lock:
            self._begin()

    def _begin(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="lines", daemon=True)
        with contextlib.suppress(RuntimeError):  # There is none to be had: with the next line.
            thread.start()
            self._thread = thread
            atexit.register(self.finish)

    def say(self, line: str, left_out: Callable[[int], str] = LEFT_OUT.format) -> None:
        """Have a line written, without its end. `left_out` says how many lines were."""
        with self._lock:
            if self._left:
                line = f"{left_out(self._left)}\n{line}"
            raw = line.encode("utf-8", "backslashreplace") + b"\n"
            if self._waiting and self._waiting + len(raw) > WAITING_BYTES_MAX:
                self._left += 1
                return
            self._left = 0
            self._waiting += len(raw)
            self._is_empty.clear()
            self._lines.put(raw)
            self._begin()

    def finish(self) -> None:
        """Wait until what was said is written, but not for long."""
        if self._thread is not None:
            self._is_empty.wait(FAREWELL_SECONDS_MAX)

    def _run(self) -> None:
        while True:
            raw = self._lines.get()
            self._write(raw)
            with self._lock:
                self._waiting -= len(raw)
                if not self._waiting:
                    self._is_empty.set()

    def _write(self, raw: bytes) -> None:
        with contextlib.suppress(OSError):  # Nobody reads any more.
            while raw:
                try:
                    raw = raw[os.write(self._descriptor, raw) :]
                except BlockingIOError:
                    room = select.poll()
                    room.register(self._descriptor, select.POLLOUT)
                    room.poll()
