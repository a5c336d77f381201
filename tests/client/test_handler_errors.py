"""Errors of message handlers are logged, counted and raised."""

from __future__ import annotations

import logging

import pytest

from simplebus.client.handler_errors import HandlerErrors


async def handle(message: object) -> None:
    """Handler that is never called here."""


async def handle_other(message: object) -> None:
    """Second handler that is never called here."""


def test_log_of_a_failing_handler_is_limited_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    errors = HandlerErrors()
    with caplog.at_level(logging.ERROR, "simplebus.client"):
        for number in range(2_000):
            errors.add(handle, f"message {number}", ValueError("broken"))
        errors.add(handle_other, "message 7", ValueError("broken"))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 13
    assert texts[-2].endswith("failed on message 1023; failure 1024")
    assert texts[-1].endswith("failed on message 7; failure 1"), "each handler has its own count"
    group = errors.to_exception_group()
    assert group is not None
    assert str(group).startswith("handlers failed 2001 times")
    assert len(group.exceptions) == 100
