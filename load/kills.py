"""Kills servers under load, and cuts their power: is all that was confirmed still there?

Rule 1: a server is killed by SIGKILL at a random moment, while publishers and subscribers of both
versions are at work; the next one begins with what the one before has left in its directory.
Rule 2: publishers send again what was not confirmed, and nothing else. So what was confirmed and is
gone stays away, and is counted as lost; what was stored twice moves the sequence of the last one.
Rule 3: servers take turns: one as it is, one whose segments and snapshots are small, one that has
little memory besides, so that its classes are full and spill.
Rule 4: the seed is told. It repeats the moments as far as the machine's pace does.
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
from load.accounts import Seen, Sent
from load.brokers import REPOSITORY, SERVE, closed_doors, environment
from load.clients import quick_clients
from load.measure import Manner
from load.ports import HOST, free_port
from load.power import Power
from load.processes import LoadError, Process
from load.report import Row
from simplebus.client.aio.bus import Bus
from simplebus.client.subscribe_options import SubscribeOptions

ROUNDS, QUICK_ROUNDS = 50, 3  # Of each kind.
PUBLISHERS = ("ann", "bob", "cid")
OLD_PUBLISHER = "old"
CLASSES = (1, 2)
OLD_CLASS = 3
BURST_MAX = 150  # Messages that are published at once.
OLD_BURST = 20
PAUSE_S = 0.01  # The longest pause between two bursts.
LIFE_S = 0.6  # The longest that a server is left alone once everybody is there again.
QUIET_S = 180.0  # Within which all has to be through in the end.
STILL_S = 8.0  # Longer than unacknowledged messages wait until they come again.
SMALL = (sys.executable, "-m", "load.small", "serve")
SPILLS = ("--full", "spill", "--max-class-messages", "5000")
END = "end"  # Whoever says that a class has nothing more.


@dataclass(frozen=True)
class Kind:
    """How servers come to their end."""

    name: str
    durability: str
    has_cuts: bool = False
    may_lose: bool = False


KINDS = (
    Kind("memory", "memory", may_lose=True),
    Kind("os", "os"),
    Kind("disk", "disk"),
    Kind("disk, power cut", "disk", has_cuts=True),
)


@dataclass
class Found:
    """What became of one run of kills."""

    rounds: int = 0
    cuts: int = 0
    sent: Sent = field(default_factory=Sent)
    seen: list[Seen] = field(default_factory=list)
    ready_ms: list[float] = field(default_factory=list)
    """From the start of a server to its ready line, those that found something."""
    lost: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By publisher and class: messages that were confirmed and did not come, to one durable at
    least."""
    told: Counter[str] = field(default_factory=Counter)
    """By publisher: messages of which it knows that they were confirmed and are gone."""
    stored_again: int = 0
    """Messages that are in a class more than once."""
    old_lost: int = 0
    """Of those of the version 1 publisher, to which nothing is confirmed."""

    @property
    def untold(self) -> int:
        """Messages that are lost, and whose publisher was not told: what another one was told does
        not make up for that."""
        lost = Counter[str]()
        for (name, _), count in self.lost.items():
            lost[name] += count
        return (lost - self.told).total()

    def faults(self, *, may_lose: bool) -> list[str]:
        """What must not be, a few words each."""
        where = ", ".join(
            f"{count} of {name} in class {class_id}"
            for (name, class_id), count in sorted(self.lost.items())
        )
        counts = {
            f"lost ({where})": 0 if may_lose else self.lost.total(),
            f"lost and not told ({where}; told: {dict(self.told)})": self.untold if may_lose else 0,
            "stored twice": 0 if may_lose else self.stored_again,
            "out of order": sum(each.disordered for each in self.seen),
        }
        return [f"{count} {what}" for what, count in counts.items() if count]


def run(manner: Manner) -> list[Row]:
    """The rows of the scenario. Raises LoadError when something was lost."""
    seed = manner.seed or Random().getrandbits(32)
    rounds = QUICK_ROUNDS if manner.quick else ROUNDS
    rows, faults = [], []
    for kind in KINDS:
        found = lives(kind, rounds, seed, server_args=manner.server_args)
        rows += _rows(kind, found, seed)
        faults += [f"{kind.name}: {each}" for each in found.faults(may_lose=kind.may_lose)]
    if faults:
        raise LoadError(f"{'; '.join(faults)} (--seed {seed})")
    return rows


