"""Logs on standard error: one line per event.

Control characters are escaped, so that clients can neither forge log lines nor control a terminal.
Repeated events are rate limited and the suppressed ones are counted. A reader that is slow never
blocks the server: see `LineWriter`.

Formats are text with a time, text with a priority for systemd's journal, and JSON:

    {"ts": …, "level": …, "logger": …, "event": …, "message": …, "fields": […]}

`event` is the format string that all events of one kind share, `fields` are its arguments.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from simplebus.console.line_writer import DROPPED_LINES_TEXT, LineWriter

EVENT_BURST = 20
"""Events of one kind that are logged at once."""
EVENTS_PER_SECOND = 1.0
"""Events of one kind that are logged per second after a burst."""
UNLIMITED = {"is_unlimited": True}
"""Value of `extra` for log calls without a rate limit."""
SUMMARY_SECONDS = 10.0
"""Delay until the number of suppressed events is logged, if no further event of the kind is."""
EVENT_KINDS_MAX = 1000

# Syslog priorities, which systemd's journal reads at the start of a line.
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0))}
_ESCAPED |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
# Line separators, and marks that change the writing direction.
_ESCAPED |= {
    code: f"\\u{code:04x}"
    for code in (0x2028, 0x2029, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def configure_logging(level: str, log_format: str = "text") -> None:
    """Log to standard error from `level` up; `log_format` is "text" or "json"."""
    handler = _stderr_handler()
    if isinstance(handler, LineHandler):
        handler.writer.start()
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    elif sys.stderr is not None and is_systemd_journal(sys.stderr, os.environ):
        handler.setFormatter(TextFormatter(for_journal=True))
    else:
        handler.setFormatter(TextFormatter())
    handler.addFilter(LogRateLimit(handler))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _stderr_handler() -> logging.Handler:
    """Return a handler for standard error, which may be closed or replaced."""
    if sys.stderr is None:  # Closed by the parent process.
        return logging.NullHandler()
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # Replaced by a test.
        return logging.StreamHandler(sys.stderr)
    return LineHandler(_writers.setdefault(descriptor, LineWriter(descriptor)))


_writers: dict[int, LineWriter] = {}


def write_line(line: str) -> None:
    """Write a line that is no event to standard error, after the queued log lines."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            handler.writer.write_line(line)
            return
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


class LineHandler(logging.Handler):
    """Log handler that writes lines in a thread."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.write_line(self.format(record), self._format_suppressed)
        except Exception:
            self.handleError(record)

    def _format_suppressed(self, count: int) -> str:
        text = DROPPED_LINES_TEXT.format("%d")
        record = logging.LogRecord("simplebus", logging.WARNING, "", 0, text, (count,), None)
        return self.format(record)

    def flush(self) -> None:
        """Wait until queued lines are written, for a limited time."""
        self.writer.flush()


def is_systemd_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return True if the stream is connected to systemd's journal."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def escape_controls(text: str) -> str:
    r"""Return the text on one line, with escapes such as \\n for control characters."""
    return text.translate(_ESCAPED)


class TextFormatter(logging.Formatter):
    """Formats log lines for people, or for systemd's journal, which adds the time itself."""

    def __init__(self, *, for_journal: bool = False) -> None:
        super().__init__()
        self._for_journal = for_journal

    def format(self, record: logging.LogRecord) -> str:
        text = escape_controls(record.getMessage())
        if record.exc_info:
            text += f" | {escape_controls(' | '.join(_traceback(self, record)))}"
        if self._for_journal:
            return f"<{_PRIORITIES.get(record.levelname, 6)}>{text}"
        return f"{self.formatTime(record)} {record.levelname} {text}"


class JsonFormatter(logging.Formatter):
    """Formats log lines as JSON objects."""

    def format(self, record: logging.LogRecord) -> str:
        args = record.args if isinstance(record.args, tuple) else (record.args,)
        event: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": str(record.msg),
            "message": record.getMessage(),
            "fields": [each if isinstance(each, int | float) else str(each) for each in args or ()],
        }
        if record.exc_info:
            event["traceback"] = _traceback(self, record)
        return json.dumps(event)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    assert record.exc_info
    lines = formatter.formatException(record.exc_info).splitlines()
    return [line.strip() for line in lines if line.strip()]


@dataclass(slots=True)
class _EventKind:
    """Rate limit of the events with one format string."""

    tokens: float
    """Events that may be logged now."""
    last_event_at: float
    suppressed_count: int = 0
    level: int = logging.INFO
    name: str = ""


class LogRateLimit(logging.Filter):
    """Log filter that limits the events of each kind and counts the suppressed ones."""

    def __init__(
        self, handler: logging.Handler, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._stderr_handler = handler
        self._clock = clock
        self._event_kinds: dict[str, _EventKind] = {}
        self._last_summary_at = clock()

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "is_unlimited", False):
            return True
        now, key = self._clock(), str(record.msg)
        if len(self._event_kinds) >= EVENT_KINDS_MAX and key not in self._event_kinds:
            self._report_suppressed(now, is_forced=True)
            self._event_kinds.clear()
        kind = self._event_kinds.setdefault(key, _EventKind(EVENT_BURST, now))
        kind.tokens = min(EVENT_BURST, kind.tokens + (now - kind.last_event_at) * EVENTS_PER_SECOND)
        kind.last_event_at, kind.level, kind.name = now, record.levelno, record.name
        is_allowed = kind.tokens >= 1
        if is_allowed:
            kind.tokens -= 1
            if kind.suppressed_count:
                self._report_kind(key, kind)
        else:
            kind.suppressed_count += 1
        if now - self._last_summary_at >= SUMMARY_SECONDS:
            self._last_summary_at = now
            self._report_suppressed(now)
        return is_allowed

    def _report_suppressed(self, now: float, *, is_forced: bool = False) -> None:
        for key, kind in self._event_kinds.items():
            if kind.suppressed_count and (is_forced or now - kind.last_event_at >= SUMMARY_SECONDS):
                self._report_kind(key, kind)

    def _report_kind(self, key: str, kind: _EventKind) -> None:
        """Log how many events of one kind were suppressed, past this filter."""
        count, kind.suppressed_count = kind.suppressed_count, 0
        record = logging.LogRecord(
            kind.name, kind.level, "", 0, "suppressed %d more events: %s", (count, key), None
        )
        self._stderr_handler.acquire()
        try:
            self._stderr_handler.emit(record)
        finally:
            self._stderr_handler.release()
