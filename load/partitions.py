"""Bridges over a bad line that is cut now and then, and with either end and themselves killed: is
all that was confirmed at the near end there at the far one, once, and in its order?

Rule 1: both servers and the bridge are real processes in networks of their own; between these are
packets that come late, are lost and are overtaken, and nobody is told of a cut.
Rule 2: a publisher at the near bus goes on all the time. What ends well is told with how long it
took: from the moment of mending until what was published then has come.
Rule 3: what a far end may have twice or lose is counted, and never more than is promised.
Rule 4: the line is bad behind the bridge, and then in front of it: what a bridge says to either end
is late and lost. A round takes about a minute for each kind, eight minutes for all; no wait is
longer than QUIET_S.

    publisher ─► near bus ─► bridge ═══ line ═══► far bus, or NATS ─► reader
    publisher ─► near bus, or JetStream ═══ line ═══► bridge ─► far bus, or NATS ─► reader
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
from load.accounts import Seen, Sent
from load.brokers import REPOSITORY, SERVE, START_S, closed_doors, find_program
from load.clients import quick_clients
from load.line import FAR, NEAR, Line, Network, missing
from load.measure import Manner
from load.processes import LoadError, Process
from load.report import Row

CLASSES = (1, 2)
PUBLISHER = "ann"
BURST = 10
PAUSE_S = 0.02
HEARTBEAT_S = 2.0
LONG_S, SHORT_S = 8.0, 1.0  # Cuts: longer than three heartbeats, and one that nobody notices.
BAD_S = 2.0  # How long the line is bad and whole before something happens.
DELAY_S, JITTER_S, LOSS = (
    0.025,
    0.01,
    0.05,
)  # Of each packet, one way: at least 50 ms there and back.
QUIET_S = 120.0  # Within which all has to be through.
STILL_S = 3.0  # What comes twice comes within.
HERE = "127.0.0.1"
STREAM = "PARTITIONS"
SUBJECT = "load"


@dataclass(frozen=True)
class Kind:
    """What is at the ends, where the line is, and what happens."""

    name: str
    near: str = "simplebus"
    far: str = "simplebus"
    """The programs."""
    stream: str = ""
    is_first: bool = False
    """Whether the line comes in front of the bridge, which is beside the far end then."""
    may_repeat: bool = False
    """Whether what was under way may come twice."""
    events: tuple[str, ...] = ("cut", "long cut", "kill bridge", "kill far", "kill near")

    @property
    def title(self) -> str:
        return f"{self.name}, the line {'in front of' if self.is_first else 'behind'} the bridge"


WAYS = (
    Kind("bus to bus"),
    Kind("bus to JetStream", far="nats-server", stream=STREAM),
    Kind(
        "bus to NATS core",
        far="nats-server",
        may_repeat=True,
        events=("cut", "long cut", "kill bridge", "kill near"),  # It keeps nothing through a kill.
    ),
    Kind("JetStream to bus", near="nats-server", stream=STREAM),
)
KINDS = tuple(replace(way, is_first=is_first) for way in WAYS for is_first in (False, True))


@dataclass
class Found:
    """What became of one run."""

    sent: Sent = field(default_factory=Sent)
    seen: dict[int, Seen] = field(default_factory=lambda: {each: Seen(each) for each in CLASSES})
    recovered_s: dict[str, list[float]] = field(default_factory=dict)
    """By what happened."""
    packets_lost: int = 0
    stored_again: int = 0
    """Messages that are at the far end more than once."""
    repeated: int = 0
    """The same where that may be."""

    @property
    def lost(self) -> int:
        return sum(len(seen.missing(self.sent)) for seen in self.seen.values())

    @property
    def disordered(self) -> int:
        return sum(seen.disordered for seen in self.seen.values())

    def faults(self) -> list[str]:
        """What must not be, a few words each."""
        counts = {
            "lost": self.lost,
            "stored twice": self.stored_again,
            "out of order": self.disordered,
        }
        return [f"{count} {what}" for what, count in counts.items() if count]


def run(manner: Manner) -> list[Row]:
    """The rows of the scenario. Raises LoadError when something was lost."""
    if lack := missing():
        raise LoadError(f"partitions need {lack}")
    rows, faults = [], []
    for kind in KINDS:
        if "nats-server" in (kind.near, kind.far) and find_program("nats-server") is None:
            continue
        found = lives(kind, 1 if manner.quick else manner.rounds, manner.seed)
        rows += _rows(kind, found)
        faults += [f"{kind.title}: {each}" for each in found.faults()]
    if faults:
        raise LoadError("; ".join(faults))
    return rows


def _rows(kind: Kind, found: Found) -> list[Row]:
    def row(title: str, values: list[float], unit: str = "", wish: float | None = None) -> Row:
        title = f"{kind.title}: {title}"
        return Row("partitions", title, values, unit, wish, None, less_is_better=True)

    counts = [
        row("messages confirmed", [found.sent.total]),
        row("of these lost", [found.lost], wish=0),
        row("there twice", [found.stored_again], wish=0),
        row("out of order", [found.disordered], wish=0),
    ]
    if kind.may_repeat:
        counts[2] = row("there twice, as may be", [found.repeated])
    return counts + [
        row(f"through again after a {what.replace('kill', 'kill of the')}", took, "s")
        for what, took in found.recovered_s.items()
    ]


def lives(kind: Kind, rounds: int, seed: int = 0) -> Found:
    """So many times everything that happens to a bridge."""
    with (
        quick_clients(),
        _networks() as (near, far),
        Line(near, far, seed=seed) as line,
        tempfile.TemporaryDirectory(prefix="simplebus-partitions-") as directory,
    ):
        with ExitStack() as stack:
            run = _Run(kind, near, far, line, Path(directory), stack)
            run.through(rounds)
        run.found.packets_lost = line.lost
        return run.found


def _address(program: str, host: str) -> str:
    return f"nats://{host}:4222" if program == "nats-server" else f"{host}:8888"


@contextmanager
def _networks() -> Iterator[tuple[Network, Network]]:
    with ExitStack() as stack:
        found = []
        for mine, other in ((NEAR, FAR), (FAR, NEAR)):
            found.append(Network(mine, other))
            stack.callback(found[-1].close)
        yield found[0], found[1]


class _Program:
    """One that is killed, and started again as it was."""

    def __init__(self, network: Network, command: list[str], ready: str) -> None:
        self._command, self._ready = network.command(command), ready
        self._process: Process | None = None

    def start(self) -> None:
        self._process = Process(self._command[2], self._command, directory=REPOSITORY)
        self._process.wait_for_line(self._ready, timeout_s=START_S)

    def kill(self) -> None:
        assert self._process is not None
        if "Traceback" in self._process.errors():
            raise LoadError(f"it failed: {self.last_words()}")
        self._process.kill()
        self._process.stop()

    def last_words(self) -> str:
        assert self._process is not None
        return self._process.last_words()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


class _Run:
    """Everybody who is at work."""

    def __init__(
        self,
        kind: Kind,
        near: Network,
        far: Network,
        line: Line,
        directory: Path,
        stack: ExitStack,
    ) -> None:
        self.found = Found()
        self._kind, self._near, self._far, self._line = kind, near, far, line
        self._chance = Random(kind.name)
        self._mended_at = 0.0
        self._is_over = threading.Event()
        self._errors: list[BaseException] = []
        self._programs = {
            "near": self._end(kind.near, near, directory / "near"),
            "far": self._end(kind.far, far, directory / "far"),
            "bridge": self._bridge(directory / "bridge.toml"),
        }
        for program in self._programs.values():
            stack.callback(program.stop)
        stack.callback(self._is_over.set)

    @staticmethod
    def _end(program: str, network: Network, directory: Path) -> _Program:
        if program == "nats-server":
            command = [str(find_program(program)), "-js", "-sd", str(directory)]
            return _Program(network, command, "Server is ready")
        hosts = ("--host", HERE, "--host", network.address)
        quiet = ("--data-dir", str(directory), "--log-level", "error")
        return _Program(network, [*SERVE, *hosts, *closed_doors(), *quiet], "simplebus ready")

    def _bridge(self, file: Path) -> _Program:
        kind = self._kind
        network = self._far if kind.is_first else self._near
        near = _address(kind.near, NEAR if kind.is_first else HERE)
        far = _address(kind.far, HERE if kind.is_first else FAR)
        said = [f'[[bridges]]\nname = "b"\nfrom = "{near}"\nto = "{far}"']
        said.append(f"heartbeat = {HEARTBEAT_S}")
        for class_id in CLASSES:
            said.append(f"[[bridges.copy]]\nclass = {class_id}")
            if kind.near == "nats-server":
                said.append(f'channels = ["{SUBJECT}.{class_id}"]\nstart = "earliest"')
            if kind.far == "nats-server":
                said.append(f'rewrite = [["#", "{SUBJECT}.{class_id}"]]')
            if kind.stream:
                said.append(f'stream = "{kind.stream}"')
        file.write_text("\n".join(said) + "\n")
        command = [sys.executable, "-m", "simplebus", "bridge", str(file), "--log-level", "info"]
        return _Program(network, command, "copying from sequence")

    # What happens --------------------------------------------------------------------------------

    def through(self, rounds: int) -> None:
        """Raises LoadError where somebody fails, or something does not come."""
        for name in ("near", "far"):
            self._programs[name].start()
        is_near = self._kind.near == "nats-server"
        if self._kind.stream:
            self._in(self._near if is_near else self._far, self._make_stream)
        publish = self._publish_stream if is_near else self._publish
        threads = [self._work(self._near, publish), self._work(self._far, self._reader())]
        self._programs["bridge"].start()
        line = self._line
        line.delay_s, line.jitter_s, line.loss = DELAY_S, JITTER_S, LOSS
        for _ in range(rounds):
            for what in self._kind.events:
                time.sleep(BAD_S)
                self._happen(what)
                took = self._recovered(what)
                self.found.recovered_s.setdefault(what, []).append(took)
        self._is_over.set()
        threads[0].join(QUIET_S)
        self._await(lambda: not self.found.lost, "the end")
        time.sleep(STILL_S)
        threads[1].join(QUIET_S)
        self._settle()

    def _happen(self, what: str) -> None:
        """Let it happen, and mend it."""
        if "cut" in what:
            self._line.is_cut = True
            time.sleep(LONG_S if "long" in what else SHORT_S)
            self._line.is_cut = False
            self._mended_at = time.monotonic()
            return
        program = self._programs[what.removeprefix("kill ")]
        time.sleep(self._chance.uniform(0, PAUSE_S))
        program.kill()
        self._mended_at = time.monotonic()
        program.start()

    def _recovered(self, what: str) -> float:
        """Seconds since it was mended until what is published now has come."""
        counts = {each: self.found.sent.counts[each, PUBLISHER] for each in CLASSES}

        def has_come() -> bool:
            seen = self.found.seen
            return all(seen[each].holds(PUBLISHER, number) for each, number in counts.items())

        self._await(has_come, what)
        return time.monotonic() - self._mended_at

    def _await(self, is_true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + QUIET_S
        while not is_true():
            if self._errors:
                raise LoadError(f"{self._kind.title}, {what}: {self._errors[0]!r}")
            if time.monotonic() > deadline:
                bridge = self._programs["bridge"].last_words()
                raise LoadError(
                    f"{self._kind.title}: after {what}, {self.found.lost} messages have not come "
                    f"within {QUIET_S:g} s; the bridge says: {bridge}"
                )
            time.sleep(0.02)

    def _settle(self) -> None:
        found = self.found
        for seen in found.seen.values():
            again = seen.again
            if self._kind.far == "simplebus":  # A reader may get it again; the bus has it once.
                again = max(0, seen.head - found.sent.counts[seen.class_id, PUBLISHER])
            if self._kind.may_repeat:
                found.repeated += again
            else:
                found.stored_again += again

    # At work -------------------------------------------------------------------------------------

    def _work(self, network: Network, work: Callable[[], object]) -> threading.Thread:
        """A thread in that network; what it fails of is told."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._errors.append(error)

        return network.thread(run)

    @staticmethod
    def _in(network: Network, work: Callable[[], object]) -> None:
        network.thread(work).join(START_S)

    def _publish(self) -> None:
        trio.run(self._publish_on)

    async def _publish_on(self) -> None:
        sent = self.found.sent
        async with simplebus.connect(f"{HERE}:8888", name=PUBLISHER, reconnect=QUIET_S) as bus:
            while not self._is_over.is_set():
                for class_id in CLASSES:
                    payloads = sent.more(class_id, PUBLISHER, BURST)
                    await bus.publish_many(payloads, class_id=class_id)
                await trio.sleep(PAUSE_S)

    def _is_through(self) -> bool:
        return self._is_over.is_set() and not self.found.lost

    def _reader(self) -> Callable[[], object]:
        if self._kind.far == "simplebus":
            return lambda: trio.run(self._read_all)
        return self._read_stream if self._kind.stream else self._listen

    async def _read_all(self) -> None:
        async with trio.open_nursery() as nursery:
            for seen in self.found.seen.values():
                nursery.start_soon(self._read, seen)
            while not self._is_through():  # noqa: ASYNC110 - nobody tells.
                await trio.sleep(0.1)
            await trio.sleep(STILL_S / 2)
            nursery.cancel_scope.cancel()

    async def _read(self, seen: Seen) -> None:
        async with (
            simplebus.connect(f"{HERE}:8888", reconnect=QUIET_S) as bus,
            bus.subscribe(seen.class_id, durable="reader", start="earliest") as messages,
        ):
            async for message in messages:
                seen.take(message.payload, message.sequence, time.monotonic())

    # NATS ----------------------------------------------------------------------------------------

    @staticmethod
    def _make_stream() -> None:
        with _Nats() as nats:
            nats.ask(f"STREAM.CREATE.{STREAM}", {"name": STREAM, "subjects": [f"{SUBJECT}.*"]})

    def _publish_stream(self) -> None:
        """Into the stream itself: a burst again, under the same ids, until it has all of it."""
        burst: tuple[int, list[bytes]] | None = None
        class_ids = cycle(CLASSES)
        while burst is not None or not self._is_over.is_set():
            with suppress(OSError, LoadError), _Nats() as nats:
                while burst is not None or not self._is_over.is_set():
                    if burst is None:
                        class_id = next(class_ids)
                        burst = class_id, self.found.sent.more(class_id, PUBLISHER, BURST)
                    nats.store(f"{SUBJECT}.{burst[0]}", burst[1])
                    burst = None
                    time.sleep(PAUSE_S / len(CLASSES))
            time.sleep(0.1)

    def _take(self, subject: str, payload: bytes) -> None:
        seen = self.found.seen[int(subject.rpartition(".")[2])]
        seen.take(payload, 0, time.monotonic())

    def _listen(self) -> None:
        """What is published, from now on."""
        with _Nats() as nats:
            nats.say(f"SUB {SUBJECT}.* 2\r\n")
            for subject, payload in nats.messages(lambda: self._is_through()):
                self._take(subject, payload)

    def _read_stream(self) -> None:
        """What the stream has, again from where it was when the server was killed."""
        at = 1
        while not self._is_through():
            with suppress(OSError, LoadError), _Nats() as nats:
                inbox = f"_INBOX.read.{time.monotonic_ns()}"
                nats.say(f"SUB {inbox} 2\r\n")
                config = {
                    "deliver_subject": inbox,
                    "deliver_policy": "by_start_sequence",
                    "opt_start_seq": at,
                    "ack_policy": "none",
                }
                nats.ask(f"CONSUMER.CREATE.{STREAM}", {"stream_name": STREAM, "config": config})
                for subject, payload in nats.messages(self._is_through):
                    self._take(subject, payload)
                    at += 1
            time.sleep(0.1)


