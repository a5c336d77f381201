"""Client of protocol version 1 that reads nothing for some seconds while others publish.

    python load/run.py v1-stall

The original .NET client stops reading while its thread pool has no free thread. It acknowledges
within 1.5 seconds after it has read, and must not receive any message twice: its programs check the
order.
"""

from __future__ import annotations

import socket
import threading
from time import monotonic, sleep

import numpy as np

from load.brokers import running
from load.measure import RunOptions
from load.ports import HOST
from load.processes import LoadError
from load.report import Row

CLASS = 1
PAYLOAD = b"x" * 16
FRAME_BYTES = 9 + len(PAYLOAD) + 4
COUNT, QUICK_COUNT = 2_000_000, 800_000  # More than the buffers of TCP hold.
STALL_S, QUICK_STALL_S = 20.0, 8.0  # Longer than the ack timeout.
ACK_S = 1.0
TIMEOUT_S = 60.0


def _frame(kind: bytes, class_id: int, content: bytes = b"") -> bytes:
    return kind + class_id.to_bytes(2, "big") + bytes(6) + content + b"<\r\n>"


def _connect(port: int) -> socket.socket:
    """Connect, and return the socket once the server has replied."""
    sock = socket.create_connection((HOST, port), timeout=TIMEOUT_S)
    sock.sendall(_frame(b"4", 0, b"[%d]" % CLASS))
    reply = b""
    while len(reply) < 17:
        reply += sock.recv(17 - len(reply))
    return sock


def _publish(port: int, count: int) -> None:
    with _connect(port) as sock:
        block = _frame(b"1", CLASS, PAYLOAD) * 10_000
        for _ in range(count // 10_000):
            sock.sendall(block)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)


def count_copies(port: int, count: int, stall_seconds: float) -> int:
    """Return how many messages arrive twice at a client that stops reading."""
    with _connect(port) as sock:
        sock.sendall(_frame(b"2", CLASS))
        publisher = threading.Thread(target=_publish, args=(port, count), daemon=True)
        publisher.start()
        sleep(stall_seconds)
        seen = np.zeros(count, np.int64)
        unread, ack_at = b"", monotonic() + ACK_S
        while not seen.all():
            data = sock.recv(1 << 20)
            if not data:
                raise LoadError(f"the server closed the connection after {seen.sum():,} messages")
            unread += data
            whole = len(unread) // FRAME_BYTES
            rows = np.frombuffer(unread, np.uint8, whole * FRAME_BYTES).reshape(whole, -1)
            np.add.at(seen, rows[:, 3:7].copy().view(">u4").ravel(), 1)
            unread = unread[whole * FRAME_BYTES :]
            if monotonic() >= ack_at:
                sock.sendall(_frame(b"3", CLASS, b"0-%d" % seen.argmin()))
                ack_at += ACK_S
        sock.sendall(_frame(b"3", CLASS, b"0-%d" % count))
        publisher.join(TIMEOUT_S)
        return int(seen.sum()) - count


def run(run_options: RunOptions) -> list[Row]:
    count = QUICK_COUNT if run_options.quick else COUNT
    seconds = QUICK_STALL_S if run_options.quick else STALL_S
    values: list[float] = []
    for _ in range(run_options.rounds):
        with running("simplebus", server_args=run_options.server_args) as broker:
            values.append(count_copies(broker.port, count, seconds))
    title = f"copies after {seconds:g} s without reading"
    return [Row("v1-stall", title, values, "messages", 0, less_is_better=True)]
