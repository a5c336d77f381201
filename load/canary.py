"""A broker that fails on purpose: the load generator must notice, or its figures prove nothing.

    python load/canary.py

Rule 1: the broker here is as simple as can be, one message at a time; it is never measured.
Rule 2: each fault is done to one message, and the generator's sentence must name that message.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # So that it runs by its path.

from load.brokers import HOST
from load.generators import Generator
from load.processes import LoadError

HEADER = struct.Struct(">cHiH")
DELIMITER = b"<\r\n>"
COUNT = 500
STRICKEN = 321  # The number of the message that a fault is done to.
FIRST_ID = (1 << 31) - 200  # The ids wrap on the way.
PER_TICK = 50  # Messages that share a timer index.
CLASS, ECHO = 7, 60_000
TIMEOUT_S = 3
ACK_MODES = ("ranges", "single", "random")

FAULTS = {
    "lose": f"message number {STRICKEN} has id",
    "swap": f"message number {STRICKEN} has id",
    "damage": f"message number {STRICKEN} (id",
    "cut": f"message number {STRICKEN} (id",
    "grow": f"message number {STRICKEN} (id",
    "renumber": f"message number {STRICKEN} has id",
    "foreign": f"after {STRICKEN} messages one of class 8 came",
    "garbage": f"after {STRICKEN} messages a frame of type",
    "hang up": f"closed the connection: {STRICKEN} of {COUNT} messages verified",
    "silence": f"timed out after {TIMEOUT_S} s: {STRICKEN} of {COUNT} messages verified",
    "invent": "came after the last",
}
"""Each fault, and what the generator must say of it."""


def frame(kind: bytes, class_id: int, message_id: int, timer: int, content: bytes) -> bytes:
    return HEADER.pack(kind, class_id, message_id, timer) + content + DELIMITER


@dataclass
class FaultyBroker:
    """Speaks protocol version 1 to one publisher and one subscriber, with one fault."""

    fault: str = ""
    acked: dict[int, int] = field(default_factory=dict)  # Id to how often it was acknowledged.
    timers: dict[int, int] = field(default_factory=dict)  # Id to the timer index it was sent with.
    mistimed: int = 0  # Acks that named another timer index.
    published: int = 0
    held_back: bytes = b""

    def __post_init__(self) -> None:
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]
        self.subscriber: socket.socket | None = None
        self.threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(2)]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        for thread in self.threads:
            thread.join(TIMEOUT_S)
        self.listener.close()

    def _serve(self) -> None:
        peer, _ = self.listener.accept()
        with peer, suppress(OSError):
            for kind, class_id, message_id, timer, content in _frames(peer):
                if kind == b"4":
                    peer.sendall(frame(b"4", 0, 0, 0, struct.pack("<i", 1)))
                elif kind == b"2" and class_id == CLASS:
                    self.subscriber = peer
                elif kind == b"3" and class_id == CLASS:
                    self._note_ack(content, timer)
                elif kind == b"1" and class_id == ECHO:
                    peer.sendall(frame(b"1", ECHO, message_id, 0, content))
                elif kind == b"1":
                    self._deliver(content)

    def _note_ack(self, content: bytes, timer: int) -> None:
        first, last = map(int, content.split(b"-"))
        for message_id in range(first, last):
            self.acked[message_id] = self.acked.get(message_id, 0) + 1
            self.mistimed += self.timers[message_id] != timer

    def _deliver(self, content: bytes) -> None:
        assert self.subscriber is not None
        n = self.published
        self.published += 1
        message_id, timer = (FIRST_ID + n) % (1 << 31), n // PER_TICK
        self.timers[message_id] = timer
        sent = frame(b"1", CLASS, message_id, timer, content)
        if self.fault and n == STRICKEN:
            self._strike(message_id, timer, content, sent)
        elif self.fault != "silence" or n < STRICKEN:
            self.subscriber.sendall(sent + self.held_back)
            self.held_back = b""
        if self.fault == "invent" and n == COUNT - 1:
            self.subscriber.sendall(frame(b"1", CLASS, message_id + 1, timer, content))

    def _strike(self, message_id: int, timer: int, content: bytes, sent: bytes) -> None:
        assert self.subscriber is not None
        changed = {
            "repeat": sent + sent,
            "damage": frame(b"1", CLASS, message_id, timer, bytes([content[0] ^ 1]) + content[1:]),
            "cut": frame(b"1", CLASS, message_id, timer, content[:-1]),
            "grow": frame(b"1", CLASS, message_id, timer, content + b"!"),
            "renumber": frame(b"1", CLASS, message_id + 1, timer, content),
            "foreign": frame(b"1", CLASS + 1, message_id, timer, content),
            "garbage": b"?" + sent[1:],
            "invent": sent,
        }
        if self.fault == "swap":
            self.held_back = sent
        elif self.fault == "hang up":
            self.subscriber.shutdown(socket.SHUT_RDWR)
        elif self.fault in changed:
            self.subscriber.sendall(changed[self.fault])


def _frames(peer: socket.socket) -> Iterator[tuple[bytes, int, int, int, bytes]]:
    data = b""
    while some := peer.recv(65536):
        data += some
        while (end := data.find(DELIMITER, HEADER.size)) >= 0:
            kind, class_id, message_id, timer = HEADER.unpack_from(data)
            yield kind, class_id, message_id, timer, data[HEADER.size : end]
            data = data[end + len(DELIMITER) :]


def try_fault(fault: str, *, acks: str = "ranges") -> tuple[FaultyBroker, int]:
    """A run against a broker with this fault: the broker, and the duplicates counted.

    Raises LoadError with the generator's sentence when the generator noticed.
    """
    broker = FaultyBroker(fault)
    common: dict[str, Any] = {"timeout_s": TIMEOUT_S, "count": COUNT, "classes": CLASS}
    options = {**common, "acks": acks, "echo_class": ECHO, "shuffle": 64}
    try:
        with Generator("subscribe", "simplebus", broker.port, **options) as subscriber:
            subscriber.wait_ready()
            with Generator("publish", "simplebus", broker.port, **common) as publisher:
                duplicates = int(subscriber.result()["duplicates"])
                publisher.result()
    finally:
        broker.close()
    return broker, duplicates


def check_honest(acks: str) -> None:
    """An honest broker passes, and gets exactly one ack for every message, with its timer index."""
    broker, duplicates = try_fault("", acks=acks)
    if duplicates or broker.mistimed or set(broker.acked.values()) != {1}:
        raise LoadError(f"{broker.mistimed} acks ({acks}) named a wrong timer index, or repeated")
    if len(broker.acked) != COUNT:
        raise LoadError(f"{len(broker.acked)} messages were acknowledged, expected {COUNT}")


def check_repeat() -> None:
    """A message that comes again is not an error; it is counted and acknowledged again."""
    broker, duplicates = try_fault("repeat")
    if duplicates != 1 or sum(broker.acked.values()) != COUNT + 1:
        raise LoadError(f"{duplicates} duplicates were counted, expected 1")


def check_fault(fault: str) -> str:
    """The sentence with which the generator noticed; LoadError when it did not."""
    try:
        try_fault(fault)
    except LoadError as noticed:
        if FAULTS[fault] in str(noticed):
            return str(noticed)
        raise LoadError(f"said {str(noticed)!r}, expected {FAULTS[fault]!r}") from None
    raise LoadError(f"a broker with the fault {fault!r} passed")


def main() -> None:
    for acks in ACK_MODES:
        check_honest(acks)
        print(f"honest, acks {acks}: passed, each message acknowledged once")
    check_repeat()
    print("repeat: passed, one duplicate counted")
    for fault in FAULTS:
        print(f"{fault}: {check_fault(fault).partition('generator: ')[2]}")


if __name__ == "__main__":
    main()
