"""Messages that wait for space in the dead-letter class, after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simplebus.core.errors import Reason
from simplebus.core.limits import PROGRESS_SECONDS
from tests.behaviour.wire_peer_v2 import (
    ack,
    connect_version2,
    nack,
    publish,
    publish_envelopes,
    subscribe,
)
from tests.core.broker.test_purge import purge
from tests.core.subscription.test_pending_dead_letters import (
    purge_dead_letters,
    two_dead_letters_settings,
)
from tests.models.key_order_model import encode_with_key
from tests.storage.journaled_broker import KeptBus
from tests.storage.test_recover_redelivery import KINDS, reader_of, receive_attempts


def after_a_crash(bus: KeptBus, path: Path) -> KeptBus:
    # The next checkpoint includes all changes.
    now = bus.broker.clock.now = bus.broker.clock.now + 1
    bus.sync()
    bus.crash()
    return KeptBus(path, settings=two_dead_letters_settings(), now=now)


def taken_out(bus: KeptBus) -> list[str]:
    """Sync, then purge all dead letters. Return their sequences."""
    bus.sync()
    return purge_dead_letters(bus)


@pytest.mark.parametrize("kind", KINDS)
def test_pending_dead_letter_is_not_redelivered(tmp_path: Path, kind: dict[str, Any]) -> None:
    bus = KeptBus(tmp_path, settings=two_dead_letters_settings())
    reader = reader_of(bus, **kind)
    connect_version2(
        bus, publish_envelopes(1, 0, *map(encode_with_key, (b"a", b"b", b"c", b"d", b"e", b"f")))
    )
    assert receive_attempts(reader) == [(n, 1) for n in range(6)]
    bus.sync()
    reader.send(nack(5, 0, 5, "terminate"), ack(5, 3, 4) if kind == {} else b"")
    bus = after_a_crash(bus, tmp_path)
    reader = reader_of(bus, **kind)
    assert receive_attempts(reader) == [(5, 2)]
    reader.send(ack(5, 5, 6))
    assert taken_out(bus) == ["0", "1"]
    bus = after_a_crash(bus, tmp_path)
    expected_sequences = ["2", "4"] if kind == {} else ["2", "3"]
    assert taken_out(bus) == expected_sequences
    assert taken_out(bus) == ([] if kind == {} else ["4"])
    assert bus.broker.classes[1].ring.statistics().message_count == 0
    bus.close()


def test_exhausted_message_is_dead_lettered_after_restart(
    tmp_path: Path,
) -> None:
    bus = KeptBus(tmp_path, settings=two_dead_letters_settings())
    reader = reader_of(bus, max_deliveries=1)
    connect_version2(bus, publish(1, 0, b"a", b"b", b"c"))
    receive_attempts(reader)
    bus.sync()
    reader.send(nack(5, 0, 3, 0))
    assert receive_attempts(reader) == []
    bus = after_a_crash(bus, tmp_path)
    connect_version2(bus, subscribe(1, 6, durable="other"))
    assert taken_out(bus) == ["0", "1"]
    assert taken_out(bus) == ["2"]
    connect_version2(bus, purge(0, 3))
    assert Reason.NO_DEAD_LETTER not in bus.statistics(1).dropped
    bus.close()


def test_dead_letters_are_synced_before_their_position_is_written(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    peer = connect_version2(bus, publish(1, 0, b"first", b"second"), name="till")
    bus.sync()
    assert reader.receive_message_ids() == [0, 1]
    synced = bus.journal.files_synced
    peer.send(publish(1, 2, b"third"))
    bus.write()
    assert bus.journal.files_synced == synced
    reader.send(nack(5, 0, 1, "terminate"))
    bus.write()
    assert bus.journal.files_synced > synced
    bus.crash()


def test_dead_letter_of_a_later_turn_is_stored_once(tmp_path: Path) -> None:
    """Messages are given up in one write batch, and become dead letters in another one."""
    bus = KeptBus(tmp_path)
    bus.broker.store.limit_turns(1)
    reader = reader_of(bus, max_deliveries=1)
    connect_version2(bus, publish(1, 0, b"a", b"b"))
    assert receive_attempts(reader) == [(0, 1), (1, 1)]
    reader.send(nack(5, 0, 2, 0))
    assert receive_attempts(reader) == []
    bus.sync()
    assert bus.broker.store.has_deferred_work
    while bus.broker.store.has_deferred_work:
        bus.broker.store.continue_deferred_work()
    bus.broker.end_turn()
    bus.broker.clock.now += PROGRESS_SECONDS
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    bus.tick()
    (dead_letters,) = [cls for cls in bus.broker.classes.values() if cls.name]
    assert dead_letters.ring.head == 2
    bus.crash()
