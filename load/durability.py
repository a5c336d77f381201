"""Confirm latency against the disk's own, cost of a backlog, and rate of redelivery.

    python load/run.py journal-latency backlog

The disk is measured in the same directory and round: append, then sync. The cost of a backlog is
measured on a broker in this process, since a tick cannot be seen through a socket; redelivery is
measured through one.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import numpy as np

from load.brokers import HOST, RunningBroker, running
from load.generators import Generator, disk
from load.measure import TIMEOUT_S, RunOptions
from load.memory import CONNECT_REPLY_BYTES
from load.processes import LoadError
from load.report import Row
from simplebus.core.broker.broker import Broker as Core
from simplebus.core.limits import READ_BYTES, Limits
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.session.session import Session
from simplebus.core.settings import Settings

CONFIRMS = 4_000
SLOW_US = 1_000  # Delay of a sync, for a machine whose disk has a write cache.
SYNC_BYTES = 128  # About the size of one message in a journal.
HELD = 20_000_000
WINDOW = 1_000_000
QUICK_PART = 10
BLOCK = 10_000  # Frames per write.
FRAME_BYTES = 29


# Confirms ----------------------------------------------------------------------------------------


def latency(run_options: RunOptions) -> list[Row]:
    """Return how long a publisher waits for a confirm, one message in flight, against a sync."""
    count = CONFIRMS // (QUICK_PART if run_options.quick else 1)
    args = run_options.server_args
    memory, safe, slow = list[float](), list[float](), list[float]()
    sync, slow_sync = list[float](), list[float]()
    with (
        tempfile.TemporaryDirectory(prefix="simplebus-load-") as directory,
        running("simplebus", server_args=args) as in_memory,
        running("simplebus-disk", server_args=args) as on_disk,
        running("simplebus-disk", server_args=args, sync_us=SLOW_US) as on_slow_disk,
    ):
        for _ in range(run_options.rounds):
            memory.append(_confirm_us(in_memory, count))
            sync.append(_sync_us(Path(directory), count))
            safe.append(_confirm_us(on_disk, count))
            slow_sync.append(_sync_us(Path(directory), count // 4, SLOW_US))
            slow.append(_confirm_us(on_slow_disk, count // 4))

    def row(title: str, values: list[float], unit: str, target: float | None = None) -> Row:
        return Row("journal-latency", title, values, unit, target, None, less_is_better=True)

    def ratio(values: list[float], baselines: list[float]) -> list[float]:
        return [a / b for a, b in zip(values, baselines, strict=True)]

    longer = f"when each takes {SLOW_US} us longer"
    return [
        row("one append and sync of a file, p50", sync, "us"),
        row("confirm from memory, p50", memory, "us"),
        row("confirm from disk, p50", safe, "us"),
        row("confirm from disk against one sync", ratio(safe, sync), "x", 1.5),
        row(f"one append and sync of a file, p50, {longer}", slow_sync, "us"),
        row(f"confirm from disk against one sync, {longer}", ratio(slow, slow_sync), "x", 1.5),
    ]


def _confirm_us(broker: RunningBroker, count: int) -> float:
    options = {"size": 16, "classes": 1, "count": count}
    with Generator(
        "confirm", "simplebus-2", broker.port, timeout_s=TIMEOUT_S, **options
    ) as generator:
        found: float = generator.result()["p50_us"]
    return found


def _sync_us(directory: Path, count: int, longer_us: int = 0) -> float:
    """Return the median time of an append and sync."""
    record, times = bytes(SYNC_BYTES), []
    file = os.open(directory / "synced", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        os.posix_fallocate(file, 0, count * SYNC_BYTES)
        sync = ctypes.CDLL(str(disk())).fdatasync
        os.environ["SLOW_SYNC_US"] = str(longer_us)
        for _ in range(count):
            started_at = time.perf_counter()
            os.write(file, record)
            sync(file)
            times.append(time.perf_counter() - started_at)
    finally:
        del os.environ["SLOW_SYNC_US"]
        os.close(file)
    return median(times) * 1e6


# Backlogs ----------------------------------------------------------------------------------------


class BacklogBroker:
    """Broker in this process with one subscriber that has unacked messages."""

    def __init__(self, count: int) -> None:
        limits = Limits(class_bytes=1 << 32, total_bytes=1 << 32)
        self.core = Core(Settings(limits=limits))
        self.core.clock.now = time.time()
        self.count = count
        self._buffer = ReceiveBuffer()
        self.publisher, self.subscriber = self.core.open_session(), self.core.open_session()
        self._send(self.subscriber, _frame(b"4", b"[1]") + _frame(b"2", b""))
        self.drain()

    def fill(self) -> None:
        """Publish and deliver all messages."""
        block = b"".join(_frame(b"1", b"%016d" % n) for n in range(BLOCK))
        for _ in range(self.count // BLOCK):
            self._send(self.publisher, block)
            delivered = self.drain()
            if delivered != len(block):
                raise LoadError(f"{delivered} bytes were delivered, expected {len(block)}")

    def tick(self) -> float:
        """Return the seconds of one tick."""
        self.core.clock.now += 1.0
        started_at = time.perf_counter()
        cut = self.core.tick()
        seconds = time.perf_counter() - started_at
        if cut:
            raise LoadError(f"the broker cut off {len(cut)} sessions: {cut[0][1]}")
        return seconds

    def acknowledge(self, ranges: Iterable[tuple[int, int]]) -> float:
        """Return the seconds to process these acks."""
        frames = [_frame(b"3", b"%d-%d" % pair) for pair in ranges]
        blocks = [b"".join(frames[at : at + 1_000]) for at in range(0, len(frames), 1_000)]
        started_at = time.perf_counter()
        for block in blocks:
            self._send(self.subscriber, block)
        return time.perf_counter() - started_at

    def unacked_count(self) -> int:
        """Return the number of unacked messages."""
        return self.core.classes[1].statistics().in_flight

    def drain(self) -> int:
        """Read all bytes for the subscriber. Return their number."""
        outbox, total = self.subscriber.outbox, 0
        self.core.end_turn()
        while piece := outbox.peek(self.core.tick_number):
            total += len(piece)
            outbox.mark_sent(len(piece), self.core.tick_number)
        return total

    def _send(self, session: Session, data: bytes) -> None:
        for at in range(0, len(data), READ_BYTES):
            count = self._buffer.fill(data[at : at + READ_BYTES])
            self.core.receive(session, self._buffer, count)


def _frame(kind: bytes, content: bytes) -> bytes:
    class_id = b"\0\0" if kind == b"4" else b"\0\1"
    return kind + class_id + bytes(6) + content + b"<\r\n>"


def backlog(run_options: RunOptions) -> list[Row]:
    """Return the cost of delivered, unacked messages."""
    part = QUICK_PART if run_options.quick else 1
    note = f"with a {part}th of it" if run_options.quick else ""

    def row(title: str, values: list[float], unit: str, target: float, *, less: bool = True) -> Row:
        return Row("backlog", title, values, unit, target, None, less_is_better=less, note=note)

    before = _resident_bytes()
    backlog_broker = BacklogBroker(HELD // part)
    backlog_broker.fill()
    growth = (_resident_bytes() - before) / backlog_broker.count - FRAME_BYTES
    # The ack timeout is 6 ticks: nothing is due.
    ticks = [backlog_broker.tick() * 1e3 for _ in range(5)]
    if backlog_broker.drain():
        raise LoadError("messages were delivered again before the ack timeout")
    del backlog_broker
    redelivery_ratios = _redelivery_ratios(run_options.rounds, part)
    return [
        row("one of 20 M unacked messages, beyond its frame", [growth], "bytes", 30.0),
        row("a tick over them, nothing due", ticks, "ms", 1.0),
        row("acks at random, of a million against a quarter", [_ack_ratio(part)], "x each", 1.5),
        row(
            "a million delivered again, against the first time",
            redelivery_ratios,
            "x",
            0.5,
            less=False,
        ),
    ]


def _ack_ratio(part: int) -> float:
    """Return the time of an ack in a window of a million, relative to a quarter of it."""
    each = []
    for count in (WINDOW // 4 // part, WINDOW // part):
        backlog_broker = BacklogBroker(count)
        backlog_broker.fill()
        order = random.Random(1).sample(range(count), count)
        each.append(backlog_broker.acknowledge((n, n + 1) for n in order) / count)
        if backlog_broker.unacked_count():
            raise LoadError(f"{backlog_broker.unacked_count()} messages are left, expected none")
    return each[1] / each[0]


def _redelivery_ratios(rounds: int, part: int) -> list[float]:
    """Return the rate of redelivery relative to first deliveries, through a socket."""
    count, found = WINDOW // part, []
    tick_args = ("--tick", "0.1", "--ack-timeout", "20")  # Redelivery after two seconds.
    with running("simplebus", server_args=tick_args) as broker:
        for turn in range(rounds):
            options = {"timeout_s": TIMEOUT_S, "count": count, "size": 16, "classes": 1}
            with Generator("publish", "simplebus", broker.port, **options) as publisher:
                publisher.result()
            with socket.create_connection((HOST, broker.port), timeout=TIMEOUT_S) as peer:
                peer.sendall(_frame(b"4", b"[1]") + _frame(b"2", b""))
                peer.recv(CONNECT_REPLY_BYTES, socket.MSG_WAITALL)
                first = _ids_per_s(peer, range(turn * count, (turn + 1) * count))
                repeated = _ids_per_s(peer, range(turn * count, (turn + 1) * count))
                peer.sendall(_frame(b"3", b"%d-%d" % (turn * count, (turn + 1) * count)))
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(READ_BYTES):
                    pass
            found.append(repeated / first)
    return found


def _ids_per_s(peer: socket.socket, ids: range) -> float:
    """Return the rate at which messages with these ids arrive."""
    data = np.empty(len(ids) * FRAME_BYTES, np.uint8)
    started_at, received, view = 0.0, 0, memoryview(data)
    while received < data.size:
        count = peer.recv_into(view[received:])
        if not count:
            raise LoadError(f"the server closed the connection after {received} bytes")
        started_at = started_at or time.perf_counter()
        received += count
    seconds = time.perf_counter() - started_at
    frames = data.reshape(-1, FRAME_BYTES)
    found = frames[:, 3:7].copy().view(">u4").ravel()
    if not np.array_equal(found, np.arange(ids.start, ids.stop)):
        raise LoadError(f"received ids from {found[0]} to {found[-1]}, expected {ids}")
    return len(ids) / seconds


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
