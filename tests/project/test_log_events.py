"""Every log call names its event and its values, and the reference page lists all events."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections import defaultdict
from datetime import datetime

import pytest

from simplebus.logs.formatters import UNNAMED_EVENT, JsonFormatter
from tests.docs.log_events import FIELD_MEANINGS, EventCall, find_event_calls, log_calls_of
from tests.support.sources import ROOT, SOURCES, SOURCES_GROUP

RESERVED = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
"""Names that the standard library or a JSON line uses."""
RESERVED |= {"time", "level", "logger", "event", "traceback"}
pytestmark = SOURCES_GROUP


def test_events_have_names_of_a_subject_and_an_occurrence() -> None:
    for call in find_event_calls():
        assert re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", call.event), call


def test_every_name_in_a_sentence_is_a_value() -> None:
    for call in find_event_calls():
        assert set(call.sentence_fields) <= set(call.fields), call
        assert not set(call.fields) & RESERVED, call


def test_an_event_name_has_one_meaning() -> None:
    sentences, fields = defaultdict(set), defaultdict(set)
    for call in find_event_calls():
        sentences[call.event].add(call.sentence)
        fields[call.event].add(frozenset(call.fields))
    assert {event: found for event, found in sentences.items() if len(found) > 1} == {}
    assert {event: found for event, found in fields.items() if len(found) > 1} == {}


def test_a_sentence_has_one_event_name() -> None:
    events = defaultdict(set)
    for call in find_event_calls():
        if set(call.sentence) - set("{}abcdefghijklmnopqrstuvwxyz_: "):
            events[call.sentence].add(call.event)
    assert {sentence: found for sentence, found in events.items() if len(found) > 1} == {}


def test_every_field_has_a_meaning_on_the_reference_page() -> None:
    fields = {field for call in find_event_calls() for field in call.fields}
    assert fields | {"suppressed_event"} == set(FIELD_MEANINGS)


def test_every_event_is_on_the_reference_page() -> None:
    page = (ROOT / "protocol" / "reference" / "log-events.md").read_text()
    events = {call.event for call in find_event_calls()} | {UNNAMED_EVENT}
    assert {event for event in events if f"\n| `{event}` |" not in page} == set()


def test_the_json_line_of_the_guide_is_one_of_the_server() -> None:
    guide = (ROOT / "protocol" / "guide" / "operating.md").read_text()
    line = json.loads(guide.partition("```json\n")[2].partition("\n```")[0])
    (call,) = (event_call for event_call in find_event_calls() if event_call.event == line["event"])
    values = {name: line[name] for name in call.fields}
    record = logging.makeLogRecord(
        {
            "name": line["logger"],
            "levelname": line["level"].upper(),
            "created": datetime.fromisoformat(line["time"]).timestamp(),
            "msg": call.sentence.format_map(values),
            "event": call.event,
            **values,
        }
    )
    assert json.loads(JsonFormatter().format(record)) == line
    columns = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)*", guide, re.MULTILINE)
    assert {"time", "level", "logger", "event", "message"} <= {row[0] for row in columns}


def test_no_module_calls_a_logger_of_the_standard_library() -> None:
    """`getLogger` is for configuration only, and for the logger that a module's user may call."""
    callers = {
        str(path.relative_to(ROOT / "simplebus"))
        for path in SOURCES
        if "getLogger" in path.read_text()
    }
    assert callers <= {
        "cli.py",
        "commands/serve/command.py",  # Flushes the handlers.
        "gateway/module.py",
        "logs/configure.py",
        "logs/event_logger.py",
        "spark/commands/shared.py",
    }


@pytest.mark.parametrize(
    "source",
    [
        'log.info("%s failed", name)',
        'log.info("a.b", "{c}", 1, c=2)',
        "log.info(event, sentence)",
        'log.info("a.b", f"{c}")',
        'log.info("a.b", "{c}", **values)',
    ],
)
def test_a_call_without_names_is_found(source: str) -> None:
    with pytest.raises(ValueError, match="expected an event, a sentence and named values"):
        log_calls_of(ast.walk(ast.parse(source)), "x.py")


def test_a_call_with_names_is_read() -> None:
    source = 'log.error("a.b", "c {d!r:.5} " "e {f:g}", d=1, f=2, g=3, exc_info=True)'
    assert log_calls_of(ast.walk(ast.parse(source)), "x.py") == [
        EventCall("a.b", "error", "c {d!r:.5} e {f:g}", ("d", "f", "g"), "x.py")
    ]
