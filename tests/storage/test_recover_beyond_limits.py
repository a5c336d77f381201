"""Recovery of classes that exceed their limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplebus.core.limits import Limits
from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import FullPolicy, Settings
from tests.behaviour.wire_peer_v2 import ack, connect_version2, publish, subscribe
from tests.storage.journaled_broker import KeptBus
from tests.storage.test_journal import next_number, payloads

SMALL = Limits(class_bytes=1 << 18, frame_bytes=1 << 16)
FEW = Limits(class_messages=200)
SHORT = Limits(class_bytes=1 << 18, total_bytes=1 << 18, frame_bytes=1 << 16)


@pytest.mark.parametrize("limits", [SMALL, FEW, SHORT])
@pytest.mark.parametrize("size", [2, 2000])
def test_released_messages_do_not_prevent_start(tmp_path: Path, limits: Limits, size: int) -> None:
    """Records of released messages remain; at this durability, acks are written later."""
    settings = Settings(limits=limits)
    bus = KeptBus(tmp_path, settings=settings, level=Durability.MEMORY)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    bus.sync()
    peer = connect_version2(bus, name="till")
    sent = 0
    while sent < 600:
        peer.send(publish(1, sent, *[b"%06d" % n + bytes(size) for n in range(sent, sent + 50)]))
        sent += 50
        bus.write()
        reader.receive_message_ids()
        reader.send(ack(5, 0, sent))
    assert not len(bus.broker.classes[1].ring)
    bus.crash()
    bus = KeptBus(tmp_path, settings=settings, level=Durability.MEMORY)
    ring = bus.broker.classes[1].ring
    assert [int(payload[:6]) for payload in payloads(bus)] == list(range(600 - len(ring), 600))
    assert len(ring) >= 500
    assert ring.is_over_limit == (limits is FEW or size == 2000)
    assert next_number(bus) == 600
    # Publishers wait until the class is within its limits again; then the limits hold.
    peer = connect_version2(bus, name="till")
    peer.send(publish(1, 600, b"%06d" % 600 + bytes(size)))
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    reader.receive_message_ids()
    reader.send(ack(5, 0, 600))
    bus.broker.check_invariants()
    bus.tick()
    bus.broker.check_invariants()
    assert not ring.is_over_limit
    assert ring.statistics().memory_bytes <= limits.class_bytes
    assert payloads(bus) == [b"%06d" % 600 + bytes(size)]
    bus.crash()


@pytest.mark.parametrize("policy", [FullPolicy.BLOCK, FullPolicy.DROP_OLDEST])
@pytest.mark.parametrize("sizes", [(3,), (1000,), (9000, 1)])
def test_recovers_full_class(tmp_path: Path, policy: FullPolicy, sizes: tuple[int, ...]) -> None:
    settings = Settings(limits=SMALL, full_policy=policy)
    bus = KeptBus(tmp_path, settings=settings)
    connect_version2(bus, subscribe(1, 5, durable="billing"))
    peer = connect_version2(bus, name="till")
    sent, ring, at_once = 0, None, 400_000 // (sum(sizes) + 200)
    while not peer.session.parked_messages and (ring is None or not ring.floor):
        messages = [bytes(sizes[n % len(sizes)]) for n in range(sent, sent + at_once)]
        peer.send(publish(1, sent, *messages))
        sent += at_once
        bus.write()
        ring = bus.broker.classes[1].ring
    bus.broker.clock.now += 1
    bus.write()
    bounds_before = ring.floor, ring.head
    bus.crash()
    bus = KeptBus(tmp_path, settings=settings)
    found = bus.broker.classes[1].ring
    assert (found.floor, found.head) == bounds_before
    bus.tick()
    bus.broker.check_invariants()
    bus.crash()
