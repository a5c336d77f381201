"""Random lives of a bus: publishers, durables, failing writes, kills and power cuts, by a seed.

What must hold whatever happens: what was confirmed is there, once and in its order, until the
durable has acknowledged it; a publisher never has to send again what was confirmed.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from core.talk2 import Peer2, ack, peer2, publish, subscribe

from simplebus.core.ledger import Level
from simplebus.storage.appending import AppendFile
from storage.kept_bus import KeptBus
from storage.test_journal import next_number, payloads

CLASSES = (1, 2, 3)
STEPS = {
    "publish": 30,
    "hear": 20,
    "write": 8,
    "sync": 8,
    "tick": 4,
    "kill": 2,
    "cut": 2,
    "stop": 1,
    "leave": 2,
    "snapshot": 3,
}
"""What happens, and how often in proportion."""
SEEDS = range(3)


class Life:
    """One journal's, over many buses."""

    def __init__(self, seed: int, path: Path) -> None:
        self.random = random.Random(seed)
        self.path = path
        self.sent: list[tuple[int, bytes]] = []
        """By number: class and payload."""
        self.confirmed = 0
        self.seen: dict[int, list[bytes]] = {class_id: [] for class_id in CLASSES}
        """What the durables got for the first time or again, in order."""
        self.acked: dict[int, set[bytes]] = {class_id: set() for class_id in CLASSES}
        self.begin()

    def begin(self) -> None:
        level = self.random.choice([Level.DISK, Level.DISK, Level.OS])
        self.bus = KeptBus(self.path, level=level, segment_bytes=self.random.choice([1, 400, 9999]))
        assert self.bus.found.dropped == [] or not self.is_clean
        self.publisher: Peer2 = peer2(self.bus, classes=CLASSES, name="till", instance="one")
        following = next_number(self.bus)
        assert self.confirmed <= following <= len(self.sent)
        self.confirmed = following
        self.check_messages()
        self.reader: Peer2 = peer2(self.bus)
        for class_id in CLASSES:
            self.reader.say(subscribe(class_id, class_id, durable="d", max_in_flight=20))
        self.say(following)

    is_clean = True
    """Whether no record was cut in two since something was synced last."""

    def check_messages(self) -> None:
        """What was confirmed is there or acknowledged, and nothing is there twice."""
        for class_id in CLASSES:
            there = payloads(self.bus, class_id)
            assert len(set(there)) == len(there)
            assert there == sorted(there)
            promised = {data for c, data in self.sent[: self.confirmed] if c == class_id}
            lost = promised - set(there) - self.acked[class_id]
            assert not lost, (class_id, sorted(lost)[:3])

    def say(self, first: int) -> None:
        """Publish what the bus does not have, from this number on."""
        for number in range(first, len(self.sent)):
            class_id, data = self.sent[number]
            self.publisher.say(publish(class_id, number, data))

    def step(self) -> None:
        kind = self.random.choices(
            [
                "publish",
                "hear",
                "write",
                "sync",
                "tick",
                "kill",
                "cut",
                "stop",
                "leave",
                "snapshot",
            ],
            [30, 20, 8, 8, 4, 2, 2, 1, 2, 3],
        )[0]
        getattr(self, kind)()

    def publish(self) -> None:
        first = len(self.sent)
        for number in range(first, first + self.random.randint(1, 8)):
            self.sent.append((self.random.choice(CLASSES), b"%08d" % number))
        self.say(first)

    def hear(self) -> None:
        for message in self.reader.got():
            self.seen[message.class_id].append(message.content)
            if self.random.random() < 0.8:
                self.reader.say(ack(message.number, message.message_id, message.message_id + 1))
                self.acked[message.class_id].add(message.content)

    def hear_confirms(self) -> None:
        told = [said for said in self.publisher.told() if said.kind == "confirm"]
        for said in told:
            assert said.message_id >= self.confirmed
            self.confirmed = said.message_id

    def write(self) -> None:
        self.bus.write()
        self.hear_confirms()

    def sync(self) -> None:
        self.bus.sync()
        self.is_clean = True
        self.hear_confirms()
        self.bus.remove()

    def snapshot(self) -> None:
        self.bus.keeper.wants_snapshot = True

    def tick(self) -> None:
        self.bus.broker.clock.now += self.random.choice([0.001, 0.2])
        self.bus.tick()

    def leave(self) -> None:
        """The publisher loses its connection, and comes back."""
        self.hear_confirms()
        self.publisher.leave()
        self.publisher = peer2(self.bus, classes=CLASSES, name="till", instance="one")
        following = next_number(self.bus)
        assert following >= self.confirmed
        self.confirmed = following
        self.say(following)

    def kill(self) -> None:
        self.bus.crash()
        self.begin()

    def cut(self) -> None:
        """The power fails: of what was not synced any part may be there."""
        files = self._files()
        self.bus.crash()
        for file in files if self.bus.ledger.level is Level.DISK else []:
            size = self.random.randint(file.synced, file.used)
            self.is_clean &= size in (file.synced, file.used)
            os.truncate(file.path, size)
        self.begin()

    def _files(self) -> list[AppendFile]:
        return self.bus.journal._files()

    def stop(self) -> None:
        self.is_clean = True
        self.bus.close()
        self.begin()

    def end(self) -> None:
        """All that was published is confirmed and heard."""
        for _ in range(200):
            self.hear()
            self.sync()
            self.bus.broker.clock.now += 1
            self.bus.tick()
            if not any(len(self.bus.broker.classes[class_id].ring) for class_id in CLASSES):
                break
        assert self.confirmed == len(self.sent)
        for class_id in CLASSES:
            published = [data for c, data in self.sent if c == class_id]
            assert list(dict.fromkeys(self.seen[class_id])) == published
        self.bus.crash()


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_confirmed_is_lost(tmp_path: Path, seed: int) -> None:
    life = Life(seed, tmp_path / "journal")
    for _ in range(100):
        life.step()
    life.end()
    shutil.rmtree(tmp_path)
