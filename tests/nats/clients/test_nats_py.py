"""The nats-py client library against a real server.

Tests share one server and use different subjects.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, MaxPayloadError, NoRespondersError, SlowConsumerError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import ServiceUnavailableError

from tests.nats.running_server import PATIENT, NatsTestServer, on_asyncio, settle, wait_for
from tests.support.programs import PATIENCE_SECONDS

pytestmark = pytest.mark.xdist_group("nats clients")


@contextlib.asynccontextmanager
async def connected(server: NatsTestServer, **options: Any) -> AsyncIterator[Client]:
    """Connect a client. Its errors fail the test unless `error_cb` is given."""
    errors: list[Exception] = []

    async def note(error: Exception) -> None:
        errors.append(error)

    client = await nats.connect(server.url, **{"error_cb": note, **PATIENT, **options})
    try:
        yield client
    finally:
        await client.close()
    assert errors == []


async def receive_messages(subscription: Any, count: int) -> list[bytes]:
    return [(await subscription.next_msg(timeout=60)).data for _ in range(count)]


# Publish and subscribe ---------------------------------------------------------------------------


@on_asyncio
async def test_server_info(shared_server: NatsTestServer) -> None:
    async with (
        connected(shared_server, name="me") as client,
        connected(shared_server) as other_client,
    ):
        assert client.is_connected
        assert client.connected_url is not None
        assert client.connected_url.port == shared_server.port
        assert client.max_payload == 1 << 20
        assert client.client_id != other_client.client_id
        assert client.client_ip == "127.0.0.1"
        version = client.connected_server_version
        assert (version.major, version.minor) >= (2, 9)
        assert 0 < await client.rtt() < 10


@pytest.mark.parametrize(
    "options", [{}, {"verbose": True}, {"pedantic": True}, {"verbose": True, "pedantic": True}]
)
@on_asyncio
async def test_messages_arrive_by_callback_iterator_and_next_msg(
    shared_server: NatsTestServer, options: dict[str, bool]
) -> None:
    async with connected(shared_server, **options) as client:
        called: list[Msg] = []

        async def call(message: Msg) -> None:
            called.append(message)

        await client.subscribe("ways.*", cb=call)
        iterated = await client.subscribe("ways.>")
        subscription = await client.subscribe("ways.one")
        for number in range(3):
            await client.publish("ways.one", b"%d" % number, reply="somewhere")
        found = []
        async for message in iterated.messages:
            found.append((message.subject, message.reply, message.data))
            if len(found) == 3:
                break
        assert found == [("ways.one", "somewhere", b"%d" % number) for number in range(3)]
        assert await receive_messages(subscription, 3) == [b"0", b"1", b"2"]
        await wait_for(lambda: len(called) == 3)
        assert [message.data for message in called] == [b"0", b"1", b"2"]


@on_asyncio
async def test_payloads_are_delivered_unchanged(shared_server: NatsTestServer) -> None:
    payloads = [
        b"",
        b"\r\n",
        b"\r\nPUB any 1\r\n",
        bytes(range(256)),
        b"<\r\n>" * 3,
        bytes(1 << 20),
        b"x",
    ]
    async with connected(shared_server) as client:
        subscription = await client.subscribe("any")
        for payload in payloads:
            await client.publish("any", payload)
        assert await receive_messages(subscription, len(payloads)) == payloads


@on_asyncio
async def test_20000_messages_arrive_in_order(shared_server: NatsTestServer) -> None:
    count = 20_000
    async with connected(shared_server) as publisher, connected(shared_server) as subscriber:
        found: list[tuple[str, bytes]] = []
        completed = asyncio.Event()

        async def call(message: Msg) -> None:
            found.append((message.subject, message.data))
            if len(found) == count:
                completed.set()

        await subscriber.subscribe("many.>", cb=call, pending_msgs_limit=-1)
        await settle(subscriber)
        sent = [(f"many.{n % 97}.of", b"%d " % n * (n % 30)) for n in range(count)]
        for subject, payload in sent:
            await publisher.publish(subject, payload)
        await asyncio.wait_for(completed.wait(), PATIENCE_SECONDS)
        assert found == sent


@on_asyncio
async def test_headers_are_sent_and_received(shared_server: NatsTestServer) -> None:
    async with connected(shared_server) as client:

        async def answer(message: Msg) -> None:
            assert message.headers == {"Trace": "7", "Empty": "", "Colons": "a:b: c"}
            await message.respond(message.data)
            await client.publish(message.reply, b"", headers={"Only": "headers"})

        await client.subscribe("headed", cb=answer)
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        headers = {"Trace": "7", "Empty": "", "Colons": "a:b: c"}
        await client.publish("headed", b"body", reply=inbox, headers=headers)
        first, second = [await replies.next_msg(timeout=60) for _ in range(2)]
        assert (first.data, first.headers) == (b"body", headers)
        assert (second.data, second.headers) == (b"", {"Only": "headers"})


@on_asyncio
async def test_queue_group_distributes_messages(
    shared_server: NatsTestServer,
) -> None:
    count, received_by_member = 300, [[], [], []]
    async with contextlib.AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(connected(shared_server)) for _ in received_by_member
        ]
        for member, received in zip(members, received_by_member, strict=True):

            async def call(message: Msg, received: list[int] = received) -> None:
                received.append(int(message.data))

            await member.subscribe("work.*", queue="workers", cb=call)
            await settle(member)
        publisher = await stack.enter_async_context(connected(shared_server))
        all_messages = await publisher.subscribe("work.>")
        single_member = await publisher.subscribe("work.it", queue="others")
        for number in range(count):
            await publisher.publish("work.it", b"%d" % number)
        expected = list(range(count))
        for subscription in (all_messages, single_member):
            assert [int(data) for data in await receive_messages(subscription, count)] == expected
        await wait_for(lambda: sum(map(len, received_by_member)) == count)
        assert sorted(number for received in received_by_member for number in received) == expected
        assert all(received == sorted(received) and received for received in received_by_member)


@on_asyncio
async def test_no_echo_suppresses_own_messages(shared_server: NatsTestServer) -> None:
    async with (
        connected(shared_server, no_echo=True) as no_echo_client,
        connected(shared_server) as other_client,
    ):
        subscription = await no_echo_client.subscribe("echo")
        await no_echo_client.publish("echo", b"mine")
        await settle(no_echo_client)
        await other_client.publish("echo", b"theirs")
        assert await receive_messages(subscription, 1) == [b"theirs"]


# Unsubscribe and drain ----------------------------------------------------------------------------


@on_asyncio
async def test_subscription_ends_after_max_messages(shared_server: NatsTestServer) -> None:
    async with connected(shared_server) as client:
        limited = await client.subscribe("ending.limited")
        ended = await client.subscribe("ending.*")
        observer = await client.subscribe("ending.>")
        await limited.unsubscribe(limit=2)
        for number in range(4):
            await client.publish("ending.limited", b"%d" % number)
        assert await receive_messages(ended, 4) == [b"0", b"1", b"2", b"3"]
        await ended.unsubscribe()
        await client.publish("ending.limited", b"last")
        assert (await receive_messages(observer, 5))[-1] == b"last"
        assert await receive_messages(limited, 2) == [b"0", b"1"]
        assert limited.delivered == 2
        assert ended.delivered == 4


@on_asyncio
async def test_subscription_drain_handles_received_messages(shared_server: NatsTestServer) -> None:
    async with connected(shared_server) as client:
        found = []

        async def call(message: Msg) -> None:
            await asyncio.sleep(0)
            found.append(message.data)

        subscription = await client.subscribe("drained", cb=call)
        for number in range(100):
            await client.publish("drained", b"%d" % number)
        await settle(client)
        await subscription.drain()
        await client.publish("drained", b"too late")
        await settle(client)
        assert found == [b"%d" % number for number in range(100)]


@on_asyncio
async def test_connection_drain_flushes_handler_output(
    shared_server: NatsTestServer,
) -> None:
    async with connected(shared_server) as other_client:
        results = await other_client.subscribe("draining.results")
        await settle(other_client)
        closed = asyncio.Event()

        async def note() -> None:
            closed.set()

        client = await nats.connect(shared_server.url, closed_cb=note, **PATIENT)

        may_go_on = asyncio.Event()

        async def call(message: Msg) -> None:
            await may_go_on.wait()
            await client.publish("draining.results", message.data)

        work = await client.subscribe("draining.work", cb=call)
        await settle(client)
        for number in range(50):
            await other_client.publish("draining.work", b"%d" % number)
        # The client drops messages that arrive after its drain has started.
        await wait_for(lambda: work.delivered == 50)
        draining = asyncio.create_task(client.drain())
        may_go_on.set()
        await draining
        await asyncio.wait_for(closed.wait(), PATIENCE_SECONDS)
        assert await receive_messages(results, 50) == [b"%d" % number for number in range(50)]
        assert client.is_closed
        with pytest.raises(ConnectionClosedError):
            await client.publish("draining.work", b"no more")


# Requests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("old_style", [False, True])
@on_asyncio
async def test_concurrent_requests_get_their_replies(
    shared_server: NatsTestServer, old_style: bool
) -> None:
    subject = f"double.{old_style}"
    async with connected(shared_server) as server, connected(shared_server) as client:

        async def answer(message: Msg) -> None:
            await message.respond(message.data * 2)

        await server.subscribe(subject, cb=answer, queue="servers")
        await settle(server)
        asking = [
            client.request(subject, b"%d." % number, timeout=60, old_style=old_style)
            for number in range(50)
        ]
        replies = await asyncio.gather(*asking)
        assert [reply.data for reply in replies] == [b"%d.%d." % (n, n) for n in range(50)]


@on_asyncio
async def test_no_responders_fails_at_once_and_silence_times_out(
    shared_server: NatsTestServer,
) -> None:
    async with connected(shared_server, inbox_prefix="_MINE") as client:
        with pytest.raises(NoRespondersError):
            await client.request("nobody.is.there", b"?", timeout=60)
        unanswered = await client.subscribe("silent")
        with pytest.raises(NatsTimeoutError):
            await client.request("silent", b"?", timeout=0.05)
        request = await unanswered.next_msg(timeout=60)
        assert request.reply.startswith("_MINE.")


@on_asyncio
async def test_jetstream_requests_fail_with_no_responders(shared_server: NatsTestServer) -> None:
    async with connected(shared_server) as client:
        with pytest.raises(ServiceUnavailableError):
            await client.jetstream(timeout=60).account_info()


# Errors ------------------------------------------------------------------------------------------


@on_asyncio
async def test_too_long_message_is_refused_by_the_client(shared_server: NatsTestServer) -> None:
    async with connected(shared_server) as client:
        subscription = await client.subscribe("long")
        with pytest.raises(MaxPayloadError):
            await client.publish("long", bytes((1 << 20) + 1))
        await client.publish("long", b"short")
        assert await receive_messages(subscription, 1) == [b"short"]


@on_asyncio
async def test_too_long_message_closes_the_connection(shared_server: NatsTestServer) -> None:
    is_disconnected = asyncio.Event()

    async def note_lost() -> None:
        is_disconnected.set()

    async def note(error: Exception) -> None:
        pass

    async with connected(shared_server) as observer:
        subscription = await observer.subscribe("unmeasured")
        await settle(observer)
        client = await nats.connect(
            shared_server.url, error_cb=note, closed_cb=note_lost, allow_reconnect=False, **PATIENT
        )
        client._max_payload = 1 << 30
        await client.publish("unmeasured", b"right")
        await client.publish("unmeasured", bytes((1 << 20) + 1))
        await asyncio.wait_for(is_disconnected.wait(), PATIENCE_SECONDS)
        await observer.publish("unmeasured", b"next")
        assert await receive_messages(subscription, 2) == [b"right", b"next"]


@on_asyncio
async def test_client_side_slow_consumer_drops_and_reports(shared_server: NatsTestServer) -> None:
    errors: list[Exception] = []

    async def note(error: Exception) -> None:
        errors.append(error)

    client = await nats.connect(shared_server.url, error_cb=note, **PATIENT)
    subscription = await client.subscribe("slow", pending_msgs_limit=5)
    observer = await client.subscribe("slow")
    for number in range(10):
        await client.publish("slow", b"%d" % number)
    assert len(await receive_messages(observer, 10)) == 10
    assert await receive_messages(subscription, 5) == [b"%d" % number for number in range(5)]
    await client.close()
    assert {type(error) for error in errors} == {SlowConsumerError}
