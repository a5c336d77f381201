"""Rates of Python programs with simplebus, against programs with nats-py.

    python load/run.py sdk

Publisher and subscriber are processes. Every message is verified, acked, and confirmed to its
publisher before the clock stops. Each round measures everything once, with as many messages as last
for MEASURE_S at the previous rate. The first round is not reported.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from load.brokers import REPOSITORY, RunningBroker, is_available, running
from load.generators import Generator, program
from load.jetstream import stream
from load.measure import RunOptions, probe_nothing_in_flight
from load.processes import LoadError, Process
from load.report import Row, Target
from load.sdk_job import CLASS, TYPED_CLASS, Job

MEASURE_S = 1.0
QUICK_PART = 0.3
COUNT_MIN, COUNT_MAX = 500, 4_000_000
ROUNDS_MAX = 3  # Most of the time is spent on the start of programs.
TIMEOUT_S = 60
SIZES = (16, 1024)
BACKENDS = ("trio", "asyncio")
JET_SUBJECT = "load.js.1"


class SdkEnvironment:
    """Brokers and payloads of a run."""

    def __init__(self, brokers: dict[str, RunningBroker], blocks: dict[int, Path]) -> None:
        self.brokers = brokers
        self.blocks = blocks

    def job(self, kind: str, role: str, count: int, size_bytes: int, backend: str = "trio") -> Job:
        port, block = self.brokers[kind].port, str(self.blocks[size_bytes])
        return Job(role, port, count, backend, size_bytes, block)


class Program(Process):
    """Python program under test."""

    def __init__(self, module: str, job: Job) -> None:
        name = f"{module}, {job.role} under {job.backend}"
        command = [sys.executable, "-m", f"load.{module}", job.argument()]
        super().__init__(name, command, directory=REPOSITORY)

    def wait_ready(self) -> None:
        self.wait_for_line("ready", timeout_s=TIMEOUT_S)

    def result(self) -> dict[str, float]:
        found: dict[str, float] = json.loads(self.finish(timeout_s=TIMEOUT_S).splitlines()[-1])
        return found


Side = Program | Generator


def _rate(count: int, subscriber: Side, publish: Callable[[], Side]) -> float:
    """Return messages per second, from the first published to all confirmed and acked."""
    with subscriber:
        subscriber.wait_ready()
        with publish() as publisher:
            sent, received = publisher.result(), subscriber.result()
    return float(count / (max(received["settled"], sent["confirmed"]) - sent["started"]))


@dataclass(frozen=True)
class Measure:
    """Rate measured in every round by `measure(environment, count)`."""

    name: str
    measure: Callable[[SdkEnvironment, int], float]
    first_count: int
    kind: str = "simplebus"

    def next_count(self, rate: float, seconds: float) -> int:
        """Return the count of the next round."""
        return max(COUNT_MIN, min(int(rate * seconds), COUNT_MAX))


# simplebus ---------------------------------------------------------------------------------------


def _flow(
    receive: str,
    publish: str,
    *,
    size_bytes: int = 16,
    backend: str = "trio",
    class_id: int = CLASS,
) -> Callable[[SdkEnvironment, int], float]:
    """Measure Python to Python."""

    def measure(environment: SdkEnvironment, count: int) -> float:
        jobs = [
            environment.job("simplebus", r, count, size_bytes, backend) for r in (receive, publish)
        ]
        subscriber = Program("sdk_worker", jobs[0])
        rate = _rate(count, subscriber, lambda: Program("sdk_worker", jobs[1]))
        probe_nothing_in_flight(environment.brokers["simplebus"], (class_id,))
        return rate

    return measure


def _from_generator(receive: str) -> Callable[[SdkEnvironment, int], float]:
    """Measure a Python subscriber; the load generator publishes."""

    def measure(environment: SdkEnvironment, count: int) -> float:
        job = environment.job("simplebus", receive, count, 16)
        rate = _rate(
            count,
            Program("sdk_worker", job),
            lambda: _generator("publish", "simplebus-2", job.port, count),
        )
        probe_nothing_in_flight(environment.brokers["simplebus"], (CLASS,))
        return rate

    return measure


def _to_generator(publish: str) -> Callable[[SdkEnvironment, int], float]:
    """Measure a Python publisher; the load generator subscribes."""

    def measure(environment: SdkEnvironment, count: int) -> float:
        job = environment.job("simplebus", publish, count, 16)
        subscriber = _generator("subscribe", "simplebus-2", job.port, count)
        return _rate(count, subscriber, lambda: Program("sdk_worker", job))

    return measure


def _generator(mode: str, protocol: str, port: int, count: int, **options: object) -> Generator:
    options = {"count": count, "size": 16, "classes": CLASS, **options}
    return Generator(mode, protocol, port, timeout_s=TIMEOUT_S, **options)


# nats-py -----------------------------------------------------------------------------------------


def _core(size_bytes: int) -> Callable[[SdkEnvironment, int], float]:
    def measure(environment: SdkEnvironment, count: int) -> float:
        jobs = [environment.job("nats", role, count, size_bytes) for role in ("receive", "publish")]
        subscriber = Program("sdk_peer", jobs[0])
        return _rate(count, subscriber, lambda: Program("sdk_peer", jobs[1]))

    return measure


def _jet(size_bytes: int) -> Callable[[SdkEnvironment, int], float]:
    def measure(environment: SdkEnvironment, count: int) -> float:
        roles = ("jet_receive", "jet_publish")
        jobs = [environment.job("nats", role, count, size_bytes) for role in roles]
        with stream(environment.brokers["nats"], subjects=[JET_SUBJECT]):
            subscriber = Program("sdk_peer", jobs[0])
            return _rate(count, subscriber, lambda: Program("sdk_peer", jobs[1]))

    return measure


# Targets ------------------------------------------------------------------------------------------

PUBLISHES, PUBLISHES_STRUCTS = "a loop that publishes", "a loop that publishes structs"
RECEIVES, RECEIVES_STRUCTS = "a loop that receives", "a loop that receives structs"
BATCHES = "a loop over batches"


def measures() -> Iterator[Measure]:
    for size in SIZES:
        for backend in BACKENDS:
            measure = _flow("receive", "publish", size_bytes=size, backend=backend)
            yield Measure(f"{size} B, {backend}", measure, 100_000)
        yield Measure(f"{size} B, nats-py", _core(size), 20_000, kind="nats")
        yield Measure(f"{size} B, nats-py JetStream", _jet(size), 5_000, kind="nats")
    yield Measure(PUBLISHES, _to_generator("publish"), 100_000)
    yield Measure(RECEIVES, _from_generator("receive"), 100_000)
    yield Measure(BATCHES, _from_generator("receive_batches"), 500_000)
    for name, receive, publish in (
        (PUBLISHES_STRUCTS, "receive_encoded", "publish_typed"),
        (RECEIVES_STRUCTS, "receive_typed", "publish_encoded"),
    ):
        yield Measure(name, _flow(receive, publish, class_id=TYPED_CLASS), 50_000)


def _targets() -> Iterator[Target]:
    for size in SIZES:
        for backend in BACKENDS:
            of = f"{size} B, {backend}"
            yield Target(f"{of}, against nats-py", of, f"{size} B, nats-py", 4, 8)
            jet = f"{size} B, nats-py JetStream"
            yield Target(f"{of}, against nats-py JetStream", of, jet, 30, None)
    for of, at_least, reach in (
        (PUBLISHES, 0.5e6, 1e6),
        (RECEIVES, 0.5e6, 1e6),
        (BATCHES, 3e6, None),
        (PUBLISHES_STRUCTS, 0.3e6, None),
        (RECEIVES_STRUCTS, 0.3e6, None),
    ):
        yield Target(of, of, None, at_least, reach, unit="msgs/s")


# Running -----------------------------------------------------------------------------------------


@dataclass
class _MeasureState:
    """Results of one measure so far."""

    measure: Measure
    count: int
    values: list[float] = field(default_factory=list)


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario: every quantity, then the targets."""
    has_peer = is_peer_available()
    chosen = [measure for measure in measures() if has_peer or measure.kind == "simplebus"]
    seconds = MEASURE_S * (QUICK_PART if run_options.quick else 1)
    states = {each.name: _MeasureState(each, each.first_count) for each in chosen}
    with open_environment(run_options, has_peer=has_peer) as environment:
        for turn in range(1 + min(run_options.rounds, ROUNDS_MAX)):
            for state in states.values():
                value = _value(state, environment)
                state.count = state.measure.next_count(value, seconds)
                if turn > 0:
                    state.values.append(value)
    target_rows = [
        Row(
            "sdk",
            target.title,
            _ratios(states, target),
            target.unit,
            target.at_least,
            target.reach,
            target.less_is_better,
        )
        for target in _targets()
        if target.of in states and (target.against is None or target.against in states)
    ]
    named = {row.title for row in target_rows}
    note = "" if has_peer else "nats-py and nats-server are needed to compare"
    plain = [
        Row("sdk", name, state.values, "msgs/s", note=note)
        for name, state in states.items()
        if name not in named
    ]
    return plain + target_rows


