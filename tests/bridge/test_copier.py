"""Copying a class from one bus to another, both in this process."""

from __future__ import annotations

import contextlib
import random
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio

import simplebus
from simplebus.bridge.bus_connection import connect_source
from simplebus.bridge.channel_map import ChannelMap
from simplebus.bridge.checkpoint import AnnouncedBatch, BridgeRecord
from simplebus.bridge.interfaces import Refusal
from simplebus.bridge.loop_header import PATH_HEADER
from simplebus.bridge.source.bus import BusSource
from simplebus.bridge.target.bus import BusTarget, TargetSettings
from simplebus.core.errors import BusConnectionError, LocalProtocolError
from simplebus.core.limits import Limits
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import ClassSettings, FullPolicy, Settings
from simplebus.memory.bus import MemoryBus
from tests.bridge.memory_buses import (
    BreakingEndpoint,
    create_copier,
    create_test_durable,
    endpoint_of,
    numbered_payloads,
    payloads,
    read,
    run,
    running,
    wait_until_up,
)


def test_copies_messages_once_in_order() -> None:
    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        async with source as source_bus, target as target_bus:
            await source_bus.publish_many(numbered_payloads(0, 300), class_id="orders")
            copying = create_copier(source, target)
            async with running(copying):
                assert await payloads(target_bus, "orders", 300) == numbered_payloads(0, 300)
                await source_bus.publish(b"one more", class_id="orders")
                (last,) = await read(target_bus, "orders", 1)
                assert last.payload == b"one more"
                assert dict(last.headers)[PATH_HEADER] == source_bus.connection.core.bus_id
                await trio.sleep(1)
            statistics = copying.statistics()
            assert (statistics.copied, statistics.lag, statistics.position, statistics.losses) == (
                301,
                0,
                301,
                0,
            )

    run(main)


@pytest.mark.parametrize("length", [195, 196, 200])
def test_longest_copier_name_is_accepted(length: int) -> None:
    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        async with source as source_bus, target as target_bus:
            await source_bus.publish(b"0", class_id="orders")
            copying = create_copier(source, target, "l" * length)
            async with running(copying):
                assert await payloads(target_bus, "orders", 1) == [b"0"]
            assert copying.statistics().losses == 0

    run(main)


@pytest.mark.parametrize("seed", range(6))
def test_random_failures_lose_and_duplicate_nothing(
    seed: int, request: pytest.FixtureRequest
) -> None:
    if seed % 2:
        request.getfixturevalue("small_batches")
    rng = random.Random(seed)

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        copiers = [BreakingEndpoint(source, rng, 2500), BreakingEndpoint(target, rng, 4000)]
        async with source as source_bus, target as target_bus:
            copying = create_copier(
                source, target, source_endpoint=copiers[0], target_endpoint=copiers[1]
            )
            async with running(copying):
                for first in range(0, 400, 20):
                    await source_bus.publish_many(
                        numbered_payloads(first, first + 20), class_id="orders"
                    )
                    await trio.sleep(rng.random())
                for copier in copiers:
                    copier.is_reliable = True
                assert await payloads(target_bus, "orders", 400) == numbered_payloads(0, 400)
                await source_bus.publish(b"last", class_id="orders")
                assert await payloads(target_bus, "orders", 1) == [b"last"]
            assert copying.statistics().losses > 2

    run(main)


def test_same_name_from_two_sources_works() -> None:
    async def main() -> None:
        tills, hq = [MemoryBus(), MemoryBus()], MemoryBus()
        copiers = [create_copier(source_till, hq) for source_till in tills]
        async with (
            tills[0] as first_till,
            tills[1] as second_till,
            hq as target_bus,
            running(*copiers),
        ):
            await create_test_durable(target_bus)
            await wait_until_up(*copiers)
            for first in range(0, 200, 10):
                await first_till.publish_many(
                    numbered_payloads(first, first + 10), class_id="orders"
                )
                await second_till.publish_many(
                    numbered_payloads(1000 + first, 1010 + first), class_id="orders"
                )
                await trio.sleep(0.2)
            received = [int(payload) for payload in await payloads(target_bus, "orders", 400)]
            await trio.sleep(5)
            assert [n for n in received if n < 1000] == list(range(200))
            assert [n for n in received if n >= 1000] == list(range(1000, 1200))
            assert [copier.statistics().losses for copier in copiers] == [0, 0]

    run(main)


