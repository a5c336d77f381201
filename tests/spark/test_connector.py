"""The Java connector returns the same rows, offsets and errors as the Python source."""

from __future__ import annotations

import difflib
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import simplebus
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.settings import Retention, Settings
from simplebus.core.users.permissions import PermissionRule, PermissionRules, Permissions
from simplebus.core.users.users import User, Users
from simplebus.server.tls.certificates import TlsOptions
from simplebus.spark import parse_json
from simplebus.spark.options import source_options
from simplebus.testing.server import BusServer, bus_server
from tests.spark.bus_messages import publish_numbers
from tests.spark.competing_consumer import take
from tests.spark.option_cases import INVALID_BATCH_OPTIONS, INVALID_STREAM_OPTIONS
from tests.support.certificates import CertificateAuthority

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

FORMATS = ("simplebus", "simplebus_python")
MESSAGES = 1500


def place(server: BusServer) -> str:
    return server.address.removeprefix("simplebus://")


def reading(reader: Any, kind: str, server: BusServer, **options: object) -> Any:
    """Return a frame of a source; `reader` is spark.read or spark.readStream."""
    defaults = {"servers": server.address, "subscribe": "1", **options}
    return (
        reader.format(kind).options(**{name: str(value) for name, value in defaults.items()}).load()
    )


def random_payload(source: random.Random) -> bytes:
    """Return a payload, often with a delimiter, a part of one, or its escaped form."""
    pieces = (b"", b"<", b"<\r\n", b"<\r\n>", b"<\r\n\0", b"<\r\n\0<\r\n>", b"<<\r\n>", b"text")
    if source.random() < 0.3:
        return source.randbytes(source.choice([0, 1, 3, 50, 400, 9000]))
    return b"".join(source.choice(pieces) for _ in range(source.randrange(6)))


def random_envelope(source: random.Random) -> Envelope | None:
    if source.random() < 0.3:
        return None
    return Envelope(
        channel=source.choice(["", "shop.eu", "shop.us", "ä.ö", "x"]),
        key=source.choice([b"", b"k", b"<\r\n>", source.randbytes(300)]),
        headers=source.choice([(), (("a", "b"),), (("ü", ""), ("a", "<\r\n>" * 9))]),
        published=source.choice([None, 0, -5, 1763740800000001]),
        expires_ms=source.choice([None, None, 0, 10**9]),
        not_before_ms=source.choice([None, 5]),
    )


