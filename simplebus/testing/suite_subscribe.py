"""Conformance tests of subscriptions: groups, durables, start positions, fetch and explain."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from simplebus.core.errors import LocalProtocolError, RefusedError
from simplebus.testing.suite import (
    MANUAL_TICKS,
    NUMBERED,
    PATIENCE_SECONDS,
    Suite,
    conformance_test,
    get_all_payloads,
    get_payloads,
    is_silent,
)

_KEYS = [b"key %02d" % number for number in range(24)]


class SubscribeSuite(Suite):
    """Selection of messages by a subscription."""

    @conformance_test
    async def test_every_subscription_gets_every_message(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as first_bus,
            host.connect() as second_bus,
            first_bus.subscribe(1) as a,
            first_bus.subscribe(1) as b,
            second_bus.subscribe(1) as c,
        ):
            await first_bus.publish_many(NUMBERED, class_id=1)
            for messages in (a, b, c):
                assert await get_payloads(messages, 10) == NUMBERED

    @conformance_test
    async def test_left_subscription_receives_nothing(self) -> None:
        async with self.open_bus() as bus:
            async with bus.subscribe(1) as messages:
                await bus.publish(b"before", class_id=1)
                assert await get_payloads(messages, 1) == [b"before"]
            await bus.publish(b"after", class_id=1)
            with pytest.raises(LocalProtocolError, match="was closed"):
                await messages.get(0.01)

    @conformance_test
    async def test_finds_matching_message_behind_many_others(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, max_in_flight=1, auto_ack=False):
            await bus.publish_many([b""] * 70_000, class_id=1, channel="many")
            await bus.publish(b"found", class_id=1, channel="one")
            async with (
                bus.subscribe(1, "one", start="earliest") as alone,
                bus.subscribe(1, "one", start="earliest", group="workers") as member,
            ):
                assert await get_payloads(alone, 1) == [b"found"]
                assert await get_payloads(member, 1) == [b"found"]

    # Groups --------------------------------------------------------------------------------------

    @conformance_test
    async def test_group_delivers_each_message_to_one_member(self) -> None:
        all_payloads = [b"%03d" % number for number in range(600)]
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as first_bus,
            host.connect() as second_bus,
            first_bus.subscribe(1, group="workers", max_in_flight=20) as a,
            second_bus.subscribe(1, group="workers", max_in_flight=20) as b,
            second_bus.subscribe(1) as all_messages,
        ):
            await first_bus.publish_many(all_payloads, class_id=1)
            received: list[list[bytes]] = [[], []]
            while sum(map(len, received)) < len(all_payloads):
                for payloads, messages in zip(received, (a, b), strict=True):
                    more = await messages.take(5, 0.05)
                    payloads += [message.payload for message in more]
            assert sorted(received[0] + received[1]) == all_payloads
            assert all(received)
            assert await get_payloads(all_messages, len(all_payloads)) == all_payloads

    @conformance_test
    async def test_messages_of_a_leaving_member_go_to_the_others(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as first_bus,
            host.connect() as second_bus,
            second_bus.subscribe(1, group="workers", auto_ack=False) as stays,
        ):
            async with first_bus.subscribe(1, group="workers", auto_ack=False) as leaves:
                await first_bus.publish_many(NUMBERED, class_id=1)
                unacked = await leaves.take(10, 0.1)
                await first_bus.drain()
            received = [await stays.get(PATIENCE_SECONDS) for _ in range(10)]
            assert sorted(message.payload for message in received) == NUMBERED
            marked = {message.payload for message in received if message.redelivered}
            assert {message.payload for message in unacked} <= marked

    # Groups by key -------------------------------------------------------------------------------

    @conformance_test
    async def test_key_ordered_group_delivers_a_key_to_one_member_in_order(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as first_bus,
            host.connect() as second_bus,
            first_bus.subscribe(1, group="workers", by_key=True, auto_ack=False) as a,
            second_bus.subscribe(1, group="workers", by_key=True, auto_ack=False) as b,
        ):
            for number in range(4):
                for key in _KEYS:
                    await first_bus.publish(b"%d" % number, class_id=1, key=key, confirm=False)
            await first_bus.flush()
            members: dict[bytes, int] = {}
            for number in range(4):
                received = await _take_from((a, b), len(_KEYS))
                assert sorted(message.key for _, message in received) == _KEYS
                for index, message in received:
                    assert message.payload == b"%d" % number
                    assert members.setdefault(message.key, index) == index
                    message.ack()
            assert set(members.values()) == {0, 1}
            assert await is_silent(a)
            assert await is_silent(b)

    @conformance_test
    async def test_key_ordered_group_redelivers_before_later_messages_of_the_key(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as first_bus,
            host.connect() as second_bus,
            second_bus.subscribe(1, group="workers", by_key=True, auto_ack=False) as stays,
        ):
            async with first_bus.subscribe(
                1, group="workers", by_key=True, auto_ack=False
            ) as leaves:
                for number in range(2):
                    for key in _KEYS:
                        await first_bus.publish(b"%d" % number, class_id=1, key=key, confirm=False)
                await first_bus.flush()
                received = await _take_from((leaves, stays), len(_KEYS))
                remaining = [message.key for index, message in received if index == 0]
                unacked = [message for index, message in received if index == 1]
                unacked[0].nack(delay=0)
                [redelivered] = await stays.take(len(_KEYS), PATIENCE_SECONDS)
                await first_bus.drain()
            back = [redelivered] + [await stays.get(PATIENCE_SECONDS) for _ in remaining]
            assert sorted(message.key for message in back) == sorted([*remaining, unacked[0].key])
            assert all(message.redelivered and message.payload == b"0" for message in back)
            for message in [*back, *unacked[1:]]:
                message.ack()
            following = [await stays.get(PATIENCE_SECONDS) for _ in _KEYS]
            assert sorted((m.key, m.payload) for m in following) == [(k, b"1") for k in _KEYS]

    # Durables ------------------------------------------------------------------------------------

    @conformance_test
    async def test_durable_continues_at_its_position(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect() as publisher:
            async with host.connect() as bus, bus.subscribe(1, durable="commit_log") as commit_log:
                await publisher.publish_many(NUMBERED[:5], class_id=1)
                assert await get_payloads(commit_log, 3) == NUMBERED[:3]
            await publisher.publish_many(NUMBERED[5:], class_id=1)
            async with host.connect() as bus, bus.subscribe(1, durable="commit_log") as commit_log:
                assert await get_payloads(commit_log, 7) == NUMBERED[3:]
            async with host.connect() as bus, bus.subscribe(1, durable="commit_log") as commit_log:
                assert await is_silent(commit_log)

    @conformance_test
    async def test_durable_is_refused_while_in_use(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as first_bus,
            host.connect() as second_bus,
        ):
            async with first_bus.subscribe(1, durable="commit_log"):
                with pytest.raises(RefusedError, match="durable_in_use"):
                    async with second_bus.subscribe(1, durable="commit_log"):
                        pass
            await first_bus.drain()
            async with second_bus.subscribe(1, durable="commit_log"):
                pass

    @conformance_test
    async def test_durable_can_be_forgotten(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, auto_ack=False) as holder:
            await bus.publish_many(NUMBERED[:2], class_id=1)
            async with bus.subscribe(1, durable="commit_log", start="earliest") as commit_log:
                assert await get_payloads(commit_log, 1) == NUMBERED[:1]
                commit_log.forget()
            async with bus.subscribe(1, durable="commit_log", start="earliest") as commit_log:
                assert await get_payloads(commit_log, 2) == NUMBERED[:2]
            assert await get_payloads(holder, 2) == NUMBERED[:2]

    # Positions -----------------------------------------------------------------------------------

    @conformance_test
    async def test_subscription_begins_at_its_start_position(self) -> None:
        async with self.open_bus() as bus, bus.subscribe(1, auto_ack=False):
            await bus.publish_many(NUMBERED, class_id=1)
            long_ago = datetime.now(UTC) - timedelta(days=1)
            for start, expected in (
                ("earliest", NUMBERED),
                ("last", NUMBERED[9:]),
                ("last_values", NUMBERED[9:]),
                ("new", []),
                ("waiting", []),
                (4, NUMBERED[4:]),
                (long_ago, NUMBERED),
            ):
                async with bus.subscribe(1, start=start) as messages:
                    assert await get_all_payloads(messages, len(expected)) == expected, start

    @conformance_test
    async def test_subscription_can_begin_with_last_values(self) -> None:
        async with (
            self.host(MANUAL_TICKS) as host,
            host.connect() as bus,
            bus.subscribe(1) as messages,
        ):
            await bus.keep_last_values(1)
            for number, payload in enumerate(NUMBERED):
                await bus.publish(payload, class_id=1, channel=f"{'ab'[number % 2]}.{number % 3}")
            await bus.publish(b"", class_id=1, channel="a.2")  # Removes the value.
            assert await get_payloads(messages, 11) == [*NUMBERED, b""]
            await bus.drain()
            async with bus.subscribe(1, "a.*", start="last_values") as late:
                assert await get_payloads(late, 2) == [NUMBERED[4], NUMBERED[6]]
                await bus.publish(b"new", class_id=1, channel="a.2")
                assert await get_payloads(late, 1) == [b"new"]
            async with bus.subscribe(1, start="last_values") as late:
                expected = [NUMBERED[number] for number in (4, 5, 6, 7, 9)]
                assert await get_payloads(late, 6) == [*expected, b"new"]
                assert await is_silent(late)
            async with bus.subscribe(1, start="last_values", max_in_flight=1) as late:
                assert await get_payloads(late, 1) == expected[:1]
                host.hang_up()
                received: set[bytes] = set()
                while b"new" not in received:
                    received.update(await get_payloads(late, 1))
                assert received >= {*expected[1:], b"new"}

    # Fetch and explain ----------------------------------------------------------------------------

    @conformance_test
    async def test_fetch_changes_no_position(self) -> None:
        async with self.open_bus() as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            for first, count, expected in (
                (0, 100, NUMBERED),
                (0, 3, NUMBERED[:3]),
                (7, 100, NUMBERED[7:]),
                (10, 1, []),
                (0, 0, []),
            ):
                found = await bus.fetch(1, first, count)
                assert [message.payload for message in found] == expected
                assert [message.sequence for message in found] == list(
                    range(first, first + len(expected))
                )
            for days, expected in ((-1, NUMBERED), (1, [])):
                fetch_time = datetime.now(UTC) + timedelta(days=days)
                found = await bus.fetch(1, 5, 100, time=fetch_time)
                assert [message.payload for message in found] == expected
            async with bus.subscribe(1) as messages:
                assert await get_payloads(messages, 10) == NUMBERED

    @conformance_test
    async def test_explain_describes_classes_channels_and_sessions(self) -> None:
        async with self.host(MANUAL_TICKS) as host, host.connect(name="till") as bus:
            await bus.publish_many(NUMBERED, class_id="orders", channel="orders.eu")
            waiting = await bus.explain("orders")
            assert (waiting.name, waiting.stored, waiting.backlog) == ("orders", 10, 10)
            async with bus.subscribe(
                "orders", "orders.*", max_in_flight=2, auto_ack=False
            ) as orders:
                await get_payloads(orders, 2)
                [position] = (await bus.explain("orders")).positions
                assert (position.in_flight, position.in_flight_max, position.unsent) == (2, 2, 8)
                assert (position.waits, position.name) == ("acks", "till")
                assert "2 of 2 in flight" in position.waits_for
                [matched] = (await bus.explain(channel="orders.eu")).classes
                assert [match.pattern for match in matched.matches] == ["orders.*"]
                session = await bus.explain(session=position.session)
                assert (session.name, len(session.positions)) == ("till", 1)
                assert [line.name for line in (await bus.explain()).classes] == ["orders"]
            with pytest.raises(RefusedError, match="unknown_class"):
                await bus.explain("invoices")
            with pytest.raises(RefusedError, match="unknown_session"):
                await bus.explain(session=99)
            assert [line.name for line in (await bus.explain()).classes] == ["orders"]

    @conformance_test
    async def test_purged_messages_are_not_delivered(self) -> None:
        async with self.open_bus() as bus:
            await bus.publish_many(NUMBERED, class_id=1)
            assert await bus.purge(1, 2, 4) == 2
            assert await bus.purge(1, 3, 5) == 1
            remaining_messages = NUMBERED[:2] + NUMBERED[5:]
            assert [message.payload for message in await bus.fetch(1)] == remaining_messages
            async with bus.subscribe(1, auto_ack=False) as messages:
                assert await get_payloads(messages, 7) == remaining_messages
                assert await bus.purge(1) == 7
                assert await bus.fetch(1) == []

    @conformance_test
    async def test_fetched_message_cannot_be_acknowledged(self) -> None:
        async with self.open_bus() as bus:
            await bus.publish(b"", class_id=1)
            [message] = await bus.fetch(1)
            with pytest.raises(LocalProtocolError):
                message.ack()


async def _take_from(subscriptions: tuple[Any, ...], count: int) -> list[tuple[int, Any]]:
    """Take at least `count` messages. Return each with the index of its subscription."""
    received: list[tuple[int, Any]] = []
    while len(received) < count:
        for index, subscription in enumerate(subscriptions):
            more = await subscription.take(count, 0.01)
            received += [(index, message) for message in more]
    return received
