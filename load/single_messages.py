"""Python programs that handle one message at a time: requests, confirms and one-way latency.

    python load/run.py requests confirmed one-way

Each client is a process, written as a user would write it (sdk_worker.py, sdk_peer.py). The
programs verify the payloads of replies and the numbers of one-way messages. Confirmed messages are
stored without a subscriber; afterwards the load generator receives and verifies them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from load.brokers import RunningBroker
from load.generators import Generator
from load.jetstream import DELIVER, stream
from load.measure import TIMEOUT_S, Sample, probe_nothing_in_flight
from load.sdk import JET_SUBJECT, Program, write_payloads
from load.sdk_job import CLASS, Job
from load.traces import Tracer

SIZE_BYTES = 16
FIRST_COUNT = 500
NATS_PY = "nats-py"  # A client, named in place of a protocol; others are asyncio, trio, blocking.


@dataclass(frozen=True)
class Requests:
    """Requests of one program that another program answers, one in flight."""

    @property
    def first_count(self) -> int:
        return FIRST_COUNT

    def measure(
        self, broker: RunningBroker, protocol: str, *, count: int, tracer: Tracer | None
    ) -> Sample:
        with (
            _payload_file() as block,
            _program(protocol, Job("answer", broker.port, count)) as responder,
        ):
            responder.wait_ready()
            cpu_before = broker.process.cpu_s()
            job = Job("ask", broker.port, count, size_bytes=SIZE_BYTES, block=block)
            with _program(protocol, job) as requester:
                found = requester.result()
            cpu_s = broker.process.cpu_s() - cpu_before
        return _latency_sample(broker, found, count, count * found["p50_us"] * 1e-6, cpu_s)


@dataclass(frozen=True)
class OneWay:
    """Messages of one program to another at an even pace, timed by the clock that they share."""

    pace: int
    """Messages per second."""

    @property
    def first_count(self) -> int:
        return FIRST_COUNT

    def measure(
        self, broker: RunningBroker, protocol: str, *, count: int, tracer: Tracer | None
    ) -> Sample:
        with _program(protocol, Job("receive_paced", broker.port, count)) as subscriber:
            subscriber.wait_ready()
            cpu_before = broker.process.cpu_s()
            job = Job("publish_paced", broker.port, count, pace=self.pace)
            with _program(protocol, job) as publisher:
                sent, found = publisher.result(), subscriber.result()
            cpu_s = broker.process.cpu_s() - cpu_before
        seconds = max(sent["confirmed"], found["settled"]) - sent["started"]
        return _latency_sample(broker, found, count, seconds, cpu_s)


@dataclass(frozen=True)
class Confirms:
    """Messages that each wait for their confirm, from a number of tasks of one program."""

    in_flight: int = 1
    storage: str = "memory"
    """JetStream: storage of its stream, "memory" or "file"."""

    @property
    def first_count(self) -> int:
        return FIRST_COUNT

    def measure(
        self, broker: RunningBroker, protocol: str, *, count: int, tracer: Tracer | None
    ) -> Sample:
        with self._prepared(broker, protocol), _payload_file() as block:
            cpu_before = broker.process.cpu_s()
            job = Job(
                self._role(protocol),
                broker.port,
                count,
                size_bytes=SIZE_BYTES,
                block=block,
                in_flight=self.in_flight,
            )
            with _program(protocol, job) as publisher:
                sent = publisher.result()
            cpu_s = broker.process.cpu_s() - cpu_before
            _verify_stored(broker, protocol, count)
        seconds = sent["confirmed"] - sent["started"]
        return Sample(
            count,
            seconds,
            count / seconds,
            cpu_us=cpu_s / count * 1e6,
            peak_bytes=broker.process.peak_memory_bytes(),
        )

    def _prepared(self, broker: RunningBroker, protocol: str) -> AbstractContextManager[None]:
        if protocol != NATS_PY:
            return nullcontext()
        return stream(broker, subjects=[JET_SUBJECT], ack_all=True, storage=self.storage)

    def _role(self, protocol: str) -> str:
        role = "publish_each" if self.in_flight == 1 else "publish_in_flight"
        return {NATS_PY: f"jet_{role}", "blocking": f"{role}_blocking"}.get(protocol, role)


@contextmanager
def _payload_file() -> Iterator[str]:
    with tempfile.NamedTemporaryFile(prefix="simplebus-load-") as file:
        write_payloads(Path(file.name), SIZE_BYTES)
        yield file.name


def _program(protocol: str, job: Job) -> Program:
    if protocol == NATS_PY:
        return Program("sdk_peer", replace(job, backend="asyncio"))
    return Program("sdk_worker", replace(job, backend=protocol))


def _latency_sample(
    broker: RunningBroker, found: dict[str, float], count: int, seconds: float, cpu_s: float
) -> Sample:
    return Sample(
        count,
        seconds,
        count / seconds,
        cpu_us=cpu_s / count * 1e6,
        peak_bytes=broker.process.peak_memory_bytes(),
        p50_us=found["p50_us"],
        p99_us=found["p99_us"],
        max_us=found["max_us"],
    )


def _verify_stored(broker: RunningBroker, protocol: str, count: int) -> None:
    """Receive the confirmed messages. Raises LoadError unless each is there once, in order."""
    options: dict[str, object] = {"count": count, "size": SIZE_BYTES, "classes": CLASS}
    generator_protocol = "simplebus-2"
    if protocol == NATS_PY:
        generator_protocol = "nats-jetstream"
        options |= {"deliver": DELIVER, "ack_every": 500}
    with Generator(
        "subscribe", generator_protocol, broker.port, timeout_s=TIMEOUT_S, **options
    ) as subscriber:
        subscriber.result()
    if protocol != NATS_PY:
        probe_nothing_in_flight(broker, (CLASS,))
