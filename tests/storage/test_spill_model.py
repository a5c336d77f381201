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
from tests.storage.spilling_broker import SpilledBus, small

Heard = list[tuple[int, int, bytes]]
LOOKS_MAX = 1000


class Side:
    """One of the two buses, and who is connected to it."""

    def __init__(self, bus: BrokerHarness) -> None:
        self.bus = bus
        bus.skips_checks = True
        bus.broker.clock.now = START
        self.sender = connect_version2(bus)
        self.number = 0
        self.readers: dict[str, Version2Peer] = {}

    def publish(self, contents: list[tuple[str, bytes]]) -> None:
        for kind, content in contents:
            say = publish if kind == "plain" else publish_envelopes
            self.sender.send(say(1, self.number, content))
            self.number += 1
        self.settle()

    def settle(self) -> None:
        if isinstance(self.bus, SpilledBus):
            self.bus.sync()  # Which checks the bus.

    def join(self, name: str, options: dict[str, object]) -> None:
        self.readers[name] = connect_version2(self.bus, subscribe(1, 5, **options))

    def leave(self, name: str) -> None:
        self.readers.pop(name).disconnect()

    def hear(self, name: str) -> Heard:
        reader, heard = self.readers[name], Heard()
        for _ in range(LOOKS_MAX):
            if isinstance(self.bus, SpilledBus):
                self.bus.bring()
            got = reader.receive_deliveries()
            heard += [(each.message_id, each.attempt, each.content) for each in got]
            if not got and reader.session.outbox.is_idle:  # Else it has more to look at.
                return heard
        raise AssertionError(f"{name} hears of no end")

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
"""What they subscribe to."""


class Life:
    """The same on both sides."""

    def __init__(self, path: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.sides = [
            Side(BrokerHarness(Settings(limits=Limits()))),
            Side(
                SpilledBus(
                    path,
                    settings=small(24),
                    level=Durability.OS,
                    segment_bytes=self.random.choice([1, 2000]),
                )
            ),
        ]
        self.count = 0
        for name in READERS:
            self.join(name)

    def join(self, name: str) -> None:
        for side in self.sides:
            side.join(name, READERS[name])

    def step(self) -> None:
        kind = self.random.choices(
            ["publish", "hear", "leave", "tick", "later"], [30, 30, 6, 8, 2]
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
        for side in self.sides:
            side.publish(contents)

    def one(self) -> str | None:
        """Return a connected subscriber."""
        return self.random.choice([*self.sides[0].readers, None])

    def hear(self) -> None:
        name = self.one()
        if name is None:
            return
        heard, same = [side.hear(name) for side in self.sides]
        assert same == heard, name
        for message_id, _, _ in heard:
            for said in self.answers(message_id):
                for side in self.sides:
                    side.readers[name].send(said)
        for side in self.sides:
            side.settle()

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
        name = self.one()
        if name is not None:
            for side in self.sides:
                side.leave(name)
        for gone in sorted(set(READERS) - set(self.sides[0].readers)):
            if self.random.random() < 0.4:
                self.join(gone)

    def tick(self) -> None:
        for side in self.sides:
            side.tick(1.0)

    def later(self) -> None:
        for side in self.sides:
            side.tick(5.0)

    def end(self) -> None:
        for name in sorted(set(READERS) - set(self.sides[0].readers)):
            self.join(name)
        for _ in range(1000):
            for name in READERS:
                heard, same = [side.hear(name) for side in self.sides]
                assert same == heard
                for side in self.sides:
                    for message_id, _, _ in heard:
                        side.readers[name].send(ack(5, message_id, message_id + 1))
            for side in self.sides:
                side.tick(10.0)
            here = [side.bus.statistics(1) for side in self.sides]
            if not any(each.ring.message_count + each.spilled + each.in_flight for each in here):
                break
        else:
            raise AssertionError("something is left")
        counts = [
            {
                each.durable: (each.acknowledged, sum(each.undelivered.values()))
                for each in one.subscriptions
                if each.durable
            }
            for one in here
        ]
        assert counts[0] == counts[1]
        assert here[0].acknowledged == here[1].acknowledged
        # Who goes for good may not have been read yet what came too late for him. What expires when
        # it has used up its deliveries is counted for what is noticed first.
        dropped = [sum(one.dropped.values()) for one in here]
        assert dropped[0] >= dropped[1]
        kept = self.sides[1].bus
        assert isinstance(kept, SpilledBus)
        self.reads = kept.reads
        kept.crash()


@pytest.mark.parametrize("seed", [0, 1, 111, 147, 1017, 21549, 3000008])
def test_spilling_delivers_like_memory(tmp_path: Path, seed: int) -> None:
    life = Life(tmp_path / "journal", seed)
    for _ in range(110):
        life.step()
    life.end()
    assert life.reads > 10
    shutil.rmtree(tmp_path)
