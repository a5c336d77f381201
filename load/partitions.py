"""Bridges over a faulty network, with kills of the bridge and both ends: is each message copied?

    python load/run.py partitions [--quick] [--seed N]     (needs root)

Servers and bridge are real processes in network namespaces. The link between them delays, loses and
reorders packets, and cuts are silent. A publisher at the source runs all the time. The recovery
time runs from the repair until a message published then has arrived. The faulty link is first
behind the bridge, then in front of it. A round takes about a minute per scenario, and eight minutes
for all.

    publisher ─► source bus ─► bridge ═══ link ═══► target bus, or NATS ─► reader
    publisher ─► source bus, or JetStream ═══ link ═══► bridge ─► target bus, or NATS ─► reader
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from random import Random

import trio

import simplebus
from load.brokers import REPOSITORY, SERVE, START_S, disabled_listeners, find_program
from load.faulty_network import (
    SOURCE_ADDRESS,
    TARGET_ADDRESS,
    FaultyLink,
    Network,
    missing_requirement,
)
from load.measure import RunOptions
from load.message_accounting import DeliveryRecord, PublishedMessages
from load.processes import LoadError, Process
from load.quick_reconnect import quick_reconnects
from load.report import Row

CLASSES = (1, 2)
PUBLISHER = "ann"
BURST = 10
PAUSE_S = 0.02
HEARTBEAT_S = 2.0
LONG_CUT_S, SHORT_CUT_S = 8.0, 1.0
"""Duration of cuts: longer than three heartbeats, and too short to be detected."""
EVENT_PAUSE_S = 2.0
"""Time between two events, in which the link only delays, loses and reorders packets."""
DELAY_S, JITTER_S, LOSS = 0.025, 0.01, 0.05
"""Faults of each packet, one way; a round trip takes at least 50 ms."""
FINISH_TIMEOUT_S = 120.0  # For the copies of all messages.
LAST_DELIVERY_WAIT_S = 3.0  # Repeated messages arrive within this time.
LOOPBACK = "127.0.0.1"
STREAM = "PARTITIONS"
SUBJECT = "load"


@dataclass(frozen=True)
class PartitionScenario:
    """Programs at both ends, place of the faulty link, and events."""

    name: str
    source: str = "simplebus"
    target: str = "simplebus"
    """The programs."""
    stream: str = ""
    is_before_bridge: bool = False
    """True if the link is between source and bridge."""
    may_repeat: bool = False
    """True if messages in flight may be copied twice."""
    events: tuple[str, ...] = ("cut", "long cut", "kill bridge", "kill target", "kill source")

    @property
    def title(self) -> str:
        place = "in front of" if self.is_before_bridge else "behind"
        return f"{self.name}, the link {place} the bridge"


WAYS = (
    PartitionScenario("bus to bus"),
    PartitionScenario("bus to JetStream", target="nats-server", stream=STREAM),
    PartitionScenario(
        "bus to NATS core",
        target="nats-server",
        may_repeat=True,
        # NATS core loses all messages if it is killed.
        events=("cut", "long cut", "kill bridge", "kill source"),
    ),
    PartitionScenario("JetStream to bus", source="nats-server", stream=STREAM),
)
KINDS = tuple(
    replace(way, is_before_bridge=is_before_bridge)
    for way in WAYS
    for is_before_bridge in (False, True)
)


@dataclass
class BridgeRunResult:
    """Result of one run."""

    sent: PublishedMessages = field(default_factory=PublishedMessages)
    records: dict[int, DeliveryRecord] = field(
        default_factory=lambda: {class_id: DeliveryRecord(class_id) for class_id in CLASSES}
    )
    recovered_s: dict[str, list[float]] = field(default_factory=dict)
    """Recovery times by event."""
    packets_lost: int = 0
    stored_twice: int = 0
    """Messages stored more than once at the target."""
    repeated: int = 0
    """The same, where repetition is allowed."""

    @property
    def lost(self) -> int:
        return sum(len(record.missing(self.sent)) for record in self.records.values())

    @property
    def out_of_order(self) -> int:
        return sum(record.out_of_order for record in self.records.values())

    def faults(self) -> list[str]:
        """Return a short text for each violated guarantee."""
        counts = {
            "lost": self.lost,
            "stored twice": self.stored_twice,
            "out of order": self.out_of_order,
        }
        return [f"{count} {fault}" for fault, count in counts.items() if count]


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario. Raises LoadError if a message was lost."""
    if requirement := missing_requirement():
        raise LoadError(f"partitions need {requirement}")
    rows, faults = [], []
    for kind in KINDS:
        if "nats-server" in (kind.source, kind.target) and find_program("nats-server") is None:
            continue
        found = run_rounds(kind, 1 if run_options.quick else run_options.rounds, run_options.seed)
        rows += _rows(kind, found)
        faults += [f"{kind.title}: {fault}" for fault in found.faults()]
    if faults:
        raise LoadError("; ".join(faults))
    return rows


