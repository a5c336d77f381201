"""Classes that exceed memory: reading back, waiting publishers and counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.errors import Reason
from simplebus.core.message_class import spill
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.inquiry import ClassInfo, ClassInquiry
from simplebus.core.settings import ClassSettings, FullPolicy, Retention
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer import subscribe as subscribe1
from tests.behaviour.wire_peer_v2 import (
    FETCH,
    Version2Message,
    ack,
    channel_envelope,
    connect_version2,
    json_request,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    unsubscribe,
)
from tests.storage.spilling_broker import (
    SpilledBus,
    advance_clock,
    contents,
    fetch,
    fill,
    receive_and_ack_all,
    receive_available,
    spill_settings,
)


def test_spill_requires_journal() -> None:
    with pytest.raises(ValueError, match="needs a journal"):
        Broker(Settings(full_policy=FullPolicy.SPILL))
    with pytest.raises(ValueError, match="needs a journal"):
        Broker(Settings(classes={"x": ClassSettings(full_policy=FullPolicy.SPILL)}))


# Lagging subscribers -----------------------------------------------------------------------------


def test_durable_receives_spilled_messages(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    reader.disconnect()
    fill(bus, connect_version2(bus), 1000)
    statistics = bus.statistics(1)
    assert statistics.ring.message_count <= 64
    assert statistics.spilled + statistics.ring.message_count == 1000
    assert 800 * 13 < statistics.spilled_bytes < 1000 * 30
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    assert contents(receive_and_ack_all(bus, reader)) == numbered(1000)
    assert not bus.broker.spill_manager.readers  # type: ignore[union-attr]
    assert bus.broker.spill_manager.budget.used_bytes == 0  # type: ignore[union-attr]
    assert bus.statistics(1).spilled == 0


def test_live_subscriber_is_not_affected(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    live = connect_version2(bus, subscribe(1, 7))
    sender = connect_version2(bus)
    received = []
    for first in range(0, 1000, 20):
        sender.send(publish(1, first, *numbered(20, start=first)))
        batch = live.receive_deliveries()
        received += batch
        live.send(ack(7, first, first + 20))
        bus.sync()
    assert contents(received) == numbered(1000)
    assert bus.reads == 0


def test_first_subscriber_receives_spilled_backlog(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 300)
    old_reader = bus.peer(subscribe1(1))
    received: list[bytes] = []
    for _ in ("from disk", "from memory"):
        bus.serve_reads()
        received += [message.payload for message in old_reader.receive_messages()]
    assert received == numbered(300)
    old_reader.disconnect()
    assert contents(receive_and_ack_all(bus, connect_version2(bus, subscribe(1, 5)))) == numbered(
        300
    )


def test_spilled_envelopes_keep_channels(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    connect_version2(bus, subscribe(1, 5, durable="d", channels=["eu.*"])).disconnect()
    sender = connect_version2(bus)
    for first in range(0, 300, 20):
        for number in range(first, first + 20):
            channel = "eu.de" if number % 3 else "us.ny"
            sender.send(publish_envelopes(1, number, channel_envelope(channel, b"%d" % number)))
        bus.sync()
    reader = connect_version2(bus, subscribe(1, 5, durable="d", channels=["eu.*"]))
    found = [int(each.content[8:]) for each in receive_and_ack_all(bus, reader)]
    assert found == [number for number in range(300) if number % 3]


@pytest.mark.parametrize("by_key", [False, True])
def test_group_members_receive_spilled_messages_once(tmp_path: Path, by_key: bool) -> None:
    bus = SpilledBus(tmp_path)
    options: dict[str, object] = {"durable": "g", "group": "g"}
    if by_key:
        options["by_key"] = True
    connect_version2(bus, subscribe(1, 5, **options)).disconnect()
    fill(bus, connect_version2(bus), 400)
    first_member, second_member = (
        connect_version2(bus, subscribe(1, 5, **options)),
        connect_version2(bus, subscribe(1, 6, **options)),
    )
    received: list[Version2Message] = []
    for _ in range(100):
        for reader, number in ((first_member, 5), (second_member, 6)):
            for message in receive_available(bus, reader):
                received.append(message)
                reader.send(ack(number, message.message_id, message.message_id + 1))
    assert sorted(each.message_id for each in received) == list(range(400))
    assert {each.number for each in received} == {5, 6}
    assert bus.statistics(1).spilled == 0


def test_lagging_subscribers_are_independent(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    for name in ("a", "b"):
        connect_version2(bus, subscribe(1, 5, durable=name)).disconnect()
    fill(bus, connect_version2(bus), 300)
    stuck = connect_version2(bus, subscribe(1, 5, durable="a", max_in_flight=1))
    assert len(receive_available(bus, stuck)) == 1
    assert contents(
        receive_and_ack_all(bus, connect_version2(bus, subscribe(1, 5, durable="b")))
    ) == numbered(300)
    assert (
        contents(receive_and_ack_all(bus, stuck)) == numbered(300)[1:]
        or stuck.receive_deliveries() == []
    )


def test_lagging_durable_resumes_after_disconnect(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    fill(bus, connect_version2(bus), 300)
    reader = connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=50))
    assert len(receive_available(bus, reader)) == 50
    reader.send(ack(5, 10, 20))
    reader.disconnect()
    bus.serve_reads()
    assert bus.broker.spill_manager.budget.used_bytes == 0  # type: ignore[union-attr]
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    received = receive_and_ack_all(bus, reader)
    assert sorted(each.message_id for each in received) == [*range(10), *range(20, 300)]
    assert {each.attempt for each in received if each.message_id < 50} == {2}


def test_redelivery_keeps_order_for_lagging_subscriber(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    fill(bus, connect_version2(bus), 4)
    assert [each.message_id for each in receive_available(bus, reader)] == [0, 1, 2, 3]
    reader.send(nack(5, 1, 2, 0))
    assert [each.message_id for each in receive_available(bus, reader)] == [1]
    # Unacknowledged messages are redelivered at once, the nacked one after its backoff.
    reader.disconnect()
    fill(bus, connect_version2(bus), 1000)
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    assert reader.receive_deliveries() == []  # The disk does not answer yet.
    for _ in range(30):
        advance_clock(bus, 1.0)
    assert [each.message_id for each in receive_available(bus, reader)][:6] == [0, 2, 3, 1, 4, 5]


def test_closing_lagging_subscription_frees_memory(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    fill(bus, connect_version2(bus), 300)
    reader = connect_version2(bus, subscribe(1, 5, durable="d"), subscribe(1, 6, start="new"))
    bus.broker.end_turn()  # A read is in progress.
    reader.send(unsubscribe(5, forget=True))
    bus.serve_reads()
    assert bus.statistics(1).spilled == 0
    assert not bus.broker.spill_manager.readers  # type: ignore[union-attr]


# Delayed messages ---------------------------------------------------------------------------------


def test_delayed_message_blocks_nothing(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    live, sender = connect_version2(bus, subscribe(1, 7)), connect_version2(bus)
    sender.send(publish(1, 0, b"first"))
    assert contents(live.receive_deliveries()) == [b"first"]
    live.send(nack(7, 0, 1, 3600_000))
    received = []
    for first in range(1, 1001, 20):
        sender.send(publish(1, first, *numbered(20, start=first)))
        bus.sync()
        for message in receive_available(bus, live):
            received.append(message.content)
            live.send(ack(7, message.message_id, message.message_id + 1))
    assert received == numbered(1000, start=1)
    assert bus.statistics(1).ring.message_count <= 64
    advance_clock(bus, 3600)
    (message,) = receive_available(bus, live)
    assert (message.content, message.attempt) == (b"first", 2)
    live.send(ack(7, 0, 1))
    bus.serve_reads()
    assert bus.statistics(1).spilled == bus.statistics(1).ring.message_count == 0


def test_acked_messages_are_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "SPILL_READ_BYTES", 4096)
    bus = SpilledBus(tmp_path)
    live, sender = connect_version2(bus, subscribe(1, 7)), connect_version2(bus)
    sender.send(publish(1, 0, b"first"))
    live.receive_deliveries()
    live.send(nack(7, 0, 1, 3600_000))
    for first in range(1, 1001, 20):
        sender.send(publish(1, first, *numbered(20, start=first, size=400)))
        bus.sync()
        for message in receive_available(bus, live):
            live.send(ack(7, message.message_id, message.message_id + 1))
    (spill_reader,) = bus.broker.spill_manager.readers  # type: ignore[union-attr]
    assert spill_reader.position.ring.frame_bytes < 100_000  # All messages have 400 KB.
    advance_clock(bus, 3600)
    assert b"first" in contents(receive_available(bus, live))


def test_spilled_message_is_dead_lettered_completely(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="d", max_deliveries=1, max_in_flight=10))
    fill(bus, connect_version2(bus), 300)
    assert len(receive_available(bus, reader)) == 10
    advance_clock(bus, 3600)
    for _ in range(20):
        advance_clock(bus, 60)
        receive_available(bus, reader)
        bus.sync()
    dead = bus.broker.classes[bus.broker.store.class_id_by_name["dead.1"]].ring
    texts = [dead.copy_frame(sequence) for sequence in range(dead.floor, dead.head)]
    assert len(texts) >= 10
    assert all(b"%d." % number in text for number, text in enumerate(texts))


def test_dropped_dead_letters_are_gone(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, settings=spill_settings(5))
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    sender = connect_version2(bus)
    for first in range(20):
        fill(bus, sender, 1, start=first)
        assert len(receive_available(bus, reader)) == 1
        reader.send(nack(5, first, first + 1, "terminate"))
        bus.sync()  # Checks the stored messages.
    dead = bus.broker.classes[bus.broker.store.class_id_by_name["dead.1"]]
    assert (dead.first_sequence, dead.ring.floor, dead.ring.head) == (15, 15, 20)
    assert dead.dropped_counts == {Reason.DROP_OLDEST: 15}


# Publishers --------------------------------------------------------------------------------------


def test_publisher_waits_for_unwritten_messages(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    sender = connect_version2(bus, publish(1, 0, *numbered(200)), name="till")
    assert len(bus.broker.classes[1].ring) == 64
    assert bus.statistics(1).parked == 136
    for _ in range(5):
        bus.sync()
        bus.serve_reads()
    assert bus.statistics(1).parked == 0
    assert [reply.message_id for reply in sender.receive_replies() if reply.kind == "confirm"][
        -1
    ] == 200
    assert contents(receive_and_ack_all(bus, connect_version2(bus, subscribe(1, 5)))) == numbered(
        200
    )


def test_publishers_wait_at_disk_limit(tmp_path: Path) -> None:
    class_settings = ClassSettings(disk_bytes_max=2000)
    bus = SpilledBus(tmp_path, settings=spill_settings(classes={1: class_settings}))
    fill(bus, connect_version2(bus), 600)
    statistics = bus.statistics(1)
    assert 100 < statistics.spilled < 300
    assert statistics.parked + statistics.spilled + statistics.ring.message_count == 600
    reader = connect_version2(bus, subscribe(1, 5))
    received: list[Version2Message] = []
    for _ in range(20):
        received += receive_and_ack_all(bus, reader)
        bus.sync()
    assert contents(received) == numbered(600)


def test_memory_durability_spills_written_messages(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, level=Durability.MEMORY)
    fill(bus, connect_version2(bus), 300)
    assert bus.statistics(1).spilled > 200
    assert contents(receive_and_ack_all(bus, connect_version2(bus, subscribe(1, 5)))) == numbered(
        300
    )


# Fetch and retention -----------------------------------------------------------------------------


def test_fetches_spilled_messages(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 300)
    peer, first = connect_version2(bus), 0
    found: list[bytes] = []
    while first < 300:
        received, reply = fetch(bus, peer, first=first, count=70)
        assert [each.message_id for each in received] == list(range(first, reply["next"]))
        assert (reply["first"], reply["floor"], reply["head"]) == (first, 0, 300)
        found += contents(received)
        first = reply["next"]
    assert found == numbered(300)


def test_replies_with_disk_reads_keep_order(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 300)
    peer = connect_version2(bus)
    peer.send(
        *(
            json_request(FETCH, 1, request, first=first, count=1)
            for request, first in ((1, 3), (2, 299))
        )
    )
    assert peer.receive_all() == ([], [])
    peer.send(publish(1, 0, b"x"))
    bus.sync()
    while True:  # Other requests are answered meanwhile.
        bus.serve_reads()
        received, replies = peer.receive_all()
        if [reply for reply in replies if reply.kind == "fetch"]:
            break
    fetches = [reply.message_id for reply in replies if reply.kind == "fetch"]
    while len(fetches) < 2:
        bus.serve_reads()
        more_messages, replies = peer.receive_all()
        received += more_messages
        fetches += [reply.message_id for reply in replies if reply.kind == "fetch"]
    assert fetches == [1, 2]
    assert [each.message_id for each in received] == [3, 299]


def publish_and_ack(bus: SpilledBus) -> None:
    """Publish 1000 messages and acknowledge all of them, 20 at a time."""
    reader, sender = connect_version2(bus, subscribe(1, 7)), connect_version2(bus)
    for first in range(0, 1000, 20):
        sender.send(publish(1, first, *numbered(20, start=first)))
        bus.sync()
        reader.receive_deliveries()
        reader.send(ack(7, first, first + 20))


def test_retained_messages_are_spilled_and_finally_removed(tmp_path: Path) -> None:
    settings = spill_settings(keep=Retention(messages=500))
    bus = SpilledBus(tmp_path, settings=settings, segment_bytes=1000)
    publish_and_ack(bus)
    assert bus.broker.classes[1].first_sequence == 500
    bus.keeper.is_snapshot_due = True
    bus.sync()
    assert not bus.remove()
    folder = tmp_path / "classes" / "00001"
    assert min(int(path.stem) for path in folder.iterdir()) > 400
    received, reply = fetch(bus, connect_version2(bus), first=0, count=5)
    assert (reply["first"], reply["floor"]) == (500, 500)
    assert contents(received) == numbered(5, start=500)
    assert contents(
        receive_and_ack_all(bus, connect_version2(bus, subscribe(1, 5, start="earliest")))
    ) == numbered(500, start=500)


def test_retention_counts_spilled_bytes_and_age(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, settings=spill_settings(keep=Retention(bytes=8000, seconds=100)))
    publish_and_ack(bus)
    statistics = bus.statistics(1)
    assert 6500 < statistics.spilled_bytes + statistics.ring.frame_bytes < 9000
    advance_clock(bus, 101)
    assert bus.statistics(1).spilled == 0


def test_inquiry_reports_spilled_messages_and_holder(tmp_path: Path) -> None:
    class_settings = ClassSettings(disk_bytes_max=2000)
    bus = SpilledBus(tmp_path, settings=spill_settings(classes={1: class_settings}))
    connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=1)).disconnect()
    fill(bus, connect_version2(bus), 600)
    connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=1))
    bus.broker.end_turn()  # A read for it is in progress.
    report = bus.broker.inquiry_handler.build_report(ClassInquiry(1))
    assert isinstance(report, ClassInfo)
    assert (report.floor, report.head) == (0, report.stored)
    assert report.stored > 100
    assert "are on disk only" in report.waits_for
    (position,) = report.positions
    assert (position.lag, position.unsent) == (report.stored, report.stored)