def _rows(kind: Kind, found: Found, seed: int) -> list[Row]:
    note = f"seed {seed}"
    if found.cuts:
        note += f", {found.cuts} with the power cut"

    def row(title: str, value: float, unit: str = "", wish: float | None = None) -> Row:
        name = f"{kind.name}: {title}"
        return Row("kills", name, [value], unit, wish, None, less_is_better=True)

    again = sum(each.again for each in found.seen)
    late = sum(each.late for each in found.seen)
    lost = [row("of these lost", found.lost.total(), wish=0)]
    if kind.may_lose:
        lost = [
            row("of these lost with the memory", found.lost.total()),
            row("lost, and its publisher was not told", found.untold, wish=0),
        ]
    return [
        Row("kills", f"{kind.name}: kills", [found.rounds], "", note=note),
        row("messages confirmed", found.sent.total - found.sent.counts[OLD_CLASS, OLD_PUBLISHER]),
        *lost,
        row("stored more than once", found.stored_again, wish=0),
        row("out of order", sum(each.disordered for each in found.seen), wish=0),
        row("of 1,000 deliveries repeated", again / sum(s.deliveries for s in found.seen) * 1e3),
        row("repeated though acknowledged 1 s before the kill", late),
        row(
            "of 1,000 of version 1, unconfirmed, lost",
            found.old_lost / max(1, found.sent.counts[OLD_CLASS, OLD_PUBLISHER]) * 1e3,
        ),
        Row("kills", f"{kind.name}: ready again", found.ready_ms, "ms"),
    ]


def lives(
    kind: Kind,
    rounds: int,
    seed: int,
    *,
    server_args: Sequence[str] = (),
    serve: Sequence[str] = SERVE,
) -> Found:
    """So many kills of servers, one after the other, in one directory."""
    chance = Random(f"{seed} {kind.name}")
    with quick_clients(), tempfile.TemporaryDirectory(prefix="simplebus-kills-") as directory:
        servers = _Servers(kind, Path(directory) / "data", chance, serve, server_args)
        try:
            return trio.run(_Run(servers, rounds, chance).through)
        except* (simplebus.BusError, LoadError, trio.TooSlowError) as errors:
            raise LoadError(f"{kind.name} (--seed {seed}): {_first(errors)!r}") from None
        finally:
            servers.stop()


class _Servers:
    """One after the other, on one port and in one directory."""

    def __init__(
        self,
        kind: Kind,
        directory: Path,
        chance: Random,
        serve: Sequence[str],
        server_args: Sequence[str],
    ) -> None:
        self.port = free_port()
        self.ready_ms: list[float] = []
        self.cuts = 0
        self._kind = kind
        self._power = Power.of(directory)
        self._chance = chance
        self._serve = serve
        self._started = 0
        self._options = [
            *("--host", HOST, "--port", str(self.port), *closed_doors()),
            *("--data-dir", str(self._power.directory), "--durability", kind.durability),
            *("--log-level", "warning", *server_args),
        ]
        self._process: Process | None = None

    def _command(self) -> list[str]:
        """Of the next server: those of its own kind, small ones, small ones that spill."""
        which, self._started = self._started % 3, self._started + 1
        if which == 0 or self._serve is not SERVE:
            return [*self._serve, *self._options]
        return [*SMALL, *self._options, *(SPILLS if which == 2 else ())]

    async def start(self) -> None:
        with environment(self._power.environment() if self._kind.has_cuts else {}):
            begun = time.perf_counter()
            process = self._process = Process("simplebus", self._command(), directory=REPOSITORY)

        def wait() -> None:
            process.wait_for_line("simplebus ready", timeout_s=QUIET_S)

        await trio.to_thread.run_sync(wait)
        self.ready_ms.append((time.perf_counter() - begun) * 1e3)

    def kill(self) -> None:
        """By SIGKILL; and mostly the power goes with it, if it is to go."""
        assert self._process is not None
        self._process.kill()
        self._check_log(self._process)
        self._process.stop()
        if self._kind.has_cuts and self._chance.random() < 0.8:
            self._power.cut(self._chance if self._chance.random() < 0.7 else None)
            self.cuts += 1

    @staticmethod
    def _check_log(process: Process) -> None:
        """Raises LoadError for a traceback."""
        if "Traceback" in process.errors():
            raise LoadError(f"a server failed: {process.last_words()}")

    def last_words(self) -> str:
        """What the server that is there has said, and whether it is."""
        assert self._process is not None
        return self._process.last_words()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