@pytest.fixture(scope="module")
def mixed_server() -> Iterator[BusServer]:
    """A bus with plain messages in class 1, all kinds in class 2, and gaps in class 3."""
    source = random.Random(29)
    with bus_server(Settings(keep=Retention(messages=MESSAGES // 2))) as server:
        publish_numbers(server, 0, 70_000)
        publish_numbers(server, 0, 900, 3)
        publish_numbers(server, 0, 1, "örders")
        with simplebus.connect_blocking(server.address) as bus:
            core = bus.connection.core
            bus.keep_last_values(2)
            for _ in range(MESSAGES):
                core.publish(random_payload(source), 2, random_envelope(source))
            core.publish(source.randbytes(900_000).replace(b"<\r\n>", b""), 2)
            bus.flush()
            bus.purge(3, 200, 300)
            bus.purge(3, 0, 20)
            with bus.subscribe(3) as messages:  # Acknowledged messages are released.
                take(messages, 780)
        yield server


def digest(frame: Any) -> tuple[object, ...]:
    """Return the row count and order-independent sums over all columns."""
    from pyspark.sql import functions as sql

    hashed = sql.xxhash64(*frame.columns)
    return tuple(frame.select(sql.count("*"), sql.sum("offset"), sql.bit_xor(hashed)).first())


@pytest.mark.parametrize(
    "options",
    [
        {"includeHeaders": "true", "includeMemory": "true", "minPartitions": 3},
        {"channels": "shop.*,x", "subscribe": "2"},
        {"channels": "#", "subscribe": "2,3", "maxRecordsPerPartition": 400},
        {"startingTimestamp": "0", "endingTimestamp": "0"},
    ],
)
def test_rows_equal_those_of_the_python_source(
    spark: Any, mixed_server: BusServer, options: dict[str, object]
) -> None:
    frames = [
        reading(spark.read, kind, mixed_server, **{"subscribe": "1,2,3", **options})
        for kind in FORMATS
    ]
    assert frames[0].schema == frames[1].schema
    found, expected = (max(1, frame.rdd.getNumPartitions()) for frame in frames)
    assert found == expected
    assert digest(frames[0]) == digest(frames[1])


def test_pruned_filtered_and_limited_rows_are_the_same(spark: Any, mixed_server: BusServer) -> None:
    condition = (
        "topic in ('2', '3') and offset between 40 and 1000 and channel = 'shop.eu' "
        "and timestamp < '2025-11-22'"
    )
    frames = [reading(spark.read, kind, mixed_server, subscribe="1,2,3") for kind in FORMATS]
    for columns in (["offset"], ["value", "channel"], ["topic", "timestamp", "timestampType"]):
        found, expected = (
            sorted(map(repr, frame.where(condition).select(columns).collect())) for frame in frames
        )
        assert found == expected
        assert found
    assert frames[0].where("offset < 500").rdd.getNumPartitions() <= 3
    assert frames[0].where("topic = '3'").rdd.getNumPartitions() == 1
    assert [frame.limit(7).count() for frame in frames] == [7, 7]
    assert len(frames[0].where("channel = 'x'").limit(5).collect()) == 5
    assert frames[0].where("channel is null and topic = '2'").count() == (
        frames[1].where("channel is null and topic = '2'").count()
    )


def test_columns_filters_and_statistics_reach_the_plan(spark: Any, mixed_server: BusServer) -> None:
    frame = reading(spark.read, "simplebus", mixed_server).where("offset >= 69900").select("offset")
    plan = frame._jdf.queryExecution().optimizedPlan()
    assert plan.stats().sizeInBytes() < 100 * 64
    assert "value" not in str(plan.toString())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"subscribe": "9"},
            "cannot read from {place}: no Connect has named class 9; expected a class that exists: "
            "check the option subscribe, or publish to the class first",
        ),
        ({"minPartition": "9"}, "there is no option minpartition here; did you mean minPartitions"),
        ({"subscribe": "örder"}, "{place}: there is no class 'örder'; did you mean örders?"),
        ({"subscribe": "1,zzz"}, "{place}: there is no class 'zzz'; check the option subscribe"),
        ({"servers": "127.0.0.1:9"}, "cannot connect to simplebus://127.0.0.1:9: "),
        ({"minPartitions": "-1"}, "the option minPartitions is '-1': expected a whole number from"),
        ({"subscribe": " "}, "the option subscribe is missing; expected classes by name or id"),
        (
            {"startingOffsets": '{{"{place}": {{"1": 70001}}}}'},
            "startingOffsets is 70001 for class 1 at {place}, beyond its end: the next message "
            "there will be 70000",
        ),
        ({"startingOffsets": '{{"{place}": {{"7": 1}}}}'}, "class 7 at {place}, which is not sub"),
        ({"subscribe": "1,01"}, None),
        ({"channels": "a..b"}, "the option channels is 'a..b': "),
    ],
)
def test_sources_report_the_same_errors(
    spark: Any, mixed_server: BusServer, options: dict[str, str], sentence: str | None
) -> None:
    options_of_server = {
        name: value.format(place=place(mixed_server)) for name, value in options.items()
    }
    for kind in FORMATS:
        if sentence is None:
            assert reading(spark.read, kind, mixed_server, **options_of_server).count() == 70_000
            continue
        expected = re.escape(sentence.format(place=place(mixed_server)))
        with pytest.raises(Exception, match=expected) as caught:
            reading(spark.read, kind, mixed_server, **options_of_server).count()
        assert_no_traceback(caught.value)


def assert_no_traceback(error: Exception) -> None:
    for text in ("Traceback", "\tat ", "UnboundLocalError"):
        assert text not in str(error)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"assign": "{}"}, "there is no option assign here; use subscribe"),
        ({"subscribePattern": "none", "subscribe": ""}, "no class at .* matches the option subscr"),
        ({"startingOffsets": '{"1": {"0": 5}}'}, r"as in \{\"127.0.0.1:\d+\": \{\"1\": 5\}\}"),
    ],
)
def test_streams_of_both_sources_report_the_same_errors(
    spark: Any, server: BusServer, options: dict[str, str], sentence: str
) -> None:
    publish_numbers(server, 0, 1)
    for kind in FORMATS:
        texts = {"servers": server.address, "subscribe": "1", **options}
        frame = spark.readStream.format(kind).options(**{k: v for k, v in texts.items() if v})
        query = frame.load().writeStream.format("noop").trigger(availableNow=True).start()
        with pytest.raises(Exception, match=sentence) as caught:
            query.awaitTermination(60)
        assert_no_traceback(caught.value)


