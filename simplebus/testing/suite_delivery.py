"""Conformance tests of delivery: order, acknowledgement, redelivery and flow control."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import anyio
import pytest

from simplebus.client.message_builder import BusFullError
from simplebus.core.errors import RefusedError
from simplebus.core.limits import Limits
from simplebus.core.settings import Settings
from simplebus.testing.hosts import Host
from simplebus.testing.suite import (
    MANUAL_TICKS,
    NUMBERED,
    PATIENCE_SECONDS,
    QUIET_SECONDS,
    Suite,
    conformance_test,
    get_all_payloads,
    get_payloads,
    is_silent,
)

LATE = [b"late %d" % number for number in range(10)]


class DeliverySuite(Suite):
    """Delivery of stored messages."""

    # Order ---------------------------------------------------------------------------------------

    @conformance_test
    async def test_delivers_messages_in_the_order_of_acceptance(self) -> None:
        payloads = [b"%d" % number for number in range(3000)]
        async with self.open_bus() as bus, bus.subscribe(1) as messages:
            await bus.publish_many(payloads[:2000], class_id=1)
            for payload in payloads[2000:]:
                await bus.publish(payload, class_id=1, confirm=False)
            received = [await messages.get(PATIENCE_SECONDS) for _ in payloads]
            assert [message.payload for message in received] == payloads
            assert [message.sequence for message in received] == list(range(3000))
            assert {(message.attempt, message.redelivered) for message in received} == {(1, False)}

    @conformance_test
    async def test_stores_messages_for_the_first_subscription(self) -> None:
        async with self.open_bus() as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            async with bus.subscribe(1) as messages:
                assert await get_payloads(messages, 10) == NUMBERED

    @conformance_test
    async def test_later_subscription_receives_only_new_messages(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1) as first:
            await bus.publish_many(NUMBERED, class_id=1)
            async with bus.subscribe(1) as second:
                await bus.publish_many(LATE, class_id=1)
                assert await get_payloads(second, 10) == LATE
            assert await get_payloads(first, 20) == NUMBERED + LATE

    @conformance_test
    async def test_classes_are_independent(self) -> None:
        async with (
            self.open_bus() as bus,
            bus.subscribe(1) as first_messages,
            bus.subscribe(2) as second_messages,
        ):
            await bus.publish(b"one", class_id=1)
            await bus.publish(b"two", class_id=2)
            assert await get_payloads(first_messages, 1) == [b"one"]
            assert await get_payloads(second_messages, 1) == [b"two"]
            assert await is_silent(first_messages)

    # Acknowledgement -----------------------------------------------------------------------------

    # A message is acknowledged when the consumer asks for the next one, or when the subscription's
    # block is left without an exception.

    @conformance_test
    async def test_asking_for_the_next_message_acknowledges_the_one_before(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, max_in_flight=1) as messages:
            await bus.publish_many(NUMBERED, class_id=1)
            assert await get_payloads(messages, 10) == NUMBERED

    @conformance_test
    async def test_loop_acknowledges_a_message_when_it_asks_for_the_next(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, max_in_flight=1) as messages:
            await bus.publish_many(NUMBERED, class_id=1)
            received = []
            async for message in messages:
                received.append(message.payload)
                if len(received) == 10:
                    break
            assert received == NUMBERED

    @conformance_test
    async def test_message_of_an_ended_loop_is_acknowledged_by_asking_for_the_next(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, max_in_flight=1) as messages:
            await bus.publish_many(NUMBERED[:3], class_id=1)
            async for message in messages:
                assert message.payload == NUMBERED[0]
                break
            async for message in messages:
                assert message.payload == NUMBERED[1]
                break
            assert await get_payloads(messages, 1) == [NUMBERED[2]]

    @conformance_test
    async def test_leaving_a_subscription_acknowledges_the_last_message(self) -> None:
        async with self.open_bus() as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            async with bus.subscribe(1) as messages:
                assert await get_payloads(messages, 3) == NUMBERED[:3]
            async with bus.subscribe(1) as remaining_messages:
                assert await get_payloads(remaining_messages, 7) == NUMBERED[3:]

    @conformance_test
    async def test_leaving_a_subscription_acknowledges_the_last_message_of_a_loop(self) -> None:
        async with self.open_bus() as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            received = []
            for count in 5, 10:
                async with bus.subscribe(1) as messages:
                    async for message in messages:
                        received.append(message.payload)
                        if len(received) == count:
                            break
            assert received == NUMBERED

    @conformance_test
    async def test_block_that_raises_has_its_last_message_redelivered_after_a_backoff(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect() as bus:
            await bus.publish_many(NUMBERED[:3], class_id=1)
            with pytest.raises(KeyError, match="the consumer fails"):  # noqa: PT012
                async with bus.subscribe(1) as messages:
                    await get_payloads(messages, 2)
                    raise KeyError("the consumer fails")
            await self.expect_redelivery_after_backoff(host, bus)

    @conformance_test
    async def test_loop_that_raises_has_its_message_redelivered_after_a_backoff(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect() as bus:
            await bus.publish_many(NUMBERED[:3], class_id=1)
            with pytest.raises(KeyError, match="the consumer fails"):  # noqa: PT012
                async with bus.subscribe(1) as messages:
                    async for message in messages:
                        if message.payload == NUMBERED[1]:
                            raise KeyError("the consumer fails")
            await self.expect_redelivery_after_backoff(host, bus)

    async def expect_redelivery_after_backoff(self, host: Host, bus: Any) -> None:
        """Check that message 0 is acknowledged, and message 1 rejected, of the messages 0 to 2."""
        async with bus.subscribe(1) as remaining_messages:
            assert await get_payloads(remaining_messages, 1) == [NUMBERED[2]]
            assert await is_silent(remaining_messages)
            host.tick()
            redelivered = await remaining_messages.get(PATIENCE_SECONDS)
            assert (redelivered.payload, redelivered.redelivered) == (NUMBERED[1], True)

    @conformance_test
    async def test_exception_handled_inside_the_block_does_not_reject_the_message(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect() as bus:
            await bus.publish_many(NUMBERED[:2], class_id=1)
            async with bus.subscribe(1) as messages:
                with contextlib.suppress(KeyError):
                    async for _ in messages:
                        raise KeyError("handled by the consumer")
                assert await get_payloads(messages, 1) == [NUMBERED[1]]
            host.tick(20)
            async with bus.subscribe(1) as remaining_messages:
                assert await is_silent(remaining_messages)

    @conformance_test
    async def test_messages_can_be_acknowledged_manually_in_any_order(self) -> None:
        async with self.open_bus() as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            async with bus.subscribe(1, auto_ack=False) as messages:
                received = [await messages.get(PATIENCE_SECONDS) for _ in range(10)]
                for message in (received[7], received[1], received[2]):
                    messages.ack(message)
                received[9].ack()
                await bus.drain()
            async with bus.subscribe(1) as remaining_messages:
                unacked = [NUMBERED[number] for number in (0, 3, 4, 5, 6, 8)]
                assert await get_payloads(remaining_messages, 6) == unacked

    @conformance_test
    async def test_batches_contain_all_messages(self) -> None:
        async with self.open_bus() as bus:
            await bus.publish_many(NUMBERED * 100, class_id=1)
            received: list[bytes] = []
            async with bus.subscribe(1) as messages:
                async for batch in messages.batches():
                    received += batch.payloads
                    if len(received) == 1000:
                        break
            assert received == NUMBERED * 100
            async with bus.subscribe(1) as remaining_messages:
                assert await is_silent(remaining_messages)

    @conformance_test
    async def test_batch_can_be_acknowledged_manually(self) -> None:
        async with self.open_bus() as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            async with bus.subscribe(1, auto_ack=False) as messages:
                received = 0
                async for batch in messages.batches():
                    messages.ack_batch(batch)
                    received += len(batch)
                    if received == 10:
                        break
                await bus.drain()
            async with bus.subscribe(1) as remaining_messages:
                assert await is_silent(remaining_messages)

    @conformance_test
    async def test_take_returns_at_most_the_requested_number(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1) as messages:
            assert await messages.take(3, 0.01) == []
            await bus.publish_many(NUMBERED, class_id=1)
            first = await messages.take(4, PATIENCE_SECONDS)
            assert [message.payload for message in first] == NUMBERED[: len(first)]
            assert 1 <= len(first) <= 4
            remaining = NUMBERED[len(first) :]
            assert await get_all_payloads(messages, len(remaining)) == remaining

    @conformance_test
    async def test_get_raises_after_its_timeout(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1) as messages:
            with pytest.raises(TimeoutError, match=r"no message of class 1 within 0\.01 s"):
                await messages.get(0.01)

    # Redelivery ----------------------------------------------------------------------------------

    @conformance_test
    async def test_redelivers_unacknowledged_messages_with_growing_backoff(
        self,
    ) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as bus,
            bus.subscribe(1, auto_ack=False) as messages,
        ):
            await bus.publish(b"once", class_id=1)
            for attempt, beats in (1, 0), (2, 1), (3, 2), (4, 4):
                if beats > 1:
                    host.tick(beats - 1)
                    assert await is_silent(messages)
                host.tick(min(beats, 1))
                message = await messages.get(PATIENCE_SECONDS)
                assert (message.payload, message.attempt) == (b"once", attempt)
                assert message.redelivered == (attempt > 1)
                await bus.drain()
            message.ack()
            await bus.drain()
            host.tick(20)
            assert await is_silent(messages)

    @conformance_test
    async def test_redelivers_nacked_message_after_backoff(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as bus,
            bus.subscribe(1, auto_ack=False) as messages,
        ):
            await bus.publish(b"once", class_id=1)
            (await messages.get(PATIENCE_SECONDS)).nack()
            await bus.drain()
            assert await is_silent(messages)
            host.tick()
            assert (await messages.get(PATIENCE_SECONDS)).attempt == 2

    @conformance_test
    async def test_redelivers_nacked_message_after_the_requested_delay(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, auto_ack=False) as messages:
            await bus.publish_many(NUMBERED[:2], class_id=1)
            first, second = [await messages.get(PATIENCE_SECONDS) for _ in range(2)]
            begin = anyio.current_time()
            second.nack(delay=0.3)
            first.nack(delay=0)
            received = [await messages.get(PATIENCE_SECONDS)]
            received += await messages.take(1, QUIET_SECONDS)
            # A slow test run may have received both by now, in any order.
            if anyio.current_time() - begin < 0.3:
                assert [message.payload for message in received] == NUMBERED[:1]
            await self.pass_seconds(0.3)
            received += [await messages.get(PATIENCE_SECONDS) for _ in range(2 - len(received))]
            assert {(m.payload, m.attempt) for m in received} == {
                (NUMBERED[0], 2),
                (NUMBERED[1], 2),
            }

    @conformance_test
    async def test_working_restarts_the_ack_timeout(self) -> None:
        settings = replace(MANUAL_TICKS, ack_timeout=2)
        async with (
            self.host(settings) as host,
            host.connect() as bus,
            bus.subscribe(1, auto_ack=False) as messages,
        ):
            await bus.publish(b"hard", class_id=1)
            message = await messages.get(PATIENCE_SECONDS)
            host.tick()
            message.working()
            await bus.drain()
            host.tick()
            assert await is_silent(messages)
            host.tick()
            assert (await messages.get(PATIENCE_SECONDS)).attempt == 2

    @conformance_test
    async def test_drops_message_after_max_deliveries(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect() as bus:
            async with bus.subscribe(1, auto_ack=False, max_deliveries=2) as messages:
                await bus.publish_many(NUMBERED[:2], class_id=1)
                (await messages.get(PATIENCE_SECONDS)).nack(delay=0)
                (await messages.get(PATIENCE_SECONDS)).ack()
                (await messages.get(PATIENCE_SECONDS)).nack(delay=0)
                await bus.drain()
                host.tick(20)
                assert await is_silent(messages)
            async with bus.subscribe(1) as remaining_messages:
                assert await is_silent(remaining_messages)

    @conformance_test
    async def test_dead_letter_is_stored_with_its_reason(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect() as bus:
            async with bus.subscribe(
                "orders", auto_ack=False, max_deliveries=2, durable="billing"
            ) as messages:
                await bus.publish(b"good", class_id="orders")
                await bus.publish(
                    b"bad", class_id="orders", channel="eu", key=b"k", headers={"trace": "7"}
                )
                (await messages.get(PATIENCE_SECONDS)).ack()
                for _ in range(2):
                    (await messages.get(PATIENCE_SECONDS)).nack(delay=0)
                async with bus.subscribe("dead.orders", auto_ack=False) as dead:
                    letter = await dead.get(PATIENCE_SECONDS)
                    assert await is_silent(dead)
                    assert [m.payload for m in await bus.fetch("dead.orders")] == [b"bad"]
                    letter.ack()
            assert (letter.payload, letter.channel, letter.key) == (b"bad", "eu", b"k")
            headers = dict(letter.headers)
            assert float(headers.pop("dead-since")) >= float(headers.pop("dead-accepted")) > 0
            assert headers.pop("dead-session").isdigit()
            assert headers == {
                "trace": "7",
                "dead-reason": "max_deliveries",
                "dead-class": "orders",
                "dead-sequence": "1",
                "dead-attempts": "2",
                "dead-subscription": "billing",
            }

    @conformance_test
    async def test_nacked_message_does_not_block_later_ones(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as bus,
            bus.subscribe(1) as messages,
        ):
            await bus.publish_many(NUMBERED, class_id=1)
            (await messages.get(PATIENCE_SECONDS)).nack()
            assert await get_payloads(messages, 9) == NUMBERED[1:]
            await bus.drain()
            host.tick()
            assert (await messages.get(PATIENCE_SECONDS)).payload == NUMBERED[0]

    # Bounds --------------------------------------------------------------------------------------

    @conformance_test
    async def test_client_with_tight_limits_does_not_deadlock(self) -> None:
        limits = Limits(
            class_messages=50, class_bytes=4 * 65_536, frame_bytes=4096, credit_bytes=2048
        )
        payloads = [b"%06d" % number + bytes(500) for number in range(1000)]
        async with self.open_bus(Settings(limits=limits)) as bus, bus.subscribe(1) as messages:
            received: list[bytes] = []
            for payload in payloads:
                while True:
                    try:
                        bus.publish_nowait(payload, class_id=1)
                        break
                    except BusFullError:
                        more = await messages.take(1000, PATIENCE_SECONDS)
                        received += [message.payload for message in more]
            while len(received) < len(payloads):
                more = await messages.take(1000, PATIENCE_SECONDS)
                assert more, f"stuck after {len(received)} messages"
                received += [message.payload for message in more]
            assert received == payloads

    @conformance_test
    async def test_respects_max_in_flight(self) -> None:
        async with (
            self.open_bus() as bus,
            bus.subscribe(1, max_in_flight=3, auto_ack=False) as limited,
        ):
            await bus.publish_many(NUMBERED, class_id=1)
            received = [await limited.get(PATIENCE_SECONDS) for _ in range(3)]
            assert await is_silent(limited)
            received[0].ack()
            received[2].ack()
            assert await get_payloads(limited, 2) == NUMBERED[3:5]
            assert await is_silent(limited)

    @conformance_test
    async def test_slow_subscription_does_not_block_others(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, max_in_flight=1) as slow:
            async with bus.subscribe(1) as fast:
                await bus.publish_many(NUMBERED, class_id=1)
                assert await get_payloads(fast, 10) == NUMBERED
            assert await get_payloads(slow, 10) == NUMBERED

    @conformance_test
    async def test_slow_subscription_can_drop_oldest(self) -> None:
        options = {"max_in_flight": 1, "max_pending": 3, "slow": "drop_oldest"}
        async with self.open_bus() as bus, bus.subscribe(1, **options) as slow:
            for payload in NUMBERED:
                await bus.publish(payload, class_id=1)
            received = await get_all_payloads(slow, 3)
            assert received == [NUMBERED[0], *NUMBERED[-2:]]  # The first one was in flight.

    @conformance_test
    async def test_slow_subscription_can_drop_newest(self) -> None:
        options = {"max_in_flight": 1, "max_pending": 3, "slow": "drop_newest"}
        async with self.open_bus() as bus, bus.subscribe(1, **options) as slow:
            for payload in NUMBERED:
                await bus.publish(payload, class_id=1)
            assert await get_all_payloads(slow, 3) == NUMBERED[:3]

    @conformance_test
    async def test_slow_subscription_can_be_disconnected(self) -> None:
        options = {"max_in_flight": 1, "max_pending": 3, "slow": "disconnect"}
        async with self.open_bus() as bus:
            with pytest.raises(RefusedError, match="slow_consumer"):  # noqa: PT012
                async with bus.subscribe(1, **options) as slow:
                    for payload in NUMBERED:
                        await bus.publish(payload, class_id=1)
                    while True:
                        await slow.get(PATIENCE_SECONDS)
            await bus.publish(b"the connection goes on", class_id=2)
