"""Promises about messages that are not processed: pauses, giving up, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simplebus.client.core.messages import Message
from simplebus.core.settings import ClassSettings
from simplebus.testing.suite import (
    CLOCKLESS,
    NUMBERED,
    PATIENCE_SECONDS,
    Suite,
    nothing_comes,
    payloads,
    promise,
)

PAUSING = replace(CLOCKLESS, tick_seconds=20_000.0)
"""Where pauses of several ticks can be asked for."""


class Refusing(Suite):
    """What becomes of a message that its consumer could not process."""

    # Pauses --------------------------------------------------------------------------------------

    @promise
    async def test_what_is_refused_comes_again_after_the_pauses_that_were_asked_for(self) -> None:
        options = {"backoff": [40_000, 60_000], "auto_ack": False}
        async with (
            self.host(PAUSING) as host,
            host.connect() as bus,
            bus.subscribe(1, **options) as messages,
        ):
            await bus.publish(b"once", class_id=1)
            for attempt, beats in (1, 0), (2, 2), (3, 3), (4, 3):
                if beats:
                    host.tick(beats - 1)
                    assert await nothing_comes(messages)
                    host.tick()
                message = await messages.get(PATIENCE_SECONDS)
                assert message.attempt == attempt
                message.nack()
                await bus.drain()

    @promise
    async def test_a_class_may_have_pauses_and_deliveries_of_its_own(self) -> None:
        own = ClassSettings(backoff_seconds=(40_000.0,), deliveries_max=3)
        async with (
            self.host(replace(PAUSING, classes={"orders": own})) as host,
            host.connect() as bus,
            bus.subscribe("orders", auto_ack=False) as messages,
        ):
            await bus.publish(b"once", class_id="orders")
            for attempt in 1, 2, 3:
                message = await messages.get(PATIENCE_SECONDS)
                assert message.attempt == attempt
                message.nack()
                await bus.drain()
                host.tick()
                assert await nothing_comes(messages)
                host.tick()
            assert await nothing_comes(messages)
            assert [m.payload for m in await bus.fetch("dead.orders")] == [b"once"]

    @promise
    async def test_what_was_refused_holds_up_nothing(self) -> None:
        async with (
            self.host(CLOCKLESS) as host,
            host.connect() as bus,
            bus.subscribe(1, auto_ack=False, max_in_flight=1) as messages,
        ):
            await bus.publish_many(NUMBERED[:3], class_id=1)
            for payload, delay in (NUMBERED[0], None), (NUMBERED[1], 3600), (NUMBERED[2], None):
                message = await messages.get(PATIENCE_SECONDS)
                assert message.payload == payload
                message.nack(delay)
            await bus.drain()
            host.tick()
            again = await messages.get(PATIENCE_SECONDS)
            assert (again.payload, again.attempt) == (NUMBERED[0], 2)

    @promise
    async def test_what_comes_again_comes_before_what_is_new(self) -> None:
        async with (
            self.open_bus() as bus,
            bus.subscribe(1, auto_ack=False, max_in_flight=1) as messages,
        ):
            await bus.publish_many(NUMBERED[:3], class_id=1)
            for _ in range(3):
                message = await messages.get(PATIENCE_SECONDS)
                assert message.payload == NUMBERED[0]
                message.nack(delay=0)
            (await messages.get(PATIENCE_SECONDS)).ack()
            assert await payloads(messages, 1) == [NUMBERED[1]]

    # Giving up -----------------------------------------------------------------------------------

    @promise
    async def test_a_message_is_given_up_after_16_deliveries_if_nobody_says_otherwise(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, auto_ack=False) as messages:
            await bus.publish(b"poison", class_id=1)
            for attempt in range(1, 17):
                message = await messages.get(PATIENCE_SECONDS)
                assert message.attempt == attempt
                message.nack(delay=0, error=f"for the {attempt}. time")
            await bus.drain()
            assert await nothing_comes(messages)
            assert await self.told_of_the_dead(bus) == [
                (b"poison", "max_deliveries", "16", "for the 16. time")
            ]

    @promise
    async def test_what_can_never_be_processed_is_given_up_at_once_and_says_why(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, auto_ack=False) as messages:
            await bus.publish_many(NUMBERED[:3], class_id=1)
            first, second, third = [await messages.get(PATIENCE_SECONDS) for _ in range(3)]
            first.terminate(ValueError("no number: <\r\n>"))
            second.terminate()
            third.ack()
            await bus.drain()
            assert await self.told_of_the_dead(bus) == [
                (NUMBERED[0], "terminated", "1", "ValueError: no number: <\r\n>"),
                (NUMBERED[1], "terminated", "1", None),
            ]

    @promise
    async def test_what_a_handler_raised_stands_in_the_dead_letter(self) -> None:
        calls: list[bytes] = []

        def handler(message: Message[bytes]) -> None:
            calls.append(message.payload)
            raise ValueError("not today")

        async with self.host(CLOCKLESS) as host:
            with pytest.raises(ExceptionGroup):  # noqa: PT012 - leaving raises.
                async with host.connect() as bus:
                    bus.handle(1, handler, max_deliveries=1)
                    await bus.publish(b"bad", class_id=1)
                    await host.until(bus, lambda: len(calls) == 1)
                    await bus.drain()
                    host.tick()
                    async with bus.subscribe("dead.1") as dead:
                        letter = await dead.get(PATIENCE_SECONDS)
            assert (calls, letter.payload) == ([b"bad"], b"bad")
            assert dict(letter.headers)["dead-error"] == "ValueError: not today"

    async def told_of_the_dead(self, bus: Any) -> list[tuple[bytes, str, str, str | None]]:
        """Payload, reason, attempts and error of each dead letter of class 1."""
        told = []
        for letter in await bus.fetch("dead.1"):
            headers = dict(letter.headers)
            assert 0 < float(headers["dead-accepted"]) <= float(headers["dead-since"])
            told.append(
                (
                    letter.payload,
                    headers["dead-reason"],
                    headers["dead-attempts"],
                    headers.get("dead-error"),
                )
            )
        return told

    # Which delivery ------------------------------------------------------------------------------

    @promise
    async def test_what_is_said_of_a_former_delivery_does_not_touch_the_present_one(self) -> None:
        async with (
            self.host(CLOCKLESS) as host,
            host.connect() as bus,
            bus.subscribe(1, auto_ack=False) as messages,
        ):
            await bus.publish(b"once", class_id=1)
            former = await messages.get(PATIENCE_SECONDS)
            host.tick()
            present = await messages.get(PATIENCE_SECONDS)
            assert (former.attempt, present.attempt) == (1, 2)
            former.nack(delay=0)
            former.terminate("too late")
            await bus.drain()
            assert await nothing_comes(messages)
            present.ack()
            await bus.drain()
            host.tick(20)
            assert await nothing_comes(messages)
