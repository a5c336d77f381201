"""Round trips of a bystander while the backlog of another class grows to gigabytes.

    python load/run.py growing-backlog

A publisher fills a class without a subscriber. A bystander in this process sends one message at a
time to its own class, receives the message and acknowledges it. Afterwards a subscriber receives
and verifies the whole backlog.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from statistics import median
from types import TracebackType
from typing import Self

from load.brokers import HOST, running
from load.generators import Generator
from load.measure import RunOptions
from load.processes import LoadError
from load.report import Row

BACKLOG_BYTES = 4 << 30
PAYLOAD_BYTES = 1024
FRAME_BYTES = 13 + PAYLOAD_BYTES
QUICK_PART = 8
BACKLOG_CLASS, BYSTANDER_CLASS = 1, 2
CALM_S = 3.0
TIMEOUT_S = 300
MEMORY_ARGS = ("--max-memory", "6GiB", "--max-class-memory", "5GiB")
DELIMITER = b"<\r\n>"
MB = 1e6


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario."""
    count = BACKLOG_BYTES // FRAME_BYTES // (QUICK_PART if run_options.quick else 1)
    calm_ms, growing_ms, worst_calm_ms = list[float](), list[float](), list[float]()
    memory, rates = list[float](), list[float]()
    for _ in range(run_options.rounds):
        args = (*MEMORY_ARGS, *run_options.server_args)
        with (
            running("simplebus", server_args=args) as broker,
            BacklogBystander(broker.port) as bystander,
        ):
            idle_bytes = broker.process.memory_bytes()
            calm = list(bystander.round_trips(until=time.monotonic() + CALM_S))
            options = {"timeout_s": TIMEOUT_S, "count": count, "size": PAYLOAD_BYTES}
            options |= {"classes": BACKLOG_CLASS}
            with Generator("publish", "simplebus", broker.port, **options) as publisher:
                growing = list(bystander.round_trips(beside=publisher))
                result = publisher.result()
            grown_bytes = broker.process.peak_memory_bytes() - idle_bytes
            with Generator("subscribe", "simplebus", broker.port, **options) as subscriber:
                received = subscriber.result()["messages"]
        if received != count:
            raise LoadError(f"the subscriber received {received} of {count} messages")
        worst_calm_ms.append(max(calm) * 1e3)
        calm_ms.append(median(calm) * 1e3)
        growing_ms.append(max(growing) * 1e3)
        memory.append(grown_bytes / (count * FRAME_BYTES))
        rates.append(count / (result["confirmed"] - result["started"]))
    stored = f"{count * FRAME_BYTES / MB:,.0f} MB"
    return [
        _row(f"worst round trip while a class grows to {stored}", growing_ms, "ms", 10),
        _row("worst round trip before", worst_calm_ms, "ms"),
        _row("median round trip before", calm_ms, "ms"),
        _row("peak memory against the stored frames", memory, "x", 1.1),
        Row("growing-backlog", "1 KiB messages stored", rates, "msgs/s"),
    ]


def _row(title: str, values: list[float], unit: str, at_least: float | None = None) -> Row:
    return Row("growing-backlog", title, values, unit, at_least, less_is_better=True)


class BacklogBystander:
    """Version 1 client that sends itself one message at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._next_id = 0
        self._socket.sendall(_frame(b"4", 0, b"[%d]" % BYSTANDER_CLASS))
        self._receive()
        self._socket.sendall(_frame(b"2", BYSTANDER_CLASS))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._socket.close()

    def round_trips(
        self, *, until: float | None = None, beside: Generator | None = None
    ) -> Iterator[float]:
        """Yield the seconds of each round trip, until a time or the end of a process."""
        while beside.is_running() if beside else time.monotonic() < (until or 0.0):
            started_at = time.monotonic()
            self._socket.sendall(_frame(b"1", BYSTANDER_CLASS, b"bystander"))
            received = self._receive()
            yield time.monotonic() - started_at
            if int.from_bytes(received[3:7], "big") != self._next_id:
                raise LoadError(f"the bystander received {received!r}, expected {self._next_id}")
            self._socket.sendall(
                _frame(b"3", BYSTANDER_CLASS, b"%d-%d" % (self._next_id, self._next_id + 1))
            )
            self._next_id += 1

    def _receive(self) -> bytes:
        received = b""
        while not received.endswith(DELIMITER):
            part = self._socket.recv(4096)
            if not part:
                raise LoadError("the server closed the connection of the bystander")
            received += part
        return received


def _frame(frame_type: bytes, class_id: int, content: bytes = b"") -> bytes:
    return frame_type + class_id.to_bytes(2, "big") + bytes(6) + content + DELIMITER
