"""Stream and push consumer for a JetStream measurement.

They are created and removed by plain JetStream API requests over a socket, without a client
library.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from load.brokers import HOST, RunningBroker
from load.processes import LoadError

STREAM = "LOAD"
CONSUMER = "load"
DELIVER = "load.deliver"
REPLY_S = 10.0


@contextmanager
def stream(
    broker: RunningBroker,
    *,
    subjects: list[str],
    ack_all: bool | None = None,
    storage: str = "memory",
    retention: str = "limits",
) -> Iterator[None]:
    """Create a stream with a push consumer, and remove both at the end of the block.

    Args:
        ack_all: True if an ack applies to all earlier messages, False if to one message; None for
            no consumer.
        storage: "memory" or "file".
        retention: "interest" removes acknowledged messages; "limits" keeps all.
    """
    with _connection(broker) as peer:
        _request(
            peer,
            f"STREAM.CREATE.{STREAM}",
            {
                "name": STREAM,
                "subjects": subjects,
                "storage": storage,
                "retention": retention,
                "num_replicas": 1,
            },
        )
        try:
            if ack_all is not None:
                _request(peer, f"CONSUMER.DURABLE.CREATE.{STREAM}.{CONSUMER}", _consumer(ack_all))
            yield
        finally:
            _request(peer, f"STREAM.DELETE.{STREAM}", {})


def _consumer(ack_all: bool) -> dict[str, Any]:
    config = {
        "durable_name": CONSUMER,
        "deliver_subject": DELIVER,
        "deliver_policy": "all",
        "ack_policy": "all" if ack_all else "explicit",
        "max_ack_pending": 20_000,
    }
    return {"stream_name": STREAM, "config": config}


@contextmanager
def _connection(broker: RunningBroker) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, broker.port), timeout=REPLY_S) as peer:
        peer.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB _INBOX.setup 1\r\n')
        yield peer


def _request(peer: socket.socket, subject: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"PUB $JS.API.{subject} _INBOX.setup {len(content)}\r\n".encode()
    peer.sendall(head + content + b"\r\n")
    reply = _read_message(peer)
    if "error" in reply:
        raise LoadError(f"JetStream refused {subject}: {reply['error']}")


def _read_message(peer: socket.socket) -> dict[str, Any]:
    """Return the next message. Answers PING lines, and skips INFO lines."""
    with peer.makefile("rb") as lines:
        while line := lines.readline():
            if line.startswith(b"MSG "):
                found: dict[str, Any] = json.loads(lines.read(int(line.split()[-1]) + 2))
                return found
            if line.startswith(b"PING"):
                peer.sendall(b"PONG\r\n")
            if line.startswith(b"-ERR"):
                raise LoadError(f"nats-server sent {line.decode().strip()}")
    raise LoadError("nats-server closed the connection")
