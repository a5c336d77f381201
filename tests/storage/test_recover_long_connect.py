"""A server that is killed while it applies a long Connect is as usable as before."""

from __future__ import annotations

from pathlib import Path

from simplebus.core.limits import CREATED_CLASSES_PER_TURN
from tests.behaviour.wire_peer_v2 import Version2Peer, connect_request, connect_version2
from tests.storage.journaled_broker import KeptBus

NAMES = [f"class {n}" for n in range(5 * CREATED_CLASSES_PER_TURN)]


def test_connect_that_is_repeated_after_a_crash_finds_the_same_ids(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.session.allow_split_reads()
    peer.send(connect_request(*NAMES, name="p", instance="i"))
    for _ in range(3):
        bus.broker.continue_request(peer.session)
    created = {cls.name: class_id for class_id, cls in bus.broker.classes.items()}
    assert 0 < len(created) < len(NAMES)
    bus.write()
    bus.crash()
    bus = KeptBus(tmp_path)
    assert {cls.name: class_id for class_id, cls in bus.broker.classes.items()} == created
    second_peer = connect_version2(bus, classes=NAMES, name="p", instance="i")
    assert second_peer.session.created_class_count == len(NAMES) - len(created)
    assert created.items() <= bus.broker.store.class_id_by_name.items()
    assert len(bus.broker.classes) == len(NAMES)
    bus.crash()
