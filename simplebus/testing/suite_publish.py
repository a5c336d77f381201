"""Conformance tests of publishing: confirms, refusals, payloads, types, channels and time."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

import anyio
import pytest

from simplebus.client.codecs import DecodeError
from simplebus.client.message_types import Registry
from simplebus.core.errors import RefusedError
from simplebus.core.limits import Limits
from simplebus.core.settings import FullPolicy
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

FULL = replace(MANUAL_TICKS, limits=Limits(class_messages=3), full_policy=FullPolicy.DROP_NEWEST)

registry = Registry()


@registry.message(class_id=101)
@dataclass
class Opened:
    """A message type."""

    shop: str
    shelves: int = 0


@dataclass
class Reopened(Opened):
    """Another one, though it is also an `Opened`."""


registry.bind(Reopened, name="reopened")


class PublishSuite(Suite):
    """Published messages."""

    # Confirms ------------------------------------------------------------------------------------

    @conformance_test
    async def test_confirmed_message_is_stored(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as publisher,
            host.connect() as reader,
        ):
            await publisher.publish(b"stored", class_id=1)
            assert [message.payload for message in await reader.fetch(1)] == [b"stored"]
            publisher.publish_nowait(b"as well", class_id=1)
            await publisher.flush()
            stored = [message.payload for message in await reader.fetch(1)]
            assert stored == [b"stored", b"as well"]

    @conformance_test
    async def test_leaving_the_bus_waits_for_confirms(self) -> None:
        async with self.host(MANUAL_TICKS) as host:
            async with host.connect() as bus:
                for payload in NUMBERED:
                    await bus.publish(payload, class_id=1, confirm=False)
            async with host.connect() as bus, bus.subscribe(1) as messages:
                assert await get_payloads(messages, 10) == NUMBERED

    @conformance_test
    async def test_publish_nowait_returns_positions(self) -> None:
        async with self.open_bus() as bus:
            assert [bus.publish_nowait(b"", class_id=1 + n % 2) for n in range(5)] == list(range(5))
            await bus.flush()
            assert bus.statistics().confirmed == 5

    @conformance_test
    async def test_refused_message_raises_and_is_not_stored(self) -> None:
        async with self.open_bus(FULL) as bus:
            await bus.publish_many(NUMBERED[:3], class_id=1)
            with pytest.raises(RefusedError, match="drop_newest"):
                await bus.publish(b"too much", class_id=1)
            await bus.publish(b"elsewhere", class_id=2)
            async with bus.subscribe(1) as messages:
                assert await get_all_payloads(messages, 3) == NUMBERED[:3]

    @conformance_test
    async def test_publish_many_raises_all_refusals(self) -> None:
        async with self.open_bus(FULL) as bus:
            with pytest.raises(ExceptionGroup) as raised:
                await bus.publish_many(NUMBERED, class_id=1)
            assert {str(error).split(":")[0] for error in raised.value.exceptions} == {
                "drop_newest"
            }
            await bus.publish(b"too much", class_id=1, confirm=False)
            with pytest.raises(ExceptionGroup) as raised:
                await bus.flush()
            assert [str(error).split(":")[0] for error in raised.value.exceptions] == [
                "drop_newest"
            ]

    # Payloads ------------------------------------------------------------------------------------

    @conformance_test
    async def test_payloads_and_keys_are_preserved(self) -> None:
        pieces = (b"<", b"\r\n", b">", b"\0", b"a")
        mixtures = [b"".join(c) for n in range(6) for c in itertools.product(pieces, repeat=n)]
        async with self.open_bus() as bus, bus.subscribe(0x3C0D) as messages:
            await bus.publish_many(mixtures, class_id=0x3C0D)
            assert await get_payloads(messages, len(mixtures)) == mixtures
            await bus.publish_many(mixtures, class_id=0x3C0D, channel="a.b", key=b"<\r\n>\0")
            for mixture in mixtures:
                message = await messages.get(PATIENCE_SECONDS)
                assert (message.payload, message.key) == (mixture, b"<\r\n>\0")

    @conformance_test
    async def test_payloads_can_be_empty_or_long(self) -> None:
        sizes = [0, 1, 0, 900_000, 0, 65_536, 0]
        async with self.open_bus() as bus, bus.subscribe(1) as messages:
            for size in sizes:
                await bus.publish(bytes(size), class_id=1, confirm=False)
            assert [len(payload) for payload in await get_payloads(messages, 7)] == sizes

    @conformance_test
    async def test_message_metadata_is_preserved(self) -> None:
        headers = (("a", "1"), ("a", "2"), ("empty", ""), ("ü", "<\r\n>"))
        async with self.open_bus() as bus, bus.subscribe(1) as messages:
            await bus.publish(b"x", class_id=1, channel="a.b", key=b"\0k", headers=headers)
            message = await messages.get(PATIENCE_SECONDS)
            assert (message.channel, message.key) == ("a.b", b"\0k")
            assert message.headers == headers
            assert (message.class_id, message.message_id) == (1, 0)

    # Types ---------------------------------------------------------------------------------------

    @conformance_test
    async def test_values_are_decoded_as_their_type(self) -> None:
        values = [Opened("Ada's", 3), Opened("Bob's")]
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect(registry=registry) as bus,
            bus.subscribe(Opened) as opened,
            bus.subscribe(Reopened) as reopened,
        ):
            await bus.publish_many([*values, Reopened("Eve's")])
            received = []
            async for value in opened:
                received.append(value)
                if len(received) == 2:
                    break
            assert received == values
            message = await reopened.get(PATIENCE_SECONDS)
            assert message.value == Reopened("Eve's")
            assert type(message.value) is Reopened
            assert await is_silent(opened)

    @conformance_test
    async def test_undecodable_payload_raises_and_does_not_end_the_subscription(
        self,
    ) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect(registry=registry) as bus,
            bus.subscribe(Opened) as opened,
        ):
            await bus.publish(b"no JSON", class_id=101)
            await bus.publish(Opened("Ada's"))
            with pytest.raises(DecodeError) as raised:
                async for _ in opened:
                    pass
            assert vars(raised.value)["message"].payload == b"no JSON"
            async for value in opened:
                assert value == Opened("Ada's")
                break

    @conformance_test
    async def test_classes_can_be_addressed_by_name(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as publisher,
            host.connect() as subscriber,
            subscriber.subscribe("orders") as orders,
        ):
            await publisher.publish(b"by name", class_id="orders")
            message = await orders.get(PATIENCE_SECONDS)
            assert message.payload == b"by name"
            await publisher.publish(b"by id", class_id=message.class_id)
            assert await get_payloads(orders, 1) == [b"by id"]

    # Channels ------------------------------------------------------------------------------------

    @conformance_test
    async def test_patterns_select_channels(self) -> None:
        channels = ["", "one", "two", "one.two", "one.two.three", "two.two", "One.two", "öne.two"]
        expected_channels = {
            (): channels,
            ("#",): channels,
            ("one",): ["one"],
            ("*",): ["one", "two"],
            ("*.two",): ["one.two", "two.two", "One.two", "öne.two"],
            ("one.*",): ["one.two"],
            ("one.#",): ["one", "one.two", "one.two.three"],
            ("one.two.#",): ["one.two", "one.two.three"],
            ("*.*.*",): ["one.two.three"],
            ("one.*.three",): ["one.two.three"],
            ("öne.*",): ["öne.two"],
            ("one", "two", "*"): ["one", "two"],
            ("four.#",): [],
        }
        async with self.open_bus() as bus:
            for patterns, expected in expected_channels.items():
                async with bus.subscribe(1, *patterns, start="new") as messages:
                    for channel in channels:
                        await bus.publish(b"", class_id=1, channel=channel)
                    await bus.publish(b"last", class_id=1, channel=(expected or ["four"])[0])
                    received = []
                    while (message := await messages.get(PATIENCE_SECONDS)).payload != b"last":
                        received.append(message.channel)
                    assert received == expected, patterns

    @conformance_test
    async def test_pattern_filters_many_messages(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, "even.*") as evens:
            for number in range(200):
                kind = "odd" if number % 2 else "even"
                bus.publish_nowait(b"%d" % number, class_id=1, channel=f"{kind}.n{number % 7}")
            await bus.flush()
            assert await get_payloads(evens, 100) == [b"%d" % number for number in range(0, 200, 2)]

    @conformance_test
    async def test_invalid_channel_raises(self) -> None:
        async with self.open_bus() as bus:
            for name in (".", "a.", "a..b", "a.*", "#"):
                with pytest.raises(ValueError, match=re.escape(repr(name))):
                    await bus.publish(b"", class_id=1, channel=name)
            assert bus.statistics().published == 0

    # Time ----------------------------------------------------------------------------------------

    @conformance_test
    async def test_an_expired_message_is_not_delivered(self) -> None:
        async with self.open_bus() as bus:
            await bus.publish(b"for nobody", class_id=1, expires=0)
            await bus.publish(b"for a moment", class_id=1, expires=0.1)
            await bus.publish(b"for an hour", class_id=1, expires=3600)
            await bus.publish(b"for ever", class_id=1)
            await self.pass_seconds(0.15)
            async with bus.subscribe(1) as messages:
                assert await get_all_payloads(messages, 2) == [b"for an hour", b"for ever"]

    @conformance_test
    async def test_unexpired_message_is_delivered(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1) as messages:
            await bus.publish(b"for a while", class_id=1, expires=PATIENCE_SECONDS)
            assert await get_payloads(messages, 1) == [b"for a while"]

    @conformance_test
    async def test_delayed_message_is_delivered_after_its_delay(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1) as messages:
            begin = anyio.current_time()
            await bus.publish(b"later", class_id=1, delay=0.3)
            await bus.publish(b"now", class_id=1)
            received = [await messages.get(PATIENCE_SECONDS)]
            received += await messages.take(1, QUIET_SECONDS)
            # A slow test run may have received both by now, in any order.
            if anyio.current_time() - begin < 0.3:
                assert [message.payload for message in received] == [b"now"]
            await self.pass_seconds(0.3)
            received += [await messages.get(PATIENCE_SECONDS) for _ in range(2 - len(received))]
            assert {(m.payload, m.attempt) for m in received} == {(b"now", 1), (b"later", 1)}

    @conformance_test
    async def test_delayed_messages_are_delivered_by_due_time(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1) as messages:
            begin = anyio.current_time()
            await bus.publish(b"second", class_id=1, delay=0.1)
            await bus.publish(b"first", class_id=1, delay=0.02)
            seconds = anyio.current_time() - begin
            received = await get_payloads(messages, 2)
            assert sorted(received) == [b"first", b"second"]
            # After a long delay, it may not have been due first.
            assert received[0] == b"first" or seconds > 0.08