def test_sources_report_classes_that_the_user_may_not_read(spark: Any) -> None:
    allowed = PermissionRules((PermissionRule("orders"),))
    user = User("ada", addresses=("127.0.0.1",), permissions=Permissions(allowed, allowed))
    with bus_server(users=Users([user])) as server:
        sentence = (
            f"cannot read from {place(server)}: user 'ada' has no permissions in class 'stock'; "
            "expected a class that the user may subscribe to: check the option subscribe and the "
        )
        for kind in FORMATS:
            with pytest.raises(Exception, match=re.escape(sentence)) as caught:
                reading(spark.read, kind, server, subscribe="stock").count()
            assert_no_traceback(caught.value)
            frame = reading(spark.readStream, kind, server, subscribe="stock")
            query = frame.writeStream.format("noop").trigger(availableNow=True).start()
            with pytest.raises(Exception, match=re.escape(sentence)) as caught:
                query.awaitTermination(60)
            assert_no_traceback(caught.value)


def test_schema_of_the_user_is_refused(spark: Any, server: BusServer) -> None:
    publish_numbers(server, 0, 3)
    for kind in FORMATS:
        fixed = reading(spark.read, kind, server, includeHeaders="true").schema
        frame = reading(spark.read.schema(fixed), kind, server, includeHeaders="true")
        assert frame.count() == 3
        with pytest.raises(Exception, match="a schema is set, but the columns are fix") as caught:
            reading(spark.read.schema("book string"), kind, server).count()
        assert_no_traceback(caught.value)


def test_similar_names_are_those_of_difflib(spark: Any) -> None:
    source = random.Random(29)
    jvm = spark._jvm
    list_of, find = jvm.java.util.List.of, jvm.io.simplebus.client.SimilarNames.find
    for _ in range(200):
        word, *names = ("".join(source.choices("abäS", k=source.randrange(9))) for _ in range(7))
        found = find(word, list_of(*names), 3, 0.5)
        assert list(found) == difflib.get_close_matches(word, names, n=3, cutoff=0.5)


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(Exception, match=r".") as caught:
        action()
    return str(caught.value)


def python_error(options: dict[str, str], *, streaming: bool) -> str:
    """Return the error of the Python source, without the details of a JSON error."""
    error = error_of(partial(source_options, options, streaming=streaming))
    return re.sub(r" \(Expecting .*\)\)", "", error).lower()  # Spark passes names in lower case.


def test_invalid_batch_options_are_reported_in_the_words_of_python(spark: Any) -> None:
    found, expected = [], []
    for options, _ in INVALID_BATCH_OPTIONS:
        frame = spark.read.format("simplebus").options(**options).load()
        found.append(error_of(frame.count).lower())
        expected.append(python_error(options, streaming=False))
    assert found == expected


def test_invalid_stream_options_are_reported_in_the_words_of_python(spark: Any) -> None:
    for options, _ in INVALID_STREAM_OPTIONS:
        frame = spark.readStream.format("simplebus").options(**options).load()
        query = frame.writeStream.format("noop").start()
        assert python_error(options, streaming=True) in error_of(query.awaitTermination).lower()


def run_query(spark: Any, kind: str, server: BusServer, folder: Path, **options: object) -> Any:
    """Run a query with the trigger availableNow that appends to a table. Return it."""
    frame = reading(spark.readStream, kind, server, startingOffsets="earliest", **options)
    writing = frame.select("topic", "offset").writeStream.trigger(availableNow=True)
    query = writing.option("checkpointLocation", str(folder / "checkpoint")).start(
        str(folder / "table"), format="parquet"
    )
    try:
        assert query.awaitTermination(60)
    finally:
        query.stop()
    return query


