"""Watchdog that reports a stalled event loop from a thread.

Each stall is logged once, while it lasts, with the stack of the loop's thread. If the watchdog's
own thread did not run either, the whole process was stopped, and the log line reports that.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import trio

from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.server")

STALL_SECONDS = 1.0
"""Duration from which a stall is logged."""
_HEARTBEAT_SECONDS = 0.2
_FRAMES_MAX = 12


class LoopWatchdog:
    """Detects stalls of the event loop that runs in the creating thread.

    The loop calls `record_heartbeat`; another thread calls `check`.
    """

    def __init__(
        self,
        *,
        threshold_seconds: float = STALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        describe_stack: Callable[[], str] | None = None,
    ) -> None:
        """`describe_stack` returns the current stack of the event loop as text."""
        self.stall_count = 0
        """Stalls that were longer than the threshold."""
        self.stalled_seconds = 0.0
        """Total duration of the stalls that have ended."""
        self._threshold_seconds = threshold_seconds
        self._clock = clock
        self._thread_id = threading.get_ident()
        self._describe_stack = describe_stack or self._describe_loop_stack
        self._last_heartbeat_at = self._last_check_at = clock()
        self._is_stalled = False

    def record_heartbeat(self) -> None:
        """Record that the event loop runs."""
        now = self._clock()
        silence_seconds = now - self._last_heartbeat_at
        self._last_heartbeat_at = now
        if self._is_stalled:
            self._is_stalled = False
            self.stalled_seconds += silence_seconds
            log.warning(
                "event_loop.resumed",
                "the event loop runs again after a stall of {seconds:.1f} s",
                seconds=silence_seconds,
            )

    def check(self) -> None:
        """Log a stall if the latest heartbeat is too old."""
        now = self._clock()
        silence_seconds, check_gap_seconds = (
            now - self._last_heartbeat_at,
            now - self._last_check_at,
        )
        self._last_check_at = now
        if self._is_stalled or silence_seconds < self._threshold_seconds:
            return
        self._is_stalled = True
        self.stall_count += 1
        if check_gap_seconds >= self._threshold_seconds:
            log.error(
                "process.stalled",
                "the whole process was stalled for {seconds:.1f} s: stopped by the system, "
                "or in a call that holds the interpreter lock; the event loop is in {stack}",
                seconds=check_gap_seconds,
                stack=self._describe_stack(),
            )
        else:
            log.error(
                "event_loop.stalled",
                "the event loop is stalled for {seconds:.1f} s: it is in {stack}",
                seconds=silence_seconds,
                stack=self._describe_stack(),
            )

    def _describe_loop_stack(self) -> str:
        frame = sys._current_frames().get(self._thread_id)
        return "a thread that has ended" if frame is None else format_stack(frame)

    async def run(self) -> None:
        """Record heartbeats until cancelled."""
        while True:
            self.record_heartbeat()
            await trio.sleep(_HEARTBEAT_SECONDS)

    @contextmanager
    def watch_in_thread(self) -> Iterator[None]:
        """Check in a thread for the length of the block."""
        stopped = threading.Event()

        def check_until_stopped() -> None:
            while not stopped.wait(_HEARTBEAT_SECONDS):
                self.check()

        thread = threading.Thread(
            target=check_until_stopped, name="simplebus watchdog", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


def format_stack(frame: FrameType) -> str:
    """Return the calls of a thread in one line, innermost first."""
    call_texts: list[str] = []
    caller: FrameType | None = frame
    while caller is not None and len(call_texts) < _FRAMES_MAX:
        code = caller.f_code
        file = Path(code.co_filename)
        call_texts.append(f"{code.co_name} ({file.parent.name}/{file.name}:{caller.f_lineno})")
        caller = caller.f_back
    return " < ".join(call_texts) + (" < …" if caller is not None else "")