class _Run:
    """Everybody who is at work, in one program."""

    def __init__(self, servers: _Servers, rounds: int, chance: Random) -> None:
        self._servers = servers
        self._rounds = rounds
        self._chance = chance
        self._found = Found()
        self._buses: dict[str, Bus] = {}
        self._is_over = False
        self._address = f"simplebus://{HOST}:{servers.port}"

    async def through(self) -> Found:
        found = self._found
        await self._servers.start()
        async with trio.open_nursery() as readers:
            for class_id in (*CLASSES, OLD_CLASS):
                await readers.start(self._read, Seen(class_id), f"only-{class_id}", "")
            crew = Seen(CLASSES[1], is_ordered=False)
            for member in ("first", "second"):
                await readers.start(self._read, crew, member, "crew")
            # One that comes back in the end: until then, all has to stay.
            late = Seen(CLASSES[0])
            async with self._bus("early") as bus:
                async with bus.subscribe(late.class_id, durable="late"):
                    pass
                del self._buses["early"]
            async with trio.open_nursery() as publishers:
                for name in PUBLISHERS:
                    await publishers.start(self._publish, name)
                publishers.start_soon(self._publish_old)
                await self._kill_again_and_again()
                self._is_over = True
            await readers.start(self._read, late, "late", "")
            await self._end()
            readers.cancel_scope.cancel()
        found.rounds, found.cuts = self._rounds, self._servers.cuts
        found.ready_ms = self._servers.ready_ms[1:]
        self._settle()
        return found

    @asynccontextmanager
    async def _bus(self, name: str) -> AsyncIterator[Bus]:
        async with simplebus.connect(self._address, name=name) as bus:
            self._buses[name] = bus
            yield bus

    async def _kill_again_and_again(self) -> None:
        for _ in range(self._rounds):
            await trio.sleep(self._chance.uniform(0, LIFE_S))
            self._servers.kill()
            for seen in self._found.seen:
                seen.killed_at = trio.current_time()
            await self._servers.start()
            with trio.move_on_after(QUIET_S) as scope:
                await _until(self._are_all_there)
            if scope.cancelled_caught:
                away = [name for name, bus in self._buses.items() if not _is_there(bus)]
                words = self._servers.last_words()
                raise LoadError(f"{', '.join(away)} are not back within {QUIET_S:g} s: {words}")

    def _are_all_there(self) -> bool:
        return all(map(_is_there, self._buses.values()))

    # At work -------------------------------------------------------------------------------------

    async def _publish(self, name: str, *, task_status: trio.TaskStatus[None]) -> None:
        """Under a name, sending again what was not confirmed."""
        sent, chance = self._found.sent, Random(name)
        async with self._bus(name) as bus:
            task_status.started()
            while not self._is_over:
                for class_id in chance.sample(CLASSES, len(CLASSES)):
                    payloads = sent.more(class_id, name, chance.randint(1, BURST_MAX))
                    await bus.publish_many(payloads, class_id=class_id, confirm=False)
                await trio.sleep(chance.uniform(0, PAUSE_S))
            with trio.fail_after(QUIET_S):
                await bus.flush()
            self._found.told[name] += bus.statistics().forgotten
            del self._buses[name]

    async def _publish_old(self) -> None:
        """In version 1, to which nothing is confirmed."""
        while not self._is_over:
            try:
                stream = await trio.open_tcp_stream(HOST, self._servers.port)
                async with stream:
                    await stream.send_all(_frame(b"4", 0, b"[]"))
                    while not self._is_over:
                        frames = [_frame(b"1", OLD_CLASS, p) for p in self._old()]
                        await stream.send_all(b"".join(frames))
                        await trio.sleep(PAUSE_S)
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(PAUSE_S)

    def _old(self) -> list[bytes]:
        return self._found.sent.more(OLD_CLASS, OLD_PUBLISHER, OLD_BURST)

    async def _read(
        self, seen: Seen, name: str, group: str, *, task_status: trio.TaskStatus[None]
    ) -> None:
        """A durable subscription, or one member of a durable group."""
        if seen not in self._found.seen:
            self._found.seen.append(seen)
        options: SubscribeOptions = (
            {"durable": group, "group": group} if group else {"durable": name}
        )
        async with (
            self._bus(f"reader-{name}") as bus,
            bus.subscribe(seen.class_id, **options) as messages,
        ):
            task_status.started()
            async for message in messages:
                seen.take(message.payload, message.sequence, trio.current_time())

    # In the end ----------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Wait until everybody has all there is, or has had the time for it."""
        sent, seen = self._found.sent, self._found.seen
        async with self._bus(END) as bus:
            for class_id in (*CLASSES, OLD_CLASS):
                await bus.publish_many(sent.more(class_id, END, 1), class_id=class_id)
            del self._buses[END]
        with trio.move_on_after(QUIET_S):
            await _until(lambda: all(each.holds(END, 0) for each in seen))
            while any(each.missing(sent) for each in seen if each.class_id != OLD_CLASS):
                before = sum(each.deliveries for each in seen)
                await trio.sleep(STILL_S)
                if sum(each.deliveries for each in seen) == before and self._are_all_there():
                    break  # What has not come will not.

    def _settle(self) -> None:
        """Add up."""
        found = self._found
        lost = dict[int, set[tuple[str, int]]]()
        for each in found.seen:
            lost[each.class_id] = lost.get(each.class_id, set()) | each.missing(found.sent)
        found.old_lost = len(lost.pop(OLD_CLASS))
        for class_id, missing in lost.items():
            found.lost.update((name, class_id) for name, _ in missing)
        for class_id in CLASSES:
            head = max(each.head for each in found.seen if each.class_id == class_id)
            found.stored_again += max(0, head - sum(found.sent.of(class_id).values()))


def _is_there(bus: Bus) -> bool:
    return bus.statistics().session_id is not None


async def _until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 - nobody tells.
        await trio.sleep(0.01)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """One of them, out of the groups within groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _frame(kind: bytes, class_id: int, content: bytes) -> bytes:
    """Of version 1."""
    return kind + class_id.to_bytes(2) + bytes(6) + content + b"<\r\n>"
