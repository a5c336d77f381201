"""Kills servers under load, some with a power cut: are all confirmed messages kept?

    python load/run.py kills [--quick] [--seed N]

A server is killed by SIGKILL at a random moment, while publishers and subscribers of both protocol
versions work; the next server starts from the same directory. Publishers resend only unconfirmed
messages, so a missing confirmed message counts as lost. Servers alternate between default
sizes, small segments and snapshots, and little memory, so that classes spill. The seed repeats the
kill times as far as the machine's speed does.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import trio

import simplebus
from load.brokers import REPOSITORY, SERVE, disabled_listeners, environment
from load.measure import RunOptions
from load.message_accounting import DeliveryRecord, PublishedMessages
from load.ports import HOST, free_port
from load.power_cut import PowerCutDirectory
from load.processes import LoadError, Process
from load.quick_reconnect import quick_reconnects
from load.report import Row
from simplebus.client.aio.bus import Bus
from simplebus.client.subscribe_options import SubscribeOptions

ROUNDS, QUICK_ROUNDS = 50, 3  # Kills of each scenario.
PUBLISHERS = ("ann", "bob", "cid")
VERSION1_PUBLISHER = "old"
CLASSES = (1, 2)
VERSION1_CLASS = 3
BURST_MAX = 150  # Messages per publish.
VERSION1_BURST = 20
PAUSE_S = 0.01  # The longest pause between two bursts.
LIFE_S = 0.6  # Longest time from the reconnection of all clients to the next kill.
FINISH_TIMEOUT_S = 180.0  # For the delivery of all messages at the end.
LAST_DELIVERY_WAIT_S = 8.0  # Longer than the ack timeout.
SMALL = (sys.executable, "-m", "load.small_server", "serve")
SPILLS = ("--full", "spill", "--max-class-messages", "5000")
END = "end"  # Publisher of the last message of each class.


@dataclass(frozen=True)
class KillScenario:
    """Durability of the servers, and kills with or without power cuts."""

    name: str
    durability: str
    has_cuts: bool = False
    may_lose: bool = False


KINDS = (
    KillScenario("memory", "memory", may_lose=True),
    KillScenario("os", "os"),
    KillScenario("disk", "disk"),
    KillScenario("disk, power cut", "disk", has_cuts=True),
)


@dataclass
class RunResult:
    """Result of one run of kills."""

    rounds: int = 0
    cuts: int = 0
    sent: PublishedMessages = field(default_factory=PublishedMessages)
    records: list[DeliveryRecord] = field(default_factory=list)
    ready_ms: list[float] = field(default_factory=list)
    """Time from the start of a server with stored data to its ready line."""
    lost: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Confirmed messages that a durable did not receive, by publisher and class."""
    forgotten: Counter[str] = field(default_factory=Counter)
    """Confirmed messages reported as lost to their publisher, by publisher."""
    stored_twice: int = 0
    """Messages stored more than once in a class."""
    old_lost: int = 0
    """Lost messages of the version 1 publisher, which gets no confirms."""

    @property
    def unreported_losses(self) -> int:
        """Lost messages that were not reported to their publisher."""
        lost = Counter[str]()
        for (name, _), count in self.lost.items():
            lost[name] += count
        return (lost - self.forgotten).total()

    def faults(self, *, may_lose: bool) -> list[str]:
        """Return a short text for each violated guarantee."""
        losses = ", ".join(
            f"{count} of {name} in class {class_id}"
            for (name, class_id), count in sorted(self.lost.items())
        )
        counts = {
            f"lost ({losses})": 0 if may_lose else self.lost.total(),
            f"lost and not reported ({losses}; reported: {dict(self.forgotten)})": (
                self.unreported_losses if may_lose else 0
            ),
            "stored twice": 0 if may_lose else self.stored_twice,
            "out of order": sum(record.out_of_order for record in self.records),
        }
        return [f"{count} {fault}" for fault, count in counts.items() if count]


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario. Raises LoadError if a confirmed message was lost."""
    seed = run_options.seed or Random().getrandbits(32)
    rounds = QUICK_ROUNDS if run_options.quick else ROUNDS
    rows, faults = [], []
    for kind in KINDS:
        found = run_rounds(kind, rounds, seed, server_args=run_options.server_args)
        rows += _rows(kind, found, seed)
        faults += [f"{kind.name}: {fault}" for fault in found.faults(may_lose=kind.may_lose)]
    if faults:
        raise LoadError(f"{'; '.join(faults)} (--seed {seed})")
    return rows


def _rows(kind: KillScenario, found: RunResult, seed: int) -> list[Row]:
    note = f"seed {seed}"
    if found.cuts:
        note += f", {found.cuts} with the power cut"

    def row(title: str, value: float, unit: str = "", target: float | None = None) -> Row:
        name = f"{kind.name}: {title}"
        return Row("kills", name, [value], unit, target, None, less_is_better=True)

    repeated = sum(record.repeated_count for record in found.records)
    late = sum(record.repeated_late for record in found.records)
    lost = [row("of these lost", found.lost.total(), target=0)]
    if kind.may_lose:
        lost = [
            row("of these lost with the memory", found.lost.total()),
            row("lost, and not reported to the publisher", found.unreported_losses, target=0),
        ]
    return [
        Row("kills", f"{kind.name}: kills", [found.rounds], "", note=note),
        row(
            "messages confirmed",
            found.sent.total - found.sent.counts[VERSION1_CLASS, VERSION1_PUBLISHER],
        ),
        *lost,
        row("stored more than once", found.stored_twice, target=0),
        row("out of order", sum(record.out_of_order for record in found.records), target=0),
        row(
            "of 1,000 deliveries repeated",
            repeated / sum(s.deliveries for s in found.records) * 1e3,
        ),
        row("repeated, though acknowledged 1 s before the kill", late),
        row(
            "of 1,000 of version 1, unconfirmed, lost",
            found.old_lost / max(1, found.sent.counts[VERSION1_CLASS, VERSION1_PUBLISHER]) * 1e3,
        ),
        Row("kills", f"{kind.name}: ready again", found.ready_ms, "ms"),
    ]


def run_rounds(
    kind: KillScenario,
    rounds: int,
    seed: int,
    *,
    server_args: Sequence[str] = (),
    serve: Sequence[str] = SERVE,
) -> RunResult:
    """Kill `rounds` servers, one after the other, in one directory."""
    chance = Random(f"{seed} {kind.name}")
    with quick_reconnects(), tempfile.TemporaryDirectory(prefix="simplebus-kills-") as directory:
        servers = _ServerSequence(kind, Path(directory) / "data", chance, serve, server_args)
        try:
            return trio.run(_KillRun(servers, rounds, chance).run)
        except* (simplebus.BusError, LoadError, trio.TooSlowError) as errors:
            raise LoadError(f"{kind.name} (--seed {seed}): {_first(errors)!r}") from None
        finally:
            servers.stop()


class _ServerSequence:
    """Servers started one after the other, on one port and in one directory."""

    def __init__(
        self,
        kind: KillScenario,
        directory: Path,
        chance: Random,
        serve: Sequence[str],
        server_args: Sequence[str],
    ) -> None:
        self.port = free_port()
        self.ready_ms: list[float] = []
        self.cuts = 0
        self._kind = kind
        self._power = PowerCutDirectory.of(directory)
        self._chance = chance
        self._serve = serve
        self._started = 0
        self._options = [
            *("--host", HOST, "--port", str(self.port), *disabled_listeners()),
            *("--data-dir", str(self._power.directory), "--durability", kind.durability),
            *("--log-level", "warning", *server_args),
        ]
        self._process: Process | None = None

    def _command(self) -> list[str]:
        """Return the command of the next server: default, small, or small with spilling."""
        kind, self._started = self._started % 3, self._started + 1
        if kind == 0 or self._serve is not SERVE:
            return [*self._serve, *self._options]
        return [*SMALL, *self._options, *(SPILLS if kind == 2 else ())]

    async def start(self) -> None:
        with environment(self._power.environment() if self._kind.has_cuts else {}):
            started_at = time.perf_counter()
            process = self._process = Process("simplebus", self._command(), directory=REPOSITORY)

        def wait() -> None:
            process.wait_for_line("simplebus ready", timeout_s=FINISH_TIMEOUT_S)

        await trio.to_thread.run_sync(wait)
        self.ready_ms.append((time.perf_counter() - started_at) * 1e3)

    def kill(self) -> None:
        """Kill the server by SIGKILL, mostly with a power cut if the scenario has them."""
        assert self._process is not None
        self._process.kill()
        self._check_log(self._process)
        self._process.stop()
        if self._kind.has_cuts and self._chance.random() < 0.8:
            self._power.cut(self._chance if self._chance.random() < 0.7 else None)
            self.cuts += 1

    @staticmethod
    def _check_log(process: Process) -> None:
        """Raise LoadError if the log has a traceback."""
        if "Traceback" in process.errors():
            raise LoadError(f"a server failed: {process.last_words()}")

    def last_words(self) -> str:
        """Return the end of the current server's log, and whether it runs."""
        assert self._process is not None
        return self._process.last_words()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


