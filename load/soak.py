"""Random load for minutes or hours, with rings that grow and shrink; memory must stay constant.

    python load/run.py soak [--minutes N] [--seed N]

Each cycle builds a backlog, drains it completely, and leaves classes idle until their rings have
shrunk; then memory and descriptors are read. Channels, bindings, durables, groups, connections and
dead letters are created and removed, so the last cycle needs as much memory as the first one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from statistics import linear_regression, median

import trio

import simplebus
from load.brokers import HOST, RunningBroker, running
from load.measure import RunOptions
from load.processes import LoadError
from load.report import Row
from simplebus.client.aio.bus import Bus
from simplebus.client.message_builder import PublishOptions
from simplebus.client.subscribe_options import SubscribeOptions

SECONDS, QUICK_SECONDS = 300.0, 20.0
KINDS = {"memory": "simplebus", "journal": "simplebus-disk"}
SHORT_TICKS = ("--tick", "0.1", "--ack-timeout", "50")  # Rings shrink after 30 idle ticks.
IDLE_S = 4.0
CLASSES = tuple(f"soak-{number}" for number in range(6))
DEAD = tuple(f"dead.{name}" for name in CLASSES)
NAMES = 5  # Names of publishers, and of each class's durables: the bus keeps them for an hour.
COUNT_MAX = 8_000  # Messages per class and cycle.
SIZES = (16, 128, 1024)
SAME_CHANNEL_COUNT = 500  # Messages of one channel in a row.
QUIET_S = 0.5  # Silence after which a class has no more messages.
WARM_UP = 0.2  # Part of the cycles in which the allocator's memory still grows.
MB = 1e6
RATIO_MAX = 1.1
FILES_MAX = len(CLASSES + DEAD)  # An unused class has no open file, a used one has one.


@dataclass
class SoakSamples:
    """Samples of one server, one after each cycle."""

    hours: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    messages: int = 0

    @staticmethod
    def plateaus(values: list[int]) -> tuple[float, float]:
        """Return the medians of the first and the last third, after the warm-up."""
        values = values[int(len(values) * WARM_UP) :]
        third = max(1, len(values) // 3)
        return median(values[:third]), median(values[-third:])

    def bytes_per_hour(self) -> float:
        """Return the growth of memory, by linear regression."""
        first = int(len(self.memory) * WARM_UP)
        if len(self.memory) - first < 3:
            return 0.0
        return linear_regression(self.hours[first:], self.memory[first:]).slope


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario. Raises LoadError if a message was lost."""
    seconds = run_options.minutes * 60 or (QUICK_SECONDS if run_options.quick else SECONDS)
    seed = run_options.seed or Random().getrandbits(32)
    args = (*SHORT_TICKS, *run_options.server_args)
    with ExitStack() as stack:
        soaks = [
            _SoakWorkload(
                stack.enter_context(running(kind, server_args=args)), Random(f"{seed} {name}")
            )
            for name, kind in KINDS.items()
        ]
        try:
            trio.run(_run_all, soaks, seconds)
        except* (simplebus.BusError, LoadError) as errors:
            raise LoadError(f"--seed {seed}: {errors.exceptions[0]!r}") from None
    return [row for name, soak in zip(KINDS, soaks, strict=True) for row in _rows(name, soak, seed)]


def _rows(name: str, soak: _SoakWorkload, seed: int) -> list[Row]:
    samples = soak.samples
    first, last = samples.plateaus(samples.memory)
    first_count, last_count = samples.plateaus(samples.descriptors)
    spread = [value / MB for value in samples.memory]

    def row(title: str, values: list[float], unit: str, target: float | None = None) -> Row:
        return Row("soak", f"{name}: {title}", values, unit, target, None, less_is_better=True)

    count = f"{len(samples.memory)} cycles, {samples.messages} messages, seed {seed}"
    return [
        Row("soak", f"{name}: memory after a cycle", spread, "MB", note=count),
        row("in the last third against the first", [last / first], "x", RATIO_MAX),
        row("growth", [samples.bytes_per_hour() / MB], "MB/h"),
        row("more descriptors", [last_count - first_count], "", FILES_MAX),
    ]


