"""nats-py and the SDK at one real server with both listeners.

All tests share the server, so each uses classes and subjects of its own.
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
from tests.nats.running_server import PATIENT, on_asyncio, until
from tests.support.programs import running_program

pytestmark = pytest.mark.xdist_group("nats clients")


class Both(NamedTuple):
    """Addresses of the two listeners."""

    bus: str
    nats: str


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
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
        yield Both(f"simplebus://{ready[1]}", f"nats://{ready[2]}")


@contextlib.asynccontextmanager
async def connected(both: Both, errors: list[Exception] | None = None) -> AsyncIterator[Client]:
    """Connect a NATS client. Its errors fail the test unless `errors` collects them."""
    told: list[Exception] = [] if errors is None else errors

    async def note(error: Exception) -> None:
        told.append(error)

    client = await nats.connect(both.nats, error_cb=note, **PATIENT)
    try:
        yield client
    finally:
        await client.close()
    assert told == [] or errors is not None


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
async def test_trace_headers_pass_between_listeners_unchanged(both: Both) -> None:
    trace = {
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
    }
    async with (
        connected(both) as client,
        simplebus.connect(both.bus) as bus,
        bus.subscribe("asked", "ask.trace") as kept,
    ):
        heard = await client.subscribe("ask.trace")
        await client.publish("ask.trace", b"from nats", headers=trace)
        (first,) = await receive_messages(
            heard, 1
        )  # Its flush may overtake that it has subscribed.
        await bus.publish(b"from the sdk", class_id="asked", channel="ask.trace", headers=trace)
        assert [dict((await kept.get(60)).headers) for _ in range(2)] == [trace, trace]
        assert [message.headers for message in (first, *await receive_messages(heard, 1))] == [
            trace,
            trace,
        ]


@on_asyncio
async def test_messages_pass_between_the_bus_and_nats(both: Both) -> None:
    async with (
        connected(both) as client,
        simplebus.connect(both.bus) as bus,
        bus.subscribe(7) as kept,
    ):
        heard = await client.subscribe("orders.>")
        unnamed = await client.subscribe("class.7")
        await client.publish("orders.eu", b"from nats", headers={"Trace": "7"})
        await client.flush()
        async for message in kept:
            assert (message.channel, message.payload) == ("orders.eu", b"from nats")
            assert message.headers == (("Trace", "7"),)
            break
        await bus.publish(b"from the sdk", class_id=7, channel="orders.us", headers={"A": "b"})
        await bus.publish(b"plain", class_id=7)
        first, second = await receive_messages(heard, 2)
        assert (first.subject, first.data) == ("orders.eu", b"from nats")
        assert (second.subject, second.data) == ("orders.us", b"from the sdk")
        assert second.headers == {"A": "b"}
        assert [m.data for m in await receive_messages(unnamed, 1)] == [b"plain"]


@on_asyncio
async def test_class_subscriber_answers_a_nats_request(both: Both) -> None:
    async with (
        connected(both) as client,
        simplebus.connect(both.bus) as bus,
        bus.subscribe("asked") as asked,
    ):

        async def answer() -> None:
            async for message in asked:
                reply = dict(message.headers)["Nats-Reply-To"]
                await bus.publish(message.payload.upper(), class_id="asked", channel=reply)
                break

        answering = asyncio.create_task(answer())
        found = await client.request("ask.loud", b"hello", timeout=60)
        assert found.data == b"HELLO"
        await answering


@on_asyncio
async def test_jetstream_publish_is_confirmed_once_per_id(both: Both) -> None:
    async with connected(both) as client:
        js = client.jetstream()
        headers = {"Nats-Msg-Id": "7 shops"}
        first = await js.publish("confirmed.eu", b"7 shops", headers=headers, timeout=60)
        again = await js.publish("confirmed.eu", b"7 shops", headers=headers, timeout=60)
        assert (first.stream, first.seq, first.duplicate) == ("confirmed", 0, None)
        assert (again.stream, again.seq, again.duplicate) == ("confirmed", 0, True)
        later = await js.publish_async("confirmed.us", b"8", stream="confirmed")
        assert (await later).seq == 1
        with pytest.raises(BadRequestError, match="expected stream does not match") as caught:
            await js.publish("confirmed.us", b"9", stream="orders", timeout=60)
        assert (caught.value.code, caught.value.err_code) == (400, 10060)


@on_asyncio
async def test_nats_py_ack_methods_work(both: Both) -> None:
    async with connected(both) as client:
        begun = datetime.datetime.now(datetime.UTC)
        for payload in (b"ack", b"nak", b"slow", b"term", b"sync"):
            await client.publish(f"jobs.{payload.decode()}", payload)
        subscription = await client.subscribe("$SB.SUB.jobs.worker.ack_seconds=3")
        messages = {m.data: m for m in await receive_messages(subscription, 5)}
        first = messages[b"ack"]
        assert (first.subject, first.metadata.stream) == ("jobs.ack", "jobs")
        assert first.metadata.consumer == "worker"
        assert (first.metadata.sequence.stream, first.metadata.sequence.consumer) == (0, 1)
        assert first.metadata.num_pending == 4
        assert abs(first.metadata.timestamp - begun) < datetime.timedelta(seconds=20)
        await first.ack()
        await messages[b"sync"].ack_sync(timeout=60)
        await messages[b"term"].term()
        await messages[b"nak"].nak(delay=0.2)
        await messages[b"slow"].in_progress()
        again = await next_of(subscription, b"nak")
        assert number(again) == 2
        await again.nak(delay=1e-9)
        again = await next_of(subscription, b"nak")
        assert number(again) == 3
        await again.ack()
        assert number(await next_of(subscription, b"slow")) > 1  # Nobody has said it is done.
    async with connected(both) as other:
        subscription = await other.subscribe("$SB.SUB.jobs.worker")
        again = await next_of(subscription, b"slow")
        assert number(again) >= 3
        await again.ack_sync(timeout=60)
        letters = await other.subscribe("$SB.SUB.dead%2Ejobs")
        (letter,) = await receive_messages(letters, 1)
        assert letter.data == b"term"
        assert letter.headers is not None
        assert letter.headers["dead-reason"] == "terminated"


@on_asyncio
async def test_group_members_share_messages_of_the_sdk(both: Both) -> None:
    got: dict[bytes, int] = {}

    def taker(whose: int) -> Any:
        async def take_one(message: Msg) -> None:
            assert message.data not in got
            got[message.data] = whose
            await message.ack()

        return take_one

    async with connected(both) as one, connected(both) as other:
        for whose, client in enumerate((one, other)):
            await client.subscribe("$SB.SUB.shared.team", queue="workers", cb=taker(whose))
            await client.flush()
        async with simplebus.connect(both.bus) as bus:
            await bus.publish_many([b"%d" % n for n in range(500)], class_id="shared")
        await until(lambda: len(got) == 500)
        assert set(got.values()) == {0, 1}


@on_asyncio
async def test_publisher_to_a_full_class_waits_for_space(both: Both) -> None:
    said = [b"%d" % n for n in range(3000)]
    async with connected(both) as client:
        for payload in said:
            await client.publish("full.a", payload)
        await client.flush(timeout=60)  # What stands behind is heard all the same.
        async with simplebus.connect(both.bus) as bus, bus.subscribe("full") as messages:
            got = []
            async for message in messages:
                got.append(message.payload)
                if len(got) == len(said):
                    break
            assert got == said


@on_asyncio
async def test_one_connection_can_publish_and_ack(both: Both) -> None:
    async with connected(both) as client:
        subscription = await client.subscribe("$SB.SUB.alone")
        for number in range(1200):
            await client.publish("alone.a", b"%d" % number)
        for number in range(1200):
            (message,) = await receive_messages(subscription, 1)
            assert message.data == b"%d" % number
            await message.ack()


@on_asyncio
async def test_refusal_keeps_the_connection_open(both: Both) -> None:
    errors: list[Exception] = []
    async with connected(both, errors) as client:
        await client.subscribe("$SB.SUB.jobs.d.colour=red")
        await client.publish("orders.*", b"no channel")
        await until(lambda: len(errors) == 2)
        assert "colour=red" in str(errors[0])
        assert "wildcard" in str(errors[1])
        assert client.is_connected
