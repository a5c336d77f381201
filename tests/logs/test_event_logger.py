"""Tests of loggers of named events."""

from __future__ import annotations

import logging

import pytest

from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.test_event_logger")


def test_record_has_the_sentence_the_event_and_the_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.warning("connection.lost", "{server} was lost: {error!r}", server="a:1", error="50 %s")
    (record,) = caplog.records
    assert record.getMessage() == "a:1 was lost: '50 %s'"
    attributes = vars(record)
    assert attributes["event"] == "connection.lost"
    assert attributes["server"] == "a:1"
    assert attributes["error"] == "50 %s"
    assert record.levelno == logging.WARNING
    assert record.funcName == "test_record_has_the_sentence_the_event_and_the_values"


def test_braces_of_a_value_are_not_interpreted(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("notice.received", "{notice}", notice="{peer} {0} %d")
    assert caplog.messages == ["{peer} {0} %d"]


@pytest.mark.parametrize("method", ["debug", "info", "warning", "error", "exception"])
def test_each_method_logs_its_level(method: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    getattr(log, method)("a.b", "c")
    (record,) = caplog.records
    assert record.levelname.lower() == ("error" if method == "exception" else method)
    log.log(record.levelno, "a.b", "c")
    assert caplog.records[1].levelno == record.levelno


def test_disabled_event_is_not_formatted(caplog: pytest.LogCaptureFixture) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    caplog.set_level(logging.CRITICAL)
    for call in (log.debug, log.info, log.warning, log.error, log.exception):
        call("a.b", "{value}", value=Unprintable())
    log.log(logging.ERROR, "a.b", "{value}", value=Unprintable())
    assert caplog.records == []


def test_exception_has_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("x")
    try:
        raise error
    except ValueError:
        log.exception("a.b", "failed")
    log.error("a.b", "failed", exc_info=error)
    log.warning("a.b", "failed", exc_info=error)
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [error] * 3


def test_adapter_of_the_application_is_used(caplog: pytest.LogCaptureFixture) -> None:
    class Prefix(logging.LoggerAdapter[logging.Logger]):
        def process(self, msg, kwargs):  # type: ignore[no-untyped-def]
            return f"prefix: {msg}", kwargs

    EventLogger(Prefix(logging.getLogger("x"), {})).warning("a.b", "said {value}", value=1)
    assert caplog.messages == ["prefix: said 1"]
    assert vars(caplog.records[0])["value"] == 1
