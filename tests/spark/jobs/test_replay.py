"""Selection of archived messages, names of replay streams, and their publishing at a pace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest

import simplebus
from simplebus.core.channel.pattern import matches
from simplebus.core.errors import BusConnectionError
from simplebus.spark.jobs.pacing import DUE, ReplaySchedule
from simplebus.spark.jobs.replay import (
    ReplaySelection,
    StreamPublisherTask,
    channel_expression,
    publisher_name,
    replay,
    split_by_stream,
)
from simplebus.spark.options import SinkOptions, sink_options
from simplebus.spark.sink import count_stored
from simplebus.testing.server import BusServer

GROUP = ("orders", "h:1", "memory")
CHOSEN = ReplaySelection(channels=("a.*",), begin=datetime(2026, 3, 1, tzinfo=UTC))


def batch(streams: list[int], channels: list[str | None]) -> Any:
    numbers = list(range(len(streams)))
    return pa.RecordBatch.from_pydict(
        {
            "stream": streams,
            "offset": numbers,
            "value": [b"%d" % n for n in numbers],
            "channel": pa.array(channels, pa.string()),
        }
    )


def test_publisher_name_identifies_the_messages() -> None:
    name = publisher_name("again", GROUP, CHOSEN, "")
    elsewhere = CHOSEN.begin.astimezone(timezone(timedelta(hours=5)))  # type: ignore[union-attr]
    assert publisher_name("again", GROUP, replace(CHOSEN, begin=elsewhere), "") == name
    # Other classes do not influence the messages of this class.
    assert publisher_name("again", GROUP, replace(CHOSEN, classes=("orders",)), "") == name
    other_names = [
        publisher_name("other", GROUP, CHOSEN, ""),
        publisher_name("again", ("orders", "h:1", "anew"), CHOSEN, ""),
        publisher_name("again", ("orders", "h:2", "memory"), CHOSEN, ""),
        publisher_name("again", GROUP, replace(CHOSEN, channels=()), ""),
        publisher_name("again", GROUP, replace(CHOSEN, begin=None, end=CHOSEN.begin), ""),
        publisher_name("again", GROUP, CHOSEN, "orders"),
    ]
    assert len({name, *other_names}) == 7


def test_long_names_of_replays_differ() -> None:
    names = {publisher_name("ö" * 1000 + end, GROUP, CHOSEN, "") for end in ("a", "b")}
    assert len(names) == 2
    for name in names:
        assert sink_options({"servers": "h:1", "publisher": name}).publisher == name


def test_rows_keep_order_and_fields() -> None:
    found = dict(split_by_stream(batch([1, 0, 1, 1, 0], ["x"] * 5)))
    assert found[1].column("value").to_pylist() == [b"0", b"2", b"3"]
    assert found[0].column("value").to_pylist() == [b"1", b"4"]
    assert found[0].schema.names == ["value", "channel"]


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_channel_expressions_match_like_the_broker(spark: Any) -> None:
    source = random.Random(29)
    expression = spark._jvm.java.util.regex.Pattern

    def text(segments: list[str]) -> str:
        return ".".join(source.choices(segments, k=source.randrange(1, 5)))

    names = ["a", "b", "ä", "*", "#", ">", "\\E", "\\Q.\\E", "[", "$", "a\u2028"]
    channels = ["", ".", "a.", ".a", *(text(names) for _ in range(60))]
    for _ in range(60):
        pattern = text([*names, "*", "*"]).replace("#", "*").replace(">", "*")
        pattern += source.choice(["", ".#", ".>"])
        for legal in (pattern, "#", ">"):
            found = [expression.matches(channel_expression(legal), name) for name in channels]
            assert found == [matches(legal, name) for name in channels], legal


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"servers": "h:1,h:2"}, "expected one bus in servers of a sink, got h:1, h:2"),
        ({"servers": "h:1", "speed": 0.0}, r"expected a speed above 0, got 0\.0"),
        ({"servers": "h:1", "to_class": "a,b"}, "expected one class in the option class, got a, b"),
    ],
)
def test_invalid_replay_fails_before_reading(options: dict[str, Any], sentence: str) -> None:
    no_session: Any = None
    with pytest.raises(ValueError, match=sentence):
        replay(no_session, "/archive", **options)


# A task, without Spark --------------------------------------------------------------------------


class TaskFailedError(Exception):
    """Simulated failure of a task."""


def rows(last: int, *, dies: bool = False) -> Iterator[Any]:
    """Yield numbers that are due immediately: even ones of stream 0, odd ones of stream 1."""
    for first in range(0, last, 50):
        numbers = range(first, min(first + 50, last))
        yield pa.RecordBatch.from_pydict(
            {
                "stream": [n % 2 for n in numbers],
                "offset": list(numbers),
                "value": [b"%d" % n for n in numbers],
                "key": [b"k"] * len(numbers),
                "channel": ["even" if n % 2 == 0 else "odd" for n in numbers],
                DUE: pa.array([0] * len(numbers), pa.int64()),
            }
        )
    if dies:
        raise TaskFailedError


DUE_NOW = ReplaySchedule(0, 0.0, 1.0)


def sinks(address: str) -> list[SinkOptions]:
    return [
        SinkOptions(address, class_=name, timeout=1, publisher=f"replay {name}")
        for name in ("even", "odd")
    ]


def stored(server: BusServer, name: str) -> list[int]:
    with simplebus.connect_blocking(server.address) as bus:
        found = list(bus.fetch(name))
    assert all((message.key, message.channel) == (b"k", name) for message in found)
    return [int(message.payload) for message in found]


def test_killed_replay_continues_at_its_position(server: BusServer) -> None:
    publishing = StreamPublisherTask(sinks(server.address), DUE_NOW)
    for last in (170, 30, 410):
        with pytest.raises(TaskFailedError):
            list(publishing(rows(last, dies=True)))
    (found,) = publishing(rows(600))
    assert found.column("messages").to_pylist() == [300, 300]
    assert [count_stored(sink, 0) for sink in sinks(server.address)] == [300, 300]
    assert stored(server, "even") == list(range(0, 600, 2))
    assert stored(server, "odd") == list(range(1, 600, 2))


def test_unreachable_server_ends_the_task() -> None:
    with pytest.raises(BusConnectionError, match=r"127\.0\.0\.1:9"):
        list(StreamPublisherTask(sinks("127.0.0.1:9"), DUE_NOW)(rows(10_000)))
