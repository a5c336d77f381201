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
    all_of,
    contents,
    fetched,
    fill,
    hear,
    later,
    small,
)


def test_spill_requires_journal() -> None:
    with pytest.raises(ValueError, match="needs a journal"):
        Broker(Settings(full_policy=FullPolicy.SPILL))
    with pytest.raises(ValueError, match="needs a journal"):
        Broker(Settings(classes={"x": ClassSettings(full_policy=FullPolicy.SPILL)}))


# Who was away ------------------------------------------------------------------------------------


def test_durable_receives_spilled_messages(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    reader.disconnect()
    fill(bus, connect_version2(bus), 1000)
    here = bus.statistics(1)
    assert here.ring.message_count <= 64
    assert here.spilled + here.ring.message_count == 1000
    assert 800 * 13 < here.spilled_bytes < 1000 * 30
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    assert contents(all_of(bus, reader)) == numbered(1000)
    assert not bus.broker.spill_manager.readers  # type: ignore[union-attr]
    assert bus.broker.spill_manager.budget.used_bytes == 0  # type: ignore[union-attr]
    assert bus.statistics(1).spilled == 0


def test_live_subscriber_is_not_affected(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    live = connect_version2(bus, subscribe(1, 7))
    sender = connect_version2(bus)
    got = []
    for at in range(0, 1000, 20):
        sender.send(publish(1, at, *numbered(20, start=at)))
        some = live.receive_deliveries()
        got += some
        live.send(ack(7, at, at + 20))
        bus.sync()
    assert contents(got) == numbered(1000)
    assert bus.reads == 0


def test_first_subscriber_receives_spilled_backlog(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 300)
    old = bus.peer(subscribe1(1))
    received: list[bytes] = []
    for _ in ("from disk", "from memory"):
        bus.bring()
        received += [each.payload for each in old.receive_messages()]
    assert received == numbered(300)
    old.disconnect()
    assert contents(all_of(bus, connect_version2(bus, subscribe(1, 5)))) == numbered(300)


def test_spilled_envelopes_keep_channels(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    connect_version2(bus, subscribe(1, 5, durable="d", channels=["eu.*"])).disconnect()
    sender = connect_version2(bus)
    for at in range(0, 300, 20):
        for number in range(at, at + 20):
            channel = "eu.de" if number % 3 else "us.ny"
            sender.send(publish_envelopes(1, number, channel_envelope(channel, b"%d" % number)))
        bus.sync()
    reader = connect_version2(bus, subscribe(1, 5, durable="d", channels=["eu.*"]))
    found = [int(each.content[8:]) for each in all_of(bus, reader)]
    assert found == [number for number in range(300) if number % 3]


@pytest.mark.parametrize("by_key", [False, True])
def test_group_members_receive_spilled_messages_once(tmp_path: Path, by_key: bool) -> None:
    bus = SpilledBus(tmp_path)
    options: dict[str, object] = {"durable": "g", "group": "g"}
    if by_key:
        options["by_key"] = True
    connect_version2(bus, subscribe(1, 5, **options)).disconnect()
    fill(bus, connect_version2(bus), 400)
    one, two = (
        connect_version2(bus, subscribe(1, 5, **options)),
        connect_version2(bus, subscribe(1, 6, **options)),
    )
    got: list[Version2Message] = []
    for _ in range(100):
        for reader, number in ((one, 5), (two, 6)):
            for message in hear(bus, reader):
                got.append(message)
                reader.send(ack(number, message.message_id, message.message_id + 1))
    assert sorted(each.message_id for each in got) == list(range(400))
    assert {each.number for each in got} == {5, 6}
    assert bus.statistics(1).spilled == 0


def test_lagging_subscribers_are_independent(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    for name in ("a", "b"):
        connect_version2(bus, subscribe(1, 5, durable=name)).disconnect()
    fill(bus, connect_version2(bus), 300)
    stuck = connect_version2(bus, subscribe(1, 5, durable="a", max_in_flight=1))
    assert len(hear(bus, stuck)) == 1
    assert contents(all_of(bus, connect_version2(bus, subscribe(1, 5, durable="b")))) == numbered(
        300
    )
    assert contents(all_of(bus, stuck)) == numbered(300)[1:] or stuck.receive_deliveries() == []


def test_lagging_durable_resumes_after_disconnect(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    fill(bus, connect_version2(bus), 300)
    reader = connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=50))
    assert len(hear(bus, reader)) == 50
    reader.send(ack(5, 10, 20))
    reader.disconnect()
    bus.bring()
    assert bus.broker.spill_manager.budget.used_bytes == 0  # type: ignore[union-attr]
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    got = all_of(bus, reader)
    assert sorted(each.message_id for each in got) == [*range(10), *range(20, 300)]
    assert {each.attempt for each in got if each.message_id < 50} == {2}


def test_redelivery_keeps_order_for_lagging_subscriber(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    fill(bus, connect_version2(bus), 4)
    assert [each.message_id for each in hear(bus, reader)] == [0, 1, 2, 3]
    reader.send(nack(5, 1, 2, 0))
    assert [each.message_id for each in hear(bus, reader)] == [1]
    reader.disconnect()  # What it was sent once comes again at once, the other one after a pause.
    fill(bus, connect_version2(bus), 1000)
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    assert reader.receive_deliveries() == []  # The disk is slow.
    for _ in range(30):
        later(bus, 1.0)
    assert [each.message_id for each in hear(bus, reader)][:6] == [0, 2, 3, 1, 4, 5]


def test_closing_lagging_subscription_frees_memory(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    fill(bus, connect_version2(bus), 300)
    reader = connect_version2(bus, subscribe(1, 5, durable="d"), subscribe(1, 6, start="new"))
    bus.broker.end_turn()  # Something is being read.
    reader.send(unsubscribe(5, forget=True))
    bus.bring()
    assert bus.statistics(1).spilled == 0
    assert not bus.broker.spill_manager.readers  # type: ignore[union-attr]


# Delayed messages ---------------------------------------------------------------------------------


def test_delayed_message_blocks_nothing(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    live, sender = connect_version2(bus, subscribe(1, 7)), connect_version2(bus)
    sender.send(publish(1, 0, b"first"))
    assert contents(live.receive_deliveries()) == [b"first"]
    live.send(nack(7, 0, 1, 3600_000))
    got = []
    for at in range(1, 1001, 20):
        sender.send(publish(1, at, *numbered(20, start=at)))
        bus.sync()
        for message in hear(bus, live):
            got.append(message.content)
            live.send(ack(7, message.message_id, message.message_id + 1))
    assert got == numbered(1000, start=1)
    assert bus.statistics(1).ring.message_count <= 64
    later(bus, 3600)
    (message,) = hear(bus, live)
    assert (message.content, message.attempt) == (b"first", 2)
    live.send(ack(7, 0, 1))
    bus.bring()
    assert bus.statistics(1).spilled == bus.statistics(1).ring.message_count == 0


def test_acked_messages_are_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "SPILL_READ_BYTES", 4096)
    bus = SpilledBus(tmp_path)
    live, sender = connect_version2(bus, subscribe(1, 7)), connect_version2(bus)
    sender.send(publish(1, 0, b"first"))
    live.receive_deliveries()
    live.send(nack(7, 0, 1, 3600_000))
    for at in range(1, 1001, 20):
        sender.send(publish(1, at, *numbered(20, start=at, size=400)))
        bus.sync()
        for message in hear(bus, live):
            live.send(ack(7, message.message_id, message.message_id + 1))
    (behind,) = bus.broker.spill_manager.readers  # type: ignore[union-attr]
    assert behind.position.ring.frame_bytes < 100_000  # And not 400 KB.
    later(bus, 3600)
    assert b"first" in contents(hear(bus, live))


def test_spilled_message_is_dead_lettered_completely(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="d", max_deliveries=1, max_in_flight=10))
    fill(bus, connect_version2(bus), 300)
    assert len(hear(bus, reader)) == 10
    later(bus, 3600)
    for _ in range(20):
        later(bus, 60)
        hear(bus, reader)
        bus.sync()
    dead = bus.broker.classes[bus.broker.store.class_id_by_name["dead.1"]].ring
    texts = [dead.copy_frame(sequence) for sequence in range(dead.floor, dead.head)]
    assert len(texts) >= 10
    assert all(b"%d." % number in text for number, text in enumerate(texts))


def test_dropped_dead_letters_are_gone(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, settings=small(5))
    reader = connect_version2(bus, subscribe(1, 5, durable="d"))
    sender = connect_version2(bus)
    for at in range(20):
        fill(bus, sender, 1, start=at)
        assert len(hear(bus, reader)) == 1
        reader.send(nack(5, at, at + 1, "terminate"))
        bus.sync()  # It checks what is stored.
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
        bus.bring()
    assert bus.statistics(1).parked == 0
    assert [each.message_id for each in sender.receive_replies() if each.kind == "confirm"][
        -1
    ] == 200
    assert contents(all_of(bus, connect_version2(bus, subscribe(1, 5)))) == numbered(200)


def test_publishers_wait_at_disk_limit(tmp_path: Path) -> None:
    own = ClassSettings(disk_bytes_max=2000)
    bus = SpilledBus(tmp_path, settings=small(classes={1: own}))
    fill(bus, connect_version2(bus), 600)
    here = bus.statistics(1)
    assert 100 < here.spilled < 300
    assert here.parked + here.spilled + here.ring.message_count == 600
    reader = connect_version2(bus, subscribe(1, 5))
    got: list[Version2Message] = []
    for _ in range(20):
        got += all_of(bus, reader)
        bus.sync()
    assert contents(got) == numbered(600)


def test_memory_durability_spills_written_messages(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, level=Durability.MEMORY)
    fill(bus, connect_version2(bus), 300)
    assert bus.statistics(1).spilled > 200
    assert contents(all_of(bus, connect_version2(bus, subscribe(1, 5)))) == numbered(300)


# Fetch and retention -----------------------------------------------------------------------------


def test_fetches_spilled_messages(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 300)
    peer, at = connect_version2(bus), 0
    found: list[bytes] = []
    while at < 300:
        got, reply = fetched(bus, peer, first=at, count=70)
        assert [each.message_id for each in got] == list(range(at, reply["next"]))
        assert (reply["first"], reply["floor"], reply["head"]) == (at, 0, 300)
        found += contents(got)
        at = reply["next"]
    assert found == numbered(300)


def test_replies_with_disk_reads_keep_order(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path)
    fill(bus, connect_version2(bus), 300)
    peer = connect_version2(bus)
    peer.send(
        *(json_request(FETCH, 1, request, first=at, count=1) for request, at in ((1, 3), (2, 299)))
    )
    assert peer.receive_all() == ([], [])
    peer.send(publish(1, 0, b"x"))
    bus.sync()
    while True:  # Others are answered meanwhile.
        bus.bring()
        got, told = peer.receive_all()
        if [each for each in told if each.kind == "fetch"]:
            break
    fetches = [each.message_id for each in told if each.kind == "fetch"]
    while len(fetches) < 2:
        bus.bring()
        more, told = peer.receive_all()
        got += more
        fetches += [each.message_id for each in told if each.kind == "fetch"]
    assert fetches == [1, 2]
    assert [each.message_id for each in got] == [3, 299]


def publish_and_ack(bus: SpilledBus) -> None:
    """Publish 1000 messages and acknowledge all of them, 20 at a time."""
    reader, sender = connect_version2(bus, subscribe(1, 7)), connect_version2(bus)
    for at in range(0, 1000, 20):
        sender.send(publish(1, at, *numbered(20, start=at)))
        bus.sync()
        reader.receive_deliveries()
        reader.send(ack(7, at, at + 20))


def test_retained_messages_are_spilled_and_finally_removed(tmp_path: Path) -> None:
    settings = small(keep=Retention(messages=500))
    bus = SpilledBus(tmp_path, settings=settings, segment_bytes=1000)
    publish_and_ack(bus)
    assert bus.broker.classes[1].first_sequence == 500
    bus.keeper.is_snapshot_due = True
    bus.sync()
    assert not bus.remove()
    folder = tmp_path / "classes" / "00001"
    assert min(int(each.stem) for each in folder.iterdir()) > 400
    got, reply = fetched(bus, connect_version2(bus), first=0, count=5)
    assert (reply["first"], reply["floor"]) == (500, 500)
    assert contents(got) == numbered(5, start=500)
    assert contents(
        all_of(bus, connect_version2(bus, subscribe(1, 5, start="earliest")))
    ) == numbered(500, start=500)


def test_retention_counts_spilled_bytes_and_age(tmp_path: Path) -> None:
    bus = SpilledBus(tmp_path, settings=small(keep=Retention(bytes=8000, seconds=100)))
    publish_and_ack(bus)
    here = bus.statistics(1)
    assert 6500 < here.spilled_bytes + here.ring.frame_bytes < 9000
    later(bus, 101)
    assert bus.statistics(1).spilled == 0


def test_inquiry_reports_spilled_messages_and_holder(tmp_path: Path) -> None:
    own = ClassSettings(disk_bytes_max=2000)
    bus = SpilledBus(tmp_path, settings=small(classes={1: own}))
    connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=1)).disconnect()
    fill(bus, connect_version2(bus), 600)
    connect_version2(bus, subscribe(1, 5, durable="d", max_in_flight=1))
    bus.broker.end_turn()  # It is being read for.
    said = bus.broker.inquiry_handler.build_report(ClassInquiry(1))
    assert isinstance(said, ClassInfo)
    assert (said.floor, said.head) == (0, said.stored)
    assert said.stored > 100
    assert "are on disk only" in said.waits_for
    (position,) = said.positions
    assert (position.lag, position.unsent) == (said.stored, said.stored)
