"""One run: a bus, a network, a disk, and clients, all drawn from a seed.

Faults occur for FAULT_SECONDS. Then every promise must come true within CALM_SECONDS.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from simplebus.core import checkpoint
from simplebus.core.broker import fetch
from simplebus.core.message_class import floor_index, purge, spill
from simplebus.core.subscription import unacked_messages
from tests.simulation.clients import (
    Processed,
    SimulatedClient,
    SubscriptionSpec,
    Version1Client,
    Version2Client,
)
from tests.simulation.disk import SimulatedDisk
from tests.simulation.network import Endpoint, SimulatedConnection
from tests.simulation.program import SdkClient
from tests.simulation.promises import PromiseChecker
from tests.simulation.scenario import Scenario
from tests.simulation.server import SimulatedServer
from tests.simulation.world import World

FAULT_SECONDS = 15.0
_FAULT_INTERVAL_SECONDS = 0.75
"""Mean time between two faults."""
CALM_SECONDS = 300.0
_SETTLED_CHECK_SECONDS = 1.0
_DAMAGE_PROBABILITY = 0.15
"""Share of the runs with damaged records. Damage excuses losses, so other runs are stricter."""
SHARED_MEMORY = Path("/dev/shm")
"""File system in memory, where one exists: files are cheap there."""


class SimulationRun:
    """One random run of a simulated bus."""

    def __init__(
        self, seed: int, path: Path, *, is_verbose: bool = False, **scenario_fields: Any
    ) -> None:
        """`scenario_fields` are fields of its `Scenario`."""
        self.world = world = World(seed, is_verbose=is_verbose)
        shape = Scenario.of(world.random, **scenario_fields)
        if (
            "fates" not in scenario_fields
            and Random(f"{seed} damage").random() < _DAMAGE_PROBABILITY
        ):
            shape = replace(shape, fates=(*shape.fates[:-1], "damage"))
        self.shape = shape
        rng = Random(f"{seed} snapshots")
        self._portion, self._snapshot_bytes = rng.choice([1, 2, 128]), rng.choice([100, 1 << 20])
        """Classes and durables of a portion of a scan, and positions of a portion of other work;
        bytes of changes before a snapshot.
        """
        self.disk = SimulatedDisk(world, path)
        self.promises = PromiseChecker(world, self.disk.torn)
        self.server = SimulatedServer(
            world,
            self.disk,
            self.promises,
            level=shape.level,
            settings=shape.settings([1, 2, 3]),
            segment_bytes=shape.segment_bytes,
            positions_per_turn=self._portion,
        )
        world.trace(shape)
        self.processed: Processed = {}
        self.clients: list[SimulatedClient] = []
        self._create_clients()

    def _create_clients(self) -> None:
        world, rng = self.world, self.world.random
        class_ids = [1, 2, 3][: rng.choice([1, 1, 2, 3])]
        deliveries, max_in_flight = self.shape.deliveries, self.shape.in_flight
        specs = []
        for class_id in class_ids:
            for name in ["d", "e"][: rng.randint(1, 2)]:
                filters = rng.random() < 0.3
                specs.append(
                    SubscriptionSpec(class_id, name, "", max_in_flight, deliveries, filters=filters)
                )
        for number, spec in enumerate(specs):
            self._add(Version2Client, f"reader{number}", class_ids, specs=[spec], count=0)
        if rng.random() < 0.6:
            by_key = self.shape.by_key
            spec = SubscriptionSpec(
                class_ids[0], "g", "crew", max_in_flight, deliveries, by_key=by_key
            )
            for number in range(rng.randint(1, 3)):
                self._add(Version2Client, f"member{number}", class_ids, specs=[spec], count=5)
        for number in range(rng.randint(1, 2)):
            starts = ["waiting", "new", "earliest", "last"]
            start_position = {"sequence": rng.randrange(30)} if rng.random() < 0.2 else None
            if self.shape.values:
                starts, start_position = ["last_values"], None
            spec = SubscriptionSpec(
                class_ids[-1], start=rng.choice(starts), start_position=start_position
            )
            self._add(
                Version2Client, f"till{number}", class_ids, specs=[spec], count=rng.randint(5, 30)
            )
        if rng.random() < 0.5:
            self._add(Version2Client, "nobody", class_ids, specs=[], count=10, is_named=False)
        if rng.random() < 0.5:
            plain = Version1Client(
                world,
                self._dial,
                "plain",
                class_ids=class_ids,
                reads=rng.random() < 0.5,
                count=10,
            )
            self.clients.append(plain)
        for number in range(rng.randint(0, 2)):
            spec = SubscriptionSpec(class_ids[0], f"s{number}", "", max_in_flight, deliveries)
            self.clients.append(
                SdkClient(
                    world,
                    self._dial,
                    f"sdk{number}",
                    class_ids=class_ids,
                    spec=spec,
                    count=rng.randint(0, 20),
                    processed=self.processed,
                )
            )

    def _add(
        self,
        kind: type[Version2Client],
        name: str,
        class_ids: list[int],
        *,
        specs: list[SubscriptionSpec],
        count: int,
        is_named: bool = True,
    ) -> None:
        self.clients.append(
            kind(
                self.world,
                self._dial,
                name,
                class_ids=class_ids,
                specs=specs,
                count=count,
                is_named=is_named,
                processed=self.processed,
                purges=self.shape.purges,
            )
        )

    def _dial(self, client: Endpoint, name: str) -> SimulatedConnection | None:
        return self.server.accept(client, name)

    def run(self) -> PromiseChecker:
        """Run. Raises BrokenPromiseError if a promise is broken."""
        world = self.world
        with (
            self.disk.patch_journal(),
            self.server.log.capture(),
            mock.patch.object(spill, "SPILL_READ_BYTES", self.shape.read_bytes),
            mock.patch.object(checkpoint, "CHECKPOINT_POSITIONS_PER_TURN", self._portion),
            mock.patch.object(purge, "PURGED_POSITIONS_PER_TURN", self._portion),
            mock.patch.object(fetch, "PURGED_POSITIONS_PER_TURN", self._portion),
            mock.patch.object(unacked_messages, "RECLAIMED_MEMBERS_PER_TURN", self._portion),
            mock.patch.object(unacked_messages, "RECLAIMED_RANGES_PER_TURN", self._portion),
            mock.patch.object(floor_index, "FLOOR_CORRECTIONS_MAX", self._portion),
            mock.patch.object(checkpoint, "SNAPSHOT_CHANGE_BYTES_MIN", self._snapshot_bytes),
        ):
            self.server.start()
            world.call_later(1.0, self._inject_fault)
            world.run(FAULT_SECONDS)
            world.trace("all is calm")
            world.is_calm = True
            self.disk.is_full = self.disk.is_broken = False
            self.disk.dies_in = 0
            while world.now < FAULT_SECONDS + CALM_SECONDS:
                world.run(world.now + _SETTLED_CHECK_SECONDS)
                if self._is_settled():
                    break
            self._check_settled()
            self.promises.finish(self.processed, self.server.broker)
        return self.promises

    def _inject_fault(self) -> None:
        """Let a random fault happen, and schedule the next one."""
        world, server, disk = self.world, self.server, self.disk
        if world.is_calm:
            return
        rng = world.random
        if server.is_up and not server.is_paused:
            match rng.choice(self.shape.fates):
                case "kill":
                    server.kill()
                case "cut":
                    server.kill(power=True)
                case "damage":
                    server.kill_and_damage_record()
                case "stop":
                    server.stop()
                case "dies":
                    disk.dies_in = rng.randint(1, 12)
                case "jump":
                    server.jump(rng.choice([-2.0, 0.7, 600.0]))
                case "pause":
                    server.pause(rng.choice([0.3, 3.0, 30.0]))
                case "full":
                    disk.is_full = True
                    world.call_later(rng.uniform(0.1, 5.0), self._end_disk_fault)
                case "broken":
                    disk.is_broken = True
                    world.call_later(rng.uniform(0.1, 5.0), self._end_disk_fault)
        world.call_later(rng.expovariate(1 / _FAULT_INTERVAL_SECONDS), self._inject_fault)

    def _end_disk_fault(self) -> None:
        self.disk.is_full = self.disk.is_broken = False

    def _is_settled(self) -> bool:
        server = self.server
        return (
            server.is_up
            and not server.broker.store.has_deferred_work
            and all(
                client.is_done
                for client in self.clients
                if isinstance(client, Version2Client | SdkClient)
            )
            and not any(
                position.window.floor < cls.ring.head
                for cls in server.broker.classes.values()
                for position in cls.positions
            )
        )

    def _check_settled(self) -> None:
        promises, server = self.promises, self.server
        undone = [
            client.name
            for client in self.clients
            if isinstance(client, Version2Client | SdkClient) and not client.is_done
        ]
        promises.check(not undone, "all messages are confirmed in the end", undone)
        for cls in server.broker.classes.values():
            for position in cls.positions:
                promises.check(
                    position.window.floor == cls.ring.head,
                    "the backlog is delivered in the end",
                    f"class {cls.class_id}, {position.durable or position.group!r}: "
                    f"{position.window.floor} of {cls.ring.head}",
                )


def run_simulation(
    seed: int, *, is_verbose: bool = False, **scenario_fields: Any
) -> PromiseChecker:
    """Run the simulation of this seed, with the given scenario fields."""
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=folder, prefix="simplebus-") as path:
        simulation_run = SimulationRun(seed, Path(path), is_verbose=is_verbose, **scenario_fields)
        try:
            return simulation_run.run()
        finally:
            simulation_run.server.release_files()  # One test process runs thousands of simulations.
