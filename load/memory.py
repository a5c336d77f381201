"""Memory use of the server: idle, per million stored messages, and per connection.

Each figure is the resident memory that the kernel reports for a fresh server. Stored messages are
fetched and verified afterwards, which proves that the server held them.
"""

from __future__ import annotations

import json
import resource
import socket
from contextlib import ExitStack

from load.brokers import HOST, RunningBroker, running
from load.generators import Generator
from load.measure import RunOptions
from load.processes import LoadError
from load.report import Row

HELD = 1_000_000
QUICK_PART = 5
CONNECTIONS = 5_000
DESCRIPTORS = CONNECTIONS + 1_000
TIMEOUT_S = 60
KB, MB = 1e3, 1e6
CONNECT = b"4\0\0\0\0\0\0\0\0[1]<\r\n>"
CONNECT_REPLY_BYTES = 9 + 4 + 4


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario. `--quick` measures fewer messages and connections."""
    raise_descriptor_limit(DESCRIPTORS)
    part = QUICK_PART if run_options.quick else 1
    note = f"from a {part}th of it" if run_options.quick else ""
    with running("simplebus", server_args=run_options.server_args) as broker:
        idle = broker.process.memory_bytes()
        unacked_bytes = _held_bytes(broker, HELD // part) * part
    with running("simplebus", server_args=run_options.server_args) as broker:
        connection = _connection_bytes(broker, CONNECTIONS // part)
    return [
        _row("idle server", idle / MB, "MB", 60, 45),
        _row("1 M unacked 16 B messages more", unacked_bytes / MB, "MB", 100, 60, note),
        _row("one idle connection of 5,000", connection / KB, "kB", 30, 12, note),
    ]


def _row(title: str, value: float, unit: str, at_least: float, reach: float, note: str = "") -> Row:
    return Row("memory", title, [value], unit, at_least, reach, less_is_better=True, note=note)


def _held_bytes(broker: RunningBroker, count: int) -> int:
    """Return the growth of the server's memory with `count` stored messages."""
    before = broker.process.memory_bytes()
    options = {"timeout_s": TIMEOUT_S, "count": count, "size": 16, "classes": 1}
    with Generator("publish", "simplebus", broker.port, **options) as publisher:
        publisher.result()
    growth = broker.process.memory_bytes() - before
    with Generator("subscribe", "simplebus", broker.port, **options) as subscriber:
        found = subscriber.result()
    if found["messages"] != count:
        raise LoadError(f"the server held {found['messages']} messages, expected {count}")
    return growth


def _connection_bytes(broker: RunningBroker, count: int) -> float:
    """Return the growth of the server's memory per connection after the handshake."""
    with ExitStack() as stack:
        _connect(stack, broker, 50)  # The first connections load modules.
        before = broker.process.memory_bytes()
        _connect(stack, broker, count)
        return (broker.process.memory_bytes() - before) / count


def _connect(stack: ExitStack, broker: RunningBroker, count: int) -> None:
    peers = [
        stack.enter_context(socket.create_connection((HOST, broker.port), timeout=TIMEOUT_S))
        for _ in range(count)
    ]
    for peer in peers:
        peer.sendall(CONNECT)
    for peer in peers:
        reply = b""
        while len(reply) < CONNECT_REPLY_BYTES:
            data = peer.recv(CONNECT_REPLY_BYTES - len(reply))
            if not data:
                raise LoadError(f"the server answered Connect with {json.dumps(reply.hex())}")
            reply += data


def raise_descriptor_limit(count: int) -> None:
    """Raise the limit of open files to `count`, also for child processes.

    The server needs a descriptor for each connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        if hard != resource.RLIM_INFINITY and hard < count:
            raise LoadError(f"{count} connections need as many descriptors; the limit is {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
