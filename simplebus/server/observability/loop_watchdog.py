"""Who holds the event loop up: a thread that looks at the loop's beat, and at what it does when it
has none.

Rule 1: one stall is one line in the log, with where the loop is; it is written while it lasts.
Rule 2: who is stopped together with the loop accuses nobody: where the thread itself could not run,
it was the system, or a call that lets no thread run.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import trio

log = logging.getLogger("simplebus.server")

STALL_SECONDS = 1.0
"""A loop that stands still for longer is worth a line."""
_BEAT_SECONDS = 0.2
_FRAMES_MAX = 12


class Stalls:
    """Of the loop in the thread that makes it. `check` is for any other thread."""

    def __init__(
        self,
        *,
        seconds: float = STALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        where: Callable[[], str] | None = None,
    ) -> None:
        """`where` says where the loop is now."""
        self.count = 0
        """How often it stood still for longer than so many seconds."""
        self.stalled_seconds = 0.0
        """For how long altogether, as far as it is over."""
        self._seconds = seconds
        self._clock = clock
        self._thread_id = threading.get_ident()
        self._where = where or self._where_is_it
        self._beat_at = self._checked_at = clock()
        self._is_stalled = False

    def beat(self) -> None:
        """The loop runs."""
        now = self._clock()
        late = now - self._beat_at
        self._beat_at = now
        if self._is_stalled:
            self._is_stalled = False
            self.stalled_seconds += late
            log.warning("the event loop goes on: it stood still for %.1f s", late)

    def check(self) -> None:
        """Look whether it does; about every so often."""
        now = self._clock()
        late, own = now - self._beat_at, now - self._checked_at
        self._checked_at = now
        if self._is_stalled or late < self._seconds:
            return
        self._is_stalled = True
        self.count += 1
        if own >= self._seconds:
            log.error(
                "the whole process stood still for %.1f s: stopped by the system, or in a call "
                "that lets no thread run; the event loop is in %s",
                own,
                self._where(),
            )
        else:
            log.error("the event loop stands still for %.1f s: it is in %s", late, self._where())

    def _where_is_it(self) -> str:
        frame = sys._current_frames().get(self._thread_id)
        return "no thread any more" if frame is None else stack(frame)

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self.beat()
            await trio.sleep(_BEAT_SECONDS)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Have a thread look, as long as the block lasts."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(_BEAT_SECONDS):
                self.check()

        thread = threading.Thread(target=look, name="simplebus stalls", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def stack(frame: FrameType) -> str:
    """Where a thread is, in one line: the innermost call first."""
    calls: list[str] = []
    at: FrameType | None = frame
    while at is not None and len(calls) < _FRAMES_MAX:
        code = at.f_code
        file = Path(code.co_filename)
        calls.append(f"{code.co_name} ({file.parent.name}/{file.name}:{at.f_lineno})")
        at = at.f_back
    return " < ".join(calls) + (" < …" if at is not None else "")
