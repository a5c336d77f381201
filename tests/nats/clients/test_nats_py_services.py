"""The services API of nats-py: requests and replies, and `$SRV.PING`, `INFO` and `STATS`."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import nats
import pytest
from nats.aio.msg import Msg
from nats.micro import Request, add_service

from tests.nats.running_server import PATIENT, NatsTestServer, on_asyncio, settle

pytestmark = pytest.mark.xdist_group("nats clients")


async def answers(client: nats.NATS, subject: str, count: int) -> list[dict[str, object]]:
    """Return the replies of several services to one request."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    await client.publish(subject, b"", reply=inbox)
    found: list[Msg] = [await subscription.next_msg(timeout=60) for _ in range(count)]
    await subscription.unsubscribe()
    return [json.loads(message.data) for message in found]


@on_asyncio
async def test_services_are_discovered_requested_and_counted(shared_server: NatsTestServer) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(await nats.connect(shared_server.url, **PATIENT))
        client = await stack.enter_async_context(await nats.connect(shared_server.url, **PATIENT))

        async def answer(request: Request) -> None:
            if not request.data:
                await request.respond_error("400", "nothing to double")
            else:
                await request.respond(request.data * 2, headers={"Times": "2"})

        services = [
            await stack.enter_async_context(
                await add_service(server, name="doubling", version="1.2.3", description="two")
            )
            for _ in range(2)
        ]
        for service in services:
            group = service.add_group(name="math")
            await group.add_endpoint(name="double", handler=answer)
        await settle(server)

        replies = await asyncio.gather(
            *(client.request("math.double", b"%d" % n, timeout=60) for n in range(40))
        )
        assert [reply.data for reply in replies] == [b"%d%d" % (n, n) for n in range(40)]
        assert replies[0].headers == {"Times": "2"}
        refused = await client.request("math.double", b"", timeout=60)
        assert refused.headers == {
            "Nats-Service-Error": "nothing to double",
            "Nats-Service-Error-Code": "400",
        }

        ids = {service.id for service in services}
        for verb in ("PING", "INFO", "STATS"):
            for subject in (f"$SRV.{verb}", f"$SRV.{verb}.doubling"):
                found = await answers(client, subject, 2)
                assert {each["id"] for each in found} == ids
                assert {each["version"] for each in found} == {"1.2.3"}
        [info] = await answers(client, f"$SRV.INFO.doubling.{services[0].id}", 1)
        assert info["id"] == services[0].id
        stats = await answers(client, "$SRV.STATS.doubling", 2)
        request_counts = [
            endpoint["num_requests"] for each in stats for endpoint in each["endpoints"]
        ]
        assert sum(request_counts) == 41
        assert all(request_counts), "one instance handled every request"
