"""NATS server with injected faults, which proves that the load generator detects them.

    python load/broken_nats_server.py

The server handles one message at a time and is never measured. Each fault affects one message, and
the generator's error must name that message. `broken_broker.py` does the same for simplebus.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

# For `python load/broken_nats_server.py`.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from load.broken_broker import COUNT, FAULTY_NUMBER, SILENCE_S, TIMEOUT_S
from load.brokers import HOST
from load.generators import Generator
from load.processes import LoadError

SHAPES: dict[str, dict[str, Any]] = {"one subject": {}, "many": {"subjects": 50, "mixed": True}}
"""Kinds of flows, as options of the generator."""
FAULTS = {
    "lose": f"received message number {FAULTY_NUMBER} as",
    "swap": f"received message number {FAULTY_NUMBER} as",
    "repeat": f"received message number {FAULTY_NUMBER + 1} as",
    "damage": f"received message number {FAULTY_NUMBER} as",
    "cut": f"received message number {FAULTY_NUMBER} as",
    "move": f"received message number {FAULTY_NUMBER} as",
    "refuse": f"after {FAULTY_NUMBER} messages",
    "hang up": f"closed the connection: {FAULTY_NUMBER} of {COUNT} messages verified",
    "silence": f"timed out after {SILENCE_S[0]} s: {FAULTY_NUMBER} of {COUNT} messages verified",
    "invent": f"received message number {COUNT} as",
}
"""Error that the generator must report for each fault."""

_PUB = re.compile(rb"PUB (\S+) (\d+)\r\n")


class FaultyServer:
    """Server for one subscriber and one publisher, with one fault."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]
        self.published = 0
        self.held_back = b""
        self.subscriber: socket.socket | None = None
        self.threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(2)]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        for thread in self.threads:
            thread.join(SILENCE_S[0])
        self.listener.close()

    def _serve(self) -> None:
        peer, _ = self.listener.accept()
        with peer, suppress(OSError):
            peer.sendall(b'INFO {"server_id":"canary"}\r\n')
            data = b""
            while received := peer.recv(65536):
                data = self._process_commands(peer, data + received)

    def _process_commands(self, peer: socket.socket, data: bytes) -> bytes:
        """Process the complete commands. Returns the remaining bytes."""
        while (end := data.find(b"\r\n") + 2) >= 2:
            if message := _PUB.match(data):
                size = int(message[2])
                if len(data) < end + size + 2:
                    break
                self._deliver(message[1], data[end : end + size])
                end += size + 2
            elif data.startswith(b"SUB"):
                self.subscriber = peer
            elif data.startswith(b"PING"):
                peer.sendall(b"PONG\r\n")
            data = data[end:]
        return data

    def _deliver(self, subject: bytes, payload: bytes) -> None:
        assert self.subscriber is not None
        n = self.published
        self.published += 1
        sent = _msg_command(subject, payload)
        if self.fault and n == FAULTY_NUMBER:
            self._send_faulty(subject, payload, sent)
        elif self.fault != "silence" or n < FAULTY_NUMBER:
            self.subscriber.sendall(sent + self.held_back)
            self.held_back = b""
        if self.fault == "invent" and n == COUNT - 1:
            self.subscriber.sendall(sent)

    def _send_faulty(self, subject: bytes, payload: bytes, sent: bytes) -> None:
        assert self.subscriber is not None
        if self.fault == "swap":
            self.held_back = sent
        elif self.fault == "hang up":
            self.subscriber.shutdown(socket.SHUT_RDWR)
        else:
            replacements = {
                "repeat": sent + sent,
                "damage": _msg_command(subject, payload[:-1] + bytes([payload[-1] ^ 1])),
                "cut": _msg_command(subject, payload[:-1]),
                "move": _msg_command(subject[:-1] + b"x", payload),
                "refuse": b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n",
                "invent": sent,
            }
            self.subscriber.sendall(replacements.get(self.fault, b""))


def _msg_command(subject: bytes, payload: bytes) -> bytes:
    return b"MSG %b 1 %d\r\n%b\r\n" % (subject, len(payload), payload)


def run(fault: str, shape: str) -> None:
    """Run a generator against a faulty server. Raises LoadError with the generator's error."""
    server = FaultyServer(fault)
    timeout_s = SILENCE_S[0] if fault == "silence" else TIMEOUT_S
    options = {"timeout_s": timeout_s, "count": COUNT, "classes": 1, **SHAPES[shape]}
    try:
        with Generator("subscribe", "nats", server.port, **options) as subscriber:
            subscriber.wait_ready()
            with Generator("publish", "nats", server.port, **options) as publisher:
                subscriber.result()
                publisher.result()
    finally:
        server.close()


def check_fault(fault: str, shape: str) -> str:
    """Return the error that the generator reported. Raises LoadError if it reported none."""
    try:
        run(fault, shape)
    except LoadError as error:
        reported = str(error)
        if FAULTS[fault] in reported:
            return reported
        raise LoadError(
            f"the generator reported {reported!r}, expected {FAULTS[fault]!r}"
        ) from None
    raise LoadError(f"a server with the fault {fault!r} passed")


def main() -> None:
    for shape in SHAPES:
        run("", shape)
        print(f"{shape}: honest: passed")
        for fault in FAULTS:
            print(f"{shape}: {fault}: {check_fault(fault, shape).partition('generator: ')[2]}")


if __name__ == "__main__":
    main()
