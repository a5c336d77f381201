"""Formats of log lines: for people, for systemd's journal, and JSON.

Control characters are escaped, so that clients can neither forge log lines nor control a terminal.
A JSON line contains the named values of its event as members:

    {"time": …, "level": …, "logger": …, "event": "connection.closed", "message": …, "peer": …}
"""

from __future__ import annotations

import json
import logging
import math
import traceback
from datetime import UTC, datetime

UNNAMED_EVENT = "message.logged"
"""Event of records of other libraries and of modules of a gateway that do not give a name."""

TRACEBACK_LINES_MAX = 100
"""Lines of a traceback that are logged: the first and the last ones."""
TRACEBACK_LINE_CHARACTERS_MAX = 1000

_STANDARD_ATTRIBUTES = frozenset(
    (*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "is_unlimited")
)
"""Attributes of a record that are not fields of its event."""

# Syslog priorities, which systemd's journal reads at the start of a line.
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0))}
_ESCAPED |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
# Line separators, and marks that change the writing direction.
_ESCAPED |= {
    code: f"\\u{code:04x}"
    for code in (0x2028, 0x2029, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


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
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": UNNAMED_EVENT,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD_ATTRIBUTES:
                line[name] = _json_value(value)
        if record.exc_info:
            line["traceback"] = _traceback(self, record)
        return json.dumps(line)


def _json_value(value: object) -> object:
    """Return numbers and None as they are, and other values as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or type(value) in (int, float, bool) else str(value)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """Return the lines of an exception; `LogRateLimit` removes the traceback of a repeated one."""
    assert record.exc_info
    _, error, frames = record.exc_info
    if error is not None and frames is None:
        lines = "".join(traceback.format_exception_only(error)).splitlines()
    else:
        lines = formatter.formatException(record.exc_info).splitlines()
    lines = [line[:TRACEBACK_LINE_CHARACTERS_MAX].strip() for line in lines if line.strip()]
    if (omitted := len(lines) - TRACEBACK_LINES_MAX) > 0:
        half = TRACEBACK_LINES_MAX // 2
        lines[half:-half] = [f"… {omitted} lines omitted …"]
    return lines
