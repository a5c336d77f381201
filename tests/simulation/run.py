"""One run: a bus, a network, a disk and the programs that a seed gives it.

Rule 1: first everything fails; then all is calm, and what was promised must come true within
CALM_SECONDS.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from simplebus.core.message_class import spill
from tests.simulation.clients import (
    Client,
    Plain,
    Processed,
    Raw,
    Wish,
)
from tests.simulation.disk import Disk
from tests.simulation.network import End, Line
from tests.simulation.program import Program
from tests.simulation.promises import Promises
from tests.simulation.scenario import Shape
from tests.simulation.server import Server
from tests.simulation.world import World

WILD_SECONDS = 20.0
CALM_SECONDS = 300.0
SHARED_MEMORY = Path("/dev/shm")
"""Where files cost least, where there is such a thing."""


class Life:
    """See the module's law."""

    def __init__(self, seed: int, path: Path, *, tells: bool = False, **given: Any) -> None:
        """What is given is given to its `Shape`."""
        self.world = world = World(seed, tells=tells)
        self.shape = shape = Shape.of(world.random, **given)
        self.disk = Disk(world, path)
        self.promises = Promises(world, self.disk.torn)
        self.server = Server(
            world,
            self.disk,
            self.promises,
            level=shape.level,
            settings=shape.settings([1, 2, 3]),
            segment_bytes=shape.segment_bytes,
        )
        world.say(shape)
        self.processed: Processed = {}
        self.clients: list[Client] = []
        self._invite()

    def _invite(self) -> None:
        """Who takes part."""
        world, chance = self.world, self.world.random
        class_ids = [1, 2, 3][: chance.randint(1, 3)]
        deliveries, most = self.shape.deliveries, self.shape.in_flight
        wishes = []
        for class_id in class_ids:
            for name in ["d", "e"][: chance.randint(1, 2)]:
                filters = chance.random() < 0.3
                wishes.append(Wish(class_id, name, "", most, deliveries, filters=filters))
        for number, wish in enumerate(wishes):
            self._add(Raw, f"reader{number}", class_ids, wishes=[wish], count=0)
        if chance.random() < 0.6:
            by_key = self.shape.by_key
            wish = Wish(class_ids[0], "g", "crew", most, deliveries, by_key=by_key)
            for number in range(chance.randint(1, 3)):
                self._add(Raw, f"member{number}", class_ids, wishes=[wish], count=5)
        for number in range(chance.randint(1, 2)):
            starts = ["waiting", "new", "earliest", "last"]
            where = {"sequence": chance.randrange(30)} if chance.random() < 0.2 else None
            if self.shape.values:
                starts, where = ["last_values"], None
            wish = Wish(class_ids[-1], start=chance.choice(starts), where=where)
            self._add(Raw, f"till{number}", class_ids, wishes=[wish], count=chance.randint(5, 60))
        if chance.random() < 0.5:
            self._add(Raw, "nobody", class_ids, wishes=[], count=20, is_named=False)
        if chance.random() < 0.5:
            plain = Plain(
                world,
                self._dial,
                "plain",
                class_ids=class_ids,
                reads=chance.random() < 0.5,
                count=20,
            )
            self.clients.append(plain)
        for number in range(chance.randint(0, 2)):
            wish = Wish(class_ids[0], f"s{number}", "", most, deliveries)
            self.clients.append(
                Program(
                    world,
                    self._dial,
                    f"sdk{number}",
                    class_ids=class_ids,
                    wish=wish,
                    count=chance.randint(0, 40),
                    processed=self.processed,
                )
            )

    def _add(
        self,
        kind: type[Raw],
        name: str,
        class_ids: list[int],
        *,
        wishes: list[Wish],
        count: int,
        is_named: bool = True,
    ) -> None:
        self.clients.append(
            kind(
                self.world,
                self._dial,
                name,
                class_ids=class_ids,
                wishes=wishes,
                count=count,
                is_named=is_named,
                processed=self.processed,
                purges=self.shape.purges,
            )
        )

    def _dial(self, client: End, name: str) -> Line | None:
        return self.server.accept(client, name)

    def run(self) -> Promises:
        """Live. Raises Broken when a promise is."""
        world = self.world
        with (
            self.disk.under_the_journal(),
            self.server.log.listens(),
            mock.patch.object(spill, "SPILL_READ_BYTES", self.shape.read_bytes),
        ):
            self.server.start()
            world.after(1.0, self._fate)
            world.run(WILD_SECONDS)
            world.say("all is calm")
            world.calm = True
            self.disk.is_full = self.disk.is_broken = False
            self.disk.dies_in = 0
            while world.now < WILD_SECONDS + CALM_SECONDS:
                world.run(world.now + 10.0)
                if self._is_settled():
                    break
            self._must_be_settled()
            self.promises.finish(self.processed, self.server.broker)
        return self.promises

    def _fate(self) -> None:
        """What becomes of the machine."""
        world, server, disk = self.world, self.server, self.disk
        if world.calm:
            return
        chance = world.random
        if server.is_up:
            match chance.choice(self.shape.fates):
                case "kill":
                    server.kill()
                case "cut":
                    server.kill(power=True)
                case "stop":
                    server.stop()
                case "dies":
                    disk.dies_in = chance.randint(1, 12)
                case "jump":
                    server.jump(chance.choice([-2.0, 0.7, 600.0]))
                case "full":
                    disk.is_full = True
                    world.after(chance.uniform(0.1, 5.0), self._heal)
                case "broken":
                    disk.is_broken = True
                    world.after(chance.uniform(0.1, 5.0), self._heal)
        world.after(chance.expovariate(1.0), self._fate)

    def _heal(self) -> None:
        self.disk.is_full = self.disk.is_broken = False

    def _is_settled(self) -> bool:
        server = self.server
        return (
            server.is_up
            and all(client.is_done for client in self.clients if isinstance(client, Raw | Program))
            and not any(
                position.window.floor < cls.ring.head
                for cls in server.broker.classes.values()
                for position in cls.subscriptions
            )
        )

    def _must_be_settled(self) -> None:
        promises, server = self.promises, self.server
        undone = [
            client.name
            for client in self.clients
            if isinstance(client, Raw | Program) and not client.is_done
        ]
        promises.demand(not undone, "what is said is confirmed in the end", undone)
        for cls in server.broker.classes.values():
            for position in cls.subscriptions:
                promises.demand(
                    position.window.floor == cls.ring.head,
                    "what waits is delivered in the end",
                    f"class {cls.class_id}, {position.durable or position.group!r}: "
                    f"{position.window.floor} of {cls.ring.head}",
                )


def live(seed: int, *, tells: bool = False, **given: Any) -> Promises:
    """One run by this seed, in which what is given is so."""
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=folder, prefix="simplebus-") as path:
        life = Life(seed, Path(path), tells=tells, **given)
        try:
            return life.run()
        finally:
            life.server.let_go()  # Thousands live in one process of tests.
