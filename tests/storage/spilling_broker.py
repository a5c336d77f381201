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


def small(messages: int = 64, **given: Any) -> Settings:
    """A class holds so many messages in memory."""
    return Settings(limits=Limits(class_messages=messages), full_policy=FullPolicy.SPILL, **given)


class SpilledBus(KeptBus):
    """See the module's law."""

    def __init__(self, path: Path, **given: Any) -> None:
        given.setdefault("settings", small())
        given.setdefault("level", Durability.OS)  # What a sync takes is not of interest here.
        super().__init__(path, **given)
        self.reader = SegmentReader(path, self.directory.salt)
        self.reads = 0
        self.skips_checks = True  # Each `sync` checks the bus.

    def bring(self) -> None:
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
    """Publish so many, each few of them written before the next come."""
    sent = numbered(count, start=start)
    for at in range(0, count, step):
        peer.send(publish(1, start + at, *sent[at : at + step]))
        bus.sync()


def all_of(bus: SpilledBus, reader: Version2Peer, *, number: int = 5) -> list[Version2Message]:
    """Receive all messages of a reader that acks each message at once."""
    got: list[Version2Message] = []
    while some := hear(bus, reader):
        got += some
        for message in some:
            reader.send(ack(number, message.message_id, message.message_id + 1))
    return got


def hear(bus: SpilledBus, reader: Version2Peer) -> list[Version2Message]:
    bus.bring()
    return reader.receive_deliveries()


def contents(got: list[Version2Message]) -> list[bytes]:
    return [message.content for message in got]


def later(bus: SpilledBus, seconds: float) -> None:
    bus.broker.clock.now += seconds
    bus.tick()
    bus.broker.run_due_wakeups()


def fetched(
    bus: SpilledBus, peer: Version2Peer, **what: object
) -> tuple[list[Version2Message], dict[str, int]]:
    """Send a Fetch request. Return its messages and the content of the reply."""
    peer.send(json_request(FETCH, 1, 3, **what))
    got, told = peer.receive_all()
    if not told:
        bus.bring()
        got, told = peer.receive_all()
    (reply,) = told
    return got, reply.content