class _Nats:
    """A connection to the server of this network that does what little is wanted here."""

    def __init__(self) -> None:
        self._socket = socket.create_connection((HERE, 4222), timeout=0.2)
        self._unread = b""
        self.say('CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\nSUB _SETUP 1\r\n')

    def __enter__(self) -> _Nats:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def say(self, text: str) -> None:
        self._socket.sendall(text.encode())

    def ask(self, subject: str, body: dict[str, object]) -> None:
        """A request of JetStream's. Raises LoadError where it is refused."""
        content = json.dumps(body)
        self.say(f"PUB $JS.API.{subject} _SETUP {len(content)}\r\n{content}\r\n")
        deadline = time.monotonic() + START_S
        for _, payload in self.messages(lambda: time.monotonic() > deadline, which="1"):
            if "error" in json.loads(payload):
                raise LoadError(f"JetStream refused {subject}: {payload!r}")
            return
        raise LoadError(f"JetStream has not answered {subject}")

    def store(self, subject: str, payloads: list[bytes]) -> None:
        """Publish these, each with an id of its own. Raises LoadError where no stream says in time
        that it has them all, OSError at the end of the connection."""
        inbox = f"_STORED.{time.monotonic_ns()}"
        self.say(f"SUB {inbox} 3\r\nUNSUB 3 {len(payloads)}\r\n")
        for payload in payloads:
            block = f"NATS/1.0\r\nNats-Msg-Id: {subject} {payload.decode()}\r\n\r\n"
            size = len(block) + len(payload)
            self.say(f"HPUB {subject} {inbox} {len(block)} {size}\r\n{block}{payload.decode()}\r\n")
        deadline, left = time.monotonic() + START_S, len(payloads)
        for _, said in self.messages(lambda: time.monotonic() > deadline, which="3"):
            if "error" in json.loads(said):
                raise LoadError(f"JetStream refused a message: {said!r}")
            left -= 1
            if not left:
                return
        raise LoadError(f"{left} PubAcks did not come")

    def messages(
        self, is_over: Callable[[], bool], *, which: str = "2"
    ) -> Iterator[tuple[str, bytes]]:
        """Subjects and payloads. Raises OSError at the end of the connection."""
        while not is_over():
            line = self._line(is_over)
            words = line.decode().split()
            if words and words[0] in ("MSG", "HMSG"):
                size = int(words[-1])
                head = int(words[-2]) if words[0] == "HMSG" else 0
                content = self._exactly(size + 2)
                if words[2] == which:
                    subject = words[1]
                    yield subject, content[head:size]
            elif words and words[0] == "PING":
                self.say("PONG\r\n")
            elif words and words[0] == "-ERR":
                raise LoadError(f"nats-server said {line!r}")

    def _line(self, is_over: Callable[[], bool]) -> bytes:
        while b"\r\n" not in self._unread:
            if is_over():
                return b""
            self._fill()
        line, _, self._unread = self._unread.partition(b"\r\n")
        return line

    def _exactly(self, count: int) -> bytes:
        while len(self._unread) < count:
            self._fill()
        found, self._unread = self._unread[:count], self._unread[count:]
        return found

    def _fill(self) -> None:
        with suppress(TimeoutError):
            data = self._socket.recv(65_536)
            if not data:
                raise ConnectionError("nats-server has closed the connection")
            self._unread += data
