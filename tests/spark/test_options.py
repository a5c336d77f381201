"""Parsing of the options of a Spark job, and the errors for invalid values."""

from __future__ import annotations

import uuid

import pytest

from simplebus.core.limits import NAME_CHARACTERS_MAX
from simplebus.spark.options import (
    check_stream_sink,
    compile_class_pattern,
    sink_options,
    source_options,
)
from simplebus.spark.read.offsets import TimestampSpec
from simplebus.spark.sink import task_publisher
from tests.spark.option_cases import INVALID_BATCH_OPTIONS, INVALID_STREAM_OPTIONS, NEEDED


def test_option_names_ignore_case() -> None:
    options = {
        "SERVERS": "simplebus://a, b:9",
        "Subscribe": "7, orders,7",
        "MAXOFFSETSPERTRIGGER": "5",
    }
    found = source_options(options, streaming=True)
    assert found.servers == ("a:8888", "b:9")
    assert found.subscribe == ("7", "orders")
    assert found.max_batch_messages == 5


def test_batch_begins_at_earliest_and_stream_at_latest() -> None:
    assert source_options(NEEDED, streaming=False).starting == "earliest"
    assert source_options(NEEDED, streaming=True).starting == "latest"


def test_load_accepts_servers() -> None:
    found = source_options({"path": "a:1", "subscribe": "7"}, streaming=False)
    assert found.servers == ("a:1",)


def test_json_offsets_have_normalized_names() -> None:
    options = NEEDED | {"startingOffsets": '{"simplebus://127.0.0.1": {"007": -2, "orders": 5}}'}
    found = source_options(options, streaming=True)
    assert found.starting == {"127.0.0.1:8888": {"7": -2, "orders": 5}}


def test_times_take_precedence_over_offsets() -> None:
    by_class = {"startingOffsetsByTimestamp": '{"127.0.0.1": {"7": 5}}'}
    ends = {"endingOffsets": "latest", "endingOffsetsByTimestamp": '{"127.0.0.1": {"007": 6}}'}
    found = source_options(
        NEEDED | {"startingOffsets": "earliest"} | by_class | ends, streaming=False
    )
    assert found.starting == TimestampSpec(
        "startingOffsetsByTimestamp", {"127.0.0.1:8888": {"7": 5}}, True
    )
    assert found.ending == TimestampSpec(
        "endingOffsetsByTimestamp", {"127.0.0.1:8888": {"7": 6}}, False
    )
    common = {"startingTimestamp": " 7", "startingOffsetsByTimestampStrategy": "Latest"}
    found = source_options(NEEDED | by_class | common | {"endingTimestamp": "8"}, streaming=False)
    assert found.starting == TimestampSpec("startingTimestamp", 7, False)
    assert found.ending == TimestampSpec("endingTimestamp", 8, False)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("15m", 900), ("90s", 90), ("1.5 h", 5400), ("20ms", 0.02), ("2 Min", 120)],
)
def test_durations_have_units(text: str, seconds: float) -> None:
    found = source_options(NEEDED | {"maxTriggerDelay": text}, streaming=True)
    assert found.max_delay_seconds == seconds


def test_durable_is_private_unless_named_or_disabled() -> None:
    for options, expected in (({}, None), ({"durable": " a "}, "a"), ({"durable": "NONE"}, "")):
        assert source_options(NEEDED | options, streaming=True).durable == expected


