"""A server moves to a NATS server where JetStream answers, and stays if JetStream answers
nowhere.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import simplebus
from simplebus.core.errors import BusConnectionError
from simplebus.jetstream.cluster import failover
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsAddress, NatsConnection
from tests.jetstream.partitioned_cluster import PartitionedCluster, partitioned_cluster
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    address,
    cluster_of,
    options,
    stateless_server,
    until,
)

ELSEWHERE = NatsAddress("elsewhere")


class FakeLink:
    """Link to a NATS server whose JetStream API answers or fails."""

    def __init__(self) -> None:
        self.core = self
        self.is_ready = True
        self.connection_count = 1
        self.server = "here:4222"
        self.error: Exception | None = None
        self.is_busy = False
        self.request_times: list[float] = []
        self.switches: list[tuple[float, NatsAddress]] = []

    def send_ping(self) -> int:
        return 1

    def is_ping_answered(self, number: int) -> bool:
        return not self.is_busy

    async def api_request(self, subject: str, *, seconds: float) -> dict[str, Any]:
        self.request_times.append(trio.current_time())
        if self.error is not None:
            raise self.error
        return {}

    def switch_to(self, server: NatsAddress, reason: str) -> None:
        self.switches.append((trio.current_time(), server))
        self.connection_count += 1


class FailoverCase:
    """Observed link, and the server on which JetStream answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link = FakeLink()
        self.answering_server: NatsAddress | None = None
        self.sign_count = 0
        self.search_times: list[float] = []
        monkeypatch.setattr(failover, "_find_answering_server", self._find_server)

    async def _find_server(self, *_: object) -> NatsAddress | None:
        self.search_times.append(trio.current_time())
        return self.answering_server

    async def run(self, seconds: float) -> None:
        """Observe the connection for a number of seconds."""
        with trio.move_on_after(seconds):
            await failover.follow_jetstream(self.link, options("a"), lambda: self.sign_count)  # type: ignore[arg-type]


UNANSWERED = [
    BusConnectionError("it was not answered"),
    JetStreamError(10008, "JetStream system temporarily unavailable"),
    JetStreamError(503, "nobody answers"),
]


