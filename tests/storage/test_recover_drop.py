"""Restarts while a full class drops its oldest messages in several turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simplebus.core.limits import CHECKPOINT_PAUSE_SECONDS, Limits
from simplebus.core.settings import FullPolicy, Settings
from simplebus.core.subscription import unacked_messages
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer_v2 import Version2Peer, connect_version2, nack, publish, subscribe
from tests.storage.journaled_broker import START, KeptBus

CLASS_MESSAGES = 24
DROPPED_COUNT = 12
KINDS: list[dict[str, Any]] = [{}, {"group": "g"}, {"group": "g", "by_key": True}]


def create_bus(path: Path, *, now: float = START) -> KeptBus:
    settings = Settings(
        limits=Limits(class_messages=CLASS_MESSAGES), full_policy=FullPolicy.DROP_OLDEST
    )
    bus = KeptBus(path, settings=settings, now=now)
    bus.broker.store.limit_turns(1)
    return bus


def finish_deferred_work(bus: KeptBus) -> None:
    while bus.broker.store.has_deferred_work:
        bus.broker.store.continue_deferred_work()
    bus.broker.end_turn()


def receive_attempts(peers: list[Version2Peer]) -> dict[int, int]:
    """Return the attempt of each received message, by sequence."""
    return {
        delivery.message_id: delivery.attempt
        for peer in peers
        for delivery in peer.receive_deliveries()
    }


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_recovery_completes_a_drop(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: dict[str, Any],
    turns: int,
    is_stopped: bool,
) -> None:
    monkeypatch.setattr(unacked_messages, "RECLAIMED_MEMBERS_PER_TURN", 1)
    bus = create_bus(tmp_path)
    others = connect_version2(bus, subscribe(1, 1, durable="a"), subscribe(1, 2, durable="b"))
    readers = [
        connect_version2(bus, subscribe(1, 5, durable="d", **kind)) for _ in range(2 if kind else 1)
    ]
    bus.sync()
    publisher = connect_version2(bus, publish(1, 0, *numbered(CLASS_MESSAGES)), name="till")
    finish_deferred_work(bus)
    assert len(receive_attempts(readers)) == CLASS_MESSAGES
    for reader in readers:
        reader.send(nack(5, 0, CLASS_MESSAGES, 0))
    finish_deferred_work(bus)
    assert receive_attempts(readers) == dict.fromkeys(range(CLASS_MESSAGES), 2)
    bus.sync()

    publisher.send(publish(1, CLASS_MESSAGES, *numbered(DROPPED_COUNT)))
    for _ in range(turns):
        if bus.broker.store.oldest_dropper.has_waiting:
            bus.broker.store.continue_deferred_work()
    is_complete = not bus.broker.store.oldest_dropper.has_waiting
    bus.broker.clock.now += CHECKPOINT_PAUSE_SECONDS
    bus.sync()
    bus.close() if is_stopped else bus.crash()

    bus = create_bus(tmp_path, now=START + 3600)
    readers = [connect_version2(bus, subscribe(1, 5, durable="d", **kind))]
    finish_deferred_work(bus)
    sent_before = dict.fromkeys(range(DROPPED_COUNT, CLASS_MESSAGES), 3)
    stored = range(CLASS_MESSAGES, CLASS_MESSAGES + DROPPED_COUNT) if is_complete else ()
    assert receive_attempts(readers) == sent_before | dict.fromkeys(stored, 1)
    ring = bus.broker.classes[1].ring
    assert (ring.floor, ring.head) == (DROPPED_COUNT, CLASS_MESSAGES + len(stored))
    bus.crash()
    assert not others.session.is_closed