@pytest.mark.parametrize(("options", "sentence"), INVALID_STREAM_OPTIONS)
def test_invalid_stream_options_are_rejected(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        source_options(NEEDED | options, streaming=True)


@pytest.mark.parametrize(("options", "sentence"), INVALID_BATCH_OPTIONS)
def test_invalid_batch_options_are_rejected(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        source_options(options, streaming=False)


def test_stream_rejects_end_options() -> None:
    with pytest.raises(ValueError, match="no option endingOffsets here"):
        source_options(NEEDED | {"endingOffsets": "latest"}, streaming=True)


def test_class_patterns_match_as_in_java() -> None:
    assert compile_class_pattern(r"\w+[.]\d").fullmatch("orders.1")
    assert compile_class_pattern(r"[a-z]+\[[0-9&]\]").fullmatch("orders[1]")
    assert not compile_class_pattern(r"\w+").fullmatch("café")
    assert not compile_class_pattern("(?i)k").fullmatch("\N{KELVIN SIGN}")
    for text in (r"\p{L}", "(?<name>a)", "(?u)a"):
        with pytest.raises(ValueError, match="expected a regular expression"):
            compile_class_pattern(text)
    for text in ("[a-z&&b]", "[a-z[A-Z]]", "[[ab]c]"):
        with pytest.raises(ValueError, match="expected no unions and intersections of sets"):
            compile_class_pattern(text)


def test_sink_has_one_server_and_one_class() -> None:
    found = sink_options({"path": "a", "class": "orders", "channel": "x.y", "timeout": "2"})
    assert (found.server, found.class_, found.channel, found.timeout) == (
        "a:8888",
        "orders",
        "x.y",
        2,
    )
    with pytest.raises(
        ValueError, match="expected one bus in servers of a sink, got a:8888, b:8888"
    ):
        sink_options({"servers": "a,b"})
    with pytest.raises(ValueError, match="expected one class in the option class, got 1, 2"):
        sink_options({"servers": "a", "class": "1,2"})
    with pytest.raises(ValueError, match="no option subscribe here; it is an option of the source"):
        sink_options({"servers": "a", "subscribe": "1"})
    with pytest.raises(
        ValueError, match=r"no option topic here; use subscribe in .*, and class in"
    ):
        sink_options({"servers": "a", "topic": "1"})


def test_publisher_names_a_batch_write() -> None:
    options = {"servers": "a", "class": "orders"}
    assert sink_options(options).publisher == ""
    found = sink_options(options | {"publisher": " " + "ö" * 128})
    assert found.publisher == "ö" * 128
    with pytest.raises(ValueError, match=r"the option publisher is 'ö+', but a stream already st"):
        check_stream_sink(found)
    for name in (" ", "x" * 129):
        with pytest.raises(ValueError, match=r"publisher is .*: expected a name of 1 to 128 c"):
            sink_options(options | {"publisher": name})
    # The longest name of a task, of the largest partition number and a memory id.
    task = task_publisher(found.publisher, (1 << 31) - 1)
    assert len(f"{task} {uuid.uuid4().hex}") <= NAME_CHARACTERS_MAX


def test_path_selects_journals_that_offsets_name() -> None:
    options = {"path": "/var//lib/bus/, file:///data/./b", "subscribe": "7"}
    starting = {"startingOffsets": '{"/var/lib/bus": {"7": 5}, "/data/b/": {"7": -2}}'}
    found = source_options(options | starting, streaming=True)
    assert found.servers == ("/var/lib/bus", "/data/b")
    assert (found.is_journal, found.location_option) == (True, "path")
    assert found.starting == {"/var/lib/bus": {"7": 5}, "/data/b": {"7": -2}}
    found = source_options(NEEDED, streaming=True)
    assert (found.is_journal, found.location_option) == (False, "servers")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": "/a", "servers": "b"}, "both servers and path are set; expected servers"),
        ({"path": "data/bus"}, "path is 'data/bus': expected the absolute path .* 'data/bus'"),
        ({"path": "hdfs://a/b"}, "expected the absolute path"),
        ({"path": "/a,b:9"}, "expected either buses or data directories of buses, got both"),
        ({"path": " "}, "the option path is missing"),
        ({"path": "/a", "durable": "x"}, "durable applies to buses, but /a is a journal"),
        ({"path": "/a", "DURABLEIDLE": "1d"}, "durableIdle applies to buses, but /a is a journal"),
        ({"path": "/a", "timeout": "5"}, "timeout applies to buses"),
    ],
)
def test_invalid_path_is_reported(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        source_options({"subscribe": "7"} | options, streaming=True)