def _rows(kind: PartitionScenario, found: BridgeRunResult) -> list[Row]:
    def row(title: str, values: list[float], unit: str = "", target: float | None = None) -> Row:
        title = f"{kind.title}: {title}"
        return Row("partitions", title, values, unit, target, None, less_is_better=True)

    counts = [
        row("messages confirmed", [found.sent.total]),
        row("of these lost", [found.lost], target=0),
        row("stored twice", [found.stored_twice], target=0),
        row("out of order", [found.out_of_order], target=0),
    ]
    if kind.may_repeat:
        counts[2] = row("received twice, which is allowed", [found.repeated])
    return counts + [
        row(f"recovery from a {event.replace('kill', 'kill of the')}", seconds, "s")
        for event, seconds in found.recovered_s.items()
    ]


def run_rounds(kind: PartitionScenario, rounds: int, seed: int = 0) -> BridgeRunResult:
    """Run `rounds` rounds of all events of a scenario."""
    with (
        quick_reconnects(),
        _network_pair() as (source, target),
        FaultyLink(source, target, seed=seed) as line,
        tempfile.TemporaryDirectory(prefix="simplebus-partitions-") as directory,
    ):
        with ExitStack() as stack:
            run = _PartitionRun(kind, source, target, line, Path(directory), stack)
            run.run_events(rounds)
        run.found.packets_lost = line.lost
        return run.found


def _address(program: str, host: str) -> str:
    return f"nats://{host}:4222" if program == "nats-server" else f"{host}:8888"


@contextmanager
def _network_pair() -> Iterator[tuple[Network, Network]]:
    with ExitStack() as stack:
        found = []
        for own_address, peer_address in (
            (SOURCE_ADDRESS, TARGET_ADDRESS),
            (TARGET_ADDRESS, SOURCE_ADDRESS),
        ):
            found.append(Network(own_address, peer_address))
            stack.callback(found[-1].close)
        yield found[0], found[1]


class _RestartableProgram:
    """Process in a network namespace, restarted by the same command."""

    def __init__(self, network: Network, command: list[str], ready: str) -> None:
        self._command, self._ready = network.command(command), ready
        self._process: Process | None = None

    def start(self) -> None:
        self._process = Process(self._command[2], self._command, directory=REPOSITORY)
        self._process.wait_for_line(self._ready, timeout_s=START_S)

    def kill(self) -> None:
        assert self._process is not None
        if "Traceback" in self._process.errors():
            raise LoadError(f"{self._process.name} failed: {self.last_words()}")
        self._process.kill()
        self._process.stop()

    def last_words(self) -> str:
        assert self._process is not None
        return self._process.last_words()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


