"""nats-py and the SDK at one real server with both listeners.

All tests share the server, so each uses different classes and subjects.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import BadRequestError

import simplebus
from tests.nats.running_server import PATIENT, on_asyncio, wait_for
from tests.support.programs import running_program

pytestmark = pytest.mark.xdist_group("nats clients")


class ListenerAddresses(NamedTuple):
    """Addresses of the two listeners."""

    bus: str
    nats: str


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ListenerAddresses]:
    config = tmp_path_factory.mktemp("config") / "simplebus.toml"
    config.write_text("[classes.asked]\npub-ack = false\n")
    bound = [
        f"--bind={subject}"
        for subject in (
            "orders.>=7",
            "ask.*=asked",
            "jobs.>=jobs",
            "full.>=full",
            "alone.>=alone",
            "confirmed.*=confirmed",
        )
    ]
    flags = ["--port", "0", "--nats-port", "0", "--tick", "0.1", "--ack-timeout", "20"]
    flags += ["--max-class-messages", "1000", "--config", str(config)]
    with running_program("serve", *flags, *bound) as served:
        ready = re.match(r"simplebus ready tcp=(\S+) nats=(\S+)", served.read_line())
        assert ready
        yield ListenerAddresses(f"simplebus://{ready[1]}", f"nats://{ready[2]}")


@contextlib.asynccontextmanager
async def connected(
    addresses: ListenerAddresses, errors: list[Exception] | None = None
) -> AsyncIterator[Client]:
    """Connect a NATS client. Its errors fail the test unless `errors` collects them."""
    collected_errors: list[Exception] = [] if errors is None else errors

    async def note(error: Exception) -> None:
        collected_errors.append(error)

    client = await nats.connect(addresses.nats, error_cb=note, **PATIENT)
    try:
        yield client
    finally:
        await client.close()
    assert collected_errors == [] or errors is not None


async def receive_messages(subscription: Any, count: int) -> list[Msg]:
    return [await subscription.next_msg(timeout=60) for _ in range(count)]


async def next_of(subscription: Any, payload: bytes) -> Msg:
    """Return the next delivery of this message, skipping late deliveries of others."""
    while True:
        message: Msg = await subscription.next_msg(timeout=60)
        if message.data == payload:
            return message


def number(message: Msg) -> int:
    """Return the delivery count of a message."""
    return message.metadata.num_delivered


@on_asyncio
async def test_trace_headers_pass_between_listeners_unchanged(addresses: ListenerAddresses) -> None:
    trace = {
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
    }
    async with (
        connected(addresses) as client,
        simplebus.connect(addresses.bus) as bus,
        bus.subscribe("asked", "ask.trace") as bus_messages,
    ):
        nats_messages = await client.subscribe("ask.trace")
        await client.publish("ask.trace", b"from nats", headers=trace)
        # The flush may overtake the subscription.
        (first,) = await receive_messages(nats_messages, 1)
        await bus.publish(b"from the sdk", class_id="asked", channel="ask.trace", headers=trace)
        assert [dict((await bus_messages.get(60)).headers) for _ in range(2)] == [trace, trace]
        assert [
            message.headers for message in (first, *await receive_messages(nats_messages, 1))
        ] == [
            trace,
            trace,
        ]


@on_asyncio
async def test_messages_pass_between_the_bus_and_nats(addresses: ListenerAddresses) -> None:
    async with (
        connected(addresses) as client,
        simplebus.connect(addresses.bus) as bus,
        bus.subscribe(7) as bus_messages,
    ):
        nats_messages = await client.subscribe("orders.>")
        unnamed = await client.subscribe("class.7")
        await client.publish("orders.eu", b"from nats", headers={"Trace": "7"})
        await client.flush()
        async for message in bus_messages:
            assert (message.channel, message.payload) == ("orders.eu", b"from nats")
            assert message.headers == (("Trace", "7"),)
            break
        await bus.publish(b"from the sdk", class_id=7, channel="orders.us", headers={"A": "b"})
        await bus.publish(b"plain", class_id=7)
        first, second = await receive_messages(nats_messages, 2)
        assert (first.subject, first.data) == ("orders.eu", b"from nats")
        assert (second.subject, second.data) == ("orders.us", b"from the sdk")
        assert second.headers == {"A": "b"}
        assert [m.data for m in await receive_messages(unnamed, 1)] == [b"plain"]


@on_asyncio
async def test_class_subscriber_answers_a_nats_request(addresses: ListenerAddresses) -> None:
    async with (
        connected(addresses) as client,
        simplebus.connect(addresses.bus) as bus,
        bus.subscribe("asked") as requests,
    ):

        async def answer() -> None:
            async for message in requests:
                reply = dict(message.headers)["Nats-Reply-To"]
                await bus.publish(message.payload.upper(), class_id="asked", channel=reply)
                break

        answering = asyncio.create_task(answer())
        found = await client.request("ask.loud", b"hello", timeout=60)
        assert found.data == b"HELLO"
        await answering


@on_asyncio
async def test_jetstream_publish_is_confirmed_once_per_id(addresses: ListenerAddresses) -> None:
    async with connected(addresses) as client:
        js = client.jetstream()
        headers = {"Nats-Msg-Id": "7 shops"}
        first = await js.publish("confirmed.eu", b"7 shops", headers=headers, timeout=60)
        duplicate = await js.publish("confirmed.eu", b"7 shops", headers=headers, timeout=60)
        assert (first.stream, first.seq, first.duplicate) == ("confirmed", 0, None)
        assert (duplicate.stream, duplicate.seq, duplicate.duplicate) == ("confirmed", 0, True)
        accepted = await js.publish_async("confirmed.us", b"8", stream="confirmed")
        assert (await accepted).seq == 1
        with pytest.raises(BadRequestError, match="expected stream does not match") as caught:
            await js.publish("confirmed.us", b"9", stream="orders", timeout=60)
        assert (caught.value.code, caught.value.err_code) == (400, 10060)


@on_asyncio
async def test_nats_py_ack_methods_work(addresses: ListenerAddresses) -> None:
    async with connected(addresses) as client:
        started_at = datetime.datetime.now(datetime.UTC)
        for payload in (b"ack", b"nak", b"slow", b"term", b"sync"):
            await client.publish(f"jobs.{payload.decode()}", payload)
        subscription = await client.subscribe("$SB.SUB.jobs.worker.ack_seconds=3")
        messages = {m.data: m for m in await receive_messages(subscription, 5)}
        first = messages[b"ack"]
        assert (first.subject, first.metadata.stream) == ("jobs.ack", "jobs")
        assert first.metadata.consumer == "worker"
        assert (first.metadata.sequence.stream, first.metadata.sequence.consumer) == (0, 1)
        assert first.metadata.num_pending == 4
        assert abs(first.metadata.timestamp - started_at) < datetime.timedelta(seconds=20)
        await first.ack()
        await messages[b"sync"].ack_sync(timeout=60)
        await messages[b"term"].term()
        await messages[b"nak"].nak(delay=0.2)
        await messages[b"slow"].in_progress()
        redelivered = await next_of(subscription, b"nak")
        assert number(redelivered) == 2
        await redelivered.nak(delay=1e-9)
        redelivered = await next_of(subscription, b"nak")
        assert number(redelivered) == 3
        await redelivered.ack()
        assert number(await next_of(subscription, b"slow")) > 1  # The message was not acknowledged.
    async with connected(addresses) as second_client:
        subscription = await second_client.subscribe("$SB.SUB.jobs.worker")
        redelivered = await next_of(subscription, b"slow")
        assert number(redelivered) >= 3
        await redelivered.ack_sync(timeout=60)
        letters = await second_client.subscribe("$SB.SUB.dead%2Ejobs")
        (letter,) = await receive_messages(letters, 1)
        assert letter.data == b"term"
        assert letter.headers is not None
        assert letter.headers["dead-reason"] == "terminated"


@on_asyncio
async def test_group_members_share_messages_of_the_sdk(addresses: ListenerAddresses) -> None:
    received: dict[bytes, int] = {}

    def taker(member: int) -> Any:
        async def take_one(message: Msg) -> None:
            assert message.data not in received
            received[message.data] = member
            await message.ack()

        return take_one

    async with connected(addresses) as first_client, connected(addresses) as second_client:
        for member, client in enumerate((first_client, second_client)):
            await client.subscribe("$SB.SUB.shared.team", queue="workers", cb=taker(member))
            await client.flush()
        async with simplebus.connect(addresses.bus) as bus:
            await bus.publish_many([b"%d" % n for n in range(500)], class_id="shared")
        await wait_for(lambda: len(received) == 500)
        assert set(received.values()) == {0, 1}


@on_asyncio
async def test_publisher_to_a_full_class_waits_for_space(addresses: ListenerAddresses) -> None:
    payloads = [b"%d" % n for n in range(3000)]
    async with connected(addresses) as client:
        for payload in payloads:
            await client.publish("full.a", payload)
        await client.flush(timeout=60)  # Later messages are delivered all the same.
        async with simplebus.connect(addresses.bus) as bus, bus.subscribe("full") as messages:
            received = []
            async for message in messages:
                received.append(message.payload)
                if len(received) == len(payloads):
                    break
            assert received == payloads


@on_asyncio
async def test_one_connection_can_publish_and_ack(addresses: ListenerAddresses) -> None:
    async with connected(addresses) as client:
        subscription = await client.subscribe("$SB.SUB.alone")
        for number in range(1200):
            await client.publish("alone.a", b"%d" % number)
        for number in range(1200):
            (message,) = await receive_messages(subscription, 1)
            assert message.data == b"%d" % number
            await message.ack()


@on_asyncio
async def test_refusal_keeps_the_connection_open(addresses: ListenerAddresses) -> None:
    errors: list[Exception] = []
    async with connected(addresses, errors) as client:
        await client.subscribe("$SB.SUB.jobs.d.colour=red")
        await client.publish("orders.*", b"no channel")
        await wait_for(lambda: len(errors) == 2)
        assert "colour=red" in str(errors[0])
        assert "wildcard" in str(errors[1])
        assert client.is_connected