async def _run_all(soaks: Sequence[_SoakWorkload], seconds: float) -> None:
    async with trio.open_nursery() as nursery:
        for soak in soaks:
            nursery.start_soon(soak.run_until, time.monotonic() + seconds)


class _SoakWorkload:
    """Workload of one server."""

    def __init__(self, broker: RunningBroker, chance: Random) -> None:
        self.samples = SoakSamples()
        self._broker = broker
        self._chance = chance
        self._address = f"simplebus://{HOST}:{broker.port}"
        self._durables: dict[tuple[str, str], list[str]] = {}
        """Channels of the existing durables, by class and name."""

    async def run_until(self, end: float) -> None:
        """Run cycles until `end`."""
        started_at, cycle = time.monotonic(), 0
        while not cycle or time.monotonic() < end:
            await self._cycle(cycle)
            await trio.sleep(IDLE_S)
            cycle += 1
            process, samples = self._broker.process, self.samples
            samples.hours.append((time.monotonic() - started_at) / 3600)
            samples.memory.append(process.memory_bytes())
            samples.descriptors.append(process.descriptors())

    async def _cycle(self, cycle: int) -> None:
        chance = self._chance
        name = f"soak-{chance.randrange(NAMES)}"
        async with simplebus.connect(self._address, name=name) as bus:
            for class_name in CLASSES:
                for _ in range(chance.randint(0, 2)):
                    await self._add_durable(bus, class_name, cycle)
            await self._build_up(bus, cycle)
        async with simplebus.connect(self._address) as bus:
            for of_durables in (True, False):
                async with trio.open_nursery() as nursery:
                    if of_durables:
                        for class_name, durable in sorted(self._durables):
                            is_leaving = chance.random() < 0.5
                            nursery.start_soon(self._drain, bus, class_name, durable, is_leaving)
                    else:  # Messages without a subscription, and dead letters.
                        for class_name in (*CLASSES, *DEAD):
                            nursery.start_soon(self._drain, bus, class_name, "", True)

    async def _add_durable(self, bus: Bus, class_name: str, cycle: int) -> None:
        """Create a durable or a durable group."""
        number = self._chance.randrange(NAMES)
        durable = f"{'crew' if number % 2 else 'only'}-{number}"
        if (class_name, durable) in self._durables:
            return
        channels = [f"soak.{cycle}.*", "common.#"] if number % 3 == 0 else []
        options: SubscribeOptions = {**_options(durable), "start": "new"}
        async with bus.subscribe(class_name, *channels, **options):
            self._durables[class_name, durable] = channels

    async def _build_up(self, bus: Bus, cycle: int) -> None:
        chance = self._chance
        for class_name in chance.sample(CLASSES, chance.randint(1, len(CLASSES))):
            remaining_count, size = chance.randint(1, COUNT_MAX), chance.choice(SIZES)
            self.samples.messages += remaining_count
            while remaining_count > 0:
                count = min(remaining_count, chance.randint(1, SAME_CHANNEL_COUNT))
                remaining_count -= count
                options: PublishOptions = {}
                if chance.random() < 0.7:
                    options["channel"] = f"soak.{cycle}.{chance.randrange(1000)}"
                    options["expires"] = 0.2 if chance.random() < 0.2 else None
                    options["headers"] = [("cycle", str(cycle))] if chance.random() < 0.2 else None
                await bus.publish_many(
                    [chance.randbytes(size)] * count, class_id=class_name, confirm=False, **options
                )
        await bus.flush()

    async def _drain(self, bus: Bus, class_name: str, durable: str, is_leaving: bool) -> None:
        """Receive all messages; reject some, which become dead letters."""
        channels = self._durables.get((class_name, durable), [])
        async with bus.subscribe(class_name, *channels, **_options(durable)) as messages:
            while batch := await messages.take(SAME_CHANNEL_COUNT, timeout=QUIET_S):
                if durable and self._chance.random() < 0.1:
                    for message in batch[:: self._chance.randint(1, 50)]:
                        message.nack(0)
            if durable and is_leaving:
                messages.forget()
                del self._durables[class_name, durable]


def _options(durable: str) -> SubscribeOptions:
    options: SubscribeOptions = {"max_deliveries": 2}
    if durable:
        options["durable"] = durable
    if durable.startswith("crew"):
        options["group"] = durable
    return options
