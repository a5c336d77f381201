"""The Java connector publishes the same messages as the Python sink, each row once."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import simplebus
from simplebus.core.limits import HEADER_BYTES, Limits
from simplebus.core.settings import FullPolicy, Retention, Settings
from simplebus.core.users.permissions import PermissionRule, PermissionRules, Permissions
from simplebus.core.users.users import User, Users
from simplebus.spark.read.bus_reader import BusReader
from simplebus.spark.read.planner import MessageRange
from simplebus.testing.server import BusServer, bus_server, until
from tests.client.faulty_server import faulty_proxy
from tests.spark.bus_messages import publish_numbers, stored_payloads
from tests.spark.heartbeat_bus import heartbeat_bus

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.xdist_group("spark")]

JAVA, PYTHON = "simplebus", "simplebus_python"
ROWS = [b"%d" % n for n in range(600)]
LONG_ROWS = [b"row %d " % n * 150 for n in range(2400)]
"""More than one block of a publisher, and more than a small credit."""


def sink(frame: Any, kind: str, server: BusServer, **options: str) -> Any:
    """Return a writer of a frame or stream."""
    writing = frame.write.mode("append") if not frame.isStreaming else frame.writeStream
    return writing.format(kind).options(**{"servers": server.address, **options})


# Rows ---------------------------------------------------------------------------------------------


def random_bytes(source: random.Random) -> bytes:
    pieces = (b"", b"<", b"<\r\n", b"<\r\n>", b"<\r\n\0", b"<\r\n<\r\n>", b"text", b"\xff")
    return b"".join(source.choices(pieces, k=source.randrange(6)))


def random_text(source: random.Random) -> str:
    return "".join(source.choices(["", "<\r\n", "<\r\n>", "text", "ä", "\0"], k=3))


SHAPES: dict[str, Callable[[random.Random], object]] = {
    "value binary": random_bytes,
    "value string": random_text,
    "class string": lambda source: source.choice([None, "7", "örders", "stock"]),
    "class int": lambda source: source.choice([None, 0, 7, 65_535]),
    "topic string": lambda source: source.choice([None, "07", "örders"]),
    "channel string": lambda source: source.choice([None, "", "shop.eu", "ä.ö", "x" * 300]),
    "key binary": lambda source: source.choice([None, b"", b"k", random_bytes(source)]),
    "key string": lambda source: source.choice([None, "", "k", "<\r\n>"]),
    "headers array<struct<key:string,value:binary>>": lambda source: source.choice(
        [None, [], [("a", b"1"), ("a", b""), ("ü", b"<\r\n>")]]
    ),
    "headers array<struct<key:string,value:string>>": lambda source: source.choice(
        [None, [], [("a", "1"), ("ü", "<\r\n")]]
    ),
    "headers map<string,string>": lambda source: source.choice([None, {}, {"a": "1", "ü": "ä"}]),
    "expiry double": lambda source: source.choice([None, 9e3, 1e4 / 3, 1e300, 60.0005, 60.0015]),
    "expiry float": lambda source: source.choice([None, 1e4 / 3, 3e38]),
    "expiry bigint": lambda source: source.choice([None, 60, 1 << 62]),
    "expiry int": lambda source: source.choice([None, 60]),
}
"""Functions that return a random value of a column."""


def raw_messages(server: BusServer) -> dict[str, list[bytes]]:
    """Return the stored frames of each class, without the field that delays Confirms."""
    found: dict[str, list[bytes]] = {}
    with BusReader(server.address, timeout=60) as bus:
        for each in bus.blocking_bus.explain().classes:
            name = str(each.class_id)
            extent = bus.get_extent([name]).classes[name]
            message_range = MessageRange(
                server.address, bus.memory_id, name, extent.floor, extent.head
            )
            found[name] = [
                bytes(frames.raw[begin : begin + 7] + frames.raw[begin + HEADER_BYTES : end])
                for frames in bus.read(message_range, strict=True)
                for begin, end in pairwise(frames.bounds.tolist())
            ]
    return found


@pytest.mark.parametrize(
    "columns",
    [
        ["value binary"],
        ["value string", "channel string"],
        [
            "value binary",
            "class string",
            "channel string",
            "key binary",
            "headers array<struct<key:string,value:binary>>",
            "expiry double",
        ],
        [
            "expiry bigint",
            "headers map<string,string>",
            "key string",
            "topic string",
            "value string",
        ],
        [
            "class int",
            "value binary",
            "headers array<struct<key:string,value:string>>",
            "expiry float",
        ],
        ["value binary", "key binary", "expiry int"],
    ],
)
def test_both_sinks_publish_equal_messages(spark: Any, columns: list[str]) -> None:
    source = random.Random(29)
    rows = [tuple(SHAPES[column](source) for column in columns) for _ in range(400)]
    rows += [row for row in rows[:50] for _ in range(3)]
    frame = spark.createDataFrame(rows, ", ".join(columns)).coalesce(1)
    with bus_server() as server, bus_server() as python_server:
        sink(frame, JAVA, server, **{"class": "1", "channel": "by.default"}).save()
        sink(frame, PYTHON, python_server, **{"class": "1", "channel": "by.default"}).save()
        found, expected = raw_messages(server), raw_messages(python_server)
    assert found == expected
    assert sum(map(len, found.values())) == 550


@pytest.mark.parametrize(
    ("columns", "rows", "sentence"),
    [
        ("valeu binary", [], "unknown column valeu; did you mean value?"),
        ("value binary, offset bigint", [], "unknown column offset; expected value, class, topic"),
        (
            "value int",
            [],
            "is int, expected binary or string; convert it by cast(value as string), or set the "
            "option valueFormat to json",
        ),
        (
            "value struct<a:int>",
            [],
            "is struct<a:int>, expected binary or string; convert it by to_",
        ),
        ("value binary, headers string", [], "the column headers is string, expected array<struct"),
        ("key binary", [], "the column value is missing; there are key"),
        ("value binary, class int, topic string", [], "class and topic are two names of one colu"),
        ("value binary", [(b"a",), (None,)], "row 1 has no value, expected bytes"),
        ("value binary, channel string", [(b"a", "a..b")], "row 0: channel 'a..b': segment 2 of 3"),
        (
            "value binary, channel string",
            [(b"a", "a.*")],
            "row 0: channel 'a.*': segment 2 is the ",
        ),
        ("value binary, expiry double", [(b"a", -1.0)], "row 0: expiry must be seconds from 0 on"),
        ("value binary, class string", [(b"a", "1"), (b"a", "")], "row 1 has no class, and the op"),
        ("value binary, class int", [(b"a", -1)], "row 0 has the class -1, expected an id from 0"),
        ("value binary, class int", [(b"a", 65_536)], "row 0 has the class 65536, expected an id"),
        (
            "value binary, headers array<struct<key:string,value:binary>>",
            [(b"a", [("h", b"\xff")])],
            "utf-8",
        ),
        ("value binary, key binary", [(b"a", b"k" * 65_536)], "a key has at most 65535 bytes, got"),
        ("value binary", [(b"x" * (1 << 20),)], "bytes; a message of this connection carries at"),
    ],
)
def test_both_sinks_refuse_the_same_rows(
    spark: Any, server: BusServer, columns: str, rows: list[Any], sentence: str
) -> None:
    frame = spark.createDataFrame(rows, columns).coalesce(1)
    for kind in (JAVA, PYTHON):
        with pytest.raises(Exception, match=re.escape(sentence)) as caught:
            sink(frame, kind, server, **{"class": "1"}).save()
        assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "rows have no class; expected a column class or topic, or the option class"),
        ({"class": "1,2"}, "expected one class in the option class, got 1, 2"),
        ({"servers": "a,b", "class": "1"}, "expected one bus in servers of a sink, got a:8888, b"),
        ({"servers": " ", "class": "1"}, "the option servers is missing; expected simplebus host"),
        ({"subscribe": "1"}, "there is no option subscribe here; it is an option of the source"),
        (
            {"topic": "1"},
            "there is no option topic here; use subscribe in the source, and class in",
        ),
        ({"class": "1", "valueFormat": "avro"}, "valueFormat is 'avro': expected bytes or json"),
        ({"class": "1", "timeout": "soon"}, "the option timeout is 'soon': expected seconds above"),
        ({"class": "1", "publisher": " "}, "publisher is ' ': expected a name of 1 to 128 charact"),
        ({"class": "1", "publisher": "x" * 129}, "': expected a name of 1 to 128 characters"),
    ],
)
def test_both_sinks_report_invalid_options(
    spark: Any, server: BusServer, options: dict[str, str], sentence: str
) -> None:
    frame = spark.createDataFrame([(b"a",)], "value binary")
    for kind in (JAVA, PYTHON):
        writing = sink(frame, kind, server).options(**options)
        with pytest.raises(Exception, match=re.escape(sentence)) as caught:
            writing.save()
        assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"servers": "127.0.0.1:9"}, "cannot connect to simplebus://127.0.0.1:9: Connection refus"),
        ({"servers": "http://a"}, "'http://a' is not a server address; expected simplebus://host:"),
        (
            {"class": "stock"},
            "user 'ada' has no permissions in class 'stock'; check the option class and the permis",
        ),
        ({"class": "9"}, "user 'ada' has no permissions in class 9; check the option class and"),
    ],
)
def test_wrong_bus_and_class_fail_before_tasks_start(
    spark: Any, tmp_path: Path, options: dict[str, str], sentence: str
) -> None:
    allowed = PermissionRules((PermissionRule("orders"), PermissionRule("1")))
    user = User("ada", addresses=("127.0.0.1",), permissions=Permissions(allowed, allowed))
    frame = spark.range(3).selectExpr("if(id >= 0, raise_error('a task'), '') value")
    with bus_server(users=Users([user])) as server:
        publish_numbers(server, 0, 3)
        for kind in (JAVA, PYTHON):
            writing = sink(frame, kind, server, **{"class": "orders", **options})
            with pytest.raises(Exception, match=re.escape(sentence)) as caught:
                writing.save()
            assert_no_stack(str(caught.value))
        rows = spark.readStream.format(JAVA).options(servers=server.address, subscribe="1")
        rows = rows.option("startingOffsets", "earliest").load().select("value")
        writing = sink(rows, JAVA, server, **{"class": "orders", **options})
        query = writing.option("checkpointLocation", str(tmp_path)).start()
        with pytest.raises(Exception, match=re.escape(sentence)) as caught:
            query.awaitTermination(60)
        assert_no_stack(str(caught.value))


def assert_no_stack(text: str) -> None:
    assert "Traceback" not in text
    assert "\tat " not in text


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("id + 1", ["1", "2"]),
        ("named_struct('a', id, 'b', if(id = 0, 'x<ä', null))", ['{"a":0,"b":"x<ä"}', '{"a":1}']),
        ("array(id, null, 2)", ["[0,null,2]", "[1,null,2]"]),
        (
            "map('a', cast(id as float) / 10, 'b', double('nan'))",
            ['{"a":0,"b":"NaN"}', '{"a":0.1,"b":"NaN"}'],
        ),
        (
            "named_struct('a', timestamp_micros(id), 'b', date_from_unix_date(id))",
            [
                '{"a":"1970-01-01T00:00:00.000000Z","b":"1970-01-01"}',
                '{"a":"1970-01-01T00:00:00.000001Z","b":"1970-01-02"}',
            ],
        ),
        (
            "array(named_struct('a', binary(string(id)), 'b', timestamp_ntz'2025-01-01 10:00:00'))",
            [
                '[{"a":"MA==","b":"2025-01-01T10:00:00.000000"}]',
                '[{"a":"MQ==","b":"2025-01-01T10:00:00.000000"}]',
            ],
        ),
        ("cast(id as decimal(20, 3)) / 8", ["0.000", "0.125"]),
        ("concat('text ', id)", ['"text 0"', '"text 1"']),
        ("id = 1", ["false", "true"]),
    ],
)
def test_both_sinks_encode_values_as_json(
    spark: Any, server: BusServer, value: str, texts: list[str]
) -> None:
    frame = spark.range(2).selectExpr(f"{value} as value").coalesce(1)
    for kind in (JAVA, PYTHON):
        sink(frame, kind, server, **{"class": kind, "valueFormat": "json"}).save()
        found = [json.loads(payload) for payload in stored_payloads(server, kind)]
        assert found == [json.loads(text) for text in texts]


def test_both_sinks_refuse_values_that_json_does_not_have(spark: Any, server: BusServer) -> None:
    frame = spark.range(1).selectExpr("map(id, array(interval 1 day)) as value")
    for kind in (JAVA, PYTHON):
        writing = sink(frame, kind, server, **{"class": "1", "valueFormat": "JSON"})
        with pytest.raises(Exception, match="valueFormat is 'json', which cannot encode map<bigi"):
            writing.save()


def test_argument_of_save_names_the_bus(spark: Any, server: BusServer) -> None:
    frame = spark.createDataFrame([(b"a",)], "value binary")
    frame.write.format(JAVA).mode("append").option("class", "1").save(server.address)
    assert stored_payloads(server) == [b"a"]


def test_overwriting_is_refused(spark: Any, server: BusServer) -> None:
    frame = spark.createDataFrame([(b"a",)], "value binary")
    writing = sink(frame, JAVA, server, **{"class": "1"}).mode("overwrite")
    with pytest.raises(Exception, match="a bus cannot be overwritten, messages are added"):
        writing.save()


# Publishers ---------------------------------------------------------------------------------------


class Task:
    """Publisher of one attempt of a task, in Java."""

    def __init__(self, spark: Any, address: str, name: str = "task", class_id: int = 1) -> None:
        client = spark._jvm.io.simplebus.client
        self._bus = client.BusPublisher(
            client.BusAddress.parse(address),
            client.Credentials.fromEnvironment(spark._jvm.java.util.HashMap()),
            name,
            60.0,
        )
        self._class_id = class_id
        self._bus.nameClass(class_id)

    def publish(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            self._bus.publish(self._class_id, None, payload)

    def flush(self) -> tuple[int, int]:
        """Return how many messages there were, and how many the bus had before."""
        self._bus.flush()
        return self._bus.position(), self._bus.storedBefore()

    def close(self) -> None:
        self._bus.close()


def test_retried_task_publishes_once(spark: Any, server: BusServer) -> None:
    for stored in (0, 600):
        task = Task(spark, server.address)
        task.publish(ROWS)
        assert task.flush() == (600, stored)
        task.close()
    assert stored_payloads(server) == ROWS


def test_next_attempt_finishes_a_killed_task(spark: Any, server: BusServer) -> None:
    before = 0
    for last in (210, 35, 520, 600):
        task = Task(spark, server.address)
        task.publish(ROWS[:last])
        assert task.flush() == (last, before)
        task.publish(ROWS[last : last + 50])  # Not sent.
        task.close()
        before = max(before, last)
    assert stored_payloads(server) == ROWS


def test_replaced_attempt_stops_publishing(spark: Any, server: BusServer) -> None:
    early = Task(spark, server.address)
    early.publish(ROWS[:140])
    early.flush()
    late = Task(spark, server.address)
    late.publish(ROWS)
    assert late.flush() == (600, 140)
    early.publish(ROWS[140:])
    with pytest.raises(Exception, match=r"taken_over|connected again"):
        early.flush()
    for task in (early, late):
        task.close()
    assert stored_payloads(server) == ROWS


def test_attempt_that_reconnects_after_a_later_one_publishes_once(
    spark: Any, server: BusServer
) -> None:
    with faulty_proxy(server.address) as proxy:
        early = Task(spark, proxy.address)
        proxy.dropped_direction = "to_server"
        early.publish(ROWS[:140])
        proxy.disconnect_all()
        late = Task(spark, server.address)
        late.publish(ROWS)
        assert late.flush() == (600, 0)
        late.close()
        early.publish(ROWS[140:])
        assert early.flush() == (600, 0)
        early.close()
    assert stored_payloads(server) == ROWS


def test_attempts_at_the_same_time_publish_once(spark: Any, server: BusServer) -> None:
    begin = threading.Barrier(3)

    def attempt() -> str:
        begin.wait()
        try:
            task = Task(spark, server.address)
            task.publish(LONG_ROWS)
            task.flush()
            task.close()
        except Exception as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        errors = [future.result() for future in [pool.submit(attempt) for _ in range(3)]]
    assert "" in errors
    assert all("taken_over" in error for error in errors if error)
    assert stored_payloads(server) == LONG_ROWS


def test_network_outage_does_not_duplicate_messages(spark: Any, server: BusServer) -> None:
    with faulty_proxy(server.address) as proxy:
        task = Task(spark, proxy.address)
        for number, first in enumerate(range(0, len(LONG_ROWS), 600)):
            task.publish(LONG_ROWS[first : first + 300])
            proxy.dropped_direction = ("to_server", "to_client")[number % 2]
            task.publish(LONG_ROWS[first + 300 : first + 600])
            proxy.disconnect_all()
        assert proxy.dropped_bytes
        assert task.flush() == (len(LONG_ROWS), 0)
        task.close()
    assert stored_payloads(server) == LONG_ROWS


def test_small_credit_is_kept(spark: Any) -> None:
    with (
        bus_server(Settings(limits=Limits(credit_bytes=50_000))) as server,
        faulty_proxy(server.address) as proxy,
    ):
        task = Task(spark, proxy.address)
        for first in range(0, len(LONG_ROWS), 300):
            task.publish(LONG_ROWS[first : first + 300])
            proxy.disconnect_all()
        assert task.flush() == (len(LONG_ROWS), 0)
        task.close()
        assert stored_payloads(server) == LONG_ROWS


def test_task_fails_if_the_bus_lost_its_messages(spark: Any) -> None:
    with (
        bus_server() as server,
        bus_server() as empty_server,
        faulty_proxy(server.address) as proxy,
    ):
        task = Task(spark, proxy.address)
        task.publish(ROWS)
        task.flush()
        proxy.set_target(empty_server.address)
        proxy.disconnect_all()
        task.publish(ROWS)
        with pytest.raises(Exception, match=f"the bus at {proxy.address} was reset, has the"):
            task.flush()
        task.close()
        assert stored_payloads(empty_server) == []


def test_refused_messages_fail_the_task(spark: Any) -> None:
    settings = Settings(limits=Limits(class_messages=100), full_policy=FullPolicy.DROP_NEWEST)
    with bus_server(settings) as server:
        task = Task(spark, server.address)
        task.publish(ROWS)
        with pytest.raises(Exception, match=r"refused messages, number 100 .*: drop_newest: "):
            task.flush()
        task.close()
        retry = Task(spark, server.address)  # A refused message uses up its number.
        retry.publish(ROWS)
        assert retry.flush() == (600, 600)
        retry.close()
        assert stored_payloads(server) == ROWS[:100]


def test_task_waits_for_slow_rows(spark: Any) -> None:
    with heartbeat_bus() as bus:
        task = Task(spark, bus.server.address)
        task.publish(ROWS[:70])
        bus.advance_after_data(8)
        task.publish(ROWS[70:])
        assert task.flush() == (600, 0)
        task.close()
        assert bus.count_closed() == 0
        assert stored_payloads(bus.server) == ROWS


@pytest.mark.parametrize("kinds", [(JAVA, PYTHON), (PYTHON, JAVA)])
def test_repeated_write_of_a_publisher_is_stored_once(
    spark: Any, server: BusServer, kinds: tuple[str, str]
) -> None:
    def write(kind: str, last: int, **options: str) -> None:
        frame = spark.range(0, last, 1, 2).selectExpr("cast(id as string) as value")
        frame = frame.where("id < 300").union(frame.where("id >= 300")).coalesce(1)
        sink(frame, kind, server, **{"class": "1", **options}).save()

    publisher = {"publisher": "örders of 2026-11-21"}
    write(kinds[0], 400, **publisher)
    assert stored_payloads(server) == ROWS[:400]
    for kind in (*kinds[::-1], kinds[1]):
        write(kind, 600, **publisher)
        assert stored_payloads(server) == ROWS
    write(kinds[1], 600, publisher="another")
    write(kinds[1], 600)
    assert stored_payloads(server) == ROWS * 3


# Queries ------------------------------------------------------------------------------------------


def copy(
    spark: Any,
    kind: str,
    server: BusServer,
    folder: Path,
    condition: str = "true",
    **options: str,
) -> str:
    """Copy class 1 to the class "copies" until no message waits. Return the error of the query."""
    frame = spark.readStream.format(JAVA).options(servers=server.address, subscribe="1")
    frame = frame.option("startingOffsets", "earliest").option("minPartitions", "2").load()
    frame = frame.selectExpr(f"if({condition}, value, raise_error('killed')) as value")
    writing = sink(frame, kind, server, **{"class": "copies", **options})
    writing = writing.trigger(availableNow=True)
    # Without an aggregation, both modes are the same.
    writing = writing.outputMode("update" if kind == JAVA else "append")
    query = writing.option("checkpointLocation", str(folder)).start()
    try:
        query.awaitTermination(60)
    except Exception as error:
        return str(error)
    finally:
        query.stop()
    return ""


def test_streams_refuse_a_publisher(spark: Any, server: BusServer, tmp_path: Path) -> None:
    publish_numbers(server, 0, 3)
    for kind in (JAVA, PYTHON):
        error = copy(spark, kind, server, tmp_path / kind, publisher="x")
        assert "the option publisher is 'x', but a stream already stores each row once" in error
        assert_no_stack(error)
    assert "copies" not in server_classes(server)


def test_stream_waits_for_a_bus_that_restarts(
    spark: Any, server: BusServer, tmp_path: Path
) -> None:
    publish_numbers(server, 0, 3)
    with faulty_proxy(server.address) as proxy, ThreadPoolExecutor() as pool:
        rows = spark.readStream.format(JAVA).options(servers=server.address, subscribe="1")
        rows = rows.option("startingOffsets", "earliest").load().select("value")
        writing = rows.writeStream.format(JAVA).options(servers=proxy.address, timeout="60")
        writing = writing.option("class", "copies")
        query = writing.option("checkpointLocation", str(tmp_path)).start()
        try:
            query.processAllAvailable()
            proxy.is_refusing = True
            publish_numbers(server, 3, 6)
            waiting = pool.submit(query.processAllAvailable)
            until(lambda: proxy.refused_count > 0)
            proxy.is_refusing = False
            waiting.result()
        finally:
            query.stop()
    assert copied(server) == list(range(6))


def test_continuous_trigger_is_refused(spark: Any, server: BusServer, tmp_path: Path) -> None:
    """It has no batches that could be repeated with the same rows."""
    frame = spark.readStream.format("rate").load().selectExpr("cast(value as string) value")
    writing = sink(frame, JAVA, server, **{"class": "1"}).trigger(continuous="1 second")
    query = writing.option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(Exception, match="the sink got a trigger with continuous, which ") as caught:
        query.awaitTermination(60)
    assert_no_stack(str(caught.value))


def server_classes(server: BusServer) -> list[str]:
    with simplebus.connect_blocking(server.address) as bus:
        return [each.name for each in bus.explain().classes]


def copied(server: BusServer) -> list[int]:
    return sorted(map(int, stored_payloads(server, "copies")))


@pytest.mark.parametrize("kinds", [(JAVA, PYTHON), (PYTHON, JAVA)])
def test_batch_is_continued_by_the_other_sink(
    spark: Any, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    """The first attempt is killed within its tasks, the second before Spark commits the batch."""
    with bus_server(Settings(keep=Retention(messages=30_000))) as server:
        publish_numbers(server, 0, 30_000)
        assert "killed" in copy(spark, kinds[0], server, tmp_path, "offset not in (9999, 29000)")
        assert len(copied(server)) < 30_000
        assert copy(spark, kinds[1], server, tmp_path) == ""
        assert copied(server) == list(range(30_000))
        (tmp_path / "commits" / "0").unlink()
        (tmp_path / "commits" / ".0.crc").unlink()
        assert copy(spark, kinds[0], server, tmp_path) == ""
        assert copied(server) == list(range(30_000))
