"""Broker with injected faults, which proves that the load generator detects them.

    python load/broken_broker.py

The broker handles one message at a time and is never measured. Each fault affects one message, and
the generator's error must name that message. Faults that are possible in both versions of the
protocol are injected in both.
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

# For `python load/broken_broker.py`.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from load.brokers import HOST
from load.generators import Generator
from load.processes import LoadError
from load.traces import Tracer

HEADER = struct.Struct(">cHIH")
DELIMITER = b"<\r\n>"
COUNT = 500
FAULTY_NUMBER = 321  # Number of the message that a fault affects.
IDS = 1 << 31
# The message ids and the publisher's numbers wrap during a run.
FIRST_ID = IDS - 200
FIRST_NUMBER = IDS - 300
PER_TICK = 50  # Messages that share a timer index.
CLASS, ECHO = 7, 60_000
CHANNEL = "load.broken_broker"
CREDIT_BYTES = 1_000
TIMEOUT_S = 60
DETECTED_BY_TIMEOUT = {"silence", "leave unconfirmed"}
"""Faults that only a timeout detects."""
SILENCE_S = (3, 30)
"""Timeouts for these faults; the second is for a machine too busy for the first."""
ACK_MODES = ("ranges", "single", "random")
VERSIONS = (1, 2)

FAULTS = {
    "lose": f"message number {FAULTY_NUMBER} has id",
    "swap": f"message number {FAULTY_NUMBER} has id",
    "damage": f"message number {FAULTY_NUMBER} (id",
    "cut": f"message number {FAULTY_NUMBER} (id",
    "grow": f"message number {FAULTY_NUMBER} (id",
    "renumber": f"message number {FAULTY_NUMBER} has id",
    "foreign": f"class 8 without a subscription, after {FAULTY_NUMBER} messages",
    "garbage": f"after {FAULTY_NUMBER} messages, expected a message",
    "hang up": f"closed the connection: {FAULTY_NUMBER} of {COUNT} messages verified",
    "silence": f" s: {FAULTY_NUMBER} of {COUNT} messages verified",
    "invent": "after the last message",
}
"""Error that the generator must report for each fault."""

FAULTS_OF_2 = FAULTS | {
    "mark again": f"received message number {FAULTY_NUMBER} for the first time",
    "repeat unmarked": f"received message number {FAULTY_NUMBER} again",
    "misdeliver": f"for subscription 102 after {FAULTY_NUMBER} messages",
    "move": f"message number {FAULTY_NUMBER} (id",
    "refuse": "the broker sent an Error",
    "leave unconfirmed": f"{FAULTY_NUMBER} confirmed",
    "confirm unsent": "received a Confirm of number",
}
"""Errors for version 2, with faulty Deliver, Confirm and Error frames."""

TO_PUBLISHER = {"refuse", "leave unconfirmed", "confirm unsent"}
"""Faults that the publisher must detect; the subscriber detects the others."""


def faults(version: int) -> dict[str, str]:
    return FAULTS if version == 1 else FAULTS_OF_2


def frame(kind: bytes, key: int, number: int, last: int, content: bytes) -> bytes:
    return HEADER.pack(kind, key, number, last) + content + DELIMITER


@dataclass
class FaultyBroker:
    """Broker for one version 1 publisher and one subscriber, with one fault."""

    fault: str = ""
    acked: dict[int, int] = field(default_factory=dict)
    """Number of acks, by message id."""
    timers: dict[int, int] = field(default_factory=dict)
    """Timer index of the delivery, by message id."""
    mistimed: int = 0
    """Number of acks with another timer index than the delivery."""
    published: int = 0
    held_back: bytes = b""
    ack_key: int = CLASS

    def __post_init__(self) -> None:
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]
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
            for kind, key, number, last, content in _frames(peer):
                if kind == b"3" and key == self.ack_key:
                    self._record_ack(content, last)
                elif kind in b"15" and key == CLASS:
                    self.deliver_message(peer, kind, number, content)
                else:
                    self.handle_frame(peer, kind, key, number, last, content)

    def handle_frame(
        self, peer: socket.socket, kind: bytes, key: int, number: int, last: int, content: bytes
    ) -> None:
        """Handle a frame that is neither a message nor an ack."""
        if kind == b"4":
            peer.sendall(frame(b"4", 0, 0, 0, struct.pack("<i", 1)))
        elif kind == b"2" and key == CLASS:
            self.subscriber = peer
        elif kind == b"1" and key == ECHO:
            peer.sendall(frame(b"1", ECHO, number, 0, content))

    def deliver_message(
        self, peer: socket.socket, kind: bytes, number: int, content: bytes
    ) -> None:
        """Deliver a message, unless the fault drops this one."""
        assert self.subscriber is not None
        n = self.published
        self.published += 1
        message_id, timer = (FIRST_ID + n) % IDS, self.timer_of(n)
        self.timers[message_id] = timer
        sent = frame(kind, CLASS, message_id, timer, content)
        if self.fault and n == FAULTY_NUMBER:
            self._send_faulty(kind, message_id, timer, content, sent)
        elif self.fault != "silence" or n < FAULTY_NUMBER:
            self.subscriber.sendall(sent + self.held_back)
            self.held_back = b""
        if self.fault == "invent" and n == COUNT - 1:
            self.subscriber.sendall(frame(kind, CLASS, message_id + 1, timer, content))

    def timer_of(self, n: int) -> int:
        """Return the last header field of message n and of its ack."""
        return n // PER_TICK

    def _record_ack(self, content: bytes, timer: int) -> None:
        first, last = map(int, content.split(b"-"))
        for message_id in range(first, last):
            self.acked[message_id] = self.acked.get(message_id, 0) + 1
            self.mistimed += self.timers[message_id] != timer

    def _send_faulty(
        self, kind: bytes, message_id: int, timer: int, content: bytes, sent: bytes
    ) -> None:
        assert self.subscriber is not None
        replacements = self.faulty_bytes(kind, message_id, timer, content, sent)
        if self.fault == "swap":
            self.held_back = sent
        elif self.fault == "hang up":
            self.subscriber.shutdown(socket.SHUT_RDWR)
        elif self.fault in replacements:
            self.subscriber.sendall(replacements[self.fault])

    def faulty_bytes(
        self, kind: bytes, message_id: int, timer: int, content: bytes, sent: bytes
    ) -> dict[str, bytes]:
        """Return the bytes to send instead of a message, by fault."""
        damaged = content[:-1] + bytes([content[-1] ^ 1])
        return {
            "repeat": sent + sent,
            "damage": frame(kind, CLASS, message_id, timer, damaged),
            "cut": frame(kind, CLASS, message_id, timer, content[:-1]),
            "grow": frame(kind, CLASS, message_id, timer, content + b"!"),
            "renumber": frame(kind, CLASS, message_id + 1, timer, content),
            "foreign": frame(kind, CLASS + 1, message_id, timer, content),
            "garbage": b"?" + sent[1:],
            "invent": sent,
        }


@dataclass
class FaultyBroker2(FaultyBroker):
    """Broker for version 2. It confirms as late as the publisher's credit allows."""

    misnumbered: int = 0
    """Messages with another number than the next one."""
    overdrawn: int = 0
    """Messages beyond the credit."""
    confirmed: int = 0
    unconfirmed_bytes: int = 0

    def handle_frame(
        self, peer: socket.socket, kind: bytes, key: int, number: int, last: int, content: bytes
    ) -> None:
        if kind == b"4":
            reply = b'{"session":1,"next":%d,"credit":%d}' % (FIRST_NUMBER, CREDIT_BYTES)
            peer.sendall(frame(b"4", 0, number, 0, reply))
        elif kind == b"2":
            self.subscriber, self.ack_key = peer, last
            peer.sendall(frame(b"2", key, number, last, b"{}") + self.deliver_frame())

    def deliver_frame(self, *, attempt: int = 1) -> bytes:
        return frame(b"7", CLASS, attempt, self.ack_key, b"")

    def timer_of(self, n: int) -> int:
        return 0

    def deliver_message(
        self, peer: socket.socket, kind: bytes, number: int, content: bytes
    ) -> None:
        self.misnumbered += number != (FIRST_NUMBER + self.published) % IDS
        super().deliver_message(peer, kind, number, content)
        size = HEADER.size + len(content) + len(DELIMITER)
        self.unconfirmed_bytes += size
        self.overdrawn += self.unconfirmed_bytes > CREDIT_BYTES
        if self.fault == "refuse" and self.published == FAULTY_NUMBER:
            peer.sendall(frame(b"E", CLASS, number, ord(kind), b'{"code":"class_full"}'))
        elif self.fault == "confirm unsent" and self.published == COUNT:
            peer.sendall(self.confirm_frame(self.published + 1))
        elif self.unconfirmed_bytes + size > CREDIT_BYTES or self.published == COUNT:
            peer.sendall(self.confirm_frame(self.published))
            self.unconfirmed_bytes = 0

    def confirm_frame(self, count: int) -> bytes:
        if self.fault == "leave unconfirmed":
            count = min(count, FAULTY_NUMBER)
        return frame(b"6", 0, (FIRST_NUMBER + count) % IDS, 0, b"")

    def faulty_bytes(
        self, kind: bytes, message_id: int, timer: int, content: bytes, sent: bytes
    ) -> dict[str, bytes]:
        repeated, first = self.deliver_frame(attempt=2), self.deliver_frame()
        return {
            **super().faulty_bytes(kind, message_id, timer, content, sent),
            "repeat": sent + repeated + sent + first,
            "mark again": repeated + sent,
            "repeat unmarked": sent + sent,
            "misdeliver": frame(b"7", CLASS, 1, self.ack_key + 1, b"") + sent,
            "move": sent.replace(CHANNEL.encode(), CHANNEL.upper().encode()),
            "refuse": sent,
            "leave unconfirmed": sent,
            "confirm unsent": sent,
        }


