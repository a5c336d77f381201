"""Log lines and inquiries about streams that refuse messages."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import trio

import simplebus
from simplebus.core.errors import RefusedError
from simplebus.jetstream.publish import refusals, stream_publisher
from simplebus.jetstream.publish.refusals import RECOVERED_SECONDS, StreamRefusals
from simplebus.monitor.snapshot import MonitorSnapshot
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.server.run import RunningServer
from tests.jetstream.faulty_api import failing_requests
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    address,
    cluster_of,
    options,
    stateless_server,
    until,
)
from tests.net.test_nats_connection import linked

FULL = JetStreamError(10077, "maximum bytes exceeded")


def test_logs_start_and_end_of_refusals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    lanes: dict[int, JetStreamError | None] = {7: FULL, 8: None}
    found = StreamRefusals({}, lanes.get)
    for tick in range(1000):  # Sometimes there is space for one message.
        lanes[7] = None if tick % 3 == 2 else FULL
        found.update({7, 8}, tick * 0.25)
        found.log_recovered(tick * 0.25)
    assert (found.get_reason(7), found.get_reason(8), found.get_reason(9)) == (
        FULL.sentence,
        "unknown reason",
        "",
    )
    assert len(caplog.messages) == len(found) == 2
    lanes[7] = None
    found.log_recovered(249.75 + RECOVERED_SECONDS - 0.25)
    assert len(found) == 2
    found.log_recovered(249.75 + RECOVERED_SECONDS)
    assert len(found) == 0
    assert sorted(caplog.messages[2:]) == [
        f"class {id_}: its stream accepts messages again" for id_ in (7, 8)
    ]


def test_alternating_reasons_do_not_flood_log(caplog: pytest.LogCaptureFixture) -> None:
    found = StreamRefusals({}, lambda class_id: None)
    for tick in range(400):
        found.record(7, f"reason {tick % 2}", tick * 0.25)
    assert len(caplog.messages) <= 100 / RECOVERED_SECONDS


async def test_inquiry_shows_refusal_reason(
    jetstream_server: NatsServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "RECOVERED_SECONDS", 0.3)
    cluster = options(jetstream_server.url, max_bytes=48 * 1024)
    async with (
        stateless_server(cluster, http_port=0) as server,
        simplebus.connect(address(server), name="one") as first_bus,
        simplebus.connect(address(server), name="two") as second_bus,
        trio.open_nursery() as nursery,
    ):
        with trio.fail_after(PATIENCE_SECONDS):
            nursery.start_soon(partial(first_bus.publish_many, [bytes(1000)] * 60, class_id=8))
            await until(lambda: len(cluster_of(server).refusals) == 1)
            class_info = await second_bus.explain(8)
            assert class_info.waits_for.startswith(
                "publishing waits: its stream accepts no messages: maximum bytes exceeded; "
            )
            assert class_info.on_way > 0
            snapshot = read_snapshot(server)
            assert refused_classes(snapshot) == 1
            assert [note.about for note in snapshot.notes] == ["class '8'"]
            async with second_bus.subscribe(8) as messages:
                for _ in range(60):
                    (await messages.get()).ack()
            await until(lambda: not len(cluster_of(server).refusals))
            assert "accepts no messages" not in (await second_bus.explain(8)).waits_for
            assert refused_classes(read_snapshot(server)) == 0
    logged = ["refuses messages" in text for text in caplog.messages if "its stream" in text]
    # One line at the start, and one at the end.
    assert logged == [True, False] * (len(logged) // 2)


@pytest.mark.parametrize("change", [{"subjects": ["elsewhere"]}, {"no_ack": True}])
async def test_stream_without_acks_counts_as_refusing(
    change: dict[str, object], jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may change a stream so that it stores no messages of the class.

    If a NATS client subscribes to the subject, no server reports missing responders. Publishers
    then waited without a reported reason.
    """
    monkeypatch.setattr(refusals, "RECOVERED_SECONDS", 0.3)
    monkeypatch.setattr(stream_publisher, "PATIENCE_SECONDS", 0.3)
    cluster = options(jetstream_server.url)
    async with (
        stateless_server(cluster) as server,
        simplebus.connect(address(server)) as bus,
        simplebus.connect(address(server)) as other_bus,
        linked(jetstream_server.url) as (link, _),
        trio.open_nursery() as nursery,
    ):
        names = cluster.names
        with trio.fail_after(PATIENCE_SECONDS):
            await bus.publish(b"before", class_id=8)
            config = (await link.api_request(f"STREAM.INFO.{names.stream_name(8)}"))["config"]
            link.core.subscribe(names.class_subject(8))
            changed_config = {"subjects": [f"elsewhere.{names.class_subject(8)}"]}
            changed = changed_config if "subjects" in change else change
            link.flush()
            await link.api_request(f"STREAM.UPDATE.{names.stream_name(8)}", {**config, **changed})
            nursery.start_soon(partial(bus.publish, b"behind", class_id=8))
            await until(lambda: bool(cluster_of(server).refusals.get_reason(8)))
            class_info = await other_bus.explain(8)
            assert (
                f"no answer from the stream of {names.class_subject(8)!r}" in class_info.waits_for
            )
            await link.api_request(f"STREAM.UPDATE.{names.stream_name(8)}", config)
            await until(lambda: not len(cluster_of(server).refusals))
            async with other_bus.subscribe(8) as messages:
                found = [(await messages.get()).payload for _ in range(2)]
    assert found == [b"before", b"behind"]


