"""Types of an untyped program, as mypy --strict sees them.

An unused `type: ignore` is an error there, so each one below marks a mistake that mypy finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_type

import simplebus
from simplebus import (
    BlockingRawSubscription,
    BlockingSubscription,
    Message,
    RawSubscription,
    Subscription,
)


@simplebus.message(class_id=7, name="shop-created")
@dataclass
class ShopCreated:
    id: int


@simplebus.message(class_id=8)
@dataclass
class GetShop:
    id: int


async def under_trio_or_asyncio() -> None:
    async with simplebus.connect(["localhost:8888", "localhost:8889"], name="example") as bus:
        await bus.publish(ShopCreated(1), channel="shops.eu", expires=60)
        await bus.publish(b"raw", class_id="by-name", confirm=False)
        await bus.publish(ShopCreated(1), chanel="shops.eu")  # type: ignore[call-arg]
        assert_type(bus.publish_nowait(ShopCreated(2)), int)

        assert_type(bus.subscribe(ShopCreated), Subscription[ShopCreated])
        assert_type(bus.subscribe(7, "shops.*", durable="example"), RawSubscription)
        bus.subscribe(7, start="sometime")  # type: ignore[call-overload]
        async with bus.subscribe(ShopCreated, "shops.*", group="readers") as shops:
            async for shop in shops:
                assert_type(shop, ShopCreated)
            async for message in shops.messages():
                assert_type(message, Message[ShopCreated])
                assert_type(message.value, ShopCreated)
                message.nack(delay=1.5)
            assert_type(await shops.get(timeout=1), Message[ShopCreated])
            assert_type(await shops.take(10), list[Message[ShopCreated]])
        async with bus.subscribe("by-name") as raw:
            async for each in raw:
                assert_type(each, Message[bytes])

        async def created(shop: ShopCreated) -> None:
            print(shop.id)

        bus.handle(ShopCreated, created, concurrency=8)
        bus.handle(7, lambda message: print(message.channel))
        bus.handle(GetShop, created)  # type: ignore[arg-type]
        assert_type(await bus.request(GetShop(1), as_=ShopCreated), ShopCreated)
        assert_type(await bus.request(b"?", class_id=9), Message[bytes])
        assert_type(await bus.fetch(ShopCreated, 0, 10), list[Message[ShopCreated]])


def without_a_loop() -> None:
    with simplebus.connect_blocking("localhost:8888") as bus:
        bus.publish_many([ShopCreated(1), ShopCreated(2)])
        assert_type(bus.subscribe(7), BlockingRawSubscription)
        assert_type(bus.subscribe(ShopCreated), BlockingSubscription[ShopCreated])
        with bus.subscribe(ShopCreated, idle_seconds=1) as shops:
            for shop in shops:
                assert_type(shop, ShopCreated)
            assert_type(shops.get(), Message[ShopCreated])
        assert_type(bus.request(GetShop(1), as_=ShopCreated), ShopCreated)
