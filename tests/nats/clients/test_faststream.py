"""Two instances of a FastStream app share work, reply to requests and publish."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

import pytest
from faststream import Context, FastStream, Path
from faststream.nats import NatsBroker, NatsRouter
from nats.errors import NoRespondersError
from pydantic import BaseModel

from tests.nats.running_server import NatsTestServer, on_asyncio, wait_for

pytestmark = pytest.mark.xdist_group("nats clients")

ORDERS = 100


class Order(BaseModel):
    id: int
    price: float


class Bill(BaseModel):
    order: int
    sum: float
    region: str


class Shop:
    """One running instance of the app, with the orders that it received."""

    def __init__(self, server: NatsTestServer, name: str) -> None:
        self.order_ids: list[int] = []
        router = NatsRouter(prefix="shop.")

        @router.subscriber("orders.{region}", queue="billing")
        @router.publisher("bills")
        async def bill(order: Order, region: Annotated[str, Path()]) -> Bill:
            self.order_ids.append(order.id)
            return Bill(order=order.id, sum=order.price * 2, region=region)

        @router.subscriber("price", queue="pricing")
        async def price(
            order: Order, currency: Annotated[str, Context("message.headers.currency")]
        ) -> str:
            return f"{order.price:g} {currency}"

        @router.subscriber(f"here.{name}")
        async def is_ready(text: str) -> str:  # The last subscription of the app.
            return name

        broker = NatsBroker(server.url, logger=None, connect_timeout=60)
        broker.include_router(router)
        self.is_up = asyncio.Event()
        self.app = FastStream(broker, logger=None, after_startup=[self.is_up.set])

    async def __aenter__(self) -> Shop:
        self._running = asyncio.create_task(self.app.run(sleep_time=0.01))
        await self.is_up.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.app.exit()
        await self._running


async def wait_subscribed(client: NatsBroker, name: str) -> None:
    """Wait until the server has received all subscriptions of an instance."""
    for _ in range(1_000):
        with contextlib.suppress(NoRespondersError):
            answer = await client.request("?", f"shop.here.{name}", timeout=60)
            assert await answer.decode() == name
            return
    raise AssertionError(f"{name} has not subscribed")


@on_asyncio
async def test_two_faststream_instances_share_work(shared_server: NatsTestServer) -> None:
    bills: list[Bill] = []
    client = NatsBroker(shared_server.url, logger=None, connect_timeout=60)

    @client.subscriber("shop.bills")
    async def note(bill: Bill) -> None:
        bills.append(bill)

    async with (
        client,
        Shop(shared_server, "one") as first_shop,
        Shop(shared_server, "other") as second_shop,
    ):
        await client.start()
        await wait_subscribed(client, "one")
        await wait_subscribed(client, "other")
        for number in range(ORDERS):
            await client.publish(Order(id=number, price=number / 4), "shop.orders.eu")
        await wait_for(lambda: len(bills) == ORDERS)
        assert sorted(first_shop.order_ids + second_shop.order_ids) == list(range(ORDERS))
        assert first_shop.order_ids
        assert second_shop.order_ids
        assert sorted((bill.order, bill.sum) for bill in bills) == [
            (number, number / 2) for number in range(ORDERS)
        ]
        assert {bill.region for bill in bills} == {"eu"}
        question = Order(id=1, price=2.5)
        answer = await client.request(
            question, "shop.price", headers={"currency": "EUR"}, timeout=60
        )
        assert await answer.decode() == "2.5 EUR"