def logged_offsets(folder: Path) -> list[str]:
    """Return the offsets in a checkpoint, as text, by batch."""
    files = sorted((folder / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda f: int(f.name))
    return [file.read_text().splitlines()[-1] for file in files]


@pytest.mark.parametrize("kinds", [FORMATS, FORMATS[::-1]])
def test_query_continues_with_the_other_source(
    spark: Any, server: BusServer, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    count = 0
    for turn, kind in enumerate((*kinds, kinds[0])):
        publish_numbers(server, count, count + 70)
        publish_numbers(server, count, count + 30, "örders")
        count += 70
        run_query(
            spark, kind, server, tmp_path, subscribe="1,örders", maxOffsetsPerTrigger=60 + turn
        )
    rows = spark.read.parquet(str(tmp_path / "table")).collect()
    expected = [("1", n) for n in range(210)] + [("örders", n) for n in range(90)]
    assert sorted((row.topic, row.offset) for row in rows) == expected
    found = logged_offsets(tmp_path)
    assert all(json.dumps(json.loads(text)) == text for text in found)
    assert len({json.loads(text)["query"]["id"] for text in found}) == 1
    retained = [
        subscription for subscription in server.statistics().subscriptions if subscription.durable
    ]
    assert [(subscription.durable[:6], subscription.floor >= 140) for subscription in retained] == [
        ("spark ", True)
    ]


@pytest.fixture(scope="module")
def shop() -> Iterator[BusServer]:
    """A bus with 40 messages in "orders.eu", 30 in "orders.us", and the last 5 of 20 in "stock"."""
    with bus_server(Settings(keep=Retention(messages=5))) as server:
        publish_numbers(server, 0, 40, "orders.eu")
        publish_numbers(server, 0, 30, "orders.us")
        publish_numbers(server, 0, 20, "stock")
        publish_numbers(server, 0, 3, "dead.orders.eu")
        with simplebus.connect_blocking(server.address) as bus, bus.subscribe("stock") as messages:
            take(messages, 20)
        yield server


FUTURE = 4_000_000_000_000
LOST_STOCK = {
    "subscribe": "stock",
    "startingOffsets": '{{"{place}": {{"stock": 3}}}}',
    "failOnDataLoss": "false",
}
PATTERN = {"subscribePattern": "(orders|dead)[.].*"}
AT_THE_END = {"startingTimestamp": FUTURE, "startingOffsetsByTimestampStrategy": "latest"}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (PATTERN | {"minPartitions": 7}, {"orders.eu": 40, "orders.us": 30}),
        (PATTERN | {"startingTimestamp": 0, "includeHeaders": "true"}, {"orders.eu": 40}),
        (AT_THE_END | {"subscribe": "orders.eu"}, {}),
        (LOST_STOCK, {"stock": 5}),
        (
            {"subscribe": "orders.eu", "endingOffsets": '{{"{place}": {{"orders.eu": 7}}}}'},
            {"orders.eu": 7},
        ),
        ({"subscribe": "orders.eu", "endingTimestamp": 0}, {}),
        ({"subscribe": "orders.eu", "endingTimestamp": FUTURE}, {"orders.eu": 40}),
    ],
)
def test_options_of_batches(
    spark: Any, shop: BusServer, kind: str, options: dict[str, object], counts: dict[str, int]
) -> None:
    options_of_server = {
        name: str(value).format(place=place(shop)) for name, value in options.items()
    }
    frame = spark.read.format(kind).options(servers=shop.address, **options_of_server).load()
    assert frame.rdd.getNumPartitions() >= options.get("minPartitions", 0)
    assert ("headers" in frame.columns) == ("includeHeaders" in options)
    found = {row.topic: row["count"] for row in frame.groupBy("topic").count().collect()}
    assert found.items() >= counts.items()
    assert bool(found) == bool(counts)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("options", "count"),
    [
        (
            PATTERN
            | {"minPartitions": 3, "includeHeaders": "true", "maxOffsetsPerTrigger": 25}
            | {"minOffsetsPerTrigger": 20, "maxTriggerDelay": "10ms", "startingTimestamp": 0},
            70,
        ),
        (AT_THE_END | {"subscribe": "orders.eu"}, 0),
        (LOST_STOCK, 5),
    ],
)
def test_options_of_streams(
    spark: Any, shop: BusServer, tmp_path: Path, kind: str, options: dict[str, object], count: int
) -> None:
    options_of_server = {
        name: str(value).format(place=place(shop)) for name, value in options.items()
    }
    frame = spark.readStream.format(kind).options(servers=shop.address, **options_of_server).load()
    writing = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    query = writing.start()
    try:
        query.processAllAvailable()
        sizes = [
            progress["numInputRows"]
            for progress in query.recentProgress
            if progress["numInputRows"]
        ]
        assert sum(sizes) == count
        assert max(sizes, default=0) <= options.get("maxOffsetsPerTrigger", 70)
    finally:
        query.stop()