async def test_uncreatable_stream_counts_as_refusing(
    jetstream_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = options(jetstream_server.url)
    async with stateless_server(cluster) as server, simplebus.connect(address(server)) as bus:
        api_request = cluster_of(server).link.api_request
        body = {"name": f"other_{cluster.names.prefix}", "storage": "memory"}
        await api_request(
            f"STREAM.CREATE.{body['name']}", {**body, "subjects": [cluster.names.class_subject(8)]}
        )
        tries: list[str] = []

        def count(subject: str) -> None:
            tries.extend([subject] * subject.startswith("STREAM.CREATE"))

        async with trio.open_nursery() as nursery:
            with trio.fail_after(PATIENCE_SECONDS):
                nursery.start_soon(partial(bus.publish, b"taken", class_id=8))
                await until(lambda: bool(cluster_of(server).refusals.get_reason(8)))
                async with simplebus.connect(address(server)) as other_bus:
                    class_info = await other_bus.explain(8)
                assert "subjects overlap" in class_info.waits_for
                with failing_requests(cluster_of(server).link, count):
                    await until(lambda: len(tries) > 3)
                await api_request(f"STREAM.DELETE.{body['name']}")
    assert len([text for text in caplog.messages if "its stream" in text]) == 1


async def test_inquiry_about_missing_stream_is_answered(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with (
        stateless_server(cluster) as server,
        simplebus.connect(address(server)) as bus,
        simplebus.connect(address(server)) as other_bus,
        trio.open_nursery() as nursery,
    ):
        api_request, name = cluster_of(server).link.api_request, f"other_{cluster.names.prefix}"
        body = {"name": name, "subjects": [cluster.names.class_subject(8)], "storage": "memory"}
        with trio.fail_after(PATIENCE_SECONDS):
            await api_request(f"STREAM.CREATE.{name}", body)
            nursery.start_soon(partial(bus.publish, b"taken", class_id=8))
            await until(lambda: bool(cluster_of(server).refusals.get_reason(8)))
            for _ in range(3):
                with pytest.raises(RefusedError, match="subjects overlap"):
                    await other_bus.fetch(8)
                with trio.move_on_after(0.1):
                    async with (
                        simplebus.connect(address(server)) as late_bus,
                        late_bus.subscribe(8),
                    ):
                        raise AssertionError
            await until(lambda: not cluster_of(server).feeds)
            await api_request(f"STREAM.DELETE.{name}")
            await until(
                lambda: cluster_of(server).publisher.is_empty and not cluster_of(server).is_busy
            )


def read_snapshot(server: RunningServer) -> MonitorSnapshot:
    """Return a detailed snapshot from the monitor."""
    assert server.monitor is not None
    telling = server.monitor.take_snapshot(detailed=True)
    while True:
        try:
            next(telling)
        except StopIteration as end:
            snapshot: MonitorSnapshot = end.value
            return snapshot


def refused_classes(snapshot: MonitorSnapshot) -> object:
    return {metric.name: metric.values[0][1] for metric in snapshot.metrics}[
        "engine_refused_classes"
    ]
