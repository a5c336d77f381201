"""Acked delivery with nats-py: `ack`, `nak`, `in_progress`, `term`, `ack_sync` and `metadata`.

The server stores messages on `kept.CLASS.…` in a class.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tests.nats.running_server import IS_REFERENCE, PATIENT, NatsTestServer, on_asyncio, settle
from tests.support.programs import PATIENCE_SECONDS

pytestmark = [
    pytest.mark.xdist_group("nats clients"),
    pytest.mark.skipif(IS_REFERENCE, reason="the reference server has no classes"),
]


@contextlib.asynccontextmanager
async def connected(server: NatsTestServer) -> AsyncIterator[Client]:
    client = await nats.connect(server.url, allow_reconnect=False, **PATIENT)
    try:
        yield client
    finally:
        await client.close()


async def fill(client: Client, name: str, count: int) -> None:
    """Publish `count` messages and wait until they are stored."""
    for number in range(count):
        await client.publish(f"kept.{name}.n", b"%d" % number, headers={"Number": str(number)})
    await settle(client)


async def next_of(subscription: Subscription) -> Msg:
    return await subscription.next_msg(timeout=60)


@on_asyncio
async def test_ack_methods_work(shared_server: NatsTestServer) -> None:
    async with connected(shared_server) as client:
        await fill(client, "words", 5)
        sub = await client.subscribe("$SB.SUB.words.reader.ack_seconds=60")
        messages = [await next_of(sub) for _ in range(5)]
        assert [m.data for m in messages] == [b"%d" % number for number in range(5)]
        acked, acked_sync, nacked, worked, ended = messages
        assert acked_sync.subject == "kept.words.n"
        assert acked_sync.headers == {"Number": "1"}
        metadata = acked_sync.metadata
        assert (metadata.stream, metadata.consumer) == ("words", "reader")
        assert (metadata.sequence.stream, metadata.sequence.consumer) == (1, 2)
        assert (metadata.num_delivered, metadata.num_pending) == (1, 3)
        assert abs(metadata.timestamp.timestamp() - time.time()) < 60
        await acked.ack()
        assert (await acked_sync.ack_sync(timeout=60)).data == b""
        await ended.term()
        await worked.in_progress()
        await nacked.nak(delay=1e-9)
        redelivered = await next_of(sub)
        assert (redelivered.data, redelivered.metadata.num_delivered) == (b"2", 2)
        started_at = time.monotonic()
        await redelivered.nak(delay=0.2)
        third_delivery = await next_of(sub)
        assert (third_delivery.data, third_delivery.metadata.num_delivered) == (b"2", 3)
        assert time.monotonic() - started_at > 0.15
        await third_delivery.ack_sync(timeout=60)
        await worked.ack_sync(timeout=60)
        await sub.unsubscribe()
        new_reader = await client.subscribe("$SB.SUB.words.reader")
        await client.publish("kept.words.n", b"next")
        assert (await next_of(new_reader)).data == b"next"
        dead = await client.subscribe("$SB.SUB.dead%2Ewords.-.start=earliest")
        buried = await next_of(dead)
        assert (buried.subject, buried.data) == ("kept.words.n", b"4")


@on_asyncio
async def test_unacked_message_is_redelivered(shared_server: NatsTestServer) -> None:
    async with connected(shared_server) as client:
        await fill(client, "late", 1)
        sub = await client.subscribe("$SB.SUB.late.reader.ack_seconds=1")
        for attempt in (1, 2):
            message = await next_of(sub)
            assert (message.data, message.metadata.num_delivered) == (b"0", attempt)
        await message.ack_sync(timeout=60)


@on_asyncio
async def test_group_members_share_a_class_and_take_over(
    shared_server: NatsTestServer,
) -> None:
    count = 40
    async with connected(shared_server) as client, contextlib.AsyncExitStack() as stack:
        await fill(client, "shared", count)
        dying = await stack.enter_async_context(connected(shared_server))
        dying_subscription = await dying.subscribe("$SB.SUB.shared.crew.in_flight=10", queue="crew")
        unacked = [await next_of(dying_subscription) for _ in range(10)]
        assert [int(message.data) for message in unacked] == list(range(10))
        await unacked[0].ack_sync(timeout=60)
        staying = await client.subscribe("$SB.SUB.shared.crew", queue="crew")
        await dying.close()
        found = {}
        while len(found) < count - 1:
            message = await next_of(staying)
            found[int(message.data)] = message.metadata.num_delivered
            await message.ack()
        assert sorted(found) == list(range(1, count))
        assert {found[number] for number in range(1, 10)} == {2}


@on_asyncio
async def test_durable_resumes_and_keeps_new_messages(
    shared_server: NatsTestServer,
) -> None:
    async with connected(shared_server) as client:
        sub = await client.subscribe("$SB.SUB.left.keeper")
        await fill(client, "left", 3)
        await (await next_of(sub)).ack_sync(timeout=60)
        await sub.unsubscribe()
        await client.publish("kept.left.n", b"meanwhile")
        await settle(client)
        async with connected(shared_server) as other_client:
            redelivered = await other_client.subscribe("$SB.SUB.left.keeper")
            payloads = [(await next_of(redelivered)).data for _ in range(3)]
            assert payloads == [b"1", b"2", b"meanwhile"]
            # The first message was acknowledged by every subscription and removed.
            new_subscription = await other_client.subscribe(
                "$SB.SUB.left.-.start=earliest.filter.kept.left.*"
            )
            assert (await next_of(new_subscription)).data == b"1"


@on_asyncio
async def test_ack_by_another_client_is_ignored(shared_server: NatsTestServer) -> None:
    async with connected(shared_server) as client, connected(shared_server) as other_client:
        await fill(client, "end", 1)
        sub = await client.subscribe("$SB.SUB.end.owner.ack_seconds=1")
        message = await next_of(sub)
        await other_client.publish(message.reply, b"+ACK")
        redelivered = await next_of(sub)
        assert (redelivered.data, redelivered.metadata.num_delivered) == (b"0", 2)
        await redelivered.ack_sync(timeout=60)


@pytest.mark.parametrize(
    "subject",
    [
        "$SB.SUB.bad.reader.speed=3",
        "$SB.SUB.bad.reader.start=soon",
        "$SB.SUB.70000",
        "$SB.SUB.*",
    ],
)
@on_asyncio
async def test_refused_subscription_keeps_the_connection(
    shared_server: NatsTestServer, subject: str
) -> None:
    errors: asyncio.Queue[Exception] = asyncio.Queue()
    client = await nats.connect(shared_server.url, error_cb=errors.put, **PATIENT)
    await client.subscribe(subject)
    error = str(await asyncio.wait_for(errors.get(), PATIENCE_SECONDS))
    assert error.lower().startswith(
        f'nats: permissions violation for subscription to "{subject.lower()}" ('
    )
    plain: Any = await client.subscribe("plain")
    await client.publish("plain", b"goes on")
    assert (await next_of(plain)).data == b"goes on"
    await client.close()