def test_duplicate_bridges_log_once_and_one_copies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a delay, each bridge would end the connections of the other all the time."""

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        copiers = [create_copier(source, target), create_copier(source, target)]
        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            async with running(copiers[0]):
                await wait_until_up(copiers[0])
                async with running(copiers[1]):
                    for first in range(0, 400, 10):
                        await source_bus.publish_many(
                            numbered_payloads(first, first + 10), class_id="orders"
                        )
                        await trio.sleep(10)
                    assert await payloads(target_bus, "orders", 400) == numbered_payloads(0, 400)
                await source_bus.publish(b"last", class_id="orders")
                assert await payloads(target_bus, "orders", 1) == [b"last"]
                await trio.sleep(1)
            found = [copier.statistics() for copier in copiers]
            assert sum(each.copied for each in found) == 401
            assert sum(each.losses for each in found) < 30

    run(main)
    takeovers = [
        message
        for message in caplog.messages
        if "another bridge with this name took over" in message
    ]
    assert len(takeovers) == 2


def test_single_takeover_does_not_delay_copier(caplog: pytest.LogCaptureFixture) -> None:
    """A bus that was suspended can report a takeover by the copier's own next connection late."""

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        copying = create_copier(source, target)
        async with source as source_bus, target as target_bus, running(copying):
            for number in range(0, 30, 10):
                await source_bus.publish_many(
                    numbered_payloads(number, number + 10), class_id="orders"
                )
                await payloads(target_bus, "orders", 10)
                to = target_bus.connection.core.bus_id
                async with connect_source(
                    endpoint_of(source), "lane", target_id=to, heartbeat=9.0, auth=None
                ):
                    pass
                lost_at = trio.current_time()
                await wait_until_up(copying)
                assert trio.current_time() - lost_at < 1
                await trio.sleep(20)
            assert copying.statistics().losses == 3

    run(main)
    assert not [message for message in caplog.messages if "took over the connection" in message]


def test_changed_channels_need_another_name() -> None:
    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        async with source as source_bus, target as target_bus:
            async with running(before := create_copier(source, target)):
                await wait_until_up(before)
            async with running(after := create_copier(source, target, channels=("a.#",))):
                while "another name, or" not in after.statistics().problem:  # noqa: ASYNC110
                    await trio.sleep(0.1)
                async with source_bus.subscribe("orders", durable="lane") as messages:
                    messages.forget()
                await wait_until_up(after)
                await source_bus.publish(b"0", class_id="orders", channel="b")
                await source_bus.publish(b"1", class_id="orders", channel="a.b")
                assert await payloads(target_bus, "orders", 1) == [b"1"]

    run(main)


def test_same_name_with_two_targets_is_rejected() -> None:
    """Both would read from one position, and each would get messages that the other one lacks."""

    async def main() -> None:
        hub, first_target, second_target = MemoryBus(), MemoryBus(), MemoryBus()
        async with hub as source_bus, first_target as target_bus, second_target as other_bus:
            first, second = create_copier(hub, first_target), create_copier(hub, second_target)
            await create_test_durable(target_bus)
            async with running(first):
                await wait_until_up(first)
                async with running(second):
                    for number in range(10):
                        await source_bus.publish(b"%d" % number, class_id="orders")
                        await trio.sleep(5)
                    assert await payloads(target_bus, "orders", 10) == numbered_payloads(0, 10)
                    assert "give each bridge its own name" in (second.statistics().problem)
                    assert first.statistics().losses == 0
            await create_test_durable(other_bus)
            async with running(
                second
            ):  # A bridge whose target was moved continues at its position.
                await source_bus.publish(b"10", class_id="orders")
                assert await payloads(other_bus, "orders", 1) == [b"10"]

    run(main)


def test_rejects_copying_a_class_to_itself() -> None:
    async def main() -> None:
        memory_bus = MemoryBus()
        async with memory_bus as bus:
            same_class, other_class = (
                create_copier(memory_bus, memory_bus),
                create_copier(memory_bus, memory_bus, "other", to="copies"),
            )
            async with running(same_class, other_class):
                await bus.publish_many(numbered_payloads(0, 10), class_id="orders")
                assert await payloads(bus, "copies", 10) == numbered_payloads(0, 10)
                await trio.sleep(5)
            assert "class 'orders' cannot be copied to itself" in same_class.statistics().problem
            assert (same_class.statistics().copied, other_class.statistics().copied) == (0, 10)

    run(main)


