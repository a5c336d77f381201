"""Tests of the log of a server process: JSON lines, and the same sentences on the console."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest

import simplebus
from tests.support.programs import run_server

BINARY_ONLY = ("--no-nats", "--no-http", "--drain-timeout", "0.2")
LOST = "class orders: lost 2 stored messages, because the server has no --data-dir"


def log_of_lost_messages(*arguments: str) -> list[str]:
    """Return the log of a server that stops with two messages that no client received."""
    with run_server(*BINARY_ONLY, *arguments) as (program, url):
        with simplebus.connect_blocking(url) as bus:
            bus.publish_many([b"1", b"2"], class_id="orders")
        program.signal(signal.SIGTERM)
        status, _, log = program.wait()
        assert status == 0
        return log.splitlines()


def test_json_lines_have_event_and_named_values() -> None:
    lines: list[dict[str, Any]] = list(
        map(json.loads, log_of_lost_messages("--log-format", "json"))
    )
    for line in lines:
        assert list(line)[:5] == ["time", "level", "logger", "event", "message"]
    events = {line["event"]: line for line in lines}
    assert events["drain.started"]["signal"] == "SIGTERM"
    lost_event = events["class.messages_lost"]
    assert (lost_event["class_name"], lost_event["count"]) == ("orders", 2)
    assert lost_event["message"] == LOST
    assert lost_event["level"] == "warning"


@pytest.mark.parametrize("arguments", [(), ("--log-format", "console"), ("--log-format", "text")])
def test_console_lines_are_the_messages_of_the_json_lines(arguments: tuple[str, ...]) -> None:
    """`text` is the old name of `console`."""
    messages = ["configuration: --log-format: 'text' is deprecated: use 'console'"]
    messages = messages if "text" in arguments else []
    messages += [
        json.loads(line)["message"] for line in log_of_lost_messages("--log-format", "json")
    ]
    console = log_of_lost_messages(*arguments)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ", line) for line in console)
    assert [line.split(" ", 3)[3] for line in console] == messages
    assert LOST in messages
