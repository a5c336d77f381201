"""A spilling class delivers like one with unlimited memory."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from simplebus.core.broker.broker import Settings
from simplebus.core.limits import Limits
from simplebus.core.protocol.durability import Durability
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    channel_envelope,
    connect_version2,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    timed_envelope,
)
from tests.storage.journaled_broker import START
from tests.storage.spilling_broker import SpilledBus, spill_settings

Deliveries = list[tuple[int, int, bytes]]
POLLS_MAX = 1000


class BusUnderTest:
    """One of the two buses and the readers connected to it."""

    def __init__(self, bus: BrokerHarness) -> None:
        self.bus = bus
        bus.skips_checks = True
        bus.broker.clock.now = START
        self.sender = connect_version2(bus)
        self.number = 0
        self.readers: dict[str, Version2Peer] = {}

    def publish(self, contents: list[tuple[str, bytes]]) -> None:
        for kind, content in contents:
            encode = publish if kind == "plain" else publish_envelopes
            self.sender.send(encode(1, self.number, content))
            self.number += 1
        self.settle()

    def settle(self) -> None:
        if isinstance(self.bus, SpilledBus):
            self.bus.sync()  # Also checks the invariants.

    def join(self, name: str, options: dict[str, object]) -> None:
        self.readers[name] = connect_version2(self.bus, subscribe(1, 5, **options))

    def leave(self, name: str) -> None:
        self.readers.pop(name).disconnect()

    def receive(self, name: str) -> Deliveries:
        reader, deliveries = self.readers[name], Deliveries()
        for _ in range(POLLS_MAX):
            if isinstance(self.bus, SpilledBus):
                self.bus.serve_reads()
            received = reader.receive_deliveries()
            deliveries += [(each.message_id, each.attempt, each.content) for each in received]
            if not received and reader.session.outbox.is_idle:  # Not idle: more messages follow.
                return deliveries
        raise AssertionError(f"{name} receives messages without end")

    def tick(self, seconds: float) -> None:
        self.bus.broker.clock.now += seconds
        self.bus.tick()
        self.bus.broker.run_due_wakeups()
        self.settle()


READERS: dict[str, dict[str, object]] = {
    "all": {"durable": "all", "max_in_flight": 200},
    "few": {"durable": "few", "max_in_flight": 5, "max_deliveries": 3},
    "eu": {"durable": "eu", "channels": ["eu.*"]},
    "live": {"start": "new"},
}
"""Subscribe options by reader name."""


class SpillComparison:
    """Applies the same random operations to a bus in memory and to a bus that spills."""

    def __init__(self, path: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.buses = [
            BusUnderTest(BrokerHarness(Settings(limits=Limits()))),
            BusUnderTest(
                SpilledBus(
                    path,
                    settings=spill_settings(24),
                    level=Durability.OS,
                    segment_bytes=self.random.choice([1, 2000]),
                )
            ),
        ]
        self.count = 0
        for name in READERS:
            self.join(name)

    def join(self, name: str) -> None:
        for tested in self.buses:
            tested.join(name, READERS[name])

    def step(self) -> None:
        kind = self.random.choices(
            ["publish", "receive", "leave", "tick", "advance_far"], [30, 30, 6, 8, 2]
        )[0]
        getattr(self, kind)()

    def publish(self) -> None:
        contents: list[tuple[str, bytes]] = []
        for _ in range(self.random.randint(1, 12)):
            text = b"%d" % self.count
            self.count += 1
            contents.append(
                self.random.choice(
                    [
                        ("plain", text),
                        ("plain", text * 30),
                        ("channel", channel_envelope("eu.de", text)),
                        ("channel", channel_envelope("us.ny", text)),
                        ("timed", timed_envelope(text, expires_ms=3000)),
                        ("timed", timed_envelope(text, not_before_ms=2000)),
                    ]
                )
            )
        for tested in self.buses:
            tested.publish(contents)

    def choose_reader(self) -> str | None:
        """Return a connected subscriber."""
        return self.random.choice([*self.buses[0].readers, None])

    def receive(self) -> None:
        name = self.choose_reader()
        if name is None:
            return
        expected, actual = [tested.receive(name) for tested in self.buses]
        assert actual == expected, name
        for message_id, _, _ in expected:
            for frame in self.answers(message_id):
                for tested in self.buses:
                    tested.readers[name].send(frame)
        for tested in self.buses:
            tested.settle()

    def answers(self, message_id: int) -> list[bytes]:
        last = message_id + 1
        if self.random.random() < 0.8:
            return [ack(5, message_id, last)]
        return self.random.choice(
            [
                [],
                [nack(5, message_id, last, 0)],
                [nack(5, message_id, last, 1500)],
                [nack(5, message_id, last)],
            ]
        )

    def leave(self) -> None:
        name = self.choose_reader()
        if name is not None:
            for tested in self.buses:
                tested.leave(name)
        for absent in sorted(set(READERS) - set(self.buses[0].readers)):
            if self.random.random() < 0.4:
                self.join(absent)

    def tick(self) -> None:
        for tested in self.buses:
            tested.tick(1.0)

    def advance_far(self) -> None:
        for tested in self.buses:
            tested.tick(5.0)

    def end(self) -> None:
        for name in sorted(set(READERS) - set(self.buses[0].readers)):
            self.join(name)
        for _ in range(1000):
            for name in READERS:
                expected, actual = [tested.receive(name) for tested in self.buses]
                assert actual == expected
                for tested in self.buses:
                    for message_id, _, _ in expected:
                        tested.readers[name].send(ack(5, message_id, message_id + 1))
            for tested in self.buses:
                tested.tick(10.0)
            statistics = [tested.bus.statistics(1) for tested in self.buses]
            if not any(
                each.ring.message_count + each.spilled + each.in_flight for each in statistics
            ):
                break
        else:
            raise AssertionError("messages are left after 1000 rounds")
        counts = [
            {
                subscription.durable: (
                    subscription.acknowledged,
                    sum(subscription.undelivered.values()),
                )
                for subscription in class_statistics.subscriptions
                if subscription.durable
            }
            for class_statistics in statistics
        ]
        assert counts[0] == counts[1]
        assert statistics[0].acknowledged == statistics[1].acknowledged
        # The spilling bus has not read the messages that expired while a reader was away. A message
        # that has both expired and used up its deliveries may be counted for either reason.
        dropped = [sum(class_statistics.dropped.values()) for class_statistics in statistics]
        assert dropped[0] >= dropped[1]
        spilled_bus = self.buses[1].bus
        assert isinstance(spilled_bus, SpilledBus)
        self.reads = spilled_bus.reads
        spilled_bus.crash()


@pytest.mark.parametrize("seed", [0, 1, 111, 147, 1017, 21549, 3000008])
def test_spilling_delivers_like_memory(tmp_path: Path, seed: int) -> None:
    comparison = SpillComparison(tmp_path / "journal", seed)
    for _ in range(110):
        comparison.step()
    comparison.end()
    assert comparison.reads > 10
    shutil.rmtree(tmp_path)