async def copy_first_five(
    source: MemoryBus, target: MemoryBus, source_bus: simplebus.Bus, target_bus: simplebus.Bus
) -> tuple[str, str]:
    """Copy messages 0 to 4. Returns the id of the source and the channel of the bridge's record."""
    source_id = source_bus.connection.core.bus_id
    channel = TargetSettings("lane", "lane", "orders").for_source(source_id).record_channel
    await create_test_durable(target_bus)
    async with running(create_copier(source, target)):
        await source_bus.publish_many(numbered_payloads(0, 5), class_id="orders")
        assert await payloads(target_bus, "orders", 5) == numbered_payloads(0, 5)
        await trio.sleep(5)
    return source_id, channel


@pytest.mark.parametrize("forged", [(0, 1_000_000, True), (1 << 40, 5, True), (6, 5, False)])
def test_forged_record_skips_no_messages(
    forged: tuple[int, int, bool],
) -> None:
    count, next_, is_same = forged

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        async with source as source_bus, target as target_bus:
            source_id, channel = await copy_first_five(source, target, source_bus, target_bus)
            ranges = [(0, count)] if count else []
            record = BridgeRecord(
                source_id if is_same else "x", 5, [AnnouncedBatch(6, ranges, max(count, next_))]
            )
            await target_bus.publish(record.encode(), class_id="bridges", channel=channel)
            async with running(create_copier(source, target)):
                await source_bus.publish_many(numbered_payloads(5, 10), class_id="orders")
                assert await payloads(target_bus, "orders", 5) == numbered_payloads(5, 10)

    run(main)


def test_discards_record_of_other_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """Ignore a record that contradicts the target's numbers, because it is outdated or forged."""

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        async with source as source_bus, target as target_bus:
            source_id, channel = await copy_first_five(source, target, source_bus, target_bus)
            await source_bus.publish_many(numbered_payloads(5, 8), class_id="orders")
            record = BridgeRecord(source_id, 1, [AnnouncedBatch(2, [(5, 8)], 8)])
            await target_bus.publish(record.encode(), class_id="bridges", channel=channel)
            async with running(create_copier(source, target)):
                assert await payloads(target_bus, "orders", 3) == numbered_payloads(5, 8)
        assert "has the numbers 1 to 5" in caplog.text

    run(main)


