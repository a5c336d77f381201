"""Tests of the rate limit of log events."""

from __future__ import annotations

import logging

import pytest

from simplebus.logs.event_logger import EventLogger
from simplebus.logs.formatters import TextFormatter
from simplebus.logs.rate_limit import EVENT_BURST, EVENT_KINDS_MAX, LogRateLimit


def record(text: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("simplebus.server", level, "", 0, text, args, None)


class RecordingHandler(logging.Handler):
    """Collects the messages that pass the log rate limit."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.messages: list[str] = []
        self.texts: list[str] = []
        self.addFilter(LogRateLimit(self, clock=lambda: self.now))

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.texts.append(TextFormatter().format(record))


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


def test_events_are_limited_by_name_whatever_their_values(log: RecordingHandler) -> None:
    logger = logging.Logger("test")
    logger.addHandler(log)
    events = EventLogger(logger)
    for number in range(EVENT_BURST + 7):
        events.warning("connection.dropped", "{peer}: disconnected", peer=number)
    assert len(log.messages) == EVENT_BURST
    log.now = 1.0
    events.warning("connection.dropped", "{peer}: disconnected", peer="next")
    assert log.messages[-2:] == [
        "suppressed 7 more events: connection.dropped",
        "next: disconnected",
    ]
    for number in range(2 * EVENT_BURST):
        events.info("setting.changed", "{number}", number=number, is_unlimited=True)
    assert log.messages[-1] == str(2 * EVENT_BURST - 1)


def log_failure(logger: logging.Logger, error: Exception) -> None:
    try:
        try:
            raise KeyError("cause")
        except KeyError as cause:
            raise error from cause
    except Exception:
        EventLogger(logger).exception("http_request.failed", "answering {path} failed", path="/")


def test_a_repeated_traceback_is_logged_ever_more_rarely(log: RecordingHandler) -> None:
    logger = logging.Logger("test")
    logger.addHandler(log)
    for _ in range(32):
        log.now += 1
        log_failure(logger, ValueError("a fault of ours"))
    log_failure(logger, TypeError("another fault"))
    assert len(log.texts) == 33
    with_traceback = [number for number, text in enumerate(log.texts, 1) if "Traceback" in text]
    assert with_traceback == [1, 2, 3, 4, 8, 16, 32, 33]
    assert log.texts[4].endswith("answering / failed | ValueError: a fault of ours")


def test_tracebacks_of_one_event_are_limited(log: RecordingHandler) -> None:
    logger = logging.Logger("test")
    logger.addHandler(log)
    for number in range(1000):
        try:
            raise ValueError(number)
        except ValueError:
            EventLogger(logger).exception(
                "http_request.failed", "answering {path} failed", path=number
            )
    assert len(log.messages) == EVENT_BURST
