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
from tests.jetstream.faulty_api import asked_in_vain
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
    one: Any = object()
    two: Any = object()
    goes_on = {one: ""}
    releasing = ReleasingConsumers(lambda position: goes_on.get(position, ""))
    assert releasing.answer(b"7", 0.0) == b""
    releasing.add(one, 7, "p-one", -RELEASE_WAIT_SECONDS)
    releasing.add(two, 8, "p-two", -RELEASE_WAIT_SECONDS)
    assert not releasing.is_offered(one, 0.0)
    assert releasing.answer(b"7", 0.0) == RELEASED + b" p-one"
    assert releasing.is_offered(one, TAKEOVER_SECONDS - 0.1)
    assert not releasing.is_offered(one, TAKEOVER_SECONDS)
    assert not releasing.is_offered(two, 0.0)
    goes_on[one] = "p-more"
    assert releasing.answer(b"7", 5.0) == RELEASED + b" p-more p-one"
    releasing.remove(one)
    assert releasing.answer(b"7", 5.0) == b""
    assert not releasing.is_offered(one, 5.0)


def test_answers_wait_while_a_consumer_is_released() -> None:
    one: Any = object()
    releasing = ReleasingConsumers(lambda position: "")
    releasing.add(one, 7, "p-one", 0.0)
    assert releasing.answer(b"7", RELEASE_WAIT_SECONDS - 0.1) == WAIT  # It is left in a moment.
    with releasing.releasing(one):
        assert releasing.answer(b"7", 0.0) == WAIT
        assert releasing.answer(b"8", 0.0) == b""
        assert releasing.answer(b"", 0.0) == b""  # Whether this stateless server is there.
    assert not releasing.is_offered(one, 0.0)
    assert releasing.answer(b"7", 0.0) == RELEASED + b" p-one"


@pytest.mark.parametrize("asked", [b"", b"x", b"-1", b"123456", b"\xff", b"7 "])
def test_answers_other_queries_with_nothing(asked: bytes) -> None:
    one: Any = object()
    releasing = ReleasingConsumers(lambda position: "")
    releasing.add(one, 7, "p-one", -RELEASE_WAIT_SECONDS)
    assert releasing.answer(asked, 0.0) == b""


@pytest.mark.parametrize("at_which", ["another", "the same"])
async def test_unreleased_messages_go_to_the_next_subscriber(
    jetstream_server: NatsServer, at_which: str
) -> None:
    """The cluster does not reply to the release request, and the stateless server retries."""
    cluster = options(jetstream_server.url)
    async with stateless_server(cluster) as one, stateless_server(cluster) as other:
        left = cluster_of(one)
        names: set[str] = set()

        def fails(subject: str) -> BusConnectionError | None:
            is_meant = subject.startswith("CONSUMER") and subject.split(".")[-1] in names
            return BusConnectionError("no answer") if is_meant else None

        with trio.fail_after(PATIENCE_SECONDS), asked_in_vain(left.link, fails) as failed:
            async with (
                simplebus.connect(address(one)) as bus,
                bus.subscribe(1, auto_ack=False) as messages,
            ):
                await bus.publish_many(PAYLOADS, class_id=1)
                (await messages.get()).ack()
                names.update(left.inboxes.consumer_names.values())
            await until(lambda: failed.total() > 1)
            up = other if at_which == "another" else one
            if at_which == "the same":
                names.clear()  # It is tried again in a moment, but not before this.
            async with simplebus.connect(address(up)) as bus, bus.subscribe(1) as messages:
                again = [await messages.get() for _ in PAYLOADS[1:]]
                assert [message.payload for message in again] == PAYLOADS[1:]
                await bus.publish(b"more", class_id=1)
                assert (await messages.get()).payload == b"more"


async def quiet(*up: RunningServer) -> None:
    """All requests are done, and no subscriber is connected."""
    await until(lambda: not any(cluster_of(each).is_busy or cluster_of(each).feeds for each in up))


async def taken(messages: Any, count: int) -> list[tuple[int, int]]:
    """Receive `count` messages. Return the number and the delivery attempt of each."""
    found = [await messages.get() for _ in range(count)]
    return [(int(message.payload), message.attempt) for message in found]