@pytest.mark.usefixtures("small_batches")
def test_commits_at_source_while_records_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refused record uses up its number, so the previous record is no longer valid."""
    announced = BusTarget.wait_announced

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            calls = count()

            async def full(end: BusTarget) -> list[Refusal]:
                refusals = await announced(end)
                is_full = next(calls) > 4
                return [Refusal(-1, "disk_full", "no room")] if is_full else refusals

            monkeypatch.setattr(BusTarget, "wait_announced", full)
            await source_bus.publish_many(numbered_payloads(0, 100), class_id="orders")
            copying = create_copier(source, target)
            async with running(copying):
                await trio.sleep(5)
                copied = copying.statistics().copied
                class_statistics = next(
                    k for k in source.statistics().classes if k.ring.head == 100
                )
                assert 0 < copied == class_statistics.subscriptions[0].floor
            monkeypatch.setattr(BusTarget, "wait_announced", announced)
            async with running(create_copier(source, target)):
                assert await payloads(target_bus, "orders", 100) == numbered_payloads(0, 100)

    run(main)


def test_a_ring_of_three_neither_loops_nor_loses() -> None:
    async def main() -> None:
        a, b, c = MemoryBus(), MemoryBus(), MemoryBus()
        ring = [create_copier(a, b, "ab"), create_copier(b, c, "bc"), create_copier(c, a, "ca")]
        async with a as at_a, b as at_b, c as at_c, running(*ring):
            buses = [at_a, at_b, at_c]
            await create_test_durable(*buses)
            await wait_until_up(*ring)
            for turn, bus in enumerate(buses * 20):
                await bus.publish(b"%d" % turn, class_id="orders")
            received = [await read(bus, "orders", 60) for bus in buses]
            await trio.sleep(60)
            ids = [bus.connection.core.bus_id for bus in buses]
            for source_bus, messages in enumerate(received):
                assert sorted(int(m.payload) for m in messages) == list(range(60))
                for message in messages:  # The payload names the bus that published it.
                    hops = (source_bus - int(message.payload)) % 3
                    path = [ids[(source_bus - step) % 3] for step in range(hops, 0, -1)]
                    assert dict(message.headers).get(PATH_HEADER, "").split() == path
                came_from = (int(m.payload) for m in messages)
                orders = [
                    [n for n in came_from if n % 3 == crashed_name] for crashed_name in range(3)
                ]
                assert all(order == sorted(order) for order in orders)
            for each in ring:
                statistics = each.statistics()
                assert (statistics.copied, statistics.skipped) == (40, {"looped": 20})
            for memory in (a, b, c):
                (orders_there,) = [k for k in memory.statistics().classes if k.ring.head == 60]
                assert orders_there.ring.head == 60

    run(main)


def test_copies_in_both_directions() -> None:
    async def main() -> None:
        a, b = MemoryBus(), MemoryBus()
        copiers = [create_copier(a, b, "there"), create_copier(b, a, "back")]
        async with a as at_a, b as at_b, running(*copiers):
            await create_test_durable(at_a, at_b)
            await wait_until_up(*copiers)
            await at_a.publish_many(numbered_payloads(0, 50), class_id="orders")
            await at_b.publish_many(numbered_payloads(50, 100), class_id="orders")
            for bus in at_a, at_b:
                received = await payloads(bus, "orders", 100)
                assert sorted(map(int, received)) == list(range(100))
            await trio.sleep(10)
            assert [copier.statistics().copied for copier in copiers] == [50, 50]

    run(main)


@pytest.mark.parametrize("ranges", [1, 2, 3, 16_384])
def test_filtered_messages_are_released_at_source(
    ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simplebus.bridge.target.bus._RANGES_MAX", ranges)

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        filtered = create_copier(
            source, target, channels=("eu.#",), channel_map=ChannelMap([("eu.#", "#")])
        )
        async with source as source_bus, target as target_bus, running(filtered):
            await wait_until_up(filtered)
            for number in range(200):
                channel = "eu.x" if number % 10 == 0 else "us.x"
                await source_bus.publish(b"%d" % number, class_id="orders", channel=channel)
            received = await read(target_bus, "orders", 20)
            assert [int(m.payload) for m in received] == list(range(0, 200, 10))
            assert {m.channel for m in received} == {"x"}
            await trio.sleep(10)
            class_statistics = next(k for k in source.statistics().classes if k.ring.head == 200)
            # The bus keeps no messages on other channels.
            assert class_statistics.ring.message_count == 0

    run(main)


FULL = Settings(
    limits=Limits(class_messages=3),
    classes={"orders": ClassSettings(full_policy=FullPolicy.DROP_NEWEST)},
)


def test_dead_letter_class_of_class_named_by_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("simplebus.bridge.copier._RETRYABLE_REFUSALS", set())

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(FULL)
        async with source as source_bus, target:
            await source_bus.publish_many(numbered_payloads(0, 4), class_id=7)
            for name in ("7", "bills"):
                async with running(create_copier(source, target, class_=7, to="orders")):
                    (letter,) = await read(source_bus, f"dead.{name}", 1)
                    assert dict(letter.headers)["dead-class"] == name
                named = source_bus.connection.core.name_classes(NamedClass(id=7, name="bills"))
                await source_bus.connection.wait_answered(named)
                await source_bus.publish(b"4", class_id=7)

    run(main)


def test_refused_message_becomes_dead_letter_with_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("simplebus.bridge.copier._RETRYABLE_REFUSALS", set())

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(FULL)
        async with source as source_bus, target as target_bus:
            await source_bus.publish_many(numbered_payloads(0, 10), class_id="orders")
            copying = create_copier(source, target)
            async with running(copying):
                letters = await read(source_bus, "dead.orders", 7)
                assert [letter.payload for letter in letters] == numbered_payloads(3, 10)
                first = dict(letters[0].headers)
                assert (first["dead-class"], first["dead-sequence"]) == ("orders", "3")
                assert first["dead-reason"] == "terminated"
                assert first["dead-error"].startswith("drop_newest: ")
                assert await payloads(target_bus, "orders", 3) == numbered_payloads(0, 3)
                await source_bus.publish(b"10", class_id="orders")
                assert await payloads(target_bus, "orders", 1) == [b"10"]
                await trio.sleep(5)  # Wait until the messages are counted.
            statistics = copying.statistics()
            assert (statistics.copied, statistics.refused) == (4, 7)

    run(main)


def test_kill_before_dead_letter_loses_no_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("simplebus.bridge.copier._RETRYABLE_REFUSALS", set())
    give_up, keep = BusSource.dead_letter, BusSource.commit_position

    async def hang(*_: Any) -> int:
        await trio.sleep_forever()
        return 0

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(FULL)
        async with source as source_bus, target as target_bus:

            async def forget(end: BusSource, at: int, *, now: bool) -> None:
                """Commit the position, and purge the messages below it."""
                await keep(end, at, now=now)
                await source_bus.purge("orders", 0, at)

            monkeypatch.setattr(BusSource, "commit_position", forget)
            await source_bus.publish_many(numbered_payloads(0, 1000), class_id="orders")
            for _ in range(3):
                monkeypatch.setattr(BusSource, "dead_letter", hang)
                async with running(create_copier(source, target)):
                    await trio.sleep(20)
            monkeypatch.setattr(BusSource, "dead_letter", give_up)
            next_copier = create_copier(source, target)
            async with running(next_copier):
                letters = await payloads(source_bus, "dead.orders", 997)
                assert letters == numbered_payloads(3, 1000)
                assert await payloads(target_bus, "orders", 3) == numbered_payloads(0, 3)
                await trio.sleep(5)  # Wait until the messages are counted.
            statistics = next_copier.statistics()
            assert (statistics.refused, statistics.missed) == (997, 0)

    run(main)


def test_refused_message_that_is_gone_counts_as_missed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("simplebus.bridge.copier._RETRYABLE_REFUSALS", set())
    give_up = BusSource.dead_letter

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(FULL)
        async with source as source_bus, target as target_bus:

            async def dead_letter_late(end: BusSource, refusals: Any) -> int:
                await source_bus.purge("orders")
                return await give_up(end, refusals)

            monkeypatch.setattr(BusSource, "dead_letter", dead_letter_late)
            await create_test_durable(target_bus)
            await source_bus.publish_many(numbered_payloads(0, 10), class_id="orders")
            copying = create_copier(source, target)
            async with running(copying):
                await trio.sleep(20)
            statistics = copying.statistics()
            assert (statistics.copied, statistics.refused, statistics.missed) == (3, 0, 7)
            assert "missed 7 messages from sequence 3 on" in caplog.text

    run(main)


def test_internal_error_does_not_end_copier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults, find = iter([KeyError("state"), TypeError("odd")]), BusSource.read

    async def faulty(end: BusSource, at: int) -> Any:
        for fault in faults:
            raise fault
        return await find(end, at)

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        async with source as source_bus, target as target_bus:
            await source_bus.publish_many(numbered_payloads(0, 10), class_id="orders")
            monkeypatch.setattr(BusSource, "read", faulty)
            copying = create_copier(source, target)
            async with running(copying):
                assert await payloads(target_bus, "orders", 10) == numbered_payloads(0, 10)
            assert copying.statistics().losses == 2
            assert caplog.text.count("internal error") == 2

    run(main)


@pytest.mark.parametrize("is_slow", [False, True])
def test_waits_for_full_target_across_restarts(
    is_slow: bool, request: pytest.FixtureRequest
) -> None:
    if is_slow:
        request.getfixturevalue("small_batches")

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(FULL)
        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            await source_bus.publish_many(numbered_payloads(0, 40), class_id="orders")
            received: list[bytes] = []
            while len(received) < 40:
                copying = create_copier(
                    source, target
                )  # As if the previous copier had been killed.
                async with running(copying):
                    await trio.sleep(5)
                    received += await payloads(target_bus, "orders", min(3, 40 - len(received)))
                    await trio.sleep(5)
                assert copying.statistics().refused == 0
            # Messages in flight after a refused one may arrive first.
            assert (sorted(received, key=int) if is_slow else received) == numbered_payloads(0, 40)

    run(main)


def test_resends_more_messages_than_fit_in_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("simplebus.bridge.target.bus._RANGES_MAX", 2)

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(FULL)
        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            for number in range(40):
                channel = "eu.x" if number % 2 == 0 else "us.x"
                await source_bus.publish(b"%d" % number, class_id="orders", channel=channel)
            received: set[int] = set()
            while len(received) < 20:
                async with running(
                    create_copier(source, target, channels=("eu.#",))
                ):  # Killed each time.
                    await trio.sleep(5)
                    for message in await read(target_bus, "orders", min(3, 20 - len(received))):
                        received.add(int(message.payload))
                    await trio.sleep(5)
            assert sorted(received) == list(range(0, 40, 2))

    run(main)


@pytest.mark.parametrize(("channels", "missed"), [((), 5), (("a",), 0)])
def test_filtered_copier_counts_nothing_as_missed(channels: tuple[str, ...], missed: int) -> None:
    """The bus drops messages on channels that no subscription matches."""

    async def main() -> None:
        source = MemoryBus()
        async with source as source_bus:
            await create_test_durable(source_bus)
            for number in range(10):
                await source_bus.publish(b"%d" % number, class_id="orders", channel="b")
            async with source_bus.subscribe("orders", durable="test") as messages:
                for message in await messages.take(5):
                    message.ack()
            async with connect_source(
                endpoint_of(source), "a", target_id="x", heartbeat=10, auth=None
            ) as connection:
                end = BusSource(connection, class_="orders", durable="a", channels=channels)
                await end.open()
                assert (await end.read(0)).missed_count == missed

    run(main)


@pytest.mark.parametrize(("frame_bytes", "count"), [(1024, 1200), (8192, 3000), (65_536, 6000)])
def test_record_fits_target_frame_limit(frame_bytes: int, count: int) -> None:
    """Many skipped messages between the copied ones make the record long."""

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(Settings(limits=Limits(frame_bytes=frame_bytes)))
        async with source as source_bus, target as target_bus:
            await create_test_durable(target_bus)
            for number in range(count):
                channel = "ab"[number % 2]
                await source_bus.publish(
                    b"%d" % number, class_id="orders", channel=channel, confirm=False
                )
            await source_bus.flush()
            copying = create_copier(source, target, channels=("a",))
            async with running(copying):
                received = await payloads(target_bus, "orders", count // 2)
                assert received == [b"%d" % number for number in range(0, count, 2)]
            assert copying.statistics().losses == 0

    run(main)


def test_message_too_long_for_target_becomes_dead_letter() -> None:
    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(Settings(limits=Limits(frame_bytes=2000)))
        async with (
            source as source_bus,
            target as target_bus,
            running(create_copier(source, target)),
        ):
            for size in (10, 5000, 20):
                await source_bus.publish(bytes(size), class_id="orders")
            assert [len(payload) for payload in await payloads(target_bus, "orders", 2)] == [10, 20]
            (letter,) = await read(source_bus, "dead.orders", 1)
            assert "expected at most 2000" in dict(letter.headers)["dead-error"]

    run(main)


@pytest.mark.parametrize("headers", [{}, {"h": "x" * 1000}])
def test_splits_long_dead_letter_in_two(
    headers: dict[str, str],
) -> None:
    """The path makes each message longer, and the reason makes the dead letter longer."""

    async def longest(bus: simplebus.Bus) -> bytes:
        for size in count(bus.connection.core.accepted_frame_bytes_max, -1):
            with contextlib.suppress(LocalProtocolError):
                await bus.publish(b"x" * size, class_id="orders", headers=headers)
                return b"x" * size
        raise AssertionError

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus()
        async with source as source_bus, target as target_bus:
            await source_bus.publish(b"a", class_id="orders")
            whole = await longest(source_bus)
            await source_bus.publish(b"b", class_id="orders")
            copying = create_copier(source, target)
            async with running(copying):
                assert await payloads(target_bus, "orders", 2) == [b"a", b"b"]
                letters = await payloads(source_bus, "dead.orders", 2)
                await trio.sleep(5)  # Wait until the messages are counted.
                assert b"".join(letters) == whole
            assert (copying.statistics().refused, copying.statistics().missed) == (1, 0)

    run(main)


def test_waits_for_absent_target(caplog: pytest.LogCaptureFixture) -> None:
    class UnreachableEndpoint:
        is_reachable = False

        async def open(self) -> Any:
            if not self.is_reachable:
                raise BusConnectionError("cannot connect to the moon")
            return await endpoint_of(target).open()

    target = MemoryBus()

    async def main() -> None:
        source, absent = MemoryBus(), UnreachableEndpoint()
        async with source as source_bus, target as target_bus:
            await source_bus.publish_many(numbered_payloads(0, 5), class_id="orders")
            copying = create_copier(source, target, target_endpoint=absent)
            async with running(copying):
                await trio.sleep(600)
                assert copying.statistics().problem == "cannot connect to the moon"
                absent.is_reachable = True
                assert await payloads(target_bus, "orders", 5) == numbered_payloads(0, 5)
        assert len([line for line in caplog.messages if "the moon" in line]) == 1
        assert 100 < copying.statistics().losses < 300  # About every 5 seconds.

    run(main)


@pytest.mark.parametrize("is_silent", [False, True])
def test_keeps_messages_before_target_exists(
    is_silent: bool,
) -> None:
    """Another client acks the messages meanwhile."""

    class UnreachableEndpoint:
        is_reachable = False

        async def open(self) -> Any:
            if not self.is_reachable:
                await trio.sleep(5 if is_silent else 0)
                raise BusConnectionError("cannot connect to the moon")
            return await endpoint_of(target).open()

    target = MemoryBus()

    async def main() -> None:
        source, unreachable = MemoryBus(), UnreachableEndpoint()
        async with source as source_bus, target as target_bus:
            await create_test_durable(source_bus, target_bus)
            copying = create_copier(source, target, target_endpoint=unreachable)
            async with running(copying):
                await trio.sleep(0.01)
                await source_bus.publish_many(numbered_payloads(0, 5), class_id="orders")
                assert await payloads(source_bus, "orders", 5) == numbered_payloads(0, 5)
                await trio.sleep(60)
                unreachable.is_reachable = True
                assert await payloads(target_bus, "orders", 5) == numbered_payloads(0, 5)
            assert copying.statistics().missed == 0

    run(main)


@pytest.mark.parametrize("crashed_name", ["source", "target"])
def test_survives_crash_of_either_bus(crashed_name: str, tmp_path: Path) -> None:
    """A crash is simulated by a copy of the data directory."""

    async def main() -> None:
        folders = {"source": tmp_path / "source", "target": tmp_path / "target"}
        buses = {name: MemoryBus(data_dir=folder) for name, folder in folders.items()}
        async with (
            buses["source"] as source_bus,
            buses["target"],
            running(create_copier(buses["source"], buses["target"])),
        ):
            for number in range(10):
                await source_bus.publish(b"%d" % number, class_id="orders")
            await trio.sleep(0.05)  # Too short for another commit of the position.
            crashed = tmp_path / "crashed"
            shutil.copytree(folders[crashed_name], crashed)
        remaining = {**folders, crashed_name: crashed}
        recovered = {name: MemoryBus(data_dir=folder) for name, folder in remaining.items()}
        copying = create_copier(recovered["source"], recovered["target"])
        async with (
            recovered["source"] as source_bus,
            recovered["target"] as target_bus,
            running(copying),
        ):
            await source_bus.publish(b"10", class_id="orders")
            assert await payloads(target_bus, "orders", 11) == numbered_payloads(0, 11)
            await source_bus.publish(b"11", class_id="orders")
            assert await payloads(target_bus, "orders", 1) == [b"11"]
            assert copying.statistics().discarded_records == 0

    run(main)


def test_resends_after_connection_loss_at_full_target() -> None:
    """With long messages, the record is stored and the announced messages wait for room."""

    async def main() -> None:
        source, target = MemoryBus(), MemoryBus(Settings(limits=Limits(class_messages=2)))
        async with (
            source as source_bus,
            target as target_bus,
            running(create_copier(source, target)),
        ):
            for number in range(12):
                await source_bus.publish(b"%d" % number + bytes(300_000), class_id="orders")
            received: list[int] = []
            while len(received) < 12:
                await trio.sleep(10)
                target.hang_up()
                received += [int(p.strip(b"\0")) for p in await payloads(target_bus, "orders", 1)]
            assert received == list(range(12))

    run(main)


def test_target_without_records_gets_all_messages() -> None:
    async def main() -> None:
        source, first, second = MemoryBus(), MemoryBus(), MemoryBus()
        async with source as source_bus, first as target_bus, second as second_bus:
            async with running(create_copier(source, first)):
                await source_bus.publish_many(numbered_payloads(0, 10), class_id="orders")
                assert await payloads(target_bus, "orders", 10) == numbered_payloads(0, 10)
                await trio.sleep(1)
            await source_bus.publish_many(numbered_payloads(10, 20), class_id="orders")
            async with running(create_copier(source, second)):
                assert await payloads(second_bus, "orders", 10) == numbered_payloads(10, 20)

    run(main)