def test_pattern_must_match_a_class(spark: Any, shop: BusServer) -> None:
    for kind in FORMATS:
        frame = spark.read.format(kind).options(servers=shop.address, subscribePattern="orders")
        with pytest.raises(Exception, match="matches the option subscribePattern, 'orders'"):
            frame.load().count()


class Order(msgspec.Struct):
    book: str
    count: int | None = None


def test_payloads_become_typed_columns(spark: Any, server: BusServer) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many([b'{"book": "a", "count": 3}', b'{"book": "b"}', b"no JSON"], class_id=1)
    for kind in FORMATS:
        for schema in (Order, "book string, count bigint"):
            frame = parse_json(reading(spark.read, kind, server), schema).orderBy("offset")
            found = [tuple(row) for row in frame.select("data.book", "data.count").collect()]
            assert found == [("a", 3), ("b", None), (None, None)]


def test_progress_reports_lag_and_fetched_bytes(
    spark: Any, server: BusServer, tmp_path: Path
) -> None:
    publish_numbers(server, 0, 1000)
    query = run_query(spark, "simplebus", server, tmp_path, maxOffsetsPerTrigger=400)
    metrics = [
        report["sources"][0]["metrics"] for report in query.recentProgress if report["numInputRows"]
    ]
    name = f"lag {place(server)} 1"
    assert [report[name] for report in metrics] == ["600", "200", "0"]
    fetched = [int(report["fetchedBytes"]) for report in metrics]
    assert 1000 * 13 < fetched[-1] < 100_000
    assert fetched == sorted(fetched)


def test_connections_use_tls_and_credentials(
    spark: Any, credentials_file: Path, tmp_path: Path
) -> None:
    authority = CertificateAuthority(tmp_path)
    pair, client_certificate = authority.issue("localhost"), authority.issue("ada")
    other_authority = CertificateAuthority(tmp_path, "stranger")
    users = Users([User("ada", password="secret"), User("bob", token="t")])
    options = TlsOptions(pair.cert, pair.key, ca=authority.path, verify=True)
    with bus_server(tls=options, users=users) as server:
        access = simplebus.Access(
            token="t",
            ca=str(authority.path),
            cert=str(client_certificate.cert),
            key=str(client_certificate.key),
        )
        with simplebus.connect_blocking(server.address, access=access) as bus:
            bus.publish_many([b"x" * 1000] * 2000, class_id=1)
        common = (
            f'ca = "{authority.path}"\n'
            f'cert = "{client_certificate.cert}"\nkey = "{client_certificate.key}"\n'
        )
        cases = {
            f'user = "ada"\npassword = "secret"\n{common}': "",
            f'token = "t"\n{common}': "",
            f'token = "wrong"\n{common}': "unauthorized: ",
            f'token = "t"\nca = "{other_authority.path}"': "its certificate is not trusted",
        }
        try:
            for text, sentence in cases.items():
                credentials_file.write_text(text)
                frame = reading(spark.read, "simplebus", server)
                if not sentence:
                    assert frame.selectExpr("sum(length(value))").first()[0] == 2_000_000
                    writing = frame.select("value").write.format("simplebus").mode("append")
                    writing.options(servers=server.address, **{"class": "copies"}).save()
                else:
                    with pytest.raises(Exception, match="cannot connect") as caught:
                        frame.count()
                    assert sentence in str(caught.value)
            with simplebus.connect_blocking(server.address, access=access) as bus:
                assert len(bus.fetch("copies")) == 4000
        finally:
            credentials_file.write_text("")


def test_lost_messages_end_the_query_or_are_skipped(spark: Any) -> None:
    with bus_server(Settings(keep=Retention(messages=5))) as server:
        publish_numbers(server, 0, 20)
        with simplebus.connect_blocking(server.address) as bus, bus.subscribe(1) as messages:
            take(messages, 20)
        options = {"startingOffsets": json.dumps({place(server): {"1": 3}})}
        with pytest.raises(Exception, match=r"messages 3 to 14 of class 1 at .* are lost: the cla"):
            reading(spark.read, "simplebus", server, **options).count()
        rows = reading(spark.read, "simplebus", server, failOnDataLoss="false", **options)
        assert [row.offset for row in rows.orderBy("offset").collect()] == list(range(15, 20))
