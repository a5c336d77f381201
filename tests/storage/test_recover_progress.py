"""After a crash, recorded acks hold, and messages that were sent before count as repeated."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from simplebus.core import checkpoint, commit_log
from simplebus.core.limits import CHECKPOINT_SECONDS, PROGRESS_ROWS_MAX, PROGRESS_SECONDS
from simplebus.core.protocol import frames
from simplebus.core.protocol.durability import Durability
from simplebus.core.snapshot import decode_changes
from tests.behaviour.wire_peer_v2 import (
    INQUIRE,
    Version2Peer,
    ack,
    connect_version2,
    json_request,
    nack,
    publish,
    publish_envelopes,
    subscribe,
)
from tests.models.key_order_model import encode_with_key
from tests.storage.journaled_broker import KeptBus

SUBSCRIPTIONS = {
    "durable": subscribe(1, 5, durable="billing"),
    "group": subscribe(1, 5, durable="billing", group="workers"),
    "key-ordered group": subscribe(1, 5, durable="billing", group="workers", by_key=True),
    "plain": subscribe(1, 5),
}


def restarted(bus: KeptBus, path: Path, level: Durability = Durability.DISK) -> KeptBus:
    bus.crash()
    return KeptBus(path, level=level, now=bus.broker.clock.now)


def redelivered(bus: KeptBus, request: bytes) -> dict[int, int]:
    """Return the attempt of each message that a new reader receives within 120 ticks, by id."""
    reader, attempts_by_id = connect_version2(bus, request), {}
    for _ in range(120):
        while messages := reader.receive_deliveries():
            attempts_by_id.update((message.message_id, message.attempt) for message in messages)
            reader.send(
                *[ack(5, message.message_id, message.message_id + 1) for message in messages]
            )
        bus.broker.clock.now += 1
        bus.tick()
        bus.broker.run_due_wakeups()
    return attempts_by_id


@pytest.mark.parametrize("level", [Durability.DISK, Durability.OS])
@pytest.mark.parametrize("kind", SUBSCRIPTIONS)
def test_acks_and_deliveries_are_in_the_next_write(
    tmp_path: Path, kind: str, level: Durability
) -> None:
    bus = KeptBus(tmp_path, level=level)
    reader = connect_version2(bus, SUBSCRIPTIONS[kind])
    peer = connect_version2(bus, name="till")
    bus.sync()
    keyed = [encode_with_key(b"%d" % number, b"") for number in range(6)]
    peer.send(publish_envelopes(1, 0, *keyed))
    assert reader.receive_message_ids() == [0, 1, 2, 3, 4, 5]
    reader.send(ack(5, 0, 2), ack(5, 4, 5))
    bus.broker.clock.now += PROGRESS_SECONDS
    bus.sync()
    assert redelivered(restarted(bus, tmp_path, level), SUBSCRIPTIONS[kind]) == {2: 2, 3: 2, 5: 2}


@pytest.mark.parametrize("kind", SUBSCRIPTIONS)
def test_scan_records_deliveries_that_change_no_cursor(tmp_path: Path, kind: str) -> None:
    """The cursor of a group passes messages that its members are sent later."""
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, SUBSCRIPTIONS[kind])
    peer = connect_version2(bus, name="till")
    peer.send(publish_envelopes(1, 0, encode_with_key(b"a", b"")))
    bus.sync()
    assert reader.receive_message_ids() == [0]
    bus.broker.clock.now += CHECKPOINT_SECONDS
    bus.sync()
    assert redelivered(restarted(bus, tmp_path), SUBSCRIPTIONS[kind]) == {0: 2}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", SUBSCRIPTIONS)
def test_no_recorded_ack_or_delivery_is_forgotten(tmp_path: Path, kind: str, seed: int) -> None:
    random = Random(seed)
    bus = KeptBus(tmp_path)
    number, acked = 0, set[int]()
    attempts: dict[int, int] = {}
    """Number of deliveries of each message."""
    for _ in range(4):
        reader = connect_version2(bus, SUBSCRIPTIONS[kind])
        peer = connect_version2(bus, name="till")
        open_ids: list[int] = []
        for _ in range(random.randrange(4, 20)):
            count = random.randrange(4)
            envelopes = [
                encode_with_key(
                    b"%d" % random.randrange(5), not_before_ms=random.choice([None, 1, 20])
                )
                for _ in range(count)
            ]
            peer.send(publish_envelopes(1, number, *envelopes))
            number += count
            bus.broker.run_due_wakeups()
            for message in reader.receive_deliveries():
                assert message.message_id not in acked
                attempts[message.message_id] = attempts.get(message.message_id, 0) + 1
                assert message.attempt == attempts[message.message_id]
                open_ids.append(message.message_id)
            random.shuffle(open_ids)
            acked_ids = [open_ids.pop() for _ in range(random.randrange(len(open_ids) + 1))]
            if acked_ids and random.random() < 0.2:
                rejected_id = acked_ids.pop()
                reader.send(nack(5, rejected_id, rejected_id + 1, random.choice([0, 3])))
            reader.send(*[ack(5, acked_id, acked_id + 1) for acked_id in acked_ids])
            bus.broker.clock.now += PROGRESS_SECONDS
            bus.sync()
            acked.update(acked_ids)
        bus = restarted(bus, tmp_path)
        number = bus.broker.classes[1].ring.head
    unacked_ids = set(range(number)) - acked
    assert redelivered(bus, SUBSCRIPTIONS[kind]) == {
        message_id: attempts.get(message_id, 0) + 1 for message_id in unacked_ids
    }
    bus.crash()


def test_progress_alone_is_written_at_intervals(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    connect_version2(bus, publish(1, 0, b"a", b"b", b"c"), name="till")
    bus.sync()
    reader.receive_message_ids()
    batches = []
    for number in range(3):
        reader.send(ack(5, number, number + 1))
        batches.append(bus.keeper.build_write_batch())
        assert bus.keeper.has_unrecorded_progress == (batches[-1] is None)
        if number == 1:
            bus.broker.clock.now += PROGRESS_SECONDS
    assert [batch is None for batch in batches] == [False, True, False]
    bus.crash()


def test_class_is_recorded_once_for_all_its_subscriptions(tmp_path: Path) -> None:
    """Each record examines all positions of the class."""
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, *[subscribe(1, number) for number in range(1, 20)])
    bus.sync()
    connect_version2(bus, publish(1, 0, b"a"), name="till")
    reader.receive_message_ids()
    bus.broker.clock.now += PROGRESS_SECONDS
    batch = bus.keeper.build_write_batch()
    assert batch is not None
    assert [cls.class_id for cls in decode_changes(batch.changes).classes] == [1]
    bus.crash()


@pytest.mark.parametrize("are_requested", [False, True])
def test_progress_of_many_positions_is_recorded_in_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_requested: bool
) -> None:
    count = 10
    for module in (checkpoint, commit_log):
        monkeypatch.setattr(module, "PROGRESS_POSITIONS_PER_TURN", 4)
    bus = KeptBus(tmp_path)
    reader = connect_version2(
        bus, *[subscribe(1, n, durable=f"d {n}") for n in range(1, 1 + count)]
    )
    connect_version2(bus, publish(1, 0, b"a"), name="till")
    bus.sync()
    reader.receive_message_ids()
    bus.sync()
    reader.send(*[ack(n, 0, 1) for n in range(1, 1 + count)])
    position = bus.commit_log.append_progress_request(count) if are_requested else 0
    recorded_counts = []
    while bus.keeper.has_unrecorded_progress:
        bus.broker.clock.now += 0.0 if are_requested else PROGRESS_SECONDS
        batch = bus.keeper.build_write_batch()
        assert batch is not None
        recorded = decode_changes(batch.changes).progress
        recorded_counts.append(len(recorded))
        if are_requested and len(recorded_counts) == 1:
            # Later progress of a position is recorded behind what was requested.
            positions = {position.durable: position for position in bus.broker.classes[1].positions}
            bus.broker.store.position_changes.record_progress(positions[recorded[0].durable])
    assert recorded_counts == [4, 4, 3 if are_requested else 2]
    if are_requested:
        assert bus.commit_log.last_batch_number == position
        assert bus.commit_log.is_empty
    bus.crash()


def test_acks_inquiry_is_answered_when_all_portions_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (checkpoint, commit_log):
        monkeypatch.setattr(module, "PROGRESS_POSITIONS_PER_TURN", 4)
    bus = KeptBus(tmp_path)
    numbers = range(1, 11)
    reader = connect_version2(bus, *[subscribe(1, n, durable=f"d {n}") for n in numbers])
    connect_version2(bus, publish(1, 0, b"a"), name="till")
    bus.sync()
    reader.receive_message_ids()
    bus.sync()
    reader.send(*[ack(n, 0, 1) for n in numbers], json_request(INQUIRE, 0, 5, about="acks"))
    for _ in range(2):
        bus.sync()
        assert reader.receive_replies() == []
    bus.sync()
    assert [reply.kind for reply in reader.receive_replies()] == ["inquire"]
    bus.crash()
    bus = KeptBus(tmp_path)
    floors = {
        position.durable: position.window.floor for position in bus.broker.classes[1].positions
    }
    assert floors == {f"d {number}": 1 for number in numbers}
    bus.crash()


def test_clock_set_back_delays_no_progress(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    connect_version2(bus, publish(1, 0, b"a", b"b"), name="till")
    bus.sync()
    reader.receive_message_ids()
    for number in range(2):
        reader.send(ack(5, number, number + 1))
        bus.broker.clock.now -= 3600
        assert bus.keeper.build_write_batch() is not None
    bus.crash()


def test_costly_progress_waits_for_the_complete_scan(tmp_path: Path) -> None:
    """Otherwise every batch would repeat all rows of a position."""
    bus = KeptBus(tmp_path)
    request = subscribe(1, 5, durable="billing", group="workers", max_in_flight=1000)
    reader = connect_version2(bus, request)
    bus.sync()
    peer = connect_version2(bus, name="till")
    count = 2 * PROGRESS_ROWS_MAX + 4
    peer.send(publish(1, 0, *[b"x"] * count))
    assert len(reader.receive_message_ids()) == count
    reader.send(*[nack(5, number, number + 1, 60_000) for number in range(0, count, 2)])
    bus.sync()
    for number in range(1, 9, 2):
        reader.send(ack(5, number, number + 1))
        bus.broker.clock.now += PROGRESS_SECONDS
        assert bus.keeper.build_write_batch() is None
        assert bus.keeper.has_unrecorded_progress
    bus.broker.clock.now += 10
    batch = bus.keeper.build_write_batch()
    assert batch is not None
    assert not bus.keeper.has_unrecorded_progress
    bus.crash()


def test_a_reader_without_acks_is_recorded(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader: Version2Peer = connect_version2(bus, subscribe(1, 5, durable="billing"))
    bus.sync()
    peer = connect_version2(bus, publish(1, 0, b"a"), name="till")
    assert reader.receive_message_ids() == [0]
    bus.sync()
    peer.send(publish(1, 1, b"b"))
    bus = restarted(bus, tmp_path)
    assert redelivered(bus, subscribe(1, 5, durable="billing")) == {0: 2}
    bus.crash()


# Acks with a reply --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SUBSCRIPTIONS)
def test_reply_about_acks_waits_until_they_are_stored(tmp_path: Path, kind: str) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, SUBSCRIPTIONS[kind])
    bus.sync()
    peer = connect_version2(bus, name="till")
    keyed = [encode_with_key(b"%d" % number, b"") for number in range(3)]
    peer.send(publish_envelopes(1, 0, *keyed))
    reader.receive_all()
    bus.sync()
    reader.send(ack(5, 0, 2), json_request(frames.INQUIRE, request=9, about="acks"))
    assert reader.receive_replies() == []
    bus.write()
    assert reader.receive_replies() == []
    bus.sync()
    (reply,) = reader.receive_replies()
    assert (reply.message_id, reply.content) == (9, {"about": "acks"})
    assert redelivered(restarted(bus, tmp_path), SUBSCRIPTIONS[kind]) == {2: 2}


def test_reply_about_acks_waits_also_for_costly_progress(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    request = subscribe(1, 5, durable="billing", group="workers", max_in_flight=1000)
    reader = connect_version2(bus, request)
    bus.sync()
    count = 2 * PROGRESS_ROWS_MAX + 4
    connect_version2(bus, publish(1, 0, *[b"x"] * count), name="till")
    reader.receive_message_ids()
    reader.send(*[nack(5, number, number + 1, 60_000) for number in range(0, count, 2)])
    bus.sync()
    bus.sync()
    reader.send(ack(5, 1, 2), json_request(frames.INQUIRE, request=9, about="acks"))
    bus.sync()
    assert [reply.message_id for reply in reader.receive_replies()] == [9]
    bus = restarted(bus, tmp_path)
    window = bus.broker.classes[1].named_positions["billing", ""].window
    assert window.unacked_ranges(0, 3) == [(0, 1), (2, 3)]
    bus.crash()


def test_reply_about_acks_does_not_wait_without_durability(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path, level=Durability.MEMORY)
    reader = connect_version2(bus, classes=[1])
    reader.send(json_request(frames.INQUIRE, request=9, about="acks"))
    assert [reply.message_id for reply in reader.receive_replies()] == [9]
    bus.crash()
