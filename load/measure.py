"""Measurement of a flow of messages through one broker, or of round trips.

A rate is verified messages per second. The time starts at the publisher's first send. It ends when
the broker has received the last ack of the last subscriber and, if it confirms messages, has
confirmed the last one. Buffering therefore cannot improve a rate. After a simplebus flow, a probe
checks that no message is left in flight.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from load.brokers import RunningBroker
from load.generators import Generator
from load.jetstream import DELIVER, stream
from load.traces import Tracer

WARM_UP_S = 0.3
ECHO_CLASS = 60_000  # First of one class for each subscriber, to detect its subscription.
TIMEOUT_S = 60


class Work(Protocol):
    """Messages that a measurement sends through a broker."""

    @property
    def first_count(self) -> int:
        """Number of messages of the first measurement, whose rate sizes the next ones."""
        ...

    def measure(
        self, broker: RunningBroker, protocol: str, *, count: int, tracer: Tracer | None
    ) -> Sample:
        """Measure `count` messages. Raises LoadError if verification fails."""
        ...


@dataclass(frozen=True)
class Flow:
    """Messages from one publisher to subscribers that each get all of them."""

    size_bytes: int = 16
    mixed: bool = False
    angle: bool = False
    classes: tuple[int, ...] = (1,)
    subscribers: int = 1
    acks: str = "ranges"
    ack_every: int = 1
    channel: str = ""
    """Version 2: messages are envelopes with this channel."""
    binding: str = ""
    """Version 2: the subscribers' pattern of channels."""
    subjects: int = 0
    """NATS: number of random subjects; subscribers receive all of them. 0 for one subject."""
    pace: int = 0
    """Messages per second at an even pace; 0 for no limit."""
    name: str = ""
    """Version 2: publisher name; JetStream: prefix of the message ids."""
    storage: str = "memory"
    """JetStream: storage of its stream, "memory" or "file"."""
    retention: str = "limits"
    """JetStream: "interest" removes acknowledged messages; "limits" keeps all."""

    @property
    def first_count(self) -> int:
        return int(self.pace * WARM_UP_S) if self.pace else 100_000

    def measure(
        self, broker: RunningBroker, protocol: str, *, count: int, tracer: Tracer | None
    ) -> Sample:
        with _prepared(broker, protocol, self):
            sample = _flow(broker, protocol, self, count=count, tracer=tracer)
        if broker.kind in ("simplebus", "simplebus-os", "simplebus-disk") and self.acks != "none":
            probe_nothing_in_flight(broker, self.classes)
        return sample

    def shape(self) -> dict[str, object]:
        """Return the generator options that publisher and subscribers share."""
        options: dict[str, object] = {"classes": ",".join(map(str, self.classes))}
        if self.mixed:
            options["mixed"] = True
        else:
            options["size"] = self.size_bytes
        if self.angle:
            options["angle"] = True
        if self.name:
            options["name"] = self.name
        if self.channel:
            options["channel"] = self.channel
        if self.subjects:
            options["subjects"] = self.subjects
        return options


@dataclass(frozen=True)
class RunOptions:
    """Options of a run, from the command line."""

    rounds: int
    quick: bool = False
    server_args: tuple[str, ...] = ()
    seed: int = 0
    """Seed of random decisions; 0 for a random seed."""
    minutes: float = 0.0
    """Duration of a soak; 0 for its default."""
    only: str = ""
    """Part of the titles of the rows to measure; empty for all. For `holds`."""


@dataclass(frozen=True)
class RoundTrips:
    """One message in flight, published and received by one process."""

    size_bytes: int = 16

    @property
    def first_count(self) -> int:
        return 2_000

    def measure(
        self, broker: RunningBroker, protocol: str, *, count: int, tracer: Tracer | None
    ) -> Sample:
        return _round_trips(broker, protocol, self, count=count, tracer=tracer)


@dataclass(frozen=True)
class Sample:
    """Result of one measurement; 0.0 for quantities that were not measured."""

    messages: int
    seconds: float
    rate: float
    subscriber_rate: float = 0.0  # From the first byte received to the last message verified.
    cpu_us: float = 0.0  # Of the broker, per published message.
    peak_bytes: int = 0  # Of the broker, while it was measured.
    duplicates: int = 0
    messages_per_ack: float = 0.0
    p50_us: float = 0.0
    p99_us: float = 0.0
    max_us: float = 0.0


