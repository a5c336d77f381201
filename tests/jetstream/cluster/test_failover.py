"""A server moves to a NATS server where JetStream answers, and stays if there is none."""

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
        self.asked: list[float] = []
        self.left: list[tuple[float, NatsAddress]] = []

    def send_ping(self) -> int:
        return 1

    def is_ping_answered(self, number: int) -> bool:
        return not self.is_busy

    async def api_request(self, subject: str, *, seconds: float) -> dict[str, Any]:
        self.asked.append(trio.current_time())
        if self.error is not None:
            raise self.error
        return {}

    def switch_to(self, server: NatsAddress, reason: str) -> None:
        self.left.append((trio.current_time(), server))
        self.connection_count += 1


class Case:
    """A link that is followed, and where else JetStream answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link = FakeLink()
        self.elsewhere: NatsAddress | None = None
        self.signs = 0
        self.looked: list[float] = []
        monkeypatch.setattr(failover, "_find_answering_server", self._look)

    async def _look(self, *_: object) -> NatsAddress | None:
        self.looked.append(trio.current_time())
        return self.elsewhere

    async def run(self, seconds: float) -> None:
        """Observe the connection for a number of seconds."""
        with trio.move_on_after(seconds):
            await failover.follow_jetstream(self.link, options("a"), lambda: self.signs)  # type: ignore[arg-type]


UNANSWERED = [
    BusConnectionError("it was not answered"),
    JetStreamError(10008, "JetStream system temporarily unavailable"),
    JetStreamError(503, "nobody answers"),
]


@pytest.mark.parametrize("error", UNANSWERED)
async def test_moves_to_server_where_jetstream_answers(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    case = Case(monkeypatch)
    await case.run(100.0)
    assert not case.looked
    case.link.error, case.elsewhere = error, ELSEWHERE
    begun = trio.current_time()
    await case.run(2 * failover.SILENCE_SECONDS + 1)
    (left,) = case.link.left
    assert left[0] - begun <= failover.SILENCE_SECONDS + 3 * failover.CHECK_SECONDS
    assert left[1] is ELSEWHERE


@pytest.mark.parametrize("error", UNANSWERED)
async def test_searches_with_backoff_and_logs_once(
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    case = Case(monkeypatch)
    case.link.error = error
    await case.run(3600.0)
    assert 50 < len(case.looked) < 70
    assert len(case.link.asked) < 200
    assert not case.link.left
    assert [each.message for each in caplog.records] == [
        "JetStream has not answered for 15 s at the NATS server here:4222, nor at any other known "
        "server; still searching"
    ]


async def test_activity_counts_as_answer(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(monkeypatch)
    case.link.error = UNANSWERED[0]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(case.run, 100.0)
        for _ in range(25):
            await trio.sleep(4.0)
            case.signs += 1
    assert not case.looked


async def test_stays_on_slow_connection(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stay connected while a ping is unanswered: the API request may not have arrived yet."""
    case = Case(monkeypatch)
    case.link.error, case.link.is_busy = UNANSWERED[0], True
    await case.run(100.0)
    assert not case.looked


async def test_new_connection_gets_full_grace_period(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(monkeypatch)
    case.link.error, case.elsewhere = UNANSWERED[0], ELSEWHERE
    await case.run(1000.0)
    times = [at for at, _ in case.link.left]
    assert min(b - a for a, b in pairwise(times)) >= failover.SILENCE_SECONDS


@pytest.fixture(name="soon")
def _in_order_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server is tried first."""
    monkeypatch.setattr("simplebus.net.nats_connection.random.shuffle", lambda servers: None)
    monkeypatch.setattr(failover, "CHECK_SECONDS", 0.5)
    monkeypatch.setattr(failover, "SILENCE_SECONDS", 2.0)


async def ready(cluster: PartitionedCluster) -> None:
    """Wait until it has a leader."""
    link = NatsConnection(list(options(cluster.servers[-1].url).servers), lambda event: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(link.run)
        await link.wait_ready()
        while not await failover._is_jetstream_answering(link):  # noqa: ASYNC110 - nobody says when.
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()


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
                stateless_server(engine) as up,
                simplebus.connect(address(up), name="pub") as bus,
            ):
                link = cluster_of(up).link
                at_first = link.server
                assert cluster.servers[0].url.endswith(at_first)
                async with bus.subscribe(7, durable="d") as messages:
                    await bus.publish_many([b"%d" % n for n in range(100)], class_id=7)
                    cluster.cut_off(0)
                    await bus.publish_many([b"%d" % n for n in range(100, 200)], class_id=7)
                    assert link.server != at_first
                    cluster.mend()
                    await bus.publish_many([b"%d" % n for n in range(200, 300)], class_id=7)
                    got = list[int]()
                    while len(set(got)) < 300:  # What was on its way from its consumer comes later.
                        got.append(int((await messages.get()).payload))
                    assert set(got) == set(range(300))
                assert link.connection_count <= 3  # Who led may have answered for a while.
    assert "JetStream does not answer there, and does at" in caplog.text


@pytest.mark.usefixtures("soon")
async def test_starts_at_server_with_working_jetstream(tmp_path: Path) -> None:
    with trio.fail_after(2 * PATIENCE_SECONDS):
        async with partitioned_cluster(tmp_path) as cluster:
            await ready(cluster)
            engine = options(*(server.url for server in cluster.servers), replicas=3)
            cluster.cut_off(0)
            async with (
                stateless_server(engine) as up,
                simplebus.connect(address(up), name="pub") as bus,
            ):
                await bus.publish(b"one", class_id=7)


@pytest.mark.usefixtures("soon")
async def test_stays_without_quorum_and_resumes_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(2 * PATIENCE_SECONDS):
        async with partitioned_cluster(tmp_path) as cluster:
            await ready(cluster)
            engine = options(*(server.url for server in cluster.servers), replicas=3)
            async with (
                stateless_server(engine) as up,
                simplebus.connect(address(up), name="pub") as bus,
            ):
                link = cluster_of(up).link
                await bus.publish(b"one", class_id=7)
                for number in range(3):
                    cluster.cut_off(number)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(bus.publish, b"two", class_id=7))
                    await until(lambda: "JetStream has not answered for 2 s" in caplog.text)
                    assert link.connection_count <= 2  # Who led may not know yet that it does not.
                    cluster.mend()
                async with bus.subscribe(7) as messages:
                    assert [(await messages.get()).payload for _ in range(2)] == [b"one", b"two"]
                assert (
                    caplog.text.count("JetStream has not answered for 2 s") <= link.connection_count
                )