async def test_subscriber_at_another_server_gets_messages_being_released(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (one, _, there, here):
        with trio.fail_after(PATIENCE_SECONDS):
            for class_id in range(1, 11):
                await there.publish_many(PAYLOADS, class_id=class_id)
                async with there.subscribe(class_id, auto_ack=False) as messages:
                    await taken(messages, len(PAYLOADS))
                await until(lambda: not cluster_of(one).feeds)  # It leaves now.
                async with here.subscribe(class_id) as messages:
                    again = await taken(messages, len(PAYLOADS))
                assert [number for number, _ in again] == list(range(len(PAYLOADS)))


async def test_takeover_between_servers_keeps_attempts_and_acks(
    jetstream_server: NatsServer,
) -> None:
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (one, other, there, here):
        with trio.fail_after(PATIENCE_SECONDS):
            await there.publish_many(PAYLOADS[:10], class_id=1)
            async with there.subscribe(1, auto_ack=False) as messages:
                await taken(messages, 10)
            await quiet(one, other)
            async with there.subscribe(1, auto_ack=False) as messages:
                for _ in range(10):
                    message = await messages.get()
                    if int(message.payload) % 2 == 0:
                        message.ack()
                    elif message.payload == b"1":
                        message.nack(delay=600.0)
                await there.publish_many(PAYLOADS[10:], class_id=1)
                assert await taken(messages, 10) == [(n, 1) for n in range(10, 20)]
            await quiet(one, other)
            async with here.subscribe(1, auto_ack=False, max_in_flight=2) as messages:
                assert await taken(messages, 2) == [(10, 2), (11, 2)]
            await quiet(one, other)
            async with there.subscribe(1) as messages:  # What was sent twice pauses.
                again = await taken(messages, 8)
                assert [number for number, _ in again] == list(range(12, 20))
                assert all(attempt > 1 for _, attempt in again)


async def test_deletes_consumer_of_failed_attempt(
    jetstream_server: NatsServer,
) -> None:
    """Two leave at once, and of those that they leave one cannot be removed at first."""
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (one, other, there, here):
        link, positions = cluster_of(one).link, cluster_of(one).consumers
        fails = iter([False, True])

        def meddle(subject: str) -> BusConnectionError | None:
            is_meant = subject.startswith("CONSUMER.DELETE") and next(fails, False)
            return BusConnectionError("no answer") if is_meant else None

        with trio.fail_after(PATIENCE_SECONDS):
            async with (
                there.subscribe(1, auto_ack=False) as messages,
                here.subscribe(1, auto_ack=False) as others,
            ):
                await there.publish_many(PAYLOADS, class_id=1)
                await taken(messages, len(PAYLOADS))
                await taken(others, len(PAYLOADS))
            await quiet(one, other)
            with asked_in_vain(link, meddle):
                async with there.subscribe(1, auto_ack=False) as messages:
                    await taken(messages, len(PAYLOADS))
            await quiet(one, other)
            (left,) = await positions.list_unheld(1)
            assert left["num_ack_pending"] + left["num_pending"] == len(PAYLOADS)


async def test_closing_ends_if_nothing_is_left_to_release(
    jetstream_server: NatsServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server has taken over the claimed position before the next request."""
    for module in handover, close:
        monkeypatch.setattr(module, "TAKEOVER_SECONDS", 0.5)
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (one, other, there, here):
        left, names = cluster_of(one), set[str]()

        def fails(subject: str) -> BusConnectionError | None:
            is_meant = subject.startswith("CONSUMER") and subject.split(".")[-1] in names
            return BusConnectionError("no answer") if is_meant else None

        with trio.fail_after(PATIENCE_SECONDS):
            await there.publish_many(PAYLOADS, class_id=1)
            async with there.subscribe(1, auto_ack=False) as messages:
                await taken(messages, len(PAYLOADS))
            await quiet(one)
            with asked_in_vain(left.link, fails) as failed:
                async with there.subscribe(1, auto_ack=False) as messages:
                    await taken(messages, len(PAYLOADS))
                    names.update(left.inboxes.consumer_names.values())
                await until(lambda: failed.total() > 1)
                async with here.subscribe(1):
                    await until(lambda: bool(cluster_of(other).inboxes.consumer_names))
            await quiet(one, other)
    assert "consumer not found" not in caplog.text
