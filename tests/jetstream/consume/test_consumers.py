"""Opening and closing of positions while JetStream fails: nothing is blocked or left behind."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import simplebus
from simplebus.core.commit_log import WriteBatch
from simplebus.core.errors import BusConnectionError, RefusedError
from simplebus.core.protocol.requests import Start
from simplebus.jetstream import api
from simplebus.jetstream.class_jobs import ClassJobs
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.server.run import RunningServer
from tests.jetstream.faulty_api import failing_requests, lost_replies
from tests.jetstream.nats_servers import NatsServer, nats_server
from tests.jetstream.publish.test_stream_publisher import Stream, entry, frame
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    address,
    cluster_of,
    options,
    stateless_server,
    until,
    wait_until_idle,
)
from tests.net.test_nats_connection import linked

LATE = [0.0, -1.0, -1e300, float("nan")]
EARLY = [1.76e12, 2.6e11, 1e18, 1e300, float("inf")]
NO_MORE = JetStreamError(10026, "maximum consumers limit reached", is_final=True)
NO_LEADER = JetStreamError(10008, "JetStream system temporarily unavailable")


async def consumers_of(stateless: RunningServer, class_id: int = 7) -> list[dict[str, Any]]:
    found = await cluster_of(stateless).consumers.list_all(class_id)
    return [info for info in found if api.kind_of(info)]


def test_cancelled_subscription_resumes_publishing() -> None:
    stream = Stream()
    stream.publisher.open_classes.add(7)
    pauses: list[int] = []
    for batch_number in (1, 2, 3):
        pauses.append(stream.publisher.pause_class(7))
        stream.publisher.append_batch(
            WriteBatch(batch_number, [entry(frame(b"%d" % batch_number, batch_number))])
        )
    stream.publisher.resume_class(7, pauses[1])
    stream.publisher.publish_ready(0.0)
    assert stream.process_publications() == []
    stream.publisher.resume_class(7, pauses[0])
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.process_publications(), 0.0) == 2
    stream.publisher.resume_class(7, pauses[2])
    stream.publisher.publish_ready(0.0)
    assert stream.answer(stream.process_publications(), 0.0) == 3
    assert stream.publisher.is_empty


async def test_cancels_queued_jobs_of_closed_position() -> None:
    finished_jobs: list[str] = []
    may_continue = trio.Event()

    async def job(name: str) -> None:
        finished_jobs.append(name)
        await may_continue.wait()

    async with trio.open_nursery() as nursery:
        jobs = ClassJobs({}, lambda: finished_jobs.append("all"))
        jobs.start(nursery)
        for name, owner in (("a", "ada"), ("b", "bob"), ("c", "ada"), ("d", "bob"), ("e", None)):
            jobs.enqueue(7, partial(job, name), owner)
        await trio.testing.wait_all_tasks_blocked()
        assert jobs.cancel_queued(7, "ada")  # Running jobs continue.
        assert not jobs.cancel_queued(7, "ada")
        assert not jobs.cancel_queued(8, "bob")
        may_continue.set()
    assert finished_jobs == ["a", "b", "d", "e", "all"]


async def test_subscriptions_during_outage_leave_no_jobs(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        async with stateless_server(replace(options(server.url), storage="file")) as stateless:
            cluster = cluster_of(stateless)
            async with simplebus.connect(address(stateless), name="one") as bus:
                with trio.fail_after(PATIENCE_SECONDS):
                    await bus.publish(b"before", class_id=7)
                    server.stop()
                    await until(lambda: not cluster.link.is_ready)
                    for _ in range(20):
                        with trio.move_on_after(0.05):
                            async with (
                                simplebus.connect(address(stateless)) as other_bus,
                                other_bus.subscribe(7),
                            ):
                                await trio.sleep_forever()
                    await until(lambda: not cluster.feeds)
                    assert len(cluster._jobs._queues.get(7, ())) <= 2
                    assert len(cluster.publisher._pauses.get(7, ())) <= 1
                    server.start()
                    await bus.publish(b"after", class_id=7)
                    async with bus.subscribe(7) as messages:
                        received = [(await messages.get()).payload for _ in range(2)]
                    assert received == [b"before", b"after"]


def test_publishing_waits_only_for_earlier_positions() -> None:
    """A client that reconnects constantly delays others no longer than its first connection."""
    stream = Stream()
    stream.publisher.open_classes.add(7)
    stream.publisher.append_batch(WriteBatch(1, [entry(frame(b"1", 0))]))
    pauses: list[int] = []
    for batch_number in range(2, 6):
        pauses.append(stream.publisher.pause_class(7))
        stream.publisher.append_batch(
            WriteBatch(batch_number, [entry(frame(b"%d" % batch_number, batch_number))])
        )
    for batch_number in range(1, 6):
        stream.publisher.publish_ready(0.0)
        assert stream.answer(stream.process_publications(), 0.0) == batch_number
        stored = [payload for _, payload, _ in stream.stored]
        assert stored == [b"%d" % each for each in range(1, batch_number + 1)]
        if batch_number < 5:
            pauses.append(stream.publisher.pause_class(7))
            stream.publisher.resume_class(7, pauses.pop(0))
    assert stream.publisher.is_empty


@pytest.mark.parametrize("time", [*LATE, *EARLY, 1.5, 4e9])
def test_accepts_any_start_time(time: float) -> None:
    config = api.start_config(Start(time=time))
    policy = {1.5: "by_start_time", 4e9: "by_start_time"}
    assert config["deliver_policy"] == policy.get(time, "new" if time in EARLY else "all")


@pytest.mark.parametrize("sequence", [0, 7, 10, 11, 1 << 53, (1 << 63) - 1, (1 << 64) - 1])
def test_start_after_next_message_begins_with_it(sequence: int) -> None:
    config = api.start_config(Start(sequence=sequence), last=10)
    assert config["opt_start_seq"] == min(sequence, 10) + 1


@pytest.mark.parametrize(
    "start", [Start(time=1.76e12), Start(sequence=1000), Start(sequence=(1 << 63) - 1)]
)
async def test_start_far_ahead_begins_with_new_messages(
    jetstream_server: NatsServer, start: Start
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as stateless,
        simplebus.connect(address(stateless)) as bus,
    ):
        await bus.publish(b"old", class_id=7)
        async with bus.subscribe(7, durable="d", start=start) as messages:
            await bus.publish(b"new", class_id=7)
            assert (await messages.get(PATIENCE_SECONDS)).payload == b"new"
        assert await bus.fetch(7, time=datetime(9000, 1, 1, tzinfo=UTC)) == []


async def test_refused_consumer_is_reported_and_blocks_no_one(
    jetstream_server: NatsServer,
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as stateless,
        simplebus.connect(address(stateless)) as bus,
    ):
        await bus.publish(b"", class_id=7)
        hook = lambda subject: NO_MORE if subject.startswith("CONSUMER.CREATE") else None  # noqa: E731
        with trio.fail_after(PATIENCE_SECONDS), failing_requests(cluster_of(stateless).link, hook):
            with pytest.raises(RefusedError, match="maximum consumers limit reached"):
                async with bus.subscribe(7):
                    pass
            await bus.publish(b"", class_id=7)


async def test_retried_opening_blocks_neither_publishers_nor_closing(
    jetstream_server: NatsServer,
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as stateless,
        simplebus.connect(address(stateless)) as bus,
        simplebus.connect(address(stateless)) as other_bus,
    ):
        link, received = cluster_of(stateless).link, list[bytes]()
        await bus.publish(b"before", class_id=7)

        async def listen() -> None:
            async with other_bus.subscribe(7, durable="d", start="new") as messages:
                received.append((await messages.get()).payload)

        hook = lambda subject: NO_LEADER if subject.endswith(".d-d") else None  # noqa: E731
        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                with failing_requests(link, hook) as failed:
                    async with bus.subscribe(7) as messages:
                        assert (await messages.get()).payload == b"before"
                        nursery.start_soon(listen)
                        await until(lambda: failed.total() > 1)
                        await bus.publish(b"meanwhile", class_id=7)
                        assert (await messages.get()).payload == b"meanwhile"
                    await bus.publish(b"later", class_id=7)
                    await until(lambda: len(cluster_of(stateless).inboxes.consumer_names) == 0)
                await until(
                    lambda: any(feed.is_open for feed in cluster_of(stateless).feeds.values())
                )
                await bus.publish(b"behind", class_id=7)
        assert received == [b"behind"]


@pytest.mark.parametrize("prefix", ["CONSUMER.CREATE", "CONSUMER.DELETE"])
async def test_uses_consumer_whose_creation_was_not_confirmed(
    jetstream_server: NatsServer, prefix: str
) -> None:
    """The first subscription receives the backlog, whichever reply is lost."""
    async with (
        stateless_server(options(jetstream_server.url)) as stateless,
        simplebus.connect(address(stateless)) as bus,
    ):
        await bus.publish(b"waits", class_id=7)
        with lost_replies(cluster_of(stateless).link, prefix) as lost_counts:
            async with bus.subscribe(7) as messages:
                assert (await messages.get(PATIENCE_SECONDS)).payload == b"waits"
                assert lost_counts.total() == 1
                (info,) = await consumers_of(stateless)
                assert [info["name"]] == list(cluster_of(stateless).inboxes.consumer_names.values())


async def test_closing_during_creation_leaves_no_consumer(
    jetstream_server: NatsServer,
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as stateless,
        simplebus.connect(address(stateless)) as bus,
        bus.subscribe(7),
    ):
        with lost_replies(cluster_of(stateless).link, "CONSUMER.CREATE", 1 << 30) as lost_counts:
            with trio.fail_after(PATIENCE_SECONDS):
                async with (
                    simplebus.connect(address(stateless)) as other_bus,
                    trio.open_nursery() as nursery,
                ):
                    nursery.start_soon(_subscribe, other_bus)
                    await until(lambda: lost_counts.total() > 1)
                    nursery.cancel_scope.cancel()
            await until(lambda: len(cluster_of(stateless).feeds) == 1)
        await until(lambda: not cluster_of(stateless).is_busy)
        assert len(await consumers_of(stateless)) == 1


async def _subscribe(bus: simplebus.Bus) -> None:
    async with bus.subscribe(7):
        await trio.sleep_forever()


async def test_released_messages_survive_lost_answers(
    jetstream_server: NatsServer,
) -> None:
    """Retry the release of a consumer while its API requests fail."""
    async with (
        stateless_server(options(jetstream_server.url)) as stateless,
        simplebus.connect(address(stateless)) as bus,
    ):
        link, names = cluster_of(stateless).link, list[str]()
        await bus.publish_many([b"%d" % number for number in range(5)], class_id=7)

        def hook(subject: str) -> BaseException | None:
            is_of_it = subject.startswith("CONSUMER.INFO") and bool(names)
            return (NO_LEADER, BusConnectionError("lost"))[failed.total() % 2] if is_of_it else None

        with failing_requests(link, hook) as failed:
            async with bus.subscribe(7, auto_ack=False) as messages:
                for _ in range(5):
                    await messages.get(PATIENCE_SECONDS)
                names += cluster_of(stateless).inboxes.consumer_names.values()
            await until(lambda: failed.total() > 3)
            assert cluster_of(stateless).is_busy
            names.clear()
            await wait_until_idle(stateless)
        async with bus.subscribe(7) as messages:
            received = [(await messages.get(PATIENCE_SECONDS)).payload for _ in range(5)]
        assert received == [b"%d" % number for number in range(5)]
        await wait_until_idle(stateless)
        (info,) = await consumers_of(stateless)
        assert api.server_id_of(info) == ""


async def test_deletion_is_retried_unless_consumer_is_used_again(
    jetstream_server: NatsServer,
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as stateless,
        simplebus.connect(address(stateless)) as bus,
    ):
        cluster, exists = cluster_of(stateless), False
        link, failing = cluster.link, [True]
        delete = f"CONSUMER.DELETE.{cluster.options.names.stream_name(7)}.d-d"
        hook = lambda subject: NO_LEADER if failing[0] and subject == delete else None  # noqa: E731
        with failing_requests(link, hook) as failed:
            for comes_back in (True, False):
                failing[0] = True
                async with bus.subscribe(7, durable="d") as messages:
                    messages.forget()
                await until(lambda: failed.total() > 1)
                if comes_back:
                    async with bus.subscribe(7, durable="d"):
                        failing[0] = False
                        await until(lambda: not cluster.is_busy)
                        exists = "d-d" in [info["name"] for info in await consumers_of(stateless)]
                    await wait_until_idle(stateless)
                failing[0] = False
                await wait_until_idle(stateless)
                failed.clear()
        assert exists
        assert "d-d" not in [info["name"] for info in await consumers_of(stateless)]


async def test_silent_server_counts_as_alive_and_is_asked_once(
    jetstream_server: NatsServer,
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as stateless,
        simplebus.connect(address(stateless)) as bus,
    ):
        cluster, requests = cluster_of(stateless), list[str]()
        await bus.publish(b"", class_id=7)
        name = "p-frozen-1"
        config = api.consumer_config(
            cluster.options, name, kind="plain", server_id="frozen", start={"deliver_policy": "all"}
        )
        stream, request = cluster.options.names.stream_name(7), cluster.link.request
        body = {"stream_name": stream, "config": config, "action": "create"}
        await cluster.link.api_request(f"CONSUMER.CREATE.{stream}.{name}", body)
        await cluster.link.api_request(f"CONSUMER.DELETE.{stream}.waiting")

        async def request_with_faults(
            subject: str, *args: Any, **options: Any
        ) -> tuple[bytes, bytes]:
            if subject == cluster.options.names.server_subject("frozen"):
                requests.append(subject)
                raise BusConnectionError(f"{subject} was not answered")
            return await request(subject, *args, **options)

        cluster.link.request = request_with_faults  # type: ignore[method-assign]
        with trio.fail_after(PATIENCE_SECONDS):
            for _ in range(2):
                async with bus.subscribe(7) as messages:
                    await bus.publish(b"new", class_id=7)
                    assert (await messages.get()).payload == b"new"
                await wait_until_idle(stateless)
        assert len(requests) == 1
        assert name in [info["name"] for info in await consumers_of(stateless)]


async def test_departed_server_is_detected_despite_passive_listener(
    jetstream_server: NatsServer,
) -> None:
    """Detect a departed server although a wildcard subscription suppresses the no-responders reply.

    Otherwise, the consumers of a dead server would stay unowned while that subscription exists.
    """
    async with (
        stateless_server(options(jetstream_server.url)) as stateless,
        linked(jetstream_server.url) as (listener, _),
        simplebus.connect(address(stateless)) as bus,
    ):
        cluster = cluster_of(stateless)
        names, request = cluster.options.names, cluster.link.request
        await bus.publish(b"left", class_id=7)
        name, stream = "p-dead-1", names.stream_name(7)
        config = api.consumer_config(
            cluster.options, name, kind="plain", server_id="dead", start={"deliver_policy": "all"}
        )
        body = {"stream_name": stream, "config": config, "action": "create"}
        await cluster.link.api_request(f"CONSUMER.CREATE.{stream}.{name}", body)
        await cluster.link.api_request(f"CONSUMER.DELETE.{stream}.waiting")
        listener.core.subscribe(f"{names.server_subject('dead').rpartition('.')[0]}.*")
        listener.flush()
        await listener.api_request("INFO")  # The message has arrived by now.

        async def request_soon(subject: str, *args: Any, **options: Any) -> tuple[bytes, bytes]:
            if subject == names.server_subject("dead"):
                options["seconds"] = 0.3
            return await request(subject, *args, **options)

        cluster.link.request = request_soon  # type: ignore[method-assign]
        with trio.fail_after(PATIENCE_SECONDS):
            async with bus.subscribe(7) as messages:
                assert (await messages.get()).payload == b"left"


async def test_unexpected_error_in_a_job_ends_only_that_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    finished_jobs, is_notified = list[int](), trio.Event()

    async def job(number: int) -> None:
        if number == 1:
            raise ValueError("a fault of the server")
        finished_jobs.append(number)

    async with trio.open_nursery() as nursery:
        jobs = ClassJobs({}, is_notified.set)
        jobs.start(nursery)
        for number in range(3):
            jobs.enqueue(7, partial(job, number))
        await is_notified.wait()
    assert finished_jobs == [0, 2]
    assert jobs.is_empty
    assert "a fault of the server" in caplog.text


async def test_unexpected_error_while_closing_blocks_no_publisher(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as stateless,
        simplebus.connect(address(stateless)) as bus,
    ):
        cluster = cluster_of(stateless)
        open_consumer = cluster.consumers.open

        async def open_late(*requests: Any, **args: Any) -> Any:
            found = await open_consumer(*requests, **args)
            await until(lambda: not cluster.feeds)
            return found

        async def close(*_: Any, **__: Any) -> None:
            raise ValueError("a fault of the server")

        monkeypatch.setattr(cluster.consumers, "open", open_late)
        monkeypatch.setattr(cluster.consumers, "close", close)
        with trio.fail_after(PATIENCE_SECONDS):
            async with (
                simplebus.connect(address(stateless)) as other_bus,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(_subscribe, other_bus)
                await until(lambda: bool(cluster.feeds))
                nursery.cancel_scope.cancel()
            await bus.publish(b"", class_id=7)
        assert "a fault of the server" in caplog.text


@pytest.mark.parametrize("group", [None, "g"])
async def test_closing_without_connection_logs_no_error(
    tmp_path: Path, group: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Close a subscription while the server is trying to replace its lost consumer."""
    with nats_server(tmp_path) as server:
        async with stateless_server(options(server.url)) as stateless:
            cluster = cluster_of(stateless)
            with trio.fail_after(PATIENCE_SECONDS):
                async with (
                    simplebus.connect(address(stateless)) as bus,
                    bus.subscribe(7, group=group),
                ):
                    [feed] = cluster.feeds.values()
                    server.kill()
                    await until(lambda: not cluster.link.is_ready)
                    cluster._replace_later(feed)
                    await until(lambda: 7 in cluster._jobs.busy_classes)
                await until(lambda: not cluster.feeds)
                server.start()
                await until(lambda: not cluster.is_busy)
    assert "went wrong" not in caplog.text


async def test_retries_replacement_after_unexpected_error(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [ValueError("a fault of the server")] * 2
    async with (
        stateless_server(options(jetstream_server.url)) as stateless,
        simplebus.connect(address(stateless)) as bus,
    ):
        cluster = cluster_of(stateless)
        renew = cluster.consumers.replace

        async def renew_late(*requests: Any) -> Any:
            if faults:
                raise faults.pop()
            return await renew(*requests)

        monkeypatch.setattr(cluster.consumers, "replace", renew_late)
        with trio.fail_after(PATIENCE_SECONDS):
            async with bus.subscribe(7) as messages:
                [feed] = cluster.feeds.values()
                cluster._replace_later(feed)
                await until(lambda: not (faults or feed.is_replacing))
                await bus.publish(b"then", class_id=7)
                assert (await messages.get()).payload == b"then"