def measure(
    broker: RunningBroker,
    protocol: str,
    work: Work,
    *,
    count: int,
    tracer: Tracer | None = None,
) -> Sample:
    """Measure `count` messages, recorded by a `tracer`. Raises LoadError if verification fails."""
    broker.process.reset_peak_memory()
    return work.measure(broker, protocol, count=count, tracer=tracer)


def probe_nothing_in_flight(broker: RunningBroker, classes: tuple[int, ...]) -> None:
    named = ",".join(map(str, classes))
    with Generator("probe", "simplebus", broker.port, timeout_s=20, classes=named) as probe:
        probe.result()


def _prepared(broker: RunningBroker, protocol: str, flow: Flow) -> Any:
    if protocol != "nats-jetstream":
        return nullcontext()
    subjects = [f"load.js.{class_id}" for class_id in flow.classes]
    stream_options = {"storage": flow.storage, "retention": flow.retention}
    return stream(broker, subjects=subjects, ack_all=flow.ack_every > 1, **stream_options)


def _subscriber_options(protocol: str, flow: Flow, index: int) -> dict[str, object]:
    if protocol == "simplebus":
        return {"acks": flow.acks, "echo_class": ECHO_CLASS + index}
    if protocol == "simplebus-2":
        binding = {"binding": flow.binding} if flow.binding else {}
        return {"acks": flow.acks, **binding}
    if protocol == "nats-jetstream":
        return {"deliver": DELIVER, "ack_every": flow.ack_every}
    return {}


def _traced(tracer: Tracer | None, name: str, subscriber: str | None) -> dict[str, Any]:
    return tracer.option(name, subscriber=subscriber) if tracer else {}


def _flow(
    broker: RunningBroker, protocol: str, flow: Flow, *, count: int, tracer: Tracer | None
) -> Sample:
    common: dict[str, Any] = {"timeout_s": TIMEOUT_S, "count": count, **flow.shape()}
    with ExitStack() as stack:
        subscribers = []
        for index in range(flow.subscribers):
            name = str(index + 1)
            traced = _traced(tracer, f"subscriber {name}", name)
            options = {**common, **_subscriber_options(protocol, flow, index), **traced}
            generator = Generator("subscribe", protocol, broker.port, **options)
            subscribers.append(stack.enter_context(generator))
        for subscriber in subscribers:
            subscriber.wait_ready()
        cpu_before = broker.process.cpu_s()
        options = {**common, "pace": flow.pace, **_traced(tracer, "publisher", None)}
        publisher = stack.enter_context(Generator("publish", protocol, broker.port, **options))
        received = [subscriber.result() for subscriber in subscribers]
        sent = publisher.result()
        cpu_s = broker.process.cpu_s() - cpu_before
    settled = max(result["settled"] for result in received)
    seconds = max(settled, sent["confirmed"]) - sent["started"]
    return Sample(
        messages=count,
        seconds=seconds,
        rate=count / seconds,
        subscriber_rate=min(result["messages"] / result["seconds"] for result in received),
        cpu_us=cpu_s / count * 1e6,
        peak_bytes=broker.process.peak_memory_bytes(),
        duplicates=sum(result["duplicates"] for result in received),
        messages_per_ack=count / max(received[0]["acks"], 1) if received[0]["acks"] else 0.0,
    )


def _round_trips(
    broker: RunningBroker, protocol: str, trips: RoundTrips, *, count: int, tracer: Tracer | None
) -> Sample:
    options: dict[str, Any] = {"size": trips.size_bytes, "classes": 1, "count": count}
    options |= _traced(tracer, "both ends", "1")
    if protocol == "simplebus":
        options["echo_class"] = ECHO_CLASS
    cpu_before = broker.process.cpu_s()
    with Generator("latency", protocol, broker.port, timeout_s=TIMEOUT_S, **options) as generator:
        result = generator.result()
    seconds = count * result["p50_us"] * 1e-6
    return Sample(
        messages=count,
        seconds=seconds,
        rate=count / seconds,
        cpu_us=(broker.process.cpu_s() - cpu_before) / count * 1e6,
        peak_bytes=broker.process.peak_memory_bytes(),
        duplicates=result["duplicates"],
        p50_us=result["p50_us"],
        p99_us=result["p99_us"],
        max_us=result["max_us"],
    )
