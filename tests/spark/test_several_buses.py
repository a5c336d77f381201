"""A query on several buses: an unreachable bus ends the query, or does not delay other buses."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

import simplebus
from simplebus.core.errors import BusConnectionError
from simplebus.spark.options import source_options
from simplebus.spark.read import bus_reader as buses
from simplebus.spark.read import stream
from simplebus.spark.read.offsets import OffsetError
from simplebus.spark.read.planner import MessageRange
from simplebus.spark.read.tasks import SparkPartition, read_partition
from simplebus.testing.server import BusServer, bus_server
from tests.client.faulty_server import FaultyProxy, faulty_proxy, silent_listener
from tests.spark.simulated_query import SimulatedQuery, call_once_at


@pytest.fixture
def remote_server() -> Iterator[BusServer]:
    with bus_server() as up:
        yield up


@pytest.fixture
def proxy(remote_server: BusServer) -> Iterator[FaultyProxy]:
    """Address of the remote server, which can be blocked."""
    with faulty_proxy(remote_server.address) as found:
        yield found


@pytest.fixture
def query(
    server: BusServer, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimulatedQuery]:
    """Yield a query over two buses that hold 3 messages of class 1 each."""
    monkeypatch.setattr(stream, "_UNREACHABLE_RETRY_SECONDS", 0.0)
    for address in (server.address, proxy.address):
        publish(address, 3)
    found = SimulatedQuery(
        servers=f"{server.address},{proxy.address}",
        subscribe="1",
        startingOffsets="earliest",
        timeout=2,
    )
    yield found
    found.stop()


def publish(address: str, count: int) -> None:
    with simplebus.connect_blocking(address) as bus:
        bus.publish_many([b"x"] * count, class_id=1)


def place(address: str) -> str:
    return address.removeprefix("simplebus://")


def block_connections(proxy: FaultyProxy) -> None:
    proxy.is_refusing = True
    proxy.disconnect_all()


def new_rows(query: SimulatedQuery) -> list[tuple[str, int]]:
    """Run the query until it has caught up and return the (server, offset) pairs of new rows."""
    before = len(query.rows)
    query.catch_up()
    return sorted((row["server"], row["offset"]) for row in query.rows[before:])


def test_several_servers_form_one_stream(
    server: BusServer, proxy: FaultyProxy, query: SimulatedQuery
) -> None:
    places = [place(server.address), place(proxy.address)]
    assert new_rows(query) == sorted((place, n) for place in places for n in range(3))
    assert query.reader.reportLatestOffset() == {
        name: found for name, found in json.loads(query.ends[-1]).items() if name != "query"
    }


@pytest.mark.parametrize("restart", [True, False])
def test_unreachable_server_ends_the_query(
    proxy: FaultyProxy, query: SimulatedQuery, restart: bool
) -> None:
    query.catch_up()
    if restart:
        query.stop()
    block_connections(proxy)
    with pytest.raises(BusConnectionError, match=place(proxy.address)):
        query.run()
    query.stop()
    proxy.is_refusing = False
    assert new_rows(query) == []


@pytest.mark.parametrize("restart", [True, False])
def test_unreachable_server_is_skipped_and_resumed(
    server: BusServer,
    remote_server: BusServer,
    proxy: FaultyProxy,
    query: SimulatedQuery,
    restart: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    query.options["failOnDataLoss"] = "false"
    query.catch_up()
    before = json.loads(query.ends[-1])[place(proxy.address)]
    if restart:
        query.stop()
    block_connections(proxy)
    publish(server.address, 2)
    publish(remote_server.address, 2)
    with caplog.at_level(logging.WARNING):
        assert new_rows(query) == [(place(server.address), 3), (place(server.address), 4)]
    assert f"skipped unreachable bus {place(proxy.address)}: " in caplog.text
    assert json.loads(query.ends[-1])[place(proxy.address)] == before
    assert {s.floor for s in remote_server.statistics().subscriptions if s.durable} == {3}
    proxy.is_refusing = False
    assert new_rows(query) == [(place(proxy.address), 3), (place(proxy.address), 4)]


def test_skipped_server_is_polled_rarely(
    proxy: FaultyProxy, query: SimulatedQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(stream, "monotonic", lambda: now[0])
    monkeypatch.setattr(stream, "_UNREACHABLE_RETRY_SECONDS", 5.0)
    query.options["failOnDataLoss"] = "false"
    query.catch_up()
    query.stop()
    block_connections(proxy)
    tried = []
    for seconds in (0, 0, 4, 1):
        now[0] += seconds
        before = proxy.refused_count
        query.run()
        tried.append(proxy.refused_count > before)
    assert tried == [True, False, False, True]


@pytest.mark.parametrize("strict", [True, False])
def test_query_starts_with_all_servers(
    proxy: FaultyProxy, query: SimulatedQuery, strict: bool
) -> None:
    query.options["failOnDataLoss"] = str(strict)
    block_connections(proxy)
    with pytest.raises(BusConnectionError, match=place(proxy.address)):
        query.run()


def test_silent_server_does_not_delay_the_start(
    server: BusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buses, "_CONNECT_SECONDS", 0.2)
    with silent_listener() as deaf:
        query = SimulatedQuery(
            servers=f"{server.address},{deaf.address}", subscribe="1", timeout=3600
        )
        sentence = f"{deaf.address}, but no answer to the Connect frame came within 0.2 s"
        publish(server.address, 1)
        with pytest.raises(BusConnectionError, match=sentence):
            query.run()
        query.stop()


def test_server_lost_in_a_batch_is_retried_and_named(
    proxy: FaultyProxy, query: SimulatedQuery, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        BusConnectionError,
        match=f"messages 0 to 2 of class 1 at {place(proxy.address)} could not be read completely",
    ):
        query.run(call_once_at("planned", lambda: block_connections(proxy)))
    message_range = MessageRange(place(proxy.address), "", "1", 0, 3)
    options = {**query.options, "failOnDataLoss": "false"}
    task = SparkPartition(message_range, 1, source_options(options, streaming=True))
    with caplog.at_level(logging.WARNING):
        assert list(read_partition(task)) == []
    assert (
        f"skipped 3 messages: messages 0 to 2 of class 1 at {place(proxy.address)} are lost"
        in caplog.text
    )
    query.stop()
    proxy.is_refusing = False
    query.catch_up()
    assert len(query.rows) == 6


def test_server_with_two_addresses_is_rejected(server: BusServer) -> None:
    address = server.address.removeprefix("simplebus://")
    second_address = address.replace("127.0.0.1", "localhost")
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish(b"x", class_id=1)
    simulated_query = SimulatedQuery(
        servers=f"{address},{second_address}", subscribe=1, startingOffsets="earliest"
    )
    with pytest.raises(
        OffsetError, match=f"servers has {address} and {second_address}, which are the same bus"
    ):
        simulated_query.run()
    simulated_query.stop()
