"""NATS listener against nats-server: memory of idle connections, and rate with many subscriptions.

    python load/run.py nats-idle nats-matching

Both servers get the same bytes, in turn. Every delivery is compared with what the patterns select.
As subscriptions grow, so does the number of sites, while a name matches about as many of them.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections import Counter
from contextlib import ExitStack, closing
from random import Random

from load.brokers import HOST, SIMPLEBUS_KINDS, RunningBroker, is_available, running
from load.measure import RunOptions
from load.memory import CONNECTIONS, DESCRIPTORS, KB, MB, QUICK_PART, raise_descriptor_limit
from load.processes import LoadError
from load.report import Row
from load.subscription_matching import METERS_A_SITE, NAMES, literal_pattern, mixed_pattern

SERVERS = {"simplebus-nats": "simplebus", "nats": "nats-server"}
CONNECT = b'CONNECT {"verbose":false,"pedantic":false,"lang":"load","protocol":1}\r\nPING\r\n'
FIRST = 50  # Connections before the measurement, which load modules.
COUNTS = (10, 1_000, 100_000, 1_000_000)
QUICK_COUNTS = COUNTS[:-1]
ENOUGH_MEMORY = ("--max-memory", "8GiB")
MESSAGES = 200_000
SUBSCRIBED_AT_ONCE = 50_000
TIMEOUT_S = 300
PIECE = 1 << 18
DELIVERY = re.compile(rb"MSG (\S+) (\d+) 0\r\n\r\n")


def servers() -> dict[str, str]:
    """Return the available servers by kind."""
    return {kind: name for kind, name in SERVERS.items() if is_available(kind)}


class ScalingClient:
    """Connection after CONNECT and PONG."""

    def __init__(self, broker: RunningBroker) -> None:
        self.socket = socket.create_connection((HOST, broker.port), timeout=TIMEOUT_S)
        self.socket.sendall(CONNECT)
        self.received = b""
        self.settle()

    def settle(self, pings: bytes = b"") -> None:
        """Wait until the server has processed everything sent before."""
        if pings:
            self.socket.sendall(pings)
        while b"PONG\r\n" not in self.received:
            data = self.socket.recv(PIECE)
            if not data:
                raise LoadError(f"the server closed the connection after {self.received[-200:]!r}")
            self.received += data
        if b"-ERR" in self.received:
            raise LoadError(f"the server sent {self.received[-200:]!r}")
        self.received = b""

    def close(self) -> None:
        self.socket.close()


# Idle connections --------------------------------------------------------------------------------


def idle(run_options: RunOptions) -> list[Row]:
    """Return each server's memory growth per idle connection."""
    raise_descriptor_limit(DESCRIPTORS)
    count = CONNECTIONS // (QUICK_PART if run_options.quick else 1)
    rows = []
    for kind, name in servers().items():
        with running(kind, server_args=_args(kind, run_options)) as broker, ExitStack() as stack:
            _connect(stack, broker, FIRST)
            before = broker.process.memory_bytes()
            _connect(stack, broker, count)
            value = (broker.process.memory_bytes() - before) / count / KB
        targets = (30.0, 12.0) if kind == "simplebus-nats" else (None, None)
        title = f"NATS, one idle connection of {count:,}, {name}"
        rows.append(Row("nats-idle", title, [value], "kB", *targets, less_is_better=True))
    return rows


def _connect(stack: ExitStack, broker: RunningBroker, count: int) -> None:
    for _ in range(count):
        stack.enter_context(closing(ScalingClient(broker)))


# Many subscriptions ------------------------------------------------------------------------------


def matching(run_options: RunOptions) -> list[Row]:
    """Return rates with growing numbers of subscriptions, against the smallest number."""
    counts = QUICK_COUNTS if run_options.quick else COUNTS
    rows = []
    for kind, name in servers().items():
        few_subject_rates: list[float] = []
        any_of_all: list[float] = []
        for count in counts:
            with running(kind, server_args=_args(kind, run_options)) as broker:
                rate, any_subject_rate = rates(
                    broker, count, MESSAGES // (QUICK_PART if run_options.quick else 1)
                )
                few_subject_rates.append(rate)
                any_of_all.append(any_subject_rate)
                memory_mb = broker.process.memory_bytes() / MB
            note = f"{name}, {memory_mb:,.0f} MB"
            rows.append(_row(f"{count:,} subscriptions", [few_subject_rates[-1]], "/s", note))
        last = f"{counts[-1]:,} subscriptions against {counts[0]}"
        rows.append(_row(last, [few_subject_rates[-1] / few_subject_rates[0]], "x", name))
        rows.append(_row(f"{last}, any subject", [any_of_all[-1] / any_of_all[0]], "x", name))
    return rows


