"""Tests of log formats, escaping and the rate limit of events."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.server.observability.logs import (
    EVENT_BURST,
    EVENT_KINDS_MAX,
    JsonFormatter,
    LogRateLimit,
    TextFormatter,
    escape_controls,
    is_systemd_journal,
)


def record(text: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("simplebus.server", level, "", 0, text, args, None)


def failing_record() -> logging.LogRecord:
    """Return an event with a traceback whose error message contains a line break."""
    status = record("a beat failed")
    try:
        raise ValueError("one\ntwo\x1b[2J")
    except ValueError:
        status.exc_info = sys.exc_info()
    return status


@given(st.text())
def test_control_characters_of_peers_are_escaped(text: str) -> None:
    for formatter in (TextFormatter(), TextFormatter(for_journal=True), JsonFormatter()):
        output = formatter.format(record("%s: disconnected", text))
        assert len(output.splitlines()) == 1
        assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in output)
    assert json.loads(output)["fields"] == [text]


def test_printable_characters_are_not_escaped() -> None:
    assert escape_controls("grün, 日本, \\n") == "grün, 日本, \\n"
    assert escape_controls("a\r\n\x00\u2028\u202e") == "a\\r\\n\\x00\\u2028\\u202e"


def test_traceback_is_logged_on_one_line() -> None:
    output = TextFormatter().format(failing_record())
    assert "WARNING a beat failed | Traceback (most recent call last): | File " in output
    assert output.endswith("| ValueError: one | two\\x1b[2J")
    assert json.loads(JsonFormatter().format(failing_record()))["traceback"][-1] == "two\x1b[2J"


def test_journal_lines_have_a_priority() -> None:
    formatter = TextFormatter(for_journal=True)
    assert formatter.format(record("x")) == "<4>x"
    assert formatter.format(record("x", level=logging.ERROR)) == "<3>x"
    assert formatter.format(record("x", level=logging.INFO)) == "<6>x"


def test_stream_is_the_systemd_journal_only_if_its_inode_matches() -> None:
    with tempfile.TemporaryFile("w") as file:
        status = os.fstat(file.fileno())
        environment = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert is_systemd_journal(file, environment)
        assert not is_systemd_journal(file, {"JOURNAL_STREAM": "1:2"})
        assert not is_systemd_journal(file, {})
    assert not is_systemd_journal(io.StringIO(), environment)


def test_json_separates_the_event_from_its_fields() -> None:
    output = json.loads(
        JsonFormatter().format(record("%s: %d were dropped (%s)", "a:1", 3, "full"))
    )
    assert output.pop("ts").endswith("+00:00")
    assert output == {
        "level": "warning",
        "logger": "simplebus.server",
        "event": "%s: %d were dropped (%s)",
        "message": "a:1: 3 were dropped (full)",
        "fields": ["a:1", 3, "full"],
    }


class RecordingHandler(logging.Handler):
    """Collects the messages that pass the log rate limit."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.messages: list[str] = []
        self.addFilter(LogRateLimit(self, clock=lambda: self.now))

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def log() -> RecordingHandler:
    return RecordingHandler()


def test_repeated_events_are_suppressed_and_counted(log: RecordingHandler) -> None:
    for number in range(EVENT_BURST + 7):
        log.handle(record("%s: refused", number))
    log.handle(record("something else"))
    assert log.messages == [f"{number}: refused" for number in range(EVENT_BURST)] + [
        "something else"
    ]
    log.now = 1.0
    log.handle(record("%s: refused", "next"))
    assert log.messages[-2:] == ["suppressed 7 more events: %s: refused", "next: refused"]


def test_unlimited_events_are_never_suppressed(log: RecordingHandler) -> None:
    for number in range(2 * EVENT_BURST):
        event = record("%s", number)
        event.is_unlimited = True
        log.handle(event)
    assert len(log.messages) == 2 * EVENT_BURST


def test_reports_suppressed_events_without_a_further_one(log: RecordingHandler) -> None:
    for _ in range(EVENT_BURST + 1):
        log.handle(record("flood"))
    log.now = 11.0
    log.handle(record("quiet"))
    assert log.messages[EVENT_BURST:] == ["suppressed 1 more events: flood", "quiet"]


def test_number_of_tracked_event_kinds_is_bounded(log: RecordingHandler) -> None:
    limit = log.filters[0]
    assert isinstance(limit, LogRateLimit)
    for _ in range(EVENT_BURST + 1):
        log.handle(record("flood"))
    for number in range(EVENT_KINDS_MAX + 10):
        log.handle(record(f"kind {number}"))
    assert len(limit._event_kinds) <= EVENT_KINDS_MAX
    assert "suppressed 1 more events: flood" in log.messages
