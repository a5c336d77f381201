"""Tests of failures around a query: every message arrives once, or its loss is reported.

The query is driven in Spark's order of calls. `test_cluster` kills a real Spark driver.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import simplebus
from simplebus.core.errors import BusConnectionError
from simplebus.core.limits import Limits
from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import FullPolicy, Settings
from simplebus.spark.options import SinkOptions
from simplebus.spark.read.planner import DataLossError
from simplebus.spark.sink import BusResetError, TaskWriteResult, write_task
from simplebus.testing.server import BusServer, bus_server, until
from tests.client.faulty_server import FaultyProxy, faulty_proxy
from tests.spark.bus_messages import stored_payloads
from tests.spark.simulated_query import POINTS, SimulatedQuery, call_once_at

OLD = [b"old %d " % n * 150 for n in range(2500)]
"""More than one answer of a bus can carry."""
NEW = [b"new %d" % n for n in range(300)]


def publish(server: BusServer, payloads: list[bytes], class_id: int | str = 1) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many(payloads, class_id=class_id)


@pytest.fixture
def proxy(server: BusServer) -> Iterator[FaultyProxy]:
    """Address of a query; the server behind it can be replaced."""
    with faulty_proxy(server.address) as found:
        yield found


@contextlib.contextmanager
def running_query(proxy: FaultyProxy, **options: object) -> Iterator[SimulatedQuery]:
    more = {"startingOffsets": "earliest", "timeout": 10, **options}
    query = SimulatedQuery(servers=proxy.address, **{"subscribe": "1", **more})
    try:
        yield query
    finally:
        query.stop()


@pytest.mark.parametrize("point", POINTS)
def test_query_survives_a_network_outage(server: BusServer, proxy: FaultyProxy, point: str) -> None:
    def cut_off() -> None:
        proxy.is_refusing = True
        proxy.disconnect_all()
        opening.submit(open_again)

    def open_again() -> None:
        until(lambda: proxy.refused_count > 0)
        proxy.is_refusing = False

    publish(server, OLD)
    with ThreadPoolExecutor() as opening, running_query(proxy, maxOffsetsPerTrigger=1500) as query:
        query.run(call_once_at(point, cut_off))
        publish(server, NEW)
        query.catch_up()
    assert query.counts() == Counter(OLD + NEW)
    assert proxy.refused_count


@pytest.mark.parametrize("point", POINTS)
def test_killed_driver_repeats_only_unfinished_batches(
    server: BusServer, proxy: FaultyProxy, point: str
) -> None:
    class DeadError(Exception):
        pass

    def die() -> None:
        query.die()
        raise DeadError

    publish(server, OLD)
    with running_query(proxy, maxOffsetsPerTrigger=1500) as query:
        with pytest.raises(DeadError):
            query.run(call_once_at(point, die))
        publish(server, NEW)
        new_rows = query.run()
        assert new_rows is not None
        assert [row["offset"] for row in new_rows] == list(
            range(1500, 2800) if point == "done" else range(1500)
        )
        query.catch_up()
    assert query.counts() == Counter(OLD + NEW)


@contextlib.contextmanager
def another_bus(proxy: FaultyProxy) -> Iterator[BusServer]:
    """Replace the server by an empty one at the same address."""
    with bus_server() as empty_server:
        proxy.set_target(empty_server.address)
        proxy.disconnect_all()
        publish(empty_server, NEW)
        yield empty_server


def test_loss_of_unsynced_messages_is_reported(proxy: FaultyProxy, tmp_path: Path) -> None:
    data_dir, cut = tmp_path / "kept", tmp_path / "cut"
    with bus_server(data_dir=data_dir, durability=Durability.OS) as before:
        proxy.set_target(before.address)
        publish(before, NEW[:100])
        shutil.copytree(data_dir, cut)  # The disk content at the power failure.
        publish(before, NEW[100:])
        with running_query(proxy) as query, running_query(proxy, failOnDataLoss="false") as loose:
            assert query.reader
            assert loose.reader  # Started before `query` releases messages.
            query.catch_up()
            loose.catch_up()
            with bus_server(data_dir=cut, durability=Durability.OS) as after:
                proxy.set_target(after.address)
                proxy.disconnect_all()
                pattern = (
                    r"messages 100 to 299 of class 1 at .*: they were read, and the bus has lost"
                )
                for _ in range(2):
                    with pytest.raises(DataLossError, match=pattern):
                        query.run()
                    query.die()
                assert not loose.run()
                publish(after, OLD[:10])
                loose.catch_up()
    assert query.counts() == Counter(NEW)
    assert loose.counts() == Counter(NEW + OLD[:10])


@pytest.mark.parametrize("point", POINTS)
def test_lost_messages_end_the_query(server: BusServer, proxy: FaultyProxy, point: str) -> None:
    publish(server, OLD)
    with contextlib.ExitStack() as stack, running_query(proxy) as query:
        with pytest.raises(DataLossError) as describe_losses:
            query.catch_up(call_once_at(point, lambda: stack.enter_context(another_bus(proxy))))
        assert re.search(
            rf"messages \d+ (to 2499|and on) of class 1 at {proxy.address} are lost: .*was reset",
            str(describe_losses.value),
        )
        query.die()
        with pytest.raises(DataLossError, match=r"class 1 at .* are lost"):
            query.run()  # The loss is reported again.


@pytest.mark.parametrize("point", POINTS)
def test_lost_messages_are_skipped_if_allowed(
    server: BusServer, proxy: FaultyProxy, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(server, OLD)
    with contextlib.ExitStack() as stack, running_query(proxy, failOnDataLoss="false") as query:
        query.run(call_once_at(point, lambda: stack.enter_context(another_bus(proxy))))
        query.catch_up()
        assert query.run() is None
    counts = query.counts()
    assert set(counts.values()) == {1}
    assert set(NEW) <= set(counts)
    received_count = len(set(counts) & set(OLD))
    assert received_count == (len(OLD) if point in ("read", "done") else received_count)
    first = received_count if point == "reading" else len(OLD) if point in ("read", "done") else 0
    last = "and on" if point in ("read", "done") else "to 2499"
    assert f"messages {first} {last} of class 1 at {proxy.address} are lost" in caplog.text


SMALL = Settings(limits=Limits(class_messages=100), full_policy=FullPolicy.DROP_OLDEST)
"""A small class that drops its oldest messages even if a subscription needs them."""


@pytest.mark.parametrize(
    ("point", "first", "last"),
    [("ended", 0, 59), ("planned", 0, 59), ("done", 60, 139)],
)
def test_dropped_messages_are_the_only_loss(
    point: str, first: int, last: int, caplog: pytest.LogCaptureFixture
) -> None:
    loss = f"messages {first} to {last} of class 1 at .* are lost: the class holds messages from"
    for allowed in ("true", "false"):
        with (
            bus_server(SMALL) as server,
            faulty_proxy(server.address) as proxy,
            running_query(proxy, failOnDataLoss=allowed) as query,
        ):
            publish(server, OLD[:60])
            more = OLD[60 : 160 if point != "done" else 240]
            run_over = call_once_at(point, lambda up=server, payloads=more: publish(up, payloads))
            if allowed == "true":
                with pytest.raises(DataLossError, match=loss):
                    query.catch_up(run_over)
            else:
                query.run(run_over)
                query.catch_up()
                assert re.search(loss, caplog.text)
                seen = {row["offset"] for row in query.rows}
                whole = range(60 + len(more))
                assert [n for n in whole if n not in seen] == [*range(first, last + 1)]
                assert len(query.rows) == len(seen)


def test_checkpoint_below_the_first_stored_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with bus_server(SMALL) as server, faulty_proxy(server.address) as proxy:
        publish(server, OLD[:50])
        with running_query(proxy) as query:
            query.run()
            query.die()
            publish(server, OLD[50:250])
            with pytest.raises(DataLossError, match="messages 50 to 149 of class 1 at"):
                query.run()
            query.die()
            query.options["failOnDataLoss"] = "false"
            query.run()
            query.options["failOnDataLoss"] = "true"
            query.die()
            publish(server, NEW[:10])
            query.run()  # An allowed loss is reported once only.
        assert [row["value"] for row in query.rows] == OLD[:50] + OLD[150:250] + NEW[:10]
        assert "messages 50 to 149 of class 1 at" in caplog.text


def test_new_class_is_read_from_its_first_message(server: BusServer, proxy: FaultyProxy) -> None:
    publish(server, NEW[:10])
    with running_query(proxy, subscribe="1,later") as query:
        query.run()
        publish(server, NEW[10:20], "later")
        query.run()
        query.die()
        query.options["subscribe"] = "1,later,latest"
        publish(server, NEW[20:30], "latest")
        query.run()
    assert [row["value"] for row in query.rows] == NEW[:30]
    assert [row["topic"] for row in query.rows] == ["1"] * 10 + ["later"] * 10 + ["latest"] * 10


def run_concurrently(*attempts: Callable[[], Any]) -> list[Any]:
    """Run the attempts concurrently and return the result or the exception of each."""
    with ThreadPoolExecutor(len(attempts)) as pool:
        futures = [pool.submit(attempt) for attempt in attempts]
        return [future.exception() or future.result() for future in futures]


def test_task_attempts_read_the_same(server: BusServer, proxy: FaultyProxy) -> None:
    publish(server, OLD)
    with running_query(proxy, minPartitions=2) as query:
        reader = query.reader
        start = reader.initialOffset()
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        tasks = pickle.loads(pickle.dumps(list(reader.partitions(start, end))))
        for task in tasks:
            first, second = run_concurrently(
                *[lambda t=task: pa.Table.from_batches(reader.read(t))] * 2
            )
            assert first.equals(second)
            assert first.num_rows == len(OLD) // 2


def rows(payloads: list[bytes], piece: int) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(payloads), piece):
        yield pa.RecordBatch.from_pydict({"value": payloads[first : first + piece]})


def test_task_attempts_publish_once(server: BusServer) -> None:
    options = SinkOptions(server.address.removeprefix("simplebus://"), class_="1", timeout=60)
    for trial in range(5):
        name, expected = f"task {trial}", stored_payloads(server) + NEW
        results = run_concurrently(
            *[lambda n=n, name=name: write_task(rows(NEW, 7 + n), options, name) for n in range(3)]
        )
        assert any(isinstance(result, TaskWriteResult) for result in results)
        for result in results:
            assert isinstance(result, (TaskWriteResult, BusConnectionError))
        assert stored_payloads(server) == expected


def test_network_outage_does_not_duplicate_writes(server: BusServer, proxy: FaultyProxy) -> None:
    def cut() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(rows(OLD, 100)):
            yield batch
            if number % 6 == 3:
                proxy.dropped_direction = ("to_server", "to_client")[number % 12 == 3]
            if number % 6 == 5:
                proxy.disconnect_all()

    options = SinkOptions(proxy.address, class_="1", timeout=60)
    assert write_task(cut(), options, "task").rows == len(OLD)
    assert stored_payloads(server) == OLD


def test_attempt_that_reconnects_after_a_later_one_publishes_nothing(server: BusServer) -> None:
    """The later attempt has stored rows that the earlier one still has to publish."""
    with faulty_proxy(server.address) as proxy:
        options = SinkOptions(proxy.address, class_="1", timeout=60)

        def interrupted() -> Iterator[pa.RecordBatch]:
            for number, batch in enumerate(rows(OLD, 100)):
                yield batch
                if number == 1:
                    proxy.dropped_direction = "to_server"
                if number == 2:
                    proxy.disconnect_all()
                    later = SinkOptions(server.address, class_="1", timeout=60)
                    assert write_task(rows(OLD, 70), later, "task").rows == len(OLD)

        with pytest.raises(
            BusConnectionError, match="taken_over: the server expects message 2500, "
        ):
            write_task(interrupted(), options, "task")
    assert stored_payloads(server) == OLD


def test_lost_writes_of_a_task_are_published_again() -> None:
    settings = Settings(limits=Limits(credit_bytes=50_000))  # Most rows are confirmed early.
    with (
        bus_server(settings) as server,
        bus_server(settings) as empty_server,
        faulty_proxy(server.address) as proxy,
    ):
        options = SinkOptions(proxy.address, class_="1", timeout=60)

        def interrupted() -> Iterator[pa.RecordBatch]:
            for number, batch in enumerate(rows(OLD, 100)):
                yield batch
                if number == 15:
                    proxy.set_target(empty_server.address)
                    proxy.disconnect_all()

        with pytest.raises(BusResetError, match=f"the bus at {proxy.address} was reset"):
            write_task(interrupted(), options, "task")
        half = stored_payloads(empty_server)
        assert half == OLD[-len(half) :]
        assert len(half) < len(OLD)
        assert write_task(rows(OLD, 100), options, "task") == TaskWriteResult(len(OLD), 0)
        assert stored_payloads(empty_server) == half + OLD
