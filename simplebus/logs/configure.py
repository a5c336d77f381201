"""Logs of a process on standard error: one line per event.

Repeated events are rate limited and the suppressed ones are counted. A reader that is slow never
blocks the process: see `LineWriter`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from simplebus.console.line_writer import DROPPED_LINES_TEXT, LineWriter
from simplebus.logs.formatters import JsonFormatter, TextFormatter
from simplebus.logs.rate_limit import LogRateLimit


def configure_logging(level: str, log_format: str = "console") -> None:
    """Log to standard error from `level` up; `log_format` is "console" or "json".

    A later call keeps the handler, and so the counts of its rate limit.
    """
    handler = _stderr_handler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    elif sys.stderr is not None and is_systemd_journal(sys.stderr, os.environ):
        handler.setFormatter(TextFormatter(for_journal=True))
    else:
        handler.setFormatter(TextFormatter())
    if handler in logging.getLogger().handlers:
        logging.getLogger().setLevel(level.upper())
    else:
        handler.addFilter(LogRateLimit(handler))
        logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def level_number(level: str) -> int:
    """Return the number of a level for `configure_logging`, by which levels are ordered."""
    return logging.getLevelNamesMapping()[level.upper()]


def _stderr_handler() -> logging.Handler:
    """Return a handler for standard error, which may be closed or replaced."""
    if sys.stderr is None:  # Closed by the parent process.
        return logging.NullHandler()
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # Replaced by a test.
        return logging.StreamHandler(sys.stderr)
    if descriptor not in _handlers:
        _handlers[descriptor] = LineHandler(LineWriter(descriptor))
        _handlers[descriptor].writer.start()
    return _handlers[descriptor]


_handlers: dict[int, LineHandler] = {}
"""Handlers by descriptor. A removed handler would be flushed at the end, too."""


def write_line(line: str, event: str, values: Mapping[str, object]) -> None:
    """Write a line without time and level to standard error, after the queued log lines.

    In the format json, the line is an event with these values.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            if isinstance(handler.formatter, JsonFormatter):
                line = handler.format(_make_record(logging.INFO, event, line, values))
            handler.writer.write_line(line, handler.format_dropped)
            return
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def _make_record(
    level: int, event: str, sentence: str, values: Mapping[str, object]
) -> logging.LogRecord:
    """Return the record of an event of the log itself."""
    return logging.makeLogRecord(
        {
            "name": "simplebus",
            "levelno": level,
            "levelname": logging.getLevelName(level),
            "event": event,
            "msg": sentence,
            **values,
        }
    )


class LineHandler(logging.Handler):
    """Log handler that writes lines in a thread."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.write_line(self.format(record), self.format_dropped)
        except Exception:
            self.handleError(record)

    def format_dropped(self, count: int) -> str:
        """Return the line for a number of dropped lines."""
        sentence = DROPPED_LINES_TEXT.format(count)
        return self.format(
            _make_record(logging.WARNING, "lines.dropped", sentence, {"count": count})
        )

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