BROKERS = {1: FaultyBroker, 2: FaultyBroker2}
PROTOCOLS = {1: "simplebus", 2: "simplebus-2"}


def _frames(peer: socket.socket) -> Iterator[tuple[bytes, int, int, int, bytes]]:
    data = b""
    while received := peer.recv(65536):
        data += received
        while (end := data.find(DELIMITER, HEADER.size)) >= 0:
            kind, key, number, last = HEADER.unpack_from(data)
            yield kind, key, number, last, data[HEADER.size : end]
            data = data[end + len(DELIMITER) :]


def try_fault(
    fault: str,
    *,
    acks: str = "ranges",
    version: int = 1,
    tracer: Tracer | None = None,
    timeout_s: int = TIMEOUT_S,
) -> tuple[FaultyBroker, int]:
    """Run the generator against a broker with this fault.

    Returns the broker, and the number of duplicates that the generator counted. Raises LoadError
    with the generator's error if it detected the fault.
    """
    broker, protocol = BROKERS[version](fault), PROTOCOLS[version]
    common: dict[str, Any] = {"timeout_s": timeout_s, "count": COUNT, "classes": CLASS}
    if version == 2:
        common["channel"] = CHANNEL
    options = {**common, "acks": acks, "echo_class": ECHO, "shuffle": 64}
    if tracer:
        options |= tracer.option("subscriber 1", subscriber="1")
        common |= tracer.option("publisher")
    try:
        with Generator("subscribe", protocol, broker.port, **options) as subscriber:
            subscriber.wait_ready()
            with Generator("publish", protocol, broker.port, **common) as publisher:
                if fault in TO_PUBLISHER:
                    publisher.result()
                duplicates = int(subscriber.result()["duplicates"])
                publisher.result()
    finally:
        broker.close()
    return broker, duplicates


