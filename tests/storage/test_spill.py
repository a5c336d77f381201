"""A class that is larger than memory behaves as one that is not."""

from __future__ import annotations

from pathlib import Path

from core.talk import numbered
from core.talk2 import Got, Peer2, ack, peer2, publish, subscribe

from storage.spilled_bus import SpilledBus


def fill(bus: SpilledBus, peer: Peer2, count: int, *, start: int = 0, step: int = 16) -> None:
    """Publish so many, each few of them written before the next come."""
    sent = numbered(count, start=start)
    for at in range(0, count, step):
        peer.say(publish(1, start + at, *sent[at : at + step]))
        bus.sync()


def all_of(bus: SpilledBus, reader: Peer2, *, number: int = 5) -> list[Got]:
    """What a reader gets that acknowledges everything at once."""
    got: list[Got] = []
    while True:
        bus.bring()
        some = reader.got()
        if not some:
            return got
        got += some
        for message in some:
            reader.say(ack(number, message.message_id, message.message_id + 1))


def contents(got: list[Got]) -> list[bytes]:
    return [message.content for message in got]


def test_a_durable_that_was_away_gets_what_did_not_fit(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    reader = peer2(bus, subscribe(1, 5, durable="d"))
    reader.leave()
    fill(bus, peer2(bus), 1000)
    here = bus.statistics(1)
    assert here.ring.messages <= 64
    assert here.spilled + here.ring.messages == 1000
    reader = peer2(bus, subscribe(1, 5, durable="d"))
    assert contents(all_of(bus, reader)) == numbered(1000)
    assert not bus.broker.spilling.behind
    assert bus.statistics(1).spilled == 0


def test_a_live_subscriber_notices_nothing(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    peer2(bus, subscribe(1, 5, durable="d")).leave()
    live = peer2(bus, subscribe(1, 7))
    sender = peer2(bus)
    got = []
    for at in range(0, 1000, 20):
        sender.say(publish(1, at, *numbered(20, start=at)))
        some = live.got()
        got += some
        live.say(ack(7, at, at + 20))
        bus.sync()
    assert contents(got) == numbered(1000)
    assert bus.reads == 0
