"""Ten thousand connections: memory of each, connection rate, and effect on others.

    python load/run.py connections

Every connection is established before anything is counted. A hundred of them verify a flow, while
the server reloads its configuration; no connection may be lost.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from load.brokers import HOST, RunningBroker, running
from load.measure import RunOptions
from load.memory import CONNECT, CONNECT_REPLY_BYTES, KB, TIMEOUT_S, raise_descriptor_limit
from load.processes import LoadError
from load.report import Row
from simplebus.core.protocol import frames

CONNECTIONS = 10_000
QUICK_PART = 5
SAMPLE = 100
MESSAGES = 30_000
AT_ONCE = 200  # Connections that are made before their replies are read.


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario. `--quick` makes a fifth of the connections."""
    count = CONNECTIONS // (QUICK_PART if run_options.quick else 1)
    raise_descriptor_limit(count + 1_000)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="simplebus-load-")))
        config = folder / "bus.toml"
        config.write_text(f"[serve]\nmax-connections = {count + 100}\n")
        args = ("--config", str(config), *run_options.server_args)
        broker = stack.enter_context(running("simplebus", server_args=args))
        first = _connect(stack, broker, SAMPLE)
        _delivered_rate(stack, broker, first, 0)  # The first flow loads modules.
        alone = _delivered_rate(stack, broker, first, 1)
        before = broker.process.memory_bytes()
        begin = time.perf_counter()
        peers = first + _connect(stack, broker, count - SAMPLE)
        seconds = time.perf_counter() - begin
        bytes_each = (broker.process.memory_bytes() - before) / (count - SAMPLE)
        config.write_text(f"[serve]\nmax-connections = {count + 200}\n")
        among = _delivered_rate(
            stack, broker, peers[:: count // SAMPLE][:SAMPLE], 2, has_reload=True
        )
        _check_open(peers)
        if "reloaded the configuration" not in broker.process.errors():
            raise LoadError("the server has not reloaded its configuration")
    note = f"of {count:,}"
    return [
        Row("connections", "connected a second", [(count - SAMPLE) / seconds], "", 1_000, 5_000),
        Row("connections", "one idle connection", [bytes_each / KB], "kB", 30, 12, True, note=note),
        Row("connections", "deliveries to a hundred among them, against alone", [among / alone],
            "x", 0.5, 0.9, note=note),
    ]  # fmt: skip


def _connect(stack: ExitStack, broker: RunningBroker, count: int) -> list[socket.socket]:
    """Return connected peers that have their session id."""
    peers: list[socket.socket] = []
    while len(peers) < count:
        new_peers = [
            stack.enter_context(socket.create_connection((HOST, broker.port), timeout=TIMEOUT_S))
            for _ in range(min(AT_ONCE, count - len(peers)))
        ]
        for peer in new_peers:
            peer.sendall(CONNECT)
        for peer in new_peers:
            _read(peer, CONNECT_REPLY_BYTES)
        peers += new_peers
    return peers


def _read(peer: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        data = peer.recv(count - len(received))
        if not data:
            raise LoadError(f"a connection was closed after {len(received)} of {count} bytes")
        received += data
    return received


def _delivered_rate(
    stack: ExitStack,
    broker: RunningBroker,
    peers: list[socket.socket],
    turn: int,
    *,
    has_reload: bool = False,
) -> float:
    """Return the rate of messages that all peers receive.

    With `has_reload`, the server reloads its configuration meanwhile.
    """
    class_id = 2 + turn
    (publisher,) = _connect(stack, broker, 1)
    connect = frames.encode(frames.CONNECT, content=f"[{class_id}]".encode())
    for peer in (publisher, *peers):
        peer.sendall(connect)
        _read(peer, CONNECT_REPLY_BYTES)
    for peer in peers:
        peer.sendall(frames.encode(frames.SUBSCRIBE, class_id=class_id))
    time.sleep(1.0)  # A Subscribe of version 1 has no reply.
    contents = [b"%016d" % number for number in range(MESSAGES)]
    flow = b"".join(
        frames.encode(frames.MESSAGE, class_id=class_id, content=content) for content in contents
    )
    waits = {peer: bytearray() for peer in peers}
    begin = time.perf_counter()
    publisher.sendall(flow)
    if has_reload:
        os.kill(broker.process.pid, signal.SIGHUP)
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ)
        while waits:
            ready = selector.select(TIMEOUT_S)
            if not ready:
                raise LoadError(f"{len(waits)} of {len(peers)} subscribers wait for messages")
            for key, _ in ready:
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                waits[peer] += peer.recv(1 << 16)
                if len(waits[peer]) >= len(flow):
                    selector.unregister(peer)
                    _verify(bytes(waits.pop(peer)), contents, class_id)
    seconds = time.perf_counter() - begin
    ack = frames.encode_ack(class_id=class_id, timer_index=0, first=0, last=MESSAGES)
    for peer in peers:
        peer.sendall(ack)
    return len(peers) * MESSAGES / seconds


def _verify(received: bytes, contents: list[bytes], class_id: int) -> None:
    parts = received.split(frames.DELIMITER)
    if parts.pop() or [part[frames.HEADER_BYTES :] for part in parts] != contents:
        raise LoadError(
            f"a subscriber of class {class_id} received other messages than were published"
        )


def _check_open(peers: list[socket.socket]) -> None:
    """Raise LoadError if the server closed a connection."""
    for peer in peers:
        peer.setblocking(False)
        try:
            is_closed = peer.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            is_closed = False
        if is_closed:
            raise LoadError("the server has closed an idle connection")