class _PartitionRun:
    """Publisher, programs, readers and events of one run."""

    def __init__(
        self,
        kind: PartitionScenario,
        source: Network,
        target: Network,
        line: FaultyLink,
        directory: Path,
        stack: ExitStack,
    ) -> None:
        self.found = BridgeRunResult()
        self._kind, self._source, self._target, self._line = kind, source, target, line
        self._chance = Random(kind.name)
        self._repaired_at = 0.0
        self._is_over = threading.Event()
        self._errors: list[BaseException] = []
        self._programs = {
            "source": self._bus_or_nats(kind.source, source, directory / "source"),
            "target": self._bus_or_nats(kind.target, target, directory / "target"),
            "bridge": self._bridge(directory / "bridge.toml"),
        }
        for program in self._programs.values():
            stack.callback(program.stop)
        stack.callback(self._is_over.set)

    @staticmethod
    def _bus_or_nats(program: str, network: Network, directory: Path) -> _RestartableProgram:
        if program == "nats-server":
            command = [str(find_program(program)), "-js", "-sd", str(directory)]
            return _RestartableProgram(network, command, "Server is ready")
        hosts = ("--host", LOOPBACK, "--host", network.address)
        quiet = ("--data-dir", str(directory), "--log-level", "error")
        return _RestartableProgram(
            network, [*SERVE, *hosts, *disabled_listeners(), *quiet], "simplebus ready"
        )

    def _bridge(self, file: Path) -> _RestartableProgram:
        kind = self._kind
        network = self._target if kind.is_before_bridge else self._source
        source = _address(kind.source, SOURCE_ADDRESS if kind.is_before_bridge else LOOPBACK)
        target = _address(kind.target, LOOPBACK if kind.is_before_bridge else TARGET_ADDRESS)
        config_lines = [f'[[bridges]]\nname = "b"\nfrom = "{source}"\nto = "{target}"']
        config_lines.append(f"heartbeat = {HEARTBEAT_S}")
        for class_id in CLASSES:
            config_lines.append(f"[[bridges.copy]]\nclass = {class_id}")
            if kind.source == "nats-server":
                config_lines.append(f'channels = ["{SUBJECT}.{class_id}"]\nstart = "earliest"')
            if kind.target == "nats-server":
                config_lines.append(f'rewrite = [["#", "{SUBJECT}.{class_id}"]]')
            if kind.stream:
                config_lines.append(f'stream = "{kind.stream}"')
        file.write_text("\n".join(config_lines) + "\n")
        command = [sys.executable, "-m", "simplebus", "bridge", str(file), "--log-level", "info"]
        return _RestartableProgram(network, command, "copying from sequence")

    # Events ---------------------------------------------------------------------------------------

    def run_events(self, rounds: int) -> None:
        """Run all events of each round.

        Raises LoadError if a program fails or a message does not arrive.
        """
        for name in ("source", "target"):
            self._programs[name].start()
        has_nats_source = self._kind.source == "nats-server"
        if self._kind.stream:
            self._run_in_network(
                self._source if has_nats_source else self._target, self._make_stream
            )
        publish = self._publish_stream if has_nats_source else self._publish
        threads = [
            self._start_thread(self._source, publish),
            self._start_thread(self._target, self._reader()),
        ]
        self._programs["bridge"].start()
        line = self._line
        line.delay_s, line.jitter_s, line.loss = DELAY_S, JITTER_S, LOSS
        for _ in range(rounds):
            for event in self._kind.events:
                time.sleep(EVENT_PAUSE_S)
                self._cause_event(event)
                seconds = self._wait_recovered(event)
                self.found.recovered_s.setdefault(event, []).append(seconds)
        self._is_over.set()
        threads[0].join(FINISH_TIMEOUT_S)
        self._wait_until(lambda: not self.found.lost, "the end")
        time.sleep(LAST_DELIVERY_WAIT_S)
        threads[1].join(FINISH_TIMEOUT_S)
        self._count_faults()

    def _cause_event(self, event: str) -> None:
        """Cause an event and repair it."""
        if "cut" in event:
            self._line.is_cut = True
            time.sleep(LONG_CUT_S if "long" in event else SHORT_CUT_S)
            self._line.is_cut = False
            self._repaired_at = time.monotonic()
            return
        program = self._programs[event.removeprefix("kill ")]
        time.sleep(self._chance.uniform(0, PAUSE_S))
        program.kill()
        self._repaired_at = time.monotonic()
        program.start()

    def _wait_recovered(self, event: str) -> float:
        """Return the seconds since the repair until a message published now has arrived."""
        counts = {class_id: self.found.sent.counts[class_id, PUBLISHER] for class_id in CLASSES}

        def has_arrived() -> bool:
            records = self.found.records
            return all(
                records[each].has_delivered(PUBLISHER, number) for each, number in counts.items()
            )

        self._wait_until(has_arrived, event)
        return time.monotonic() - self._repaired_at

    def _wait_until(self, is_true: Callable[[], bool], event: str) -> None:
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        while not is_true():
            if self._errors:
                raise LoadError(f"{self._kind.title}, {event}: {self._errors[0]!r}")
            if time.monotonic() > deadline:
                bridge = self._programs["bridge"].last_words()
                raise LoadError(
                    f"{self._kind.title}: after {event}, {self.found.lost} messages did not arrive "
                    f"within {FINISH_TIMEOUT_S:g} s; the bridge printed: {bridge}"
                )
            time.sleep(0.02)

    def _count_faults(self) -> None:
        found = self.found
        for record in found.records.values():
            repeated_count = record.repeated_count
            # A reader may receive a message twice that the bus has once.
            if self._kind.target == "simplebus":
                repeated_count = max(0, record.head - found.sent.counts[record.class_id, PUBLISHER])
            if self._kind.may_repeat:
                found.repeated += repeated_count
            else:
                found.stored_twice += repeated_count

    # Publishers and readers -----------------------------------------------------------------------

    def _start_thread(self, network: Network, work: Callable[[], object]) -> threading.Thread:
        """Start a thread in a network; its exception is reported."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._errors.append(error)

        return network.thread(run)

    @staticmethod
    def _run_in_network(network: Network, work: Callable[[], object]) -> None:
        network.thread(work).join(START_S)

    def _publish(self) -> None:
        trio.run(self._publish_on)

    async def _publish_on(self) -> None:
        sent = self.found.sent
        async with simplebus.connect(
            f"{LOOPBACK}:8888", name=PUBLISHER, reconnect=FINISH_TIMEOUT_S
        ) as bus:
            while not self._is_over.is_set():
                for class_id in CLASSES:
                    payloads = sent.next_payloads(class_id, PUBLISHER, BURST)
                    await bus.publish_many(payloads, class_id=class_id)
                await trio.sleep(PAUSE_S)

    def _is_finished(self) -> bool:
        return self._is_over.is_set() and not self.found.lost

    def _reader(self) -> Callable[[], object]:
        if self._kind.target == "simplebus":
            return lambda: trio.run(self._read_all)
        return self._read_stream if self._kind.stream else self._listen

    async def _read_all(self) -> None:
        async with trio.open_nursery() as nursery:
            for record in self.found.records.values():
                nursery.start_soon(self._read, record)
            while not self._is_finished():  # noqa: ASYNC110 - no event exists to wait for.
                await trio.sleep(0.1)
            await trio.sleep(LAST_DELIVERY_WAIT_S / 2)
            nursery.cancel_scope.cancel()

    async def _read(self, record: DeliveryRecord) -> None:
        async with (
            simplebus.connect(f"{LOOPBACK}:8888", reconnect=FINISH_TIMEOUT_S) as bus,
            bus.subscribe(record.class_id, durable="reader", start="earliest") as messages,
        ):
            async for message in messages:
                record.record_delivery(message.payload, message.sequence, time.monotonic())

    # NATS ----------------------------------------------------------------------------------------

    @staticmethod
    def _make_stream() -> None:
        with _NatsConnection() as nats:
            nats.request(f"STREAM.CREATE.{STREAM}", {"name": STREAM, "subjects": [f"{SUBJECT}.*"]})

    def _publish_stream(self) -> None:
        """Publish to the stream directly.

        A burst is repeated with the same ids until it is stored.
        """
        burst: tuple[int, list[bytes]] | None = None
        class_ids = cycle(CLASSES)
        while burst is not None or not self._is_over.is_set():
            with suppress(OSError, LoadError), _NatsConnection() as nats:
                while burst is not None or not self._is_over.is_set():
                    if burst is None:
                        class_id = next(class_ids)
                        burst = class_id, self.found.sent.next_payloads(class_id, PUBLISHER, BURST)
                    nats.store(f"{SUBJECT}.{burst[0]}", burst[1])
                    burst = None
                    time.sleep(PAUSE_S / len(CLASSES))
            time.sleep(0.1)

    def _on_message(self, subject: str, payload: bytes) -> None:
        record = self.found.records[int(subject.rpartition(".")[2])]
        record.record_delivery(payload, 0, time.monotonic())

    def _listen(self) -> None:
        """Receive messages published from now on."""
        with _NatsConnection() as nats:
            nats.send_line(f"SUB {SUBJECT}.* 2\r\n")
            for subject, payload in nats.messages(lambda: self._is_finished()):
                self._on_message(subject, payload)

    def _read_stream(self) -> None:
        """Read the stream, and continue at the same sequence after a kill."""
        sequence = 1
        while not self._is_finished():
            with suppress(OSError, LoadError), _NatsConnection() as nats:
                inbox = f"_INBOX.read.{time.monotonic_ns()}"
                nats.send_line(f"SUB {inbox} 2\r\n")
                config = {
                    "deliver_subject": inbox,
                    "deliver_policy": "by_start_sequence",
                    "opt_start_seq": sequence,
                    "ack_policy": "none",
                }
                nats.request(f"CONSUMER.CREATE.{STREAM}", {"stream_name": STREAM, "config": config})
                for subject, payload in nats.messages(self._is_finished):
                    self._on_message(subject, payload)
                    sequence += 1
            time.sleep(0.1)


class _NatsConnection:
    """Minimal connection to the nats-server of this network."""

    def __init__(self) -> None:
        self._socket = socket.create_connection((LOOPBACK, 4222), timeout=0.2)
        self._unread = b""
        self.send_line(
            'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\nSUB _SETUP 1\r\n'
        )

    def __enter__(self) -> _NatsConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send_line(self, text: str) -> None:
        self._socket.sendall(text.encode())

    def request(self, subject: str, body: dict[str, object]) -> None:
        """Send a JetStream request. Raises LoadError if it is refused."""
        content = json.dumps(body)
        self.send_line(f"PUB $JS.API.{subject} _SETUP {len(content)}\r\n{content}\r\n")
        deadline = time.monotonic() + START_S
        for _, payload in self.messages(lambda: time.monotonic() > deadline, sid="1"):
            if "error" in json.loads(payload):
                raise LoadError(f"JetStream refused {subject}: {payload!r}")
            return
        raise LoadError(f"JetStream did not answer {subject}")

    def store(self, subject: str, payloads: list[bytes]) -> None:
        """Publish messages with ids, and wait for their PubAcks.

        Raises LoadError if a PubAck is missing, OSError at the end of the connection.
        """
        inbox = f"_STORED.{time.monotonic_ns()}"
        self.send_line(f"SUB {inbox} 3\r\nUNSUB 3 {len(payloads)}\r\n")
        for payload in payloads:
            block = f"NATS/1.0\r\nNats-Msg-Id: {subject} {payload.decode()}\r\n\r\n"
            size = len(block) + len(payload)
            self.send_line(
                f"HPUB {subject} {inbox} {len(block)} {size}\r\n{block}{payload.decode()}\r\n"
            )
        deadline, missing_count = time.monotonic() + START_S, len(payloads)
        for _, answer in self.messages(lambda: time.monotonic() > deadline, sid="3"):
            if "error" in json.loads(answer):
                raise LoadError(f"JetStream refused a message: {answer!r}")
            missing_count -= 1
            if not missing_count:
                return
        raise LoadError(f"{missing_count} PubAcks did not come")

    def messages(
        self, is_over: Callable[[], bool], *, sid: str = "2"
    ) -> Iterator[tuple[str, bytes]]:
        """Yield subjects and payloads. Raises OSError at the end of the connection."""
        while not is_over():
            line = self._read_line(is_over)
            words = line.decode().split()
            if words and words[0] in ("MSG", "HMSG"):
                size = int(words[-1])
                head = int(words[-2]) if words[0] == "HMSG" else 0
                content = self._read_bytes(size + 2)
                if words[2] == sid:
                    subject = words[1]
                    yield subject, content[head:size]
            elif words and words[0] == "PING":
                self.send_line("PONG\r\n")
            elif words and words[0] == "-ERR":
                raise LoadError(f"nats-server sent {line!r}")

    def _read_line(self, is_over: Callable[[], bool]) -> bytes:
        while b"\r\n" not in self._unread:
            if is_over():
                return b""
            self._fill()
        line, _, self._unread = self._unread.partition(b"\r\n")
        return line

    def _read_bytes(self, count: int) -> bytes:
        while len(self._unread) < count:
            self._fill()
        found, self._unread = self._unread[:count], self._unread[count:]
        return found

    def _fill(self) -> None:
        with suppress(TimeoutError):
            data = self._socket.recv(65_536)
            if not data:
                raise ConnectionError("nats-server closed the connection")
            self._unread += data