class _KillRun:
    """Publishers, subscribers and the killer, in one program."""

    def __init__(self, servers: _ServerSequence, rounds: int, chance: Random) -> None:
        self._servers = servers
        self._rounds = rounds
        self._chance = chance
        self._found = RunResult()
        self._buses: dict[str, Bus] = {}
        self._is_over = False
        self._address = f"simplebus://{HOST}:{servers.port}"

    async def run(self) -> RunResult:
        found = self._found
        await self._servers.start()
        async with trio.open_nursery() as readers:
            for class_id in (*CLASSES, VERSION1_CLASS):
                await readers.start(self._read, DeliveryRecord(class_id), f"only-{class_id}", "")
            crew = DeliveryRecord(CLASSES[1], is_ordered=False)
            for member in ("first", "second"):
                await readers.start(self._read, crew, member, "crew")
            # A durable that reads only at the end: until then, the bus must keep all messages.
            late = DeliveryRecord(CLASSES[0])
            async with self._bus("early") as bus:
                async with bus.subscribe(late.class_id, durable="late"):
                    pass
                del self._buses["early"]
            async with trio.open_nursery() as publishers:
                for name in PUBLISHERS:
                    await publishers.start(self._publish, name)
                publishers.start_soon(self._publish_version1)
                await self._kill_repeatedly()
                self._is_over = True
            await readers.start(self._read, late, "late", "")
            await self._wait_delivered()
            readers.cancel_scope.cancel()
        found.rounds, found.cuts = self._rounds, self._servers.cuts
        found.ready_ms = self._servers.ready_ms[1:]
        self._count_faults()
        return found

    @asynccontextmanager
    async def _bus(self, name: str) -> AsyncIterator[Bus]:
        async with simplebus.connect(self._address, name=name) as bus:
            self._buses[name] = bus
            yield bus

    async def _kill_repeatedly(self) -> None:
        for _ in range(self._rounds):
            await trio.sleep(self._chance.uniform(0, LIFE_S))
            self._servers.kill()
            for record in self._found.records:
                record.killed_at = trio.current_time()
            await self._servers.start()
            with trio.move_on_after(FINISH_TIMEOUT_S) as scope:
                await _wait_until(self._are_all_connected)
            if scope.cancelled_caught:
                disconnected = [name for name, bus in self._buses.items() if not _is_connected(bus)]
                words = self._servers.last_words()
                raise LoadError(
                    f"{', '.join(disconnected)} did not reconnect within {FINISH_TIMEOUT_S:g} s: "
                    f"{words}"
                )

    def _are_all_connected(self) -> bool:
        return all(map(_is_connected, self._buses.values()))

    # Publishers and readers -----------------------------------------------------------------------

    async def _publish(self, name: str, *, task_status: trio.TaskStatus[None]) -> None:
        """Publish under a name, which resends unconfirmed messages."""
        sent, chance = self._found.sent, Random(name)
        async with self._bus(name) as bus:
            task_status.started()
            while not self._is_over:
                for class_id in chance.sample(CLASSES, len(CLASSES)):
                    payloads = sent.next_payloads(class_id, name, chance.randint(1, BURST_MAX))
                    await bus.publish_many(payloads, class_id=class_id, confirm=False)
                await trio.sleep(chance.uniform(0, PAUSE_S))
            with trio.fail_after(FINISH_TIMEOUT_S):
                await bus.flush()
            self._found.forgotten[name] += bus.statistics().forgotten
            del self._buses[name]

    async def _publish_version1(self) -> None:
        """Publish in version 1, without confirms."""
        while not self._is_over:
            try:
                stream = await trio.open_tcp_stream(HOST, self._servers.port)
                async with stream:
                    await stream.send_all(_frame(b"4", 0, b"[]"))
                    while not self._is_over:
                        frames = [
                            _frame(b"1", VERSION1_CLASS, p) for p in self._next_version1_messages()
                        ]
                        await stream.send_all(b"".join(frames))
                        await trio.sleep(PAUSE_S)
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(PAUSE_S)

    def _next_version1_messages(self) -> list[bytes]:
        return self._found.sent.next_payloads(VERSION1_CLASS, VERSION1_PUBLISHER, VERSION1_BURST)

    async def _read(
        self, record: DeliveryRecord, name: str, group: str, *, task_status: trio.TaskStatus[None]
    ) -> None:
        """Subscribe as a durable, or as a member of a durable group."""
        if record not in self._found.records:
            self._found.records.append(record)
        options: SubscribeOptions = (
            {"durable": group, "group": group} if group else {"durable": name}
        )
        async with (
            self._bus(f"reader-{name}") as bus,
            bus.subscribe(record.class_id, **options) as messages,
        ):
            task_status.started()
            async for message in messages:
                record.record_delivery(message.payload, message.sequence, trio.current_time())

    # End of the run -------------------------------------------------------------------------------

    async def _wait_delivered(self) -> None:
        """Wait until every subscriber has every message, or FINISH_TIMEOUT_S are over."""
        sent, records = self._found.sent, self._found.records
        async with self._bus(END) as bus:
            for class_id in (*CLASSES, VERSION1_CLASS):
                await bus.publish_many(sent.next_payloads(class_id, END, 1), class_id=class_id)
            del self._buses[END]
        with trio.move_on_after(FINISH_TIMEOUT_S):
            await _wait_until(lambda: all(record.has_delivered(END, 0) for record in records))
            while any(
                record.missing(sent) for record in records if record.class_id != VERSION1_CLASS
            ):
                before = sum(record.deliveries for record in records)
                await trio.sleep(LAST_DELIVERY_WAIT_S)
                if (
                    sum(record.deliveries for record in records) == before
                    and self._are_all_connected()
                ):
                    break  # The missing messages are lost.

    def _count_faults(self) -> None:
        """Count lost, repeated and out-of-order messages."""
        found = self._found
        lost = dict[int, set[tuple[str, int]]]()
        for record in found.records:
            lost[record.class_id] = lost.get(record.class_id, set()) | record.missing(found.sent)
        found.old_lost = len(lost.pop(VERSION1_CLASS))
        for class_id, missing in lost.items():
            found.lost.update((name, class_id) for name, _ in missing)
        for class_id in CLASSES:
            head = max(record.head for record in found.records if record.class_id == class_id)
            found.stored_twice += max(
                0, head - sum(found.sent.counts_by_publisher(class_id).values())
            )


def _is_connected(bus: Bus) -> bool:
    return bus.statistics().session_id is not None


async def _wait_until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 - no event exists to wait for.
        await trio.sleep(0.01)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first leaf of nested exception groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _frame(kind: bytes, class_id: int, content: bytes) -> bytes:
    """Return a frame of version 1."""
    return kind + class_id.to_bytes(2) + bytes(6) + content + b"<\r\n>"
