"""Conformance tests of rejected messages: backoff, maximum deliveries and dead letters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simplebus.client.core.messages import Message
from simplebus.core.settings import ClassSettings
from simplebus.testing.suite import (
    MANUAL_TICKS,
    NUMBERED,
    PATIENCE_SECONDS,
    Suite,
    conformance_test,
    get_payloads,
    is_silent,
)


class NackSuite(Suite):
    """Messages that their consumer rejects."""

    # Backoff --------------------------------------------------------------------------------------

    @conformance_test
    async def test_uses_the_backoff_of_the_subscription(self) -> None:
        options = {"backoff": [0.1, 0.2], "auto_ack": False}
        async with self.open_bus() as bus, bus.subscribe(1, **options) as messages:
            await bus.publish(b"once", class_id=1)
            for attempt, delay_seconds in (1, 0.1), (2, 0.2), (3, 0.2):
                message = await messages.get(PATIENCE_SECONDS)
                assert message.attempt == attempt
                message.nack()
                await bus.drain()
                await self.pass_seconds(delay_seconds)
            assert (await messages.get(PATIENCE_SECONDS)).attempt == 4

    @conformance_test
    async def test_long_backoff_does_not_end_with_ticks(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as bus,
            bus.subscribe(1, backoff=[40_000], auto_ack=False) as messages,
        ):
            await bus.publish(b"once", class_id=1)
            (await messages.get(PATIENCE_SECONDS)).nack()
            await bus.drain()
            host.tick(10)
            assert await is_silent(messages)

    @conformance_test
    async def test_uses_the_delivery_policy_of_the_class(self) -> None:
        class_settings = ClassSettings(backoff_seconds=(0.1,), deliveries_max=3)
        async with (
            self.host(replace(MANUAL_TICKS, classes={"orders": class_settings})) as host,
            host.connect() as bus,
            bus.subscribe("orders", auto_ack=False) as messages,
            bus.subscribe("dead.orders", start="earliest") as dead_letters,
        ):
            await bus.publish(b"once", class_id="orders")
            for attempt in 1, 2, 3:
                message = await messages.get(PATIENCE_SECONDS)
                assert message.attempt == attempt
                message.nack()
                await bus.drain()
                await self.pass_seconds(0.1)
            assert (await dead_letters.get(PATIENCE_SECONDS)).payload == b"once"
            assert await is_silent(messages)

    @conformance_test
    async def test_nacked_messages_do_not_count_as_in_flight(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
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
            redelivered = await messages.get(PATIENCE_SECONDS)
            assert (redelivered.payload, redelivered.attempt) == (NUMBERED[0], 2)

    @conformance_test
    async def test_redelivery_precedes_new_messages(self) -> None:
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
            assert await get_payloads(messages, 1) == [NUMBERED[1]]

    # Dead letters ---------------------------------------------------------------------------------

    @conformance_test
    async def test_default_max_deliveries_is_16(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, auto_ack=False) as messages:
            await bus.publish(b"poison", class_id=1)
            for attempt in range(1, 17):
                message = await messages.get(PATIENCE_SECONDS)
                assert message.attempt == attempt
                message.nack(delay=0, error=f"for the {attempt}. time")
            await bus.drain()
            assert await is_silent(messages)
            assert await self.fetch_dead_letters(bus) == [
                (b"poison", "max_deliveries", "16", "for the 16. time")
            ]

    @conformance_test
    async def test_terminated_message_becomes_a_dead_letter_at_once(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, auto_ack=False) as messages:
            await bus.publish_many(NUMBERED[:3], class_id=1)
            first, second, third = [await messages.get(PATIENCE_SECONDS) for _ in range(3)]
            first.terminate(ValueError("no number: <\r\n>"))
            second.terminate()
            third.ack()
            await bus.drain()
            assert await self.fetch_dead_letters(bus) == [
                (NUMBERED[0], "terminated", "1", "ValueError: no number: <\r\n>"),
                (NUMBERED[1], "terminated", "1", None),
            ]

    @conformance_test
    async def test_dead_letter_contains_the_error_of_the_handler(self) -> None:
        calls: list[bytes] = []

        def handler(message: Message[bytes]) -> None:
            calls.append(message.payload)
            raise ValueError("not today")

        async with self.host(MANUAL_TICKS) as host:
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

    async def fetch_dead_letters(self, bus: Any) -> list[tuple[bytes, str, str, str | None]]:
        """Return payload, reason, attempts and error of each dead letter of class 1."""
        found = []
        for letter in await bus.fetch("dead.1"):
            headers = dict(letter.headers)
            assert 0 < float(headers["dead-accepted"]) <= float(headers["dead-since"])
            found.append(
                (
                    letter.payload,
                    headers["dead-reason"],
                    headers["dead-attempts"],
                    headers.get("dead-error"),
                )
            )
        return found

    # Repeated deliveries --------------------------------------------------------------------------

    @conformance_test
    async def test_nack_of_an_earlier_delivery_is_ignored(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as bus,
            bus.subscribe(1, auto_ack=False) as messages,
        ):
            await bus.publish(b"once", class_id=1)
            first = await messages.get(PATIENCE_SECONDS)
            host.tick()
            second = await messages.get(PATIENCE_SECONDS)
            assert (first.attempt, second.attempt) == (1, 2)
            first.nack(delay=0)
            first.terminate("too late")
            await bus.drain()
            assert await is_silent(messages)
            second.ack()
            await bus.drain()
            host.tick(20)
            assert await is_silent(messages)
