"""Tests of log formats and the escaping of control characters."""

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

from simplebus.logs.configure import is_systemd_journal
from simplebus.logs.event_logger import EventLogger
from simplebus.logs.formatters import (
    TRACEBACK_LINE_CHARACTERS_MAX,
    TRACEBACK_LINES_MAX,
    JsonFormatter,
    TextFormatter,
    escape_controls,
)


def record(text: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("simplebus.server", level, "", 0, text, args, None)


def event_record(event: str, message: str, **values: object) -> logging.LogRecord:
    """Return the record that an event logger creates."""
    records: list[logging.LogRecord] = []
    logger = logging.Logger("test")
    logger.addFilter(lambda record: not records.append(record))
    EventLogger(logger).warning(event, message, **values)  # type: ignore[arg-type]
    return records[0]


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
    dropped = event_record("connection.dropped", "{peer}: disconnected", peer=text)
    for formatter in (TextFormatter(), TextFormatter(for_journal=True), JsonFormatter()):
        output = formatter.format(dropped)
        assert len(output.splitlines()) == 1
        assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in output)
    assert json.loads(output)["peer"] == text


def test_printable_characters_are_not_escaped() -> None:
    assert escape_controls("grün, 日本, \\n") == "grün, 日本, \\n"
    assert escape_controls("a\r\n\x00\u2028\u202e") == "a\\r\\n\\x00\\u2028\\u202e"


def test_traceback_is_logged_on_one_line() -> None:
    output = TextFormatter().format(failing_record())
    assert "WARNING a beat failed | Traceback (most recent call last): | File " in output
    assert output.endswith("| ValueError: one | two\\x1b[2J")
    assert json.loads(JsonFormatter().format(failing_record()))["traceback"][-1] == "two\x1b[2J"


def test_traceback_is_bounded() -> None:
    failed = record("a beat failed")
    error = ValueError("last " + "x" * 1_000_000)
    for number in range(1000):
        cause, error = error, ValueError("\n".join([f"error {number}"] * 3))
        error.__cause__ = cause
    try:
        raise error
    except ValueError:
        failed.exc_info = sys.exc_info()
    lines = json.loads(JsonFormatter().format(failed))["traceback"]
    assert lines[0] == f"ValueError: last {'x' * 1000}"[:TRACEBACK_LINE_CHARACTERS_MAX]
    assert lines[-1] == "error 999"
    assert len(lines) == TRACEBACK_LINES_MAX + 1
    assert " lines omitted …" in lines[TRACEBACK_LINES_MAX // 2]
    assert len(TextFormatter().format(failed)) < TRACEBACK_LINES_MAX * 1100


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


def test_json_line_has_the_event_and_its_named_values() -> None:
    dropped = event_record(
        "messages.dropped",
        "dropped {count} messages of class {class_name}",
        count=3,
        class_name="a",
    )
    line = json.loads(JsonFormatter().format(dropped))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "test",
        "event": "messages.dropped",
        "message": "dropped 3 messages of class a",
        "count": 3,
        "class_name": "a",
    }
    assert TextFormatter().format(dropped).endswith(" WARNING dropped 3 messages of class a")


def test_record_of_another_library_has_an_event_and_its_extra_fields() -> None:
    foreign = record("%s: %d", "a", 3)
    foreign.query = "x"
    line = json.loads(JsonFormatter().format(foreign))
    assert line["event"] == "message.logged"
    assert line["message"] == "a: 3"
    assert line["query"] == "x"
    assert set(line) == {"time", "level", "logger", "event", "message", "query"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, ("a", 1), logging.INFO, True])
def test_json_line_is_valid_for_every_value(value: object) -> None:
    measured = event_record("lag.measured", "lag {lag}", lag=value)
    line = json.loads(JsonFormatter().format(measured), parse_constant=pytest.fail)
    assert line["lag"] in (value, str(value))
