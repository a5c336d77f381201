"""Exchange of class names between servers and through stream descriptions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import trio

import simplebus
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import NAME_CHARACTERS_MAX
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import NamedClass
from simplebus.jetstream.api import list_streams
from simplebus.jetstream.class_jobs import Job
from simplebus.jetstream.cluster import class_names
from simplebus.jetstream.cluster.class_names import LEADER_WAIT_SECONDS, ClassNameExchange
from simplebus.jetstream.names import JetStreamNames as Subjects
from simplebus.jetstream.publish.codec import HEADERS_BYTES_MAX
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.server.run import RunningServer
from tests.behaviour.wire_peer_v2 import connect_request
from tests.jetstream.consume.test_feed import arrived
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    address,
    cluster_of,
    options,
    stateless_server,
    until,
)
from tests.support import running_server

SUBJECTS = Subjects("bus")
NO_RESPONDERS = b"HMSG s 2 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"


class ClassNamesOfServer(dict[str, int]):
    """Class names of a stateless server, with a record of its publications."""

    is_ready = True

    def __init__(self, **ids_by_name: int) -> None:
        super().__init__(ids_by_name)
        self.published: list[tuple[str, bytes]] = []
        self.sids: dict[str, int] = {}
        self.jobs: list[Job] = []
        self.query_count = self.leaderless_queries = 0
        self.naming = ClassNameExchange(
            self, SUBJECTS, "d1", self, self.add_names, enqueue_job=self.enqueue_job
        )  # type: ignore[arg-type]

    def add_names(self, named_classes: list[Any]) -> None:
        for named_class in named_classes:
            if isinstance(named_class, NamedClass):
                assert named_class.name is not None
                assert named_class.id is not None
                is_other = self.get(named_class.name, named_class.id) != named_class.id
                if is_other or named_class.id in {
                    i for n, i in self.items() if n != named_class.name
                }:
                    raise RemoteProtocolError(Reason.CLASS_NAME_CONFLICT, "another one")
                self[named_class.name] = named_class.id

    def subscribe(self, subject: str) -> int:
        return self.sids.setdefault(subject, 1 + len(self.sids))

    def publish(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        self.published.append((subject, payload))

    def enqueue_job(self, class_id: int, job: Job) -> None:
        self.jobs.append(job)

    async def api_request(
        self, subject: str, body: dict[str, Any] | None = None, *, seconds: float = 0.0
    ) -> dict[str, Any]:
        """Return a stream config without a description. Reject any update of the description."""
        if body is not None:
            self.published.append((subject, body["description"].encode()))
            raise JetStreamError(10052, "no")
        return {"config": {}}

    async def classes(self) -> tuple[list[tuple[int, str]], list[str]]:
        """Return no streams; a stream without a leader appears after `leaderless_queries`."""
        self.query_count += 1
        return (
            ([], ["bus_7"])
            if self.query_count <= self.leaderless_queries
            else ([(7, "orders")] * self.leaderless_queries, [])
        )

    async def load_without_peers(self) -> None:
        """No server replies."""
        [inbox] = [sid for sid in self.sids if sid.startswith("_INBOX")]
        self.naming.handle_messages(self.sids[inbox], arrived(NO_RESPONDERS))
        await self.naming.load(self.classes)

    def publish_names(self, now: float = 0.0) -> list[bytes]:
        self.published.clear()
        self.naming.publish_new_names(self, now)  # type: ignore[arg-type]
        assert {subject for subject, _ in self.published} <= {"bus.naming"}
        return [payload for _, payload in self.published]


async def test_merged_names_are_not_published_again() -> None:
    first, second = ClassNamesOfServer(**{f"class {n}": n for n in range(50)}), ClassNamesOfServer()
    await first.load_without_peers()
    await second.load_without_peers()
    for payload in first.publish_names():
        second.naming.merge_names(payload)
    assert dict(second) == dict(first)
    assert first.publish_names() == second.publish_names() == []
    first.naming.query_peers()
    assert {
        name for payload in first.publish_names() for name in msgspec.json.decode(payload)
    } == set(first)
    assert first.publish_names() == []


async def test_name_conflict_is_logged_once_on_both_sides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = ClassNamesOfServer(orders=7, bills=9), ClassNamesOfServer(orders=8)
    await first.load_without_peers()
    await second.load_without_peers()
    first.publish_names()
    second.publish_names()
    for _ in range(3):
        for payload in second.publish_names() or [b'{"orders":8}']:
            first.naming.merge_names(payload)
        for payload in first.publish_names():
            second.naming.merge_names(payload)
    conflicts = [(vars(record)["class_id"], vars(record)["error"]) for record in caplog.records]
    assert conflicts == [(8, "another one"), (7, "another one")]
    assert dict(first) == {"orders": 7, "bills": 9}
    assert dict(second) == {"orders": 8}
    assert first.publish_names() == second.publish_names() == []


async def test_query_is_answered_with_all_names_and_an_end() -> None:
    first = ClassNamesOfServer(orders=7, bills=9)
    await first.load_without_peers()
    first.published.clear()
    for sender in (b"d1", b"d2"):
        queries = arrived(b"MSG bus.door.names 9 their.inbox 2\r\n%b\r\n" % sender)
        assert first.naming.handle_messages(first.sids["bus.door.names"], queries)
    assert first.published == [("their.inbox", b'{"orders":7,"bills":9}'), ("their.inbox", b"{}")]


@pytest.mark.parametrize(("untold", "names"), [(3, {"orders": 7}), (1 << 20, {})])
async def test_waits_a_limited_time_for_stream_leaders(
    untold: int, names: dict[str, int], autojump_clock: trio.testing.MockClock
) -> None:
    stateless_server = ClassNamesOfServer()
    stateless_server.leaderless_queries = untold
    await stateless_server.load_without_peers()
    assert stateless_server == names
    assert trio.current_time() <= LEADER_WAIT_SECONDS + 1


class Listed:
    """Cluster whose servers list three streams at a time; some streams have no leader."""

    def __init__(self, count: int, *leaderless: int) -> None:
        self.names = [f"t_{number}" for number in range(count)]
        self.missing = [self.names[number] for number in leaderless]

    async def api_request(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        page = self.names[body["offset"] :][:3]
        infos = [{"config": {"name": name}} for name in page if name not in self.missing]
        missing = [name for name in page if name in self.missing]
        return {"total": len(self.names), "streams": infos, "missing": missing or None}


@pytest.mark.parametrize("leaderless", [(), (0,), (2, 3), (4, 5, 6), range(8)])
async def test_lists_all_streams_and_those_without_leader(leaderless: Iterable[int]) -> None:
    link = Listed(8, *leaderless)
    configs, without_leader = await list_streams(link)  # type: ignore[arg-type]
    assert without_leader == link.missing
    assert [config["name"] for config in configs] == [
        n for n in link.names if n not in without_leader
    ]


async def test_silent_servers_delay_start_only_briefly(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    first = ClassNamesOfServer()
    await first.naming.load(first.classes)
    assert trio.current_time() < 2 * class_names.PEER_WAIT_SECONDS
    assert "no other server sent class names" in caplog.text


async def test_retries_refused_description_with_backoff(
    autojump_clock: trio.testing.MockClock,
) -> None:
    first = ClassNamesOfServer(orders=7)
    await first.load_without_peers()
    for _ in range(600):
        first.naming.publish_new_names(first, trio.current_time())  # type: ignore[arg-type]
        for job in first.jobs:
            await job()
        first.jobs.clear()
        await trio.sleep(0.25)
    assert 8 < first.published.count(("STREAM.UPDATE.bus_7", b"orders")) < 16


async def test_name_messages_fit_any_server() -> None:
    long_names = {chr(n % 32) * (NAME_CHARACTERS_MAX - 4) + f"{n:04}": n for n in range(4096)}
    names = ClassNamesOfServer(**long_names)
    await names.load_without_peers()
    assert all(len(payload) <= HEADERS_BYTES_MAX for payload in names.publish_names())


@pytest.mark.parametrize(
    "payload",
    [b"", b"[1]", b'{"a":70000}', b'{"a":-1}', b'{"a":"b"}', b'{"":1}', b"[" * 5000,
     b'{"%b":1}' % (b"x" * 300)],
)  # fmt: skip
def test_ignores_invalid_name_messages(payload: bytes) -> None:
    names = ClassNamesOfServer()
    names.naming.merge_names(payload)
    assert names == {}


async def name_orders(server: RunningServer) -> None:
    """A program names class 7 `orders`, and disconnects."""
    peer = await running_server.connect(server)
    await peer.send(connect_request({"id": 7, "name": "orders"}))
    assert (await peer.read_frame())[0] == frames.CONNECT


async def test_starting_server_learns_names_from_peers(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with stateless_server(cluster) as server:
        await name_orders(server)
        async with (
            stateless_server(cluster) as late_server,
            simplebus.connect(address(late_server)) as bus,
        ):
            await bus.publish(b"one", class_id="orders")
            await until(lambda: 7 in cluster_of(late_server).publisher.open_classes)
            streams = await cluster_of(server).consumers.list_classes()
    assert streams == ([(7, "orders")], [])


async def test_late_class_name_survives_all_servers(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with stateless_server(cluster) as server, simplebus.connect(address(server)) as bus:
        await bus.publish(b"one", class_id=7)
        positions = cluster_of(server).consumers
        assert await positions.list_classes() == ([(7, "")], [])
        await name_orders(server)
        await bus.publish(b"two", class_id="orders")
        with trio.fail_after(PATIENCE_SECONDS):
            while await positions.list_classes() != ([(7, "orders")], []):  # noqa: ASYNC110
                await trio.sleep(0.01)
    async with (
        stateless_server(cluster) as server,
        simplebus.connect(address(server)) as bus,
        bus.subscribe("orders", start="earliest") as messages,
    ):
        received = [(await messages.get(PATIENCE_SECONDS)).payload for _ in range(2)]
    assert received == [b"one", b"two"]


async def test_reads_name_from_foreign_stream_description(jetstream_server: NatsServer) -> None:
    cluster = options(jetstream_server.url)
    stream = {"name": cluster.names.stream_name(7), "subjects": [cluster.names.class_subject(7)]}
    async with stateless_server(cluster) as server, simplebus.connect(address(server)) as bus:
        body = {**stream, "description": "orders"}
        await cluster_of(server).link.api_request(f"STREAM.CREATE.{stream['name']}", body)
        await bus.publish(b"one", class_id=7)
        async with bus.subscribe("orders") as messages:
            assert (await messages.get(PATIENCE_SECONDS)).payload == b"one"