def _value(state: _MeasureState, environment: SdkEnvironment) -> float:
    try:
        return state.measure.measure(environment, state.count)
    except LoadError as error:
        raise LoadError(f"{state.measure.name}: {error}") from error


def _ratios(states: dict[str, _MeasureState], target: Target) -> list[float]:
    values = states[target.of].values
    if target.against is None:
        return values
    return [a / b for a, b in zip(values, states[target.against].values, strict=True)]


def is_peer_available() -> bool:
    """Return True if nats-py and nats-server are installed."""
    return is_available("nats") and importlib.util.find_spec("nats") is not None


@contextmanager
def open_environment(run_options: RunOptions, *, has_peer: bool) -> Iterator[SdkEnvironment]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        blocks = {size: directory / f"{size}.block" for size in SIZES}
        for size, path in blocks.items():
            write_payloads(path, size)
        args: dict[str, tuple[str, ...]] = {"simplebus": run_options.server_args}
        if has_peer:
            args["nats"] = ()
        brokers = {
            kind: stack.enter_context(running(kind, server_args=more))
            for kind, more in args.items()
        }
        yield SdkEnvironment(brokers, blocks)


def write_payloads(path: Path, size_bytes: int) -> None:
    """Write the generator's payloads, which both sides need."""
    command = [str(program()), "block", "simplebus", "--size", str(size_bytes)]
    path.write_bytes(subprocess.run(command, capture_output=True, check=True, timeout=10).stdout)
