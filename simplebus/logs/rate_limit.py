"""Rate limit of repeated log events and tracebacks, with a count of the suppressed events."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from simplebus.logs.sampling import FailureCounts, is_logged

EVENT_BURST = 20
"""Events of one kind that are logged at once."""
EVENTS_PER_SECOND = 1.0
"""Events of one kind that are logged per second after a burst."""
SUMMARY_SECONDS = 10.0
"""Delay until the number of suppressed events is logged, if no further event of the kind is."""
EVENT_KINDS_MAX = 1000


@dataclass(slots=True)
class _EventKind:
    """Rate limit of the events with one name."""

    tokens: float
    """Events that may be logged now."""
    last_event_at: float
    suppressed_count: int = 0
    level: int = logging.INFO
    name: str = ""


class LogRateLimit(logging.Filter):
    """Log filter that limits the events of each kind and counts the suppressed ones.

    Exceptions of one event, of one type and from one line are logged with their traceback as
    `is_logged` decides, otherwise without.
    """

    def __init__(
        self, handler: logging.Handler, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._handler = handler
        self._clock = clock
        self._event_kinds: dict[str, _EventKind] = {}
        self._tracebacks = FailureCounts()
        self._last_summary_at = clock()

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "is_unlimited", False):
            return True
        now, key = self._clock(), str(getattr(record, "event", record.msg))
        if len(self._event_kinds) >= EVENT_KINDS_MAX and key not in self._event_kinds:
            self._report_suppressed(now, is_forced=True)
            self._event_kinds.clear()
        kind = self._event_kinds.setdefault(key, _EventKind(EVENT_BURST, now))
        kind.tokens = min(EVENT_BURST, kind.tokens + (now - kind.last_event_at) * EVENTS_PER_SECOND)
        kind.last_event_at, kind.level, kind.name = now, record.levelno, record.name
        is_allowed = kind.tokens >= 1
        if is_allowed:
            kind.tokens -= 1
            self._limit_traceback(record, key)
            if kind.suppressed_count:
                self._report_kind(key, kind)
        else:
            kind.suppressed_count += 1
        if now - self._last_summary_at >= SUMMARY_SECONDS:
            self._last_summary_at = now
            self._report_suppressed(now)
        return is_allowed

    def _limit_traceback(self, record: logging.LogRecord, key: str) -> None:
        """Remove the traceback, but not the exception, if it was logged often."""
        if not record.exc_info or record.exc_info[1] is None:
            return
        error = record.exc_info[1]
        frames = traceback.extract_tb(error.__traceback__)
        location = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        if not is_logged(self._tracebacks.add(f"{key} {type(error).__qualname__} {location}")):
            record.exc_info = (type(error), error, None)

    def _report_suppressed(self, now: float, *, is_forced: bool = False) -> None:
        for key, kind in self._event_kinds.items():
            if kind.suppressed_count and (is_forced or now - kind.last_event_at >= SUMMARY_SECONDS):
                self._report_kind(key, kind)

    def _report_kind(self, key: str, kind: _EventKind) -> None:
        """Log how many events of one kind were suppressed, past this filter."""
        count, kind.suppressed_count = kind.suppressed_count, 0
        record = logging.makeLogRecord(
            {
                "name": kind.name,
                "levelno": kind.level,
                "levelname": logging.getLevelName(kind.level),
                "event": "events.suppressed",
                "msg": f"suppressed {count} more events: {key}",
                "suppressed_event": key,
                "count": count,
            }
        )
        self._handler.acquire()
        try:
            self._handler.emit(record)
        finally:
            self._handler.release()
