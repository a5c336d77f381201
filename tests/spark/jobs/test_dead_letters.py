"""Tests of the dead letter report.

Options and output are tested without Spark. The figures are computed by a real Spark, from
hand-made dead letters and from dead letters of a real bus.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest
from typer.testing import CliRunner

import simplebus
from simplebus import cli
from simplebus.spark.commands import dead_letters as command
from simplebus.spark.jobs import archive
from simplebus.spark.jobs.dead_letters import (
    HEADINGS,
    dead_letter_classes,
    dead_letters,
    read_archived,
    to_json_object,
    to_table_cells,
)
from simplebus.testing.server import BusServer, until

ROW: dict[str, Any] = {
    "class": "orders",
    "reason": "max_deliveries",
    "subscription": "billing",
    "messages": 1234,
    "first": datetime(2026, 11, 21, 8, 0, 0, 250_000, UTC),
    "last": datetime(2026, 11, 21, 9, 30, tzinfo=UTC),
    "attempts": 5,
    "example": {
        "server": "127.0.0.1:8888",
        "sequence": 7,
        "session": "3",
        "channel": "orders.eu",
        "key": "k1",
        "text": '{"id": 7}\n\x1b[31m',
    },
}


@pytest.mark.parametrize(
    ("classes", "meant"),
    [
        ("orders", "dead.orders"),
        ("orders, 7", "dead.orders,dead.7"),
        ("dead.orders,7", "dead.orders,dead.7"),
        ("orders,", "dead.orders,"),
    ],
)
def test_dead_letter_classes_are_derived_from_classes(classes: str, meant: str) -> None:
    assert dead_letter_classes(classes) == meant


def test_row_is_formatted_for_a_table() -> None:
    cells = to_table_cells(ROW)
    assert len(cells) == len(HEADINGS)
    assert cells[:4] == ("orders", "max_deliveries", "billing", "1,234")
    assert cells[4:7] == ("2026-11-21 08:00:00+00:00", "2026-11-21 09:30:00+00:00", "5")
    assert cells[7] == '7 on orders.eu key k1 {"id": 7}\ufffd\ufffd[31m'


def test_incomplete_row_is_formatted() -> None:
    example = dict.fromkeys(ROW["example"])
    row = {**ROW, "first": None, "last": None, "attempts": None, "example": example}
    assert to_table_cells(row)[4:] == ("", "", "", "")
    assert to_json_object(row)["first"] is None


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=2)), None])
def test_times_are_shown_in_utc(zone: tzinfo | None) -> None:
    local_time = ROW["last"].astimezone(zone)
    row = {**ROW, "last": local_time if zone else local_time.replace(tzinfo=None)}
    assert to_table_cells(row)[5] == "2026-11-21 09:30:00+00:00"
    assert to_json_object(row)["last"] == "2026-11-21T09:30:00+00:00"


def test_row_is_encoded_as_json() -> None:
    decoded = json.loads(json.dumps(to_json_object(ROW)))
    assert datetime.fromisoformat(decoded.pop("first")) == ROW["first"]
    assert datetime.fromisoformat(decoded.pop("last")) == ROW["last"]
    assert decoded == {name: ROW[name] for name in decoded}


def test_classes_or_archive_are_required() -> None:
    result = CliRunner().invoke(cli.app, ["pipeline", "dead-letters"])
    assert result.exit_code == 2
    assert "expected --subscribe, such as orders,7, or --archive PATH" in " ".join(
        result.stderr.replace("│", " ").split()
    )


DDL = (
    "key binary, value binary, class string, timestamp timestamp, channel string, server string, "
    "headers array<struct<key: string, value: binary>>"
)


def dead_letter_row(
    number: int, *, class_: str = "orders", since: str | None = None, **more: object
) -> tuple[object, ...]:
    facts = {
        "reason": "max_deliveries",
        "class": class_,
        "sequence": number,
        "attempts": 2 + number % 2,
        "subscription": "billing",
        "session": 3,
        "since": f"{1_763_700_000 + number}.250000" if since is None else since,
        **more,
    }
    headers = [("trace", b"1"), ("dead-reason", b"an older one")]
    headers += [(f"dead-{name}", str(value).encode()) for name, value in facts.items()]
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return (b"k", b"{%d} \xff" % number + b"x" * 100, f"dead.{class_}", at, "eu", "here", headers)


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_figures_of_given_and_stored_dead_letters_agree(
    spark: Any, server: BusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    without_headers = (None, b"published there", "dead.orders", at, None, "here", None)
    no_reason = (None, b"the same", "dead.orders", at, None, "here", [("trace", b"1")])
    rows = [
        *[dead_letter_row(number) for number in (2, 5, 3)],
        dead_letter_row(4, class_="returns"),
        (None, b"alive", "orders", at, None, "here", dead_letter_row(4)[-1]),
        dead_letter_row(9, class_="7", subscription="", reason="uncarriable", attempts=0),
        dead_letter_row(
            9, class_="7", subscription="", since="not a time", attempts="many", sequence="x"
        ),
        without_headers,
        no_reason,
    ]
    frame = spark.createDataFrame(rows, DDL)
    monkeypatch.setattr(archive, "read", lambda spark, path: {"there": frame}[path])
    found = dead_letters(read_archived(spark, "there", "orders,7")).limit(9).collect()
    times = [1_763_700_002.25, 1_763_700_005.25]
    first = found[0].asDict(recursive=True)
    assert [first.pop(name).timestamp() for name in ("first", "last")] == times
    assert first == {
        "class": "orders",
        "reason": "max_deliveries",
        "subscription": "billing",
        "messages": 3,
        "attempts": 3,
        "example": {
            "server": "here",
            "sequence": 5,
            "session": "3",
            "channel": "eu",
            "key": "k",
            "text": "{5} \ufffd" + "x" * 75,
        },
    }
    assert [(row["class"], row.reason, row.messages, row.attempts) for row in found[1:]] == [
        ("7", "max_deliveries", 1, None),
        ("7", "uncarriable", 1, 0),
    ]
    assert (found[1]["first"].astimezone(UTC), found[1].example.sequence) == (at, None)

    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many([b"good", b"bad", b"worse"], class_id="orders", channel="eu")
        options: dict[str, Any] = {"durable": "billing", "max_deliveries": 2, "auto_ack": False}
        with bus.subscribe("orders", **options) as messages:
            for _ in range(5):
                message = messages.get(60)
                if message.payload == b"good":
                    message.ack()
                else:
                    message.nack(delay=0)
            until(lambda: len(bus.fetch("dead.orders")) == 2)

    @contextmanager
    def this_session(*arguments: object) -> Iterator[Any]:
        yield spark

    monkeypatch.setattr(command, "spark_session", this_session)
    arguments = ["--servers", server.address, "--subscribe", "orders,none", "--json"]
    result = CliRunner().invoke(cli.app, ["pipeline", "dead-letters", *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    [row] = map(json.loads, result.stdout.splitlines())
    assert (row["class"], row["subscription"], row["messages"]) == ("orders", "billing", 2)
    assert row["attempts"] == 2
    assert (row["example"]["channel"], row["example"]["text"]) in (("eu", "bad"), ("eu", "worse"))
