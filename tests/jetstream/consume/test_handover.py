"""Consumers that a server is about to release, and their take-over."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import simplebus
from simplebus.core.errors import BusConnectionError
from simplebus.jetstream.cluster.peers import RELEASED, WAIT
from simplebus.jetstream.consume import close, handover
from simplebus.jetstream.consume.handover import (
    RELEASE_WAIT_SECONDS,
    TAKEOVER_SECONDS,
    ReleasingConsumers,
)
from simplebus.server.run import RunningServer
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

PAYLOADS = [b"%d" % number for number in range(20)]


def test_offers_unreleased_consumers_and_then_waits_for_a_takeover() -> None:
    first_server: Any = object()
    second_position: Any = object()
    goes_on = {first_server: ""}
    releasing = ReleasingConsumers(lambda position: goes_on.get(position, ""))
    assert releasing.answer(b"7", 0.0) == b""
    releasing.add(first_server, 7, "p-one", -RELEASE_WAIT_SECONDS)
    releasing.add(second_position, 8, "p-two", -RELEASE_WAIT_SECONDS)
    assert not releasing.is_offered(first_server, 0.0)
    assert releasing.answer(b"7", 0.0) == RELEASED + b" p-one"
    assert releasing.is_offered(first_server, TAKEOVER_SECONDS - 0.1)
    assert not releasing.is_offered(first_server, TAKEOVER_SECONDS)
    assert not releasing.is_offered(second_position, 0.0)
    goes_on[first_server] = "p-more"
    assert releasing.answer(b"7", 5.0) == RELEASED + b" p-more p-one"
    releasing.remove(first_server)
    assert releasing.answer(b"7", 5.0) == b""
    assert not releasing.is_offered(first_server, 5.0)


def test_answers_wait_while_a_consumer_is_released() -> None:
    first_server: Any = object()
    releasing = ReleasingConsumers(lambda position: "")
    releasing.add(first_server, 7, "p-one", 0.0)
    assert releasing.answer(b"7", RELEASE_WAIT_SECONDS - 0.1) == WAIT  # It is released soon.
    with releasing.releasing(first_server):
        assert releasing.answer(b"7", 0.0) == WAIT
        assert releasing.answer(b"8", 0.0) == b""
        assert releasing.answer(b"", 0.0) == b""  # Asks if this stateless server is running.
    assert not releasing.is_offered(first_server, 0.0)
    assert releasing.answer(b"7", 0.0) == RELEASED + b" p-one"


@pytest.mark.parametrize("query", [b"", b"x", b"-1", b"123456", b"\xff", b"7 "])
def test_answers_other_queries_with_nothing(query: bytes) -> None:
    first_server: Any = object()
    releasing = ReleasingConsumers(lambda position: "")
    releasing.add(first_server, 7, "p-one", -RELEASE_WAIT_SECONDS)
    assert releasing.answer(query, 0.0) == b""


@pytest.mark.parametrize("at_which", ["another", "the same"])
async def test_unreleased_messages_go_to_the_next_subscriber(
    jetstream_server: NatsServer, at_which: str
) -> None:
    """The cluster does not reply to the release request, and the stateless server retries."""
    cluster = options(jetstream_server.url)
    async with (
        stateless_server(cluster) as first_server,
        stateless_server(cluster) as second_server,
    ):
        first_backend = cluster_of(first_server)
        names: set[str] = set()

        def fails(subject: str) -> BusConnectionError | None:
            is_meant = subject.startswith("CONSUMER") and subject.split(".")[-1] in names
            return BusConnectionError("no answer") if is_meant else None

        with (
            trio.fail_after(PATIENCE_SECONDS),
            failing_requests(first_backend.link, fails) as failed,
        ):
            async with (
                simplebus.connect(address(first_server)) as bus,
                bus.subscribe(1, auto_ack=False) as messages,
            ):
                await bus.publish_many(PAYLOADS, class_id=1)
                (await messages.get()).ack()
                names.update(first_backend.inboxes.consumer_names.values())
            await until(lambda: failed.total() > 1)
            server = second_server if at_which == "another" else first_server
            if at_which == "the same":
                names.clear()  # Retried soon, but not before this.
            async with simplebus.connect(address(server)) as bus, bus.subscribe(1) as messages:
                redelivered = [await messages.get() for _ in PAYLOADS[1:]]
                assert [message.payload for message in redelivered] == PAYLOADS[1:]
                await bus.publish(b"more", class_id=1)
                assert (await messages.get()).payload == b"more"


async def wait_until_released(*server: RunningServer) -> None:
    """Wait until all requests are done, and no subscriber is connected."""
    await until(
        lambda: not any(cluster_of(each).is_busy or cluster_of(each).feeds for each in server)
    )


async def receive_attempts(messages: Any, count: int) -> list[tuple[int, int]]:
    """Receive `count` messages. Return the number and the delivery attempt of each."""
    found = [await messages.get() for _ in range(count)]
    return [(int(message.payload), message.attempt) for message in found]


async def test_subscriber_at_another_server_gets_messages_being_released(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (first_server, _, first_bus, second_bus):
        with trio.fail_after(PATIENCE_SECONDS):
            for class_id in range(1, 11):
                await first_bus.publish_many(PAYLOADS, class_id=class_id)
                async with first_bus.subscribe(class_id, auto_ack=False) as messages:
                    await receive_attempts(messages, len(PAYLOADS))
                # The subscriber disconnects now.
                await until(lambda: not cluster_of(first_server).feeds)
                async with second_bus.subscribe(class_id) as messages:
                    redelivered = await receive_attempts(messages, len(PAYLOADS))
                assert [number for number, _ in redelivered] == list(range(len(PAYLOADS)))


async def test_takeover_between_servers_keeps_attempts_and_acks(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (first_server, second_server, first_bus, second_bus):
        with trio.fail_after(PATIENCE_SECONDS):
            await first_bus.publish_many(PAYLOADS[:10], class_id=1)
            async with first_bus.subscribe(1, auto_ack=False) as messages:
                await receive_attempts(messages, 10)
            await wait_until_released(first_server, second_server)
            async with first_bus.subscribe(1, auto_ack=False) as messages:
                for _ in range(10):
                    message = await messages.get()
                    if int(message.payload) % 2 == 0:
                        message.ack()
                    elif message.payload == b"1":
                        message.nack(delay=600.0)
                await first_bus.publish_many(PAYLOADS[10:], class_id=1)
                assert await receive_attempts(messages, 10) == [(n, 1) for n in range(10, 20)]
            await wait_until_released(first_server, second_server)
            async with second_bus.subscribe(1, auto_ack=False, max_in_flight=2) as messages:
                assert await receive_attempts(messages, 2) == [(10, 2), (11, 2)]
            await wait_until_released(first_server, second_server)
            async with first_bus.subscribe(
                1
            ) as messages:  # A message that was sent twice waits for its backoff.
                redelivered = await receive_attempts(messages, 8)
                assert [number for number, _ in redelivered] == list(range(12, 20))
                assert all(attempt > 1 for _, attempt in redelivered)


async def test_deletes_consumer_of_failed_attempt(
    jetstream_server: NatsServer,
) -> None:
    """Two subscribers disconnect at once, and one of their consumers cannot be deleted at first."""
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (first_server, second_server, first_bus, second_bus):
        link, positions = cluster_of(first_server).link, cluster_of(first_server).consumers
        fails = iter([False, True])

        def hook(subject: str) -> BusConnectionError | None:
            is_meant = subject.startswith("CONSUMER.DELETE") and next(fails, False)
            return BusConnectionError("no answer") if is_meant else None

        with trio.fail_after(PATIENCE_SECONDS):
            async with (
                first_bus.subscribe(1, auto_ack=False) as messages,
                second_bus.subscribe(1, auto_ack=False) as other_messages,
            ):
                await first_bus.publish_many(PAYLOADS, class_id=1)
                await receive_attempts(messages, len(PAYLOADS))
                await receive_attempts(other_messages, len(PAYLOADS))
            await wait_until_released(first_server, second_server)
            with failing_requests(link, hook):
                async with first_bus.subscribe(1, auto_ack=False) as messages:
                    await receive_attempts(messages, len(PAYLOADS))
            await wait_until_released(first_server, second_server)
            (first_backend,) = await positions.list_unheld(1)
            assert first_backend["num_ack_pending"] + first_backend["num_pending"] == len(PAYLOADS)


async def test_closing_ends_if_nothing_is_left_to_release(
    jetstream_server: NatsServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server has taken over the claimed position before the next request."""
    for module in handover, close:
        monkeypatch.setattr(module, "TAKEOVER_SECONDS", 0.5)
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (first_server, second_server, first_bus, second_bus):
        first_backend, names = cluster_of(first_server), set[str]()

        def fails(subject: str) -> BusConnectionError | None:
            is_meant = subject.startswith("CONSUMER") and subject.split(".")[-1] in names
            return BusConnectionError("no answer") if is_meant else None

        with trio.fail_after(PATIENCE_SECONDS):
            await first_bus.publish_many(PAYLOADS, class_id=1)
            async with first_bus.subscribe(1, auto_ack=False) as messages:
                await receive_attempts(messages, len(PAYLOADS))
            await wait_until_released(first_server)
            with failing_requests(first_backend.link, fails) as failed:
                async with first_bus.subscribe(1, auto_ack=False) as messages:
                    await receive_attempts(messages, len(PAYLOADS))
                    names.update(first_backend.inboxes.consumer_names.values())
                await until(lambda: failed.total() > 1)
                async with second_bus.subscribe(1):
                    await until(lambda: bool(cluster_of(second_server).inboxes.consumer_names))
            await wait_until_released(first_server, second_server)
    assert "consumer not found" not in caplog.text
