"""Restarts while a full class drops its oldest messages in several turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simplebus.core.limits import CHECKPOINT_SECONDS, PROGRESS_SECONDS, Limits
from simplebus.core.settings import FullPolicy, Settings
from simplebus.core.subscription import unacked_messages
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer_v2 import Version2Peer, connect_version2, nack, publish, subscribe
from tests.storage.journaled_broker import START, KeptBus

CLASS_MESSAGES = 24
DROPPED_COUNT = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "durable": {},
    "group": {"group": "g"},
    "key-ordered group": {"group": "g", "by_key": True},
}


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
@pytest.mark.parametrize("turn_count", range(6))
@pytest.mark.parametrize("kind", OPTIONS)
def test_recovery_completes_a_drop(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    turn_count: int,
    is_stopped: bool,
) -> None:
    monkeypatch.setattr(unacked_messages, "RECLAIMED_MEMBERS_PER_TURN", 1)
    subscribe_reader = subscribe(1, 5, durable="d", **OPTIONS[kind])
    bus = create_bus(tmp_path)
    # More positions, so that the drop takes several turns.
    connect_version2(bus, subscribe(1, 1, durable="a"), subscribe(1, 2, durable="b"))
    readers = [
        connect_version2(bus, subscribe_reader) for _ in range(1 if kind == "durable" else 2)
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
    for _ in range(turn_count):
        if bus.broker.store.oldest_dropper.has_waiting:
            bus.broker.store.continue_deferred_work()
    is_drop_complete = not bus.broker.store.oldest_dropper.has_waiting
    bus.broker.clock.now += PROGRESS_SECONDS  # The next batch records all deliveries.
    bus.sync()
    if is_stopped:
        bus.close()
    else:
        bus.crash()

    bus = create_bus(tmp_path, now=START + 3600)  # No redelivery is delayed any more.
    reader = connect_version2(bus, subscribe_reader)
    finish_deferred_work(bus)
    redelivered = dict.fromkeys(range(DROPPED_COUNT, CLASS_MESSAGES), 3)
    # Before the drop is complete, new messages are not stored: the publisher sends them again.
    new_count = DROPPED_COUNT if is_drop_complete else 0
    new = dict.fromkeys(range(CLASS_MESSAGES, CLASS_MESSAGES + new_count), 1)
    assert receive_attempts([reader]) == redelivered | new
    ring = bus.broker.classes[1].ring
    assert (ring.floor, ring.head) == (DROPPED_COUNT, CLASS_MESSAGES + new_count)
    bus.crash()


def test_recovery_repeats_the_drops_before_a_drop_in_several_turns(tmp_path: Path) -> None:
    bus = create_bus(tmp_path)
    bus.broker.store.limit_turns(2)
    subscribe_reader = subscribe(1, 5, durable="d")
    reader = connect_version2(bus, subscribe_reader)
    connect_version2(bus, subscribe(1, 1, durable="a"))
    bus.sync()
    publisher = connect_version2(bus, publish(1, 0, *numbered(CLASS_MESSAGES)), name="till")
    finish_deferred_work(bus)
    assert len(receive_attempts([reader])) == CLASS_MESSAGES
    reader.disconnect()
    bus.broker.clock.now += CHECKPOINT_SECONDS
    bus.sync()
    publisher.send(publish(1, CLASS_MESSAGES, b"at once"))
    assert bus.broker.classes[1].ring.floor == 1
    connect_version2(bus, subscribe(1, 1, start="earliest"))
    publisher.send(publish(1, CLASS_MESSAGES + 1, b"in turns"))
    assert bus.broker.store.oldest_dropper.has_waiting
    finish_deferred_work(bus)
    bus.broker.clock.now += PROGRESS_SECONDS
    bus.sync()
    bus.crash()

    bus = create_bus(tmp_path)
    reader = connect_version2(bus, subscribe_reader)
    finish_deferred_work(bus)
    assert min(receive_attempts([reader])) == bus.broker.classes[1].ring.floor == 2
    bus.crash()