@pytest.mark.parametrize("error", UNANSWERED)
async def test_moves_to_server_where_jetstream_answers(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    case = FailoverCase(monkeypatch)
    await case.run(100.0)
    assert not case.search_times
    case.link.error, case.answering_server = error, ELSEWHERE
    started_at = trio.current_time()
    await case.run(2 * failover.SILENCE_SECONDS + 1)
    (switch,) = case.link.switches
    assert switch[0] - started_at <= failover.SILENCE_SECONDS + 3 * failover.CHECK_SECONDS
    assert switch[1] is ELSEWHERE


@pytest.mark.parametrize("error", UNANSWERED)
async def test_searches_with_backoff_and_logs_once(
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    case = FailoverCase(monkeypatch)
    case.link.error = error
    await case.run(3600.0)
    assert 50 < len(case.search_times) < 70
    assert len(case.link.request_times) < 200
    assert not case.link.switches
    assert [record.message for record in caplog.records] == [
        "JetStream has not answered for 15 s at the NATS server here:4222, nor at any other known "
        "server; still searching"
    ]


async def test_activity_counts_as_answer(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FailoverCase(monkeypatch)
    case.link.error = UNANSWERED[0]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(case.run, 100.0)
        for _ in range(25):
            await trio.sleep(4.0)
            case.sign_count += 1
    assert not case.search_times


async def test_stays_on_slow_connection(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stay connected while a ping is unanswered: the API request may not have arrived yet."""
    case = FailoverCase(monkeypatch)
    case.link.error, case.link.is_busy = UNANSWERED[0], True
    await case.run(100.0)
    assert not case.search_times


async def test_new_connection_gets_full_grace_period(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FailoverCase(monkeypatch)
    case.link.error, case.answering_server = UNANSWERED[0], ELSEWHERE
    await case.run(1000.0)
    times = [time for time, _ in case.link.switches]
    assert min(b - a for a, b in pairwise(times)) >= failover.SILENCE_SECONDS


@pytest.fixture(name="soon")
def _in_order_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client tries the first server first."""
    monkeypatch.setattr("simplebus.net.nats_connection.random.shuffle", lambda servers: None)
    monkeypatch.setattr(failover, "CHECK_SECONDS", 0.5)
    monkeypatch.setattr(failover, "SILENCE_SECONDS", 2.0)


async def ready(cluster: PartitionedCluster) -> None:
    """Wait until the stream has a leader."""
    link = NatsConnection(list(options(cluster.servers[-1].url).servers), lambda event: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(link.run)
        await link.wait_ready()
        while not await failover._is_jetstream_answering(link):  # noqa: ASYNC110 - no event.
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()


@pytest.mark.long
@pytest.mark.usefixtures("soon")
async def test_leaves_server_cut_off_from_cluster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(2 * PATIENCE_SECONDS):
        async with partitioned_cluster(tmp_path) as cluster:
            await ready(cluster)
            engine = options(
                *(server.url for server in cluster.servers), replicas=3, ack_wait_seconds=5.0
            )
            async with (
                stateless_server(engine) as stateless,
                simplebus.connect(address(stateless), name="pub") as bus,
            ):
                link = cluster_of(stateless).link
                at_first = link.server
                assert cluster.servers[0].url.endswith(at_first)
                async with bus.subscribe(7, durable="d") as messages:
                    await bus.publish_many([b"%d" % n for n in range(100)], class_id=7)
                    cluster.cut_off(0)
                    await bus.publish_many([b"%d" % n for n in range(100, 200)], class_id=7)
                    assert link.server != at_first
                    cluster.reconnect()
                    await bus.publish_many([b"%d" % n for n in range(200, 300)], class_id=7)
                    received = list[int]()
                    # Messages in flight from its consumer arrive later.
                    while len(set(received)) < 300:
                        received.append(int((await messages.get()).payload))
                    assert set(received) == set(range(300))
                # The former leader may have answered for a while.
                assert link.connection_count <= 3
    assert "JetStream does not answer there, and does at" in caplog.text


@pytest.mark.long
@pytest.mark.usefixtures("soon")
async def test_starts_at_server_with_working_jetstream(tmp_path: Path) -> None:
    with trio.fail_after(2 * PATIENCE_SECONDS):
        async with partitioned_cluster(tmp_path) as cluster:
            await ready(cluster)
            engine = options(*(server.url for server in cluster.servers), replicas=3)
            cluster.cut_off(0)
            async with (
                stateless_server(engine) as stateless,
                simplebus.connect(address(stateless), name="pub") as bus,
            ):
                await bus.publish(b"one", class_id=7)


@pytest.mark.long
@pytest.mark.usefixtures("soon")
async def test_stays_without_quorum_and_resumes_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(2 * PATIENCE_SECONDS):
        async with partitioned_cluster(tmp_path) as cluster:
            await ready(cluster)
            engine = options(*(server.url for server in cluster.servers), replicas=3)
            async with (
                stateless_server(engine) as stateless,
                simplebus.connect(address(stateless), name="pub") as bus,
            ):
                link = cluster_of(stateless).link
                await bus.publish(b"one", class_id=7)
                for number in range(3):
                    cluster.cut_off(number)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(bus.publish, b"two", class_id=7))
                    await until(lambda: "JetStream has not answered for 2 s" in caplog.text)
                    # It moved only while JetStream answered elsewhere: on a slow machine often, and
                    # at the former leader until that notices the change.
                    moves = caplog.text.count("JetStream does not answer there, and does at")
                    assert link.connection_count <= 1 + moves
                    cluster.reconnect()
                async with bus.subscribe(7) as messages:
                    assert [(await messages.get()).payload for _ in range(2)] == [b"one", b"two"]
