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


def failed() -> logging.LogRecord:
    """An event with a traceback, whose error has a line end in it."""
    found = record("a beat failed")
    try:
        raise ValueError("one\ntwo\x1b[2J")
    except ValueError:
        found.exc_info = sys.exc_info()
    return found


@given(st.text())
def test_control_characters_of_peers_are_escaped(text: str) -> None:
    for formatter in (TextFormatter(), TextFormatter(for_journal=True), JsonFormatter()):
        said = formatter.format(record("%s: disconnected", text))
        assert len(said.splitlines()) == 1
        assert not any(ord(sign) < 32 or 0x7F <= ord(sign) < 0xA0 for sign in said)
    assert json.loads(said)["fields"] == [text]


def test_printable_characters_are_not_escaped() -> None:
    assert escape_controls("grün, 日本, \\n") == "grün, 日本, \\n"
    assert escape_controls("a\r\n\x00\u2028\u202e") == "a\\r\\n\\x00\\u2028\\u202e"


def test_traceback_is_logged_on_one_line() -> None:
    said = TextFormatter().format(failed())
    assert "WARNING a beat failed | Traceback (most recent call last): | File " in said
    assert said.endswith("| ValueError: one | two\\x1b[2J")
    assert json.loads(JsonFormatter().format(failed()))["traceback"][-1] == "two\x1b[2J"


def test_journal_lines_have_a_priority() -> None:
    formatter = TextFormatter(for_journal=True)
    assert formatter.format(record("x")) == "<4>x"
    assert formatter.format(record("x", level=logging.ERROR)) == "<3>x"
    assert formatter.format(record("x", level=logging.INFO)) == "<6>x"


def test_stream_is_the_systemd_journal_only_if_its_inode_matches() -> None:
    with tempfile.TemporaryFile("w") as file:
        found = os.fstat(file.fileno())
        named = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert is_systemd_journal(file, named)
        assert not is_systemd_journal(file, {"JOURNAL_STREAM": "1:2"})
        assert not is_systemd_journal(file, {})
    assert not is_systemd_journal(io.StringIO(), named)


def test_json_separates_the_event_from_its_fields() -> None:
    said = json.loads(JsonFormatter().format(record("%s: %d were dropped (%s)", "a:1", 3, "full")))
    assert said.pop("ts").endswith("+00:00")
    assert said == {
        "level": "warning",
        "logger": "simplebus.server",
        "event": "%s: %d were dropped (%s)",
        "message": "a:1: 3 were dropped (full)",
        "fields": ["a:1", 3, "full"],
    }


class RecordingHandler(logging.Handler):
    """What is logged, with the limit of ours."""

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
    for at in range(EVENT_BURST + 7):
        log.handle(record("%s: refused", at))
    log.handle(record("something else"))
    assert log.messages == [f"{at}: refused" for at in range(EVENT_BURST)] + ["something else"]
    log.now = 1.0
    log.handle(record("%s: refused", "next"))
    assert log.messages[-2:] == ["suppressed 7 more events: %s: refused", "next: refused"]


def test_unlimited_events_are_never_suppressed(log: RecordingHandler) -> None:
    for at in range(2 * EVENT_BURST):
        heard = record("%s", at)
        heard.is_unlimited = True
        log.handle(heard)
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
    for at in range(EVENT_KINDS_MAX + 10):
        log.handle(record(f"kind {at}"))
    assert len(limit._event_kinds) <= EVENT_KINDS_MAX
    assert "suppressed 1 more events: flood" in log.messages
