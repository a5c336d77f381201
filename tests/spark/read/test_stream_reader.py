"""Stream reader, called in Spark's order: no lost or duplicate rows, and no unneeded retention."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from typing import Any

import pytest

import simplebus
from simplebus.core.errors import BusConnectionError
from simplebus.core.settings import Retention, Settings
from simplebus.spark.read.offsets import OffsetError
from simplebus.spark.read.retention_durable import QueryRetention
from simplebus.testing.server import BusServer, bus_server, until
from tests.spark.bus_messages import consume_messages
from tests.spark.simulated_query import POINTS, SimulatedQuery, call_once_at


def publish(server: BusServer, count: int, class_id: int | str = 1) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many([b"x"] * count, class_id=class_id)


def place(server: BusServer) -> str:
    return server.address.removeprefix("simplebus://")


def query(server: BusServer, **options: object) -> SimulatedQuery:
    return SimulatedQuery(**{"servers": server.address, "subscribe": 1, **options})


def run(stream_query: SimulatedQuery, **options: object) -> list[int]:
    """Run a query with further options until it has caught up. Returns the offsets of new rows."""
    return [offset for _, _, offset in run_all(stream_query, **options)]


def run_all(stream_query: SimulatedQuery, **options: object) -> list[tuple[str, str, int]]:
    """Run the query. Returns server, class and offset of its rows, batch by batch."""
    before = len(stream_query.rows)
    usual, stream_query.options = (
        stream_query.options,
        stream_query.options | {n: str(v) for n, v in options.items()},
    )
    try:
        stream_query.catch_up()
    finally:
        stream_query.stop()
        stream_query.options = usual
    return sorted(
        (row["server"], row["topic"], row["offset"]) for row in stream_query.rows[before:]
    )


def query_identity(stream_query: SimulatedQuery) -> dict[str, Any]:
    """Return the query identity recorded in the last offsets of the query."""
    found: dict[str, Any] = json.loads(stream_query.ends[-1])["query"]
    return found


class CrashError(Exception):
    """Simulated crash of the driver."""


def crash_at(stream_query: SimulatedQuery, point: str) -> None:
    """Crash a running query in its next batch."""

    with pytest.raises(CrashError):
        stream_query.run(call_once_at(point, crash))
    stream_query.die()


def crash() -> None:
    raise CrashError


def durables(server: BusServer, class_id: int = 1) -> dict[str, int]:
    """Return the floor of each durable subscription of a class."""
    return {s.durable: s.floor for s in server.statistics(class_id).subscriptions if s.durable}


def test_query_durable_name_is_in_its_checkpoint(
    server: BusServer,
) -> None:
    publish(server, 5)
    first_query, second_query = query(server, startingOffsets="earliest"), query(server)
    assert run(first_query) == [0, 1, 2, 3, 4]
    assert run(second_query) == []
    identity = query_identity(first_query)
    assert durables(server) == {
        identity["durable"]: 5,
        query_identity(second_query)["durable"]: 5,
    }
    publish(server, 3)
    # The first messages were stored for the first subscription only.
    until(lambda: server.statistics().ring.floor == 5)
    assert run(first_query) == run(second_query) == [5, 6, 7]
    assert query_identity(first_query) == identity
    assert set(durables(server).values()) == {8}
    assert server.statistics().ring.floor == 8


@pytest.mark.parametrize("crash", ["ended", "planned", "read"])
@pytest.mark.parametrize("starting", ["latest", "earliest"])
@pytest.mark.parametrize("durable", [None, "mine"])
def test_repeated_first_batch_begins_at_the_same_offset(
    server: BusServer, crash: str, starting: str, durable: str | None
) -> None:
    publish(server, 5)
    named = {} if durable is None else {"durable": durable}
    stream_query = query(server, startingOffsets=starting, **named)
    assert stream_query.reader  # Determines the start offset.
    publish(server, 4)
    crash_at(stream_query, crash)
    if starting == "latest":  # Otherwise the query, the first subscription, receives them.
        consume_messages(server, 5)
    publish(server, 2)
    assert run(stream_query) == list(range(5 if starting == "latest" else 0, 11))
    assert len(durables(server)) == 1


def test_empty_query_keeps_its_start_offset(server: BusServer) -> None:
    publish(server, 5)
    stream_query = query(server)
    assert run(stream_query) == []
    publish(server, 2)
    consume_messages(server, 5)
    assert run(stream_query) == [5, 6]
    assert run(stream_query) == []
    assert len(stream_query.ends) == 2  # Reports the same end once.


def test_query_without_durable_retains_nothing(server: BusServer) -> None:
    publish(server, 5)
    stream_query = query(server, startingOffsets="earliest", durable="None")
    assert len(run(stream_query)) == 5
    until(lambda: not server.statistics().subscriptions)
    assert "durable" not in query_identity(stream_query)
    publish(server, 2)
    assert run(stream_query) == [5, 6]


def test_durable_of_abandoned_query_expires(
    server: BusServer,
) -> None:
    publish(server, 5)
    for options, seconds in (({}, 7 * 86_400), ({"durableIdle": "90s"}, 90)):
        stream_query = query(server, **options)
        run(stream_query)
        name = query_identity(stream_query)["durable"]
        [idle_seconds] = server.ask(
            lambda up, name=name: [
                position.idle_seconds
                for position in up.server.broker.classes[1].positions
                if position.durable == name
            ]
        )
        assert idle_seconds == seconds


def test_new_durable_name_replaces_the_previous_one(server: BusServer) -> None:
    publish(server, 5)
    stream_query = query(server, startingOffsets="earliest")
    run(stream_query)
    assert [name[:6] for name in durables(server)] == ["spark "]
    run(stream_query, durable="archive")
    assert durables(server) == {"archive": 5}
    run(stream_query, durable="none")
    assert durables(server) == {}
    run(stream_query)
    assert durables(server) == {query_identity(stream_query)["durable"]: 5}


def test_durable_of_removed_class_is_forgotten(server: BusServer) -> None:
    with bus_server() as stopped_server:
        for class_id in (1, 2):
            publish(server, 5, class_id)
            publish(stopped_server, 5, class_id)
        addresses = f"{server.address},{stopped_server.address}"
        stream_query = query(server, servers=addresses, subscribe="1,2", startingOffsets="earliest")
        assert len(run(stream_query)) == 20
        publish(server, 1)
        found = run_all(stream_query, servers=server.address, subscribe="1")
        assert found == [(place(server), "1", 5)]
        assert durables(server, 1) == {query_identity(stream_query)["durable"]: 6}
        assert not durables(server, 2)
        assert not durables(stopped_server, 1)
        assert not durables(stopped_server, 2)
        offsets = json.loads(stream_query.ends[-1])
        assert set(offsets) == {place(server), "query"}
        assert set(offsets[place(server)]) == {"1", ""}


def test_added_class_begins_at_earliest(server: BusServer) -> None:
    publish(server, 3)
    stream_query = query(server)
    assert run(stream_query) == []
    with bus_server() as second_server:
        publish(server, 2, "orders")
        publish(second_server, 4)
        addresses = f"{server.address},{second_server.address}"
        found = run_all(stream_query, servers=addresses, subscribe="1,orders")
        assert sorted(found) == sorted(
            [(place(server), "orders", n) for n in range(2)]
            + [(place(second_server), "1", n) for n in range(4)]
        )


def test_new_class_is_read_from_its_first_message(server: BusServer) -> None:
    stream_query = query(server, subscribe="orders")
    stream_query.catch_up()
    publish(server, 3, "orders")
    assert run(stream_query) == [0, 1, 2]


def test_checkpoint_without_name_is_resumed(server: BusServer) -> None:
    publish(server, 5)
    stream_query = query(server, startingOffsets="earliest")
    run(stream_query)
    old = json.loads(stream_query.ends[-1])
    old.pop("query")
    stream_query.ends[-1] = json.dumps(old)
    publish(server, 2)
    crash_at(stream_query, "planned")
    assert run(stream_query) == [5, 6]
    assert query_identity(stream_query)["durable"] in durables(server)


# Start -------------------------------------------------------------------------------------------


def test_query_begins_at_a_time(server: BusServer) -> None:
    publish(server, 3)
    stream_query = query(server, startingTimestamp=1000, startingOffsets="latest")
    assert run(stream_query) == [0, 1, 2]
    late = 4_000_000_000_000
    times_json = json.dumps({place(server): {"1": late}})
    for options in ({"startingTimestamp": late}, {"startingOffsetsByTimestamp": times_json}):
        with pytest.raises(
            OffsetError, match=rf"is {late} \(2096-.*\) for class 1 at .*stores no message acc"
        ):
            run(query(server, **options))
        late_too = query(server, **options, startingOffsetsByTimestampStrategy="latest")
        assert run(late_too) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"startingOffsets": {"1": 9}}, "startingOffsets is 9 for class 1 at .*, beyond its end"),
        ({"startingOffsets": {"2": 0}}, "class 2 at .*, which is not subscribed to"),
        ({"startingOffsetsByTimestamp": {"2": 0}}, "class 2 at .*, which is not subscribed to"),
        ({"startingOffsets": {"orders": 0, "1": 0}}, "class orders at"),
    ],
)
def test_invalid_start_is_reported(
    server: BusServer, options: dict[str, dict[str, int]], sentence: str
) -> None:
    publish(server, 5)
    encoded_options = {name: json.dumps({place(server): value}) for name, value in options.items()}
    with pytest.raises(OffsetError, match=sentence):
        run(query(server, **encoded_options))
    stream_query = query(server, startingOffsets="earliest")
    run(stream_query)
    publish(server, 1)
    assert run(stream_query, **encoded_options) == [5]  # A started query ignores its start options.


def test_missing_class_fails_and_is_not_created(server: BusServer) -> None:
    with pytest.raises(ValueError, match="no Connect has named class 1"):
        run(query(server))
    assert server.ask(lambda up: 1 not in up.server.broker.classes)


@pytest.mark.parametrize("strict", [True, False])
def test_offsets_below_first_message_are_a_loss(strict: bool) -> None:
    with bus_server(Settings(keep=Retention(messages=2))) as server:
        publish(server, 5)
        consume_messages(server, 5)
        starting_offsets = json.dumps({place(server): {"1": 1}})
        stream_query = query(server, startingOffsets=starting_offsets, failOnDataLoss=strict)
        if strict:
            with pytest.raises(Exception, match=r"messages 1 to 2 of class 1 at .* are lost: the"):
                run(stream_query)
        else:
            assert run(stream_query) == [3, 4]


def test_batch_waits_for_minimum_or_timeout(
    server: BusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("simplebus.spark.read.stream.monotonic", lambda: now[0])
    publish(server, 2)
    stream_query = query(
        server, startingOffsets="earliest", minOffsetsPerTrigger=3, maxTriggerDelay="90s"
    )
    due = []
    for count, seconds in ((0, 0), (2, 0), (1, 0), (1, 89), (0, 1), (1, 0)):
        publish(server, count)
        now[0] += seconds
        due.append(stream_query.run() is not None)
    assert due == [True, False, True, False, True, False]
    assert [row["offset"] for row in stream_query.rows] == list(range(6))
    stream_query.reader.prepareForTriggerAvailableNow()
    assert run(stream_query) == [6]  # An ending query does not wait.


@pytest.mark.parametrize("seed", range(3))
def test_each_message_is_read_once_under_faults(seed: int) -> None:
    chance = random.Random(seed)
    with bus_server() as server:
        publish(server, 3)
        publish(server, 3, 2)
        starting = chance.choice(["latest", "earliest"])
        stream_query = query(
            server, subscribe="1,2", startingOffsets=starting, maxOffsetsPerTrigger=4, timeout=60
        )
        # The first start offset is valid if a batch is planned with it.
        assert stream_query.reader
        publish(server, 1)
        heads = Counter({"1": 4, "2": 3})
        with pytest.raises(CrashError):
            stream_query.run(call_once_at("ended", crash))
        for _ in range(40):
            match chance.choice(["publish", "run", "stop", "hang up", *POINTS]):
                case "publish":
                    class_id = chance.choice([1, 2])
                    publish(server, count := chance.randint(1, 5), class_id)
                    heads[str(class_id)] += count
                case "run":
                    stream_query.run()
                case "stop":
                    stream_query.stop()
                case "hang up":
                    server.hang_up()
                case point:
                    with contextlib.suppress(CrashError):
                        stream_query.run(call_once_at(point, crash))
                    stream_query.die()
        run(stream_query)
        first = 0 if starting == "earliest" else 3
        received = sorted((row["topic"], row["offset"]) for row in stream_query.rows)
        assert received == [(name, n) for name in sorted(heads) for n in range(first, heads[name])]
        for class_id, head in heads.items():
            assert list(durables(server, int(class_id)).values()) == [head]


def test_log_of_failing_releases_is_limited(
    server: BusServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise BusConnectionError("the bus is away")

    publish(server, 3)
    stream_query = query(server, startingOffsets="earliest", failOnDataLoss="false")
    stream_query.run()
    monkeypatch.setattr(QueryRetention, "retain_from", fail)
    caplog.clear()
    for _ in range(100):
        stream_query.reader.commit(json.loads(stream_query.ends[-1]))
    stream_query.stop()
    releases = [each for each in caplog.records if vars(each)["event"] == "durable.release_failed"]
    assert len(releases) == 8