def check_honest(acks: str, version: int = 1) -> None:
    """Check that a broker without a fault passes. Raises LoadError.

    The broker must get exactly one ack for each message, with its timer index; in version 2 also
    messages with the right numbers, within the credit.
    """
    broker, duplicates = try_fault("", acks=acks, version=version)
    if duplicates or broker.mistimed or set(broker.acked.values()) != {1}:
        raise LoadError(f"{broker.mistimed} acks ({acks}) named a wrong timer index, or repeated")
    if len(broker.acked) != COUNT:
        raise LoadError(f"{len(broker.acked)} messages were acknowledged, expected {COUNT}")
    if isinstance(broker, FaultyBroker2) and (broker.misnumbered or broker.overdrawn):
        raise LoadError(
            f"{broker.misnumbered} messages carried a wrong number, "
            f"{broker.overdrawn} were beyond the credit"
        )


def check_repeat(version: int = 1) -> None:
    """Check that a duplicate is counted and acknowledged again, without an error."""
    broker, duplicates = try_fault("repeat", version=version)
    if duplicates != 1 or sum(broker.acked.values()) != COUNT + 1:
        raise LoadError(f"{duplicates} duplicates were counted, expected 1")


def check_fault(fault: str, version: int = 1) -> str:
    """Return the error that the generator reported. Raises LoadError if it reported none."""
    expected = faults(version)[fault]
    for timeout_s in SILENCE_S if fault in DETECTED_BY_TIMEOUT else (TIMEOUT_S,):
        try:
            try_fault(fault, version=version, timeout_s=timeout_s)
        except LoadError as error:
            reported = str(error)
        else:
            raise LoadError(f"a broker with the fault {fault!r} passed")
        if expected in reported:
            return reported
    raise LoadError(f"the generator reported {reported!r}, expected {expected!r}")


def main() -> None:
    for version in VERSIONS:
        for acks in ACK_MODES:
            check_honest(acks, version)
            print(f"{version}: honest, acks {acks}: passed, each message acknowledged once")
        check_repeat(version)
        print(f"{version}: repeat: passed, one duplicate counted")
        for fault in faults(version):
            reported = check_fault(fault, version).partition("generator: ")[2]
            print(f"{version}: {fault}: {reported}")


if __name__ == "__main__":
    main()