def _row(title: str, values: list[float], unit: str, note: str) -> Row:
    return Row("nats-matching", title, values, unit, note=note)


def _args(kind: str, run_options: RunOptions) -> tuple[str, ...]:
    """Return the arguments of the server, with memory for a million subscriptions."""
    return (*ENOUGH_MEMORY, *run_options.server_args) if kind in SIMPLEBUS_KINDS else ()


def pattern(number: int) -> str:
    """Return a subscription's pattern in NATS syntax."""
    return mixed_pattern(number).replace("#", ">")


def matching_subscriptions() -> dict[int, list[int]]:
    """Return which of a site's eight subscriptions match each meter."""
    return {
        meter: [at for at in range(METERS_A_SITE) if _matches(at, meter)]
        for meter in range(METERS_A_SITE)
    }


def _matches(at: int, meter: int) -> bool:
    if at == 5:
        return True
    if at == 6:
        return meter == 2
    return at == 7 or at == meter


def expected(numbers: list[int], count: int) -> Counter[tuple[bytes, int]]:
    """Return the number of deliveries by subject and subscription."""
    matching_by_meter = matching_subscriptions()
    found: Counter[tuple[bytes, int]] = Counter()
    for number in numbers:
        site, meter = divmod(number, METERS_A_SITE)
        subject = literal_pattern(number).encode()
        for at in matching_by_meter[meter]:
            if (subscription := site * METERS_A_SITE + at) < count:
                found[subject, subscription] += 1
    return found


def rates(broker: RunningBroker, count: int, messages: int) -> tuple[float, float]:
    """Return two rates of verified deliveries per second.

    The first is for messages to NAMES random subscribed subjects, the second for messages to any
    subscribed subject.
    """
    random = Random(count)
    with closing(ScalingClient(broker)) as subscriber, closing(ScalingClient(broker)) as publisher:
        for first in range(0, count, SUBSCRIBED_AT_ONCE):
            numbers = range(first, min(first + SUBSCRIBED_AT_ONCE, count))
            lines = b"".join(b"SUB %b %d\r\n" % (pattern(n).encode(), n) for n in numbers)
            subscriber.settle(lines + b"PING\r\n")
        subscribed = [random.randrange(count) for _ in range(NAMES)]
        drawn = random.choices(subscribed, k=messages), random.choices(range(count), k=messages)
        first_rate, second_rate = (_rate(publisher, subscriber, count, each) for each in drawn)
    return first_rate, second_rate


def _rate(
    publisher: ScalingClient, subscriber: ScalingClient, count: int, numbers: list[int]
) -> float:
    """Return verified deliveries per second of one message to each of these subjects."""
    wire = b"".join(b"PUB %b 0\r\n\r\n" % literal_pattern(n).encode() for n in numbers)
    deliveries = expected(numbers, count)
    size = sum(len(b"MSG %b %d 0\r\n\r\n" % key) * times for key, times in deliveries.items())
    started_at = time.monotonic()
    received = _exchange(publisher.socket, wire, subscriber.socket, size)
    seconds = time.monotonic() - started_at
    found = Counter((subject, int(sid)) for subject, sid in DELIVERY.findall(received))
    if found != deliveries:
        example = next(iter((found - deliveries) or (deliveries - found)))
        raise LoadError(
            f"{found.total():,} deliveries with {count:,} subscriptions, expected "
            f"{deliveries.total():,}; for example {example}"
        )
    return deliveries.total() / seconds


def _exchange(publisher: socket.socket, wire: bytes, subscriber: socket.socket, size: int) -> bytes:
    """Send to one socket while reading `size` bytes of another."""
    publisher.setblocking(False)
    pieces, received_bytes, unsent = [], 0, memoryview(wire)
    while received_bytes < size:
        writers = [publisher] if unsent else []
        readable, writable, _ = select.select([subscriber], writers, [], TIMEOUT_S)
        if not readable and not writable:
            raise LoadError(
                f"only {received_bytes:,} of {size:,} bytes arrived within {TIMEOUT_S} s"
            )
        if writable:
            unsent = unsent[publisher.send(unsent[:PIECE]) :]
        if readable:
            data = subscriber.recv(PIECE)
            if not data:
                raise LoadError(
                    f"the server closed the connection after {received_bytes:,} of {size:,} bytes"
                )
            pieces.append(data)
            received_bytes += len(data)
    return b"".join(pieces)
