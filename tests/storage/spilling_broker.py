"""Broker whose classes exceed memory and are read back as in a server, without threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simplebus.core.broker.broker import Settings
from simplebus.core.limits import Limits
from simplebus.core.message_class.spill import SpillRead
from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import FullPolicy
from simplebus.storage.segment_reader import SegmentReader
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer_v2 import (
    FETCH,
    Version2Message,
    Version2Peer,
    ack,
    json_request,
    publish,
)
from tests.storage.journaled_broker import KeptBus


def spill_settings(class_messages: int = 64, **options: Any) -> Settings:
    """Return settings under which a class holds `class_messages` messages in memory."""
    return Settings(
        limits=Limits(class_messages=class_messages), full_policy=FullPolicy.SPILL, **options
    )


class SpilledBus(KeptBus):
    """Journaled broker that spills messages, with `serve_reads` in place of the reader thread."""

    def __init__(self, path: Path, **options: Any) -> None:
        options.setdefault("settings", spill_settings())
        options.setdefault("level", Durability.OS)  # Syncs are slow and not tested here.
        super().__init__(path, **options)
        self.reader = SegmentReader(path, self.directory.salt)
        self.reads = 0
        self.skips_checks = True  # Each `sync` checks the bus.

    def serve_reads(self) -> None:
        """Serve read requests until none are left."""
        spilling = self.broker.spill_manager
        assert spilling is not None
        while True:
            self.broker.end_turn()
            reads = spilling.drain_reads()
            if not reads:
                break
            for read in reads:
                self.answer(read)

    def answer(self, read: SpillRead) -> None:
        """Serve one read request."""
        assert self.broker.spill_manager is not None
        self.reads += 1
        try:
            found = self.reader.read(read)
        except OSError:
            self.broker.spill_manager.fail_read(read)
        else:
            self.broker.spill_manager.complete_read(read, found)


def fill(
    bus: SpilledBus, peer: Version2Peer, count: int, *, start: int = 0, step: int = 16
) -> None:
    """Publish `count` messages in batches of `step`, and sync each batch."""
    sent = numbered(count, start=start)
    for offset in range(0, count, step):
        peer.send(publish(1, start + offset, *sent[offset : offset + step]))
        bus.sync()


def receive_and_ack_all(
    bus: SpilledBus, reader: Version2Peer, *, number: int = 5
) -> list[Version2Message]:
    """Receive all messages of a reader that acks each message at once."""
    received: list[Version2Message] = []
    while batch := receive_available(bus, reader):
        received += batch
        for message in batch:
            reader.send(ack(number, message.message_id, message.message_id + 1))
    return received


def receive_available(bus: SpilledBus, reader: Version2Peer) -> list[Version2Message]:
    bus.serve_reads()
    return reader.receive_deliveries()


def contents(messages: list[Version2Message]) -> list[bytes]:
    return [message.content for message in messages]


def advance_clock(bus: SpilledBus, seconds: float) -> None:
    bus.broker.clock.now += seconds
    bus.tick()
    bus.broker.run_due_wakeups()


def fetch(
    bus: SpilledBus, peer: Version2Peer, **options: object
) -> tuple[list[Version2Message], dict[str, int]]:
    """Send a Fetch request. Return its messages and the content of the reply."""
    peer.send(json_request(FETCH, 1, 3, **options))
    messages, replies = peer.receive_all()
    if not replies:
        bus.serve_reads()
        messages, replies = peer.receive_all()
    (reply,) = replies
    return messages, reply.content
