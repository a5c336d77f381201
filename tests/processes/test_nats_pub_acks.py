"""Messages that nats-py publishes with PubAcks survive SIGKILL, and are stored once."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import PubAck

import simplebus
from tests.support.programs import PATIENCE_SECONDS, run_server

MESSAGES_PER_ROUND = 60
ROUNDS = 3


async def connect(address: str) -> Client:
    return await nats.connect(
        f"nats://{address}",
        connect_timeout=PATIENCE_SECONDS,
        allow_reconnect=False,
        error_cb=ignore_error,
    )


async def ignore_error(error: Exception) -> None:
    pass


async def publish(client: Client, number: int, timeout: float = PATIENCE_SECONDS) -> PubAck:
    """Publish a message whose id and payload are its number."""
    name = str(number)
    headers = {"Nats-Msg-Id": name}
    js = client.jetstream()
    return await js.publish("orders.a", name.encode(), timeout=timeout, headers=headers)


async def publish_until_killed(client: Client, first: int, kill_after: int) -> set[int]:
    """Publish concurrently, and call `kill` after some PubAcks. Returns the confirmed numbers."""
    confirmed: set[int] = set()
    enough = asyncio.Event()

    async def publish_one(number: int) -> None:
        with contextlib.suppress(Exception):  # The server is killed.
            await publish(client, number)
            confirmed.add(number)
            if len(confirmed) >= kill_after:
                enough.set()

    tasks = [
        asyncio.create_task(publish_one(number))
        for number in range(first, first + MESSAGES_PER_ROUND)
    ]
    await asyncio.wait_for(enough.wait(), PATIENCE_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return confirmed


@pytest.mark.parametrize("durability", ["os", "disk"])
def test_confirmed_messages_survive_kills_and_are_stored_once(
    durability: str, tmp_path: Path
) -> None:
    asyncio.run(asyncio.wait_for(publish_through_kills(durability, tmp_path), PATIENCE_SECONDS))


async def publish_through_kills(durability: str, folder: Path) -> None:
    options = ("--bind", "orders.>=orders", "--data-dir", str(folder), "--durability", durability)
    confirmed: set[int] = set()
    stored: dict[int, int] = {}
    """Numbers by sequence: a message may be delivered again after a kill."""
    numbers = range(ROUNDS * MESSAGES_PER_ROUND)
    for round_number in range(ROUNDS):
        with run_server(*options) as (server, url):
            client = await connect(server.nats_address)
            first = round_number * MESSAGES_PER_ROUND
            confirmed |= await publish_until_killed(client, first, 10 + 20 * round_number)
            if round_number == 1:  # Acknowledged messages are deleted, but their ids stay.
                stored |= await receive_all(url, client)
            server.process.kill()
            await client.close()
    with run_server(*options) as (server, url):
        client = await connect(server.nats_address)
        acks = {number: await publish(client, number) for number in numbers}
        assert all(acks[number].duplicate for number in confirmed)
        assert {ack.stream for ack in acks.values()} == {"orders"}
        sequences = [ack.seq for ack in acks.values()]
        assert len(set(sequences)) == len(sequences)
        stored |= await receive_all(url, client)
        await client.close()
    assert sorted(stored.values()) == list(numbers)


async def receive_all(url: str, client: Client) -> dict[int, int]:
    """Receive and acknowledge everything that is stored. Returns numbers by sequence."""
    last = await client.jetstream().publish("orders.last", timeout=PATIENCE_SECONDS)
    found: dict[int, int] = {}
    async with simplebus.connect(url) as bus, bus.subscribe("orders", durable="all") as orders:
        async for message in orders:
            if message.channel == "orders.a":
                found[message.sequence] = int(message.payload)
            elif message.sequence == last.seq:
                break
    return found
