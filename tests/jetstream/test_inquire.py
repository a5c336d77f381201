"""Inquiries about messages that are stored in the cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

import simplebus
from simplebus.commands.operate.explain import describe_reply
from simplebus.core.errors import BusConnectionError
from simplebus.core.protocol.inquiry import ClassInfo
from simplebus.jetstream import backlog
from simplebus.jetstream.cluster.peers import RELEASED
from tests.jetstream.faulty_api import failing_requests
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    address,
    cluster_of,
    options,
    stateless_server,
    two_servers,
    until,
)

NUMBERED = [b"%d" % number for number in range(5)]


def shown(class_info: ClassInfo) -> str:
    return "\n".join(text for _, text in describe_reply(class_info))


async def wait_info(bus: simplebus.Bus, is_so: Callable[[ClassInfo], bool]) -> ClassInfo:
    """Return the info of class 7 as soon as `is_so` accepts it."""
    with trio.fail_after(PATIENCE_SECONDS):
        while not is_so(class_info := await bus.explain(7)):  # noqa: ASYNC110 - no event signals the change.
            await trio.sleep(0.05)
    return class_info


async def silence(*_: object, **__: object) -> None:
    await trio.sleep_forever()


async def test_every_server_reports_unclaimed_backlog(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url, max_bytes=100 * 1024)
    async with two_servers(cluster) as (_, second_server, publisher, reader):
        await publisher.publish_many(NUMBERED, class_id=7)
        await reader.fetch(7)  # A stateless server reports only classes that it knows.
        for bus in publisher, reader:
            class_info = await bus.explain(7)
            assert (class_info.stored, class_info.backlog, class_info.floor, class_info.head) == (
                5,
                5,
                0,
                5,
            )
            assert class_info.waits_for == "5 messages wait for a first subscription"
            assert "5 messages (0 to 4)" in shown(class_info)
            assert "at most 100 KiB, then block" in shown(class_info)
        async with reader.subscribe(7, auto_ack=False) as messages:
            for _ in range(2):
                (await messages.get()).ack()
            # Removed later.
            class_info = await wait_info(publisher, lambda class_info: class_info.stored == 3)
            assert (class_info.backlog, class_info.floor, class_info.unknown) == (0, 2, "")
            assert "a subscription without a name, not held by this server" in class_info.waits_for
            class_info = await reader.explain(7)
            assert class_info.waits_for.startswith("the oldest stored message is held by session")
            assert "its acknowledgements" in class_info.waits_for
        await until(
            lambda: not (cluster_of(second_server).feeds or cluster_of(second_server).is_busy)
        )
        class_info = await publisher.explain(7)
        assert (class_info.stored, class_info.backlog) == (3, 3)
        [line] = (await publisher.explain()).classes
        assert line.is_remote


async def test_disconnected_durable_is_not_unclaimed_backlog(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (_, _, bus, elsewhere):
        async with bus.subscribe(7, durable="my till"):
            pass
        await bus.publish_many(NUMBERED, class_id=7)
        await elsewhere.fetch(7)
        with trio.fail_after(PATIENCE_SECONDS):
            for client in bus, elsewhere:
                class_info = await client.explain(7)
                assert (class_info.stored, class_info.backlog, class_info.positions) == (5, 0, [])
                assert class_info.waits_for == (
                    "the oldest stored message is held by the durable 'my till', held by no "
                    "server; 5 messages wait for it"
                )
            async with elsewhere.subscribe(7, durable="my till", auto_ack=False) as messages:
                assert "'my till', held by another server" in (await bus.explain(7)).waits_for
                class_info = await elsewhere.explain(7)
                assert "held by the durable 'my till'; " in class_info.waits_for
                for _ in NUMBERED:
                    (await messages.get()).ack()
                class_info = await wait_info(bus, lambda class_info: not class_info.stored)
                assert class_info.waits_for == "nothing is stored"


async def test_counts_dead_letters_in_their_stream(jetstream_server: NatsServer) -> None:
    cluster = options(jetstream_server.url)
    async with stateless_server(cluster) as up, simplebus.connect(address(up)) as bus:
        with trio.fail_after(PATIENCE_SECONDS):
            async with bus.subscribe(7, group="g") as messages:
                await bus.publish_many(NUMBERED[:2], class_id=7)
                for _ in range(2):
                    (await messages.get()).terminate()
                await wait_info(bus, lambda class_info: class_info.dead_letters == 2)


async def test_reports_unknown_counts_as_unknown(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as up,
        simplebus.connect(address(up)) as bus,
    ):
        await bus.publish_many(NUMBERED, class_id=7)
        link = cluster_of(up).link
        with failing_requests(link, lambda subject: BusConnectionError("no leader")):
            class_info = await bus.explain(7)
        assert (class_info.stored, class_info.backlog) == (0, 0)
        assert class_info.waits_for == "the messages in the cluster are unknown: no leader"
        assert "stored:" not in shown(class_info)
        with monkeypatch.context() as patch:
            patch.setattr(link, "api_request", silence)
            patch.setattr(backlog, "COUNT_SECONDS", 0.2)
            assert (await bus.explain(7)).unknown == "the cluster has not answered within 0.2 s"
        assert (await bus.explain(7)).backlog == 5


async def test_errors_while_counting_do_not_end_server(
    jetstream_server: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An empty reply of another stateless server, and an error in this server."""
    cluster = options(jetstream_server.url)
    async with (
        two_servers(cluster) as (up, elsewhere, bus, second_server),
        second_server.subscribe(7, auto_ack=False) as messages,
    ):
        with trio.fail_after(PATIENCE_SECONDS):
            await bus.publish_many(NUMBERED, class_id=7)
            await messages.get()
            inboxes = cluster_of(elsewhere).inboxes
            monkeypatch.setattr(inboxes, "answer_query", lambda query: RELEASED + b" \xff\xfe")
            await wait_info(bus, lambda class_info: class_info.stored == 5)
            assert not caplog.records
            with failing_requests(cluster_of(up).link, lambda subject: ValueError("on purpose")):
                class_info = await bus.explain(7)
            assert class_info.unknown == "internal error of the server; see its log"
            assert "unexpected error while counting its stream" in caplog.text
            assert (await bus.explain(7)).stored == 5
