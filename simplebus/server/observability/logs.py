"""Logs on standard error: one event, one line, whatever peers have put into it.

Rule 1: a line has nothing in it that a terminal obeys, and no line end: who connects cannot write
lines of his own into a log.
Rule 2: an event that comes again and again is said some times, then counted: the log of a server
under attack stays small, and says how much was left out. What was asked for is said however often.
Rule 3: who does not read the log holds nobody up: see `line_writer`.

As text, with a time; to the journal, with its priority instead; or as JSON, an object a line:

    {"ts": …, "level": …, "logger": …, "event": …, "message": …, "fields": […]}

`event` is the same for all events of one kind, `fields` are what differs in it, `message` is both.
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

from simplebus.console.line_writer import LEFT_OUT, LineWriter

BURST = 20
"""So many events of one kind are said at once,"""
PER_SECOND = 1.0
"""and so many a second from then on."""
ASKED_FOR = {"is_asked_for": True}
"""Said with an event, as `extra`: it is said however often it comes."""
TOLD_SECONDS = 10.0
"""So long after the last one that was left out, or with the next that is said, it is told how many
were."""
KINDS_MAX = 1000

# Priorities of syslog, which the journal reads at the beginning of a line.
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0))}
_ESCAPED |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
# Ends of lines, and what turns the direction of writing.
_ESCAPED |= {
    code: f"\\u{code:04x}"
    for code in (0x2028, 0x2029, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def configure_logging(level: str, how: str = "text") -> None:
    """Log to standard error from this level up; how is `text` or `json`."""
    handler = _handler()
    if isinstance(handler, LineHandler):
        handler.writer.begin()
    if how == "json":
        handler.setFormatter(JsonFormatter())
    elif sys.stderr is not None and is_journal(sys.stderr, os.environ):
        handler.setFormatter(TextFormatter(for_journal=True))
    else:
        handler.setFormatter(TextFormatter())
    handler.addFilter(Limit(handler))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _handler() -> logging.Handler:
    """What writes to standard error, wherever that leads."""
    if sys.stderr is None:  # It was closed before we began.
        return logging.NullHandler()
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # Of a test.
        return logging.StreamHandler(sys.stderr)
    return LineHandler(_writers.setdefault(descriptor, LineWriter(descriptor)))


_writers: dict[int, LineWriter] = {}


def say(line: str) -> None:
    """Have a line on standard error that is no event, behind those that are said already."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            handler.writer.say(line)
            return
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


class LineHandler(logging.Handler):
    """Has a thread write events, a line each."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.say(self.format(record), self._left_out)
        except Exception:
            self.handleError(record)

    def _left_out(self, count: int) -> str:
        words = LEFT_OUT.format("%d")
        record = logging.LogRecord("simplebus", logging.WARNING, "", 0, words, (count,), None)
        return self.format(record)

    def flush(self) -> None:
        """Wait until what was said is written, but not for long."""
        self.writer.finish()


def is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether a stream leads straight to systemd's journal."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def plain(text: str) -> str:
    """A text on one line, with escapes such as \\n for what is not to be seen."""
    return text.translate(_ESCAPED)


class TextFormatter(logging.Formatter):
    """Lines for people, or for the journal, which has the time itself."""

    def __init__(self, *, for_journal: bool = False) -> None:
        super().__init__()
        self._for_journal = for_journal

    def format(self, record: logging.LogRecord) -> str:
        text = plain(record.getMessage())
        if record.exc_info:
            text += f" | {plain(' | '.join(_traceback(self, record)))}"
        if self._for_journal:
            return f"<{_PRIORITIES.get(record.levelname, 6)}>{text}"
        return f"{self.formatTime(record)} {record.levelname} {text}"


class JsonFormatter(logging.Formatter):
    """Objects, one a line."""

    def format(self, record: logging.LogRecord) -> str:
        args = record.args if isinstance(record.args, tuple) else (record.args,)
        said: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": str(record.msg),
            "message": record.getMessage(),
            "fields": [each if isinstance(each, int | float) else str(each) for each in args or ()],
        }
        if record.exc_info:
            said["traceback"] = _traceback(self, record)
        return json.dumps(said)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    assert record.exc_info
    lines = formatter.formatException(record.exc_info).splitlines()
    return [line.strip() for line in lines if line.strip()]


@dataclass(slots=True)
class _Kind:
    """Events of one kind."""

    left: float
    """How many may be said now."""
    at: float
    left_out: int = 0
    level: int = logging.INFO
    name: str = ""


class Limit(logging.Filter):
    """Lets so many events of each kind through, and says how many it did not."""

    def __init__(
        self, handler: logging.Handler, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._handler = handler
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}
        self._told_at = clock()

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "is_asked_for", False):  # No event: somebody wants to see each.
            return True
        now, key = self._clock(), str(record.msg)
        if len(self._kinds) >= KINDS_MAX and key not in self._kinds:
            self._tell(now, everything=True)
            self._kinds.clear()
        kind = self._kinds.setdefault(key, _Kind(BURST, now))
        kind.left = min(BURST, kind.left + (now - kind.at) * PER_SECOND)
        kind.at, kind.level, kind.name = now, record.levelno, record.name
        is_said = kind.left >= 1
        if is_said:
            kind.left -= 1
            if kind.left_out:
                self._say(key, kind)
        else:
            kind.left_out += 1
        if now - self._told_at >= TOLD_SECONDS:
            self._told_at = now
            self._tell(now)
        return is_said

    def _tell(self, now: float, *, everything: bool = False) -> None:
        for key, kind in self._kinds.items():
            if kind.left_out and (everything or now - kind.at >= TOLD_SECONDS):
                self._say(key, kind)

    def _say(self, key: str, kind: _Kind) -> None:
        """Past this filter: how many were left out."""
        count, kind.left_out = kind.left_out, 0
        words = logging.LogRecord(
            kind.name, kind.level, "", 0, "%d more events were left out: %s", (count, key), None
        )
        self._handler.acquire()
        try:
            self._handler.emit(words)
        finally:
            self._handler.release()
