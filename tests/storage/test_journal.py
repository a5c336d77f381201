"""Messages, numbers, positions and names survive a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import Retention, Settings
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    Version2Reply,
    ack,
    channel_envelope,
    connect_version2,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    timed_envelope,
    unsubscribe,
)
from tests.models.key_order_model import encode_with_key
from tests.storage.journaled_broker import START, KeptBus

FOLDERS = ("00001", "00002")


def confirms(replies: list[Version2Reply]) -> list[tuple[int, int]]:
    return [(reply.message_id, reply.last_field) for reply in replies if reply.kind == "confirm"]


def payloads(bus: KeptBus, class_id: int = 1) -> list[bytes]:
    ring = bus.broker.classes[class_id].ring
    return [ring.copy_frame(sequence)[9:-4] for sequence in range(ring.floor, ring.head)]


def crash_and_recover(bus: KeptBus, path: Path, **options: object) -> KeptBus:
    """Crash the bus and recover it from its directory."""
    bus.crash()
    return KeptBus(path, **options)  # type: ignore[arg-type]


# Messages ----------------------------------------------------------------------------------------


def test_confirm_waits_for_disk(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, publish(1, 0, b"a", b"b"), name="till")
    assert confirms(peer.receive_replies()) == []
    bus.write()
    assert confirms(peer.receive_replies()) == []
    peer.send(publish(1, 2, b"c"))
    bus.sync()
    assert confirms(peer.receive_replies()) == [(3, 2)]


def test_delivery_does_not_wait_for_disk(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5))
    connect_version2(bus, publish(1, 0, b"a"))
    assert [message.content for message in reader.receive_deliveries()] == [b"a"]


def test_memory_confirm_does_not_wait(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path, level=Durability.MEMORY)
    assert confirms(connect_version2(bus, publish(1, 0, b"a")).receive_replies()) == [(1, 0)]


def test_confirmed_messages_survive_crash(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    sent = numbered(500, size=40)
    peer = connect_version2(bus, name="till")
    for first in range(0, 500, 100):
        peer.send(publish(1, first, *sent[first : first + 100]))
        bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    assert payloads(bus) == sent
    assert bus.found.problems == []
    assert bus.broker.subscription_manager.identity == "here"
    reader = connect_version2(bus, subscribe(1, 5))
    assert [message.content for message in reader.receive_deliveries()] == sent


def test_unwritten_messages_are_lost_and_sequences_continue(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, publish(1, 0, b"a"))
    bus.sync()
    peer.send(publish(1, 1, b"lost"))
    bus = crash_and_recover(bus, tmp_path)
    connect_version2(bus, publish(1, 0, b"b"))
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    assert payloads(bus) == [b"a", b"b"]


def test_recovery_keeps_channel_and_expiry(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    connect_version2(
        bus,
        publish_envelopes(
            1,
            0,
            channel_envelope("orders.eu", b"a"),
            timed_envelope(b"soon too late", expires_ms=1000),
        ),
        publish(1, 2, b"plain"),
        publish_envelopes(
            1,
            3,
            timed_envelope(b"later", not_before_ms=60_000),
            channel_envelope("orders.us", b"c"),
        ),
    )
    bus.sync()
    bus = crash_and_recover(bus, tmp_path, now=START + 2)
    reader = connect_version2(
        bus, subscribe(1, 5), subscribe(1, 6, channels=["orders.*"], start="earliest")
    )
    deliveries = reader.receive_deliveries()
    assert [message.message_id for message in deliveries if message.number == 5] == [0, 2, 4]
    assert [message.message_id for message in deliveries if message.number == 6] == [0, 4]
    bus.broker.clock.now = START + 61
    bus.broker.run_due_wakeups()
    assert reader.receive_message_ids() == [3]


def test_clock_set_back_delays_nothing(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    contents = (
        timed_envelope(b"later", not_before_ms=1000),
        timed_envelope(b"brief", expires_ms=2000),
        timed_envelope(b"now"),
    )
    connect_version2(bus, publish_envelopes(1, 0, *contents))
    bus.sync()
    bus = crash_and_recover(bus, tmp_path, now=START - 3600)
    reader = connect_version2(bus, subscribe(1, 5))
    assert reader.receive_message_ids() == [1, 2]
    bus.broker.clock.now += 1
    bus.broker.run_due_wakeups()
    assert reader.receive_message_ids() == [0]


def test_class_names_survive_restart(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    connect_version2(bus, classes=["orders", {"id": 3, "name": "bills"}])
    ids_by_name = dict(bus.broker.store.class_id_by_name)
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    assert bus.broker.store.class_id_by_name == ids_by_name


def test_removes_segments_without_needed_messages(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path, segment_bytes=2000)
    reader = connect_version2(bus, subscribe(1, 5))
    peer = connect_version2(bus, name="till")
    for first in range(0, 200, 20):
        peer.send(publish(1, first, *numbered(20, size=40, start=first)))
        bus.sync()
    reader.receive_message_ids()
    folder = tmp_path / "classes" / "00001"
    assert len(list(folder.iterdir())) == 10
    reader.send(ack(5, 0, 190))
    bus.sync()
    assert bus.remove(), "only the publisher's numbers of the first batch are in a snapshot"
    assert len(list(folder.iterdir())) == 9
    bus.keeper.is_snapshot_due = True
    bus.sync()
    assert not bus.remove()
    assert [path.name for path in folder.iterdir()] == ["00000000000000000180.log"]
    assert len(list((tmp_path / "state").iterdir())) == 1
    bus = crash_and_recover(bus, tmp_path)
    assert payloads(bus) == numbered(10, size=40, start=190)
    peer = connect_version2(
        bus, publish(1, 199, b"a duplicate"), publish(1, 200, b"new"), name="till"
    )
    assert payloads(bus)[-1] == b"new"
    assert len(payloads(bus)) == 11


@pytest.mark.parametrize("is_begun_anew", [False, True])
def test_removes_last_segment_on_full_disk(tmp_path: Path, is_begun_anew: bool) -> None:
    bus = KeptBus(tmp_path)
    requests = subscribe(1, 5, durable="all"), subscribe(2, 6, durable="some")
    reader = connect_version2(bus, *requests, classes=[1, 2])
    peer = connect_version2(bus, classes=[1, 2], name="till")
    peer.send(publish(1, 0, *numbered(20)), publish(2, 20, *numbered(20)))
    bus.sync()
    reader.receive_all()
    reader.send(ack(5, 0, 20), ack(6, 0, 19))
    if is_begun_anew:
        bus.remove()  # The floors are written periodically.
        bus = crash_and_recover(bus, tmp_path)
    bus.keeper.is_snapshot_due = True
    assert not bus.remove()
    names = [[path.name for path in (tmp_path / "classes" / c).iterdir()] for c in FOLDERS]
    assert names == [["00000000000000000000.log"]] * 2  # The disk has space, so the segment stays.
    assert not bus.remove(is_short=True)
    assert not bus.remove(is_short=True)
    names = [[path.name for path in (tmp_path / "classes" / c).iterdir()] for c in FOLDERS]
    assert names == [["00000000000000000020.log"], ["00000000000000000000.log"]]
    bus = crash_and_recover(bus, tmp_path)
    connect_version2(
        bus, publish(1, 19, b"a duplicate"), publish(1, 40, b"new"), classes=[1], name="till"
    )
    bus.sync()
    assert bus.broker.classes[1].ring.head == 21
    requests = subscribe(1, 5, durable="all"), subscribe(2, 6, durable="some")
    reader = connect_version2(bus, *requests, classes=[1, 2])
    assert (1, 20) in {(each.class_id, each.message_id) for each in reader.receive_all()[0]}
    assert payloads(bus, 2) == numbered(20)[19:]
    bus = crash_and_recover(bus, tmp_path)
    assert bus.broker.classes[1].ring.head == 21


def test_removal_is_synced_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that reappeared before a gap would hide the messages after the gap."""
    bus = KeptBus(tmp_path, segment_bytes=500)
    reader = connect_version2(bus, subscribe(1, 5))
    peer = connect_version2(bus, name="till")
    for first in range(0, 40, 10):
        peer.send(publish(1, first, *numbered(10, size=40, start=first)))
        bus.sync()
    reader.receive_message_ids()
    reader.send(ack(5, 0, 40))
    bus.keeper.is_snapshot_due = True
    bus.sync()
    calls: list[str] = []
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: calls.append("gone"))
    monkeypatch.setattr(
        "simplebus.storage.journal.sync_directory", lambda _: calls.append("synced")
    )
    assert not bus.remove()
    assert calls == ["gone", "synced"] * 3


def test_empty_class_continues_its_sequences(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5), publish(1, 0, b"a", b"b"))
    reader.receive_message_ids()
    reader.send(ack(5, 0, 2))
    bus.close()
    bus = KeptBus(tmp_path)
    assert bus.broker.classes[1].ring.head == 2
    assert payloads(bus) == []


def test_retained_messages_survive_restart(tmp_path: Path) -> None:
    settings = Settings(keep=Retention(messages=2))
    bus = KeptBus(tmp_path, settings=settings)
    reader = connect_version2(bus, subscribe(1, 5), publish(1, 0, *numbered(5)))
    reader.receive_message_ids()
    reader.send(ack(5, 0, 5))
    bus.close()
    bus = KeptBus(tmp_path, settings=settings)
    assert payloads(bus) == [b"3.", b"4."]
    assert connect_version2(bus, subscribe(1, 5)).receive_message_ids() == []


# Numbers -----------------------------------------------------------------------------------------


def next_number(bus: KeptBus, name: str = "till") -> int:
    publisher = {
        producer_state.name: producer_state
        for producer_state in bus.broker.subscription_manager.producer_states
    }[name]
    return publisher.next_number


def test_producer_state_survives_crash(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    connect_version2(
        bus, publish(1, 0, b"a", b"b"), publish(2, 2, b"c"), classes=(1, 2), name="till"
    )
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    assert next_number(bus) == 3
    connect_version2(bus, publish(1, 1, b"b"), publish(1, 3, b"d"), name="till")
    assert payloads(bus) == [b"a", b"b", b"d"]


def test_lost_messages_of_one_class_are_stored_once(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, classes=(1, 2), name="till", instance="one")
    bus.sync()
    for number in range(6):
        peer.send(publish(1 + number % 2, number, b"%d" % number))
    bus.write()
    bus.crash()
    segment = tmp_path / "classes" / "00001" / "00000000000000000000.log"
    segment.write_bytes(b"")  # The pages of only one of the two files had reached the disk.
    bus = KeptBus(tmp_path)
    assert next_number(bus) == 0
    connect_version2(
        bus,
        *(publish(1 + number % 2, number, b"%d" % number) for number in range(7)),
        classes=(1, 2),
        name="till",
        instance="one",
    )
    assert payloads(bus, 1) == [b"0", b"2", b"4", b"6"]
    assert payloads(bus, 2) == [b"1", b"3", b"5"]


def test_recovers_numbers_around_anonymous_messages(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    named_peer, anonymous_peer = connect_version2(bus, name="till"), connect_version2(bus)
    for peer, number in [(named_peer, 0), (named_peer, 1), (anonymous_peer, 0), (named_peer, 2)]:
        peer.send(publish(1, number, b"%d" % number))
        bus.sync()
    reader.send(ack(5, reader.receive_message_ids()[0], 4))
    bus.broker.clock.now += 1
    bus.sync()
    named_peer.send(publish(1, 3, b"new"))
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    assert payloads(bus) == [b"new"]
    assert next_number(bus) == 4


def test_lost_memory_confirms_free_their_numbers(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path, level=Durability.MEMORY)
    bus.sync()
    connect_version2(bus, publish(1, 0, b"a"), publish(2, 1, b"b"), classes=(1, 2), name="till")
    bus.sync()
    bus.crash()
    (path,) = (tmp_path / "classes" / "00001").glob("*.log")
    path.write_bytes(b"")
    bus = KeptBus(tmp_path, level=Durability.MEMORY)
    assert next_number(bus) == 0
    connect_version2(bus, publish(1, 0, b"c"), publish(2, 1, b"d"), name="till")
    assert payloads(bus, 2) == [b"b", b"d"]


def test_refused_numbers_survive_crash(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    connect_version2(
        bus, publish(1, 0, b"a"), publish(99, 1, b"no class"), publish(1, 2, b"b"), name="till"
    )
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    assert next_number(bus) == 3


def test_returning_publisher_stores_nothing_twice(
    tmp_path: Path,
) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, publish(1, 0, b"a"), name="till", instance="one")
    bus.sync()
    peer.send(publish(1, 1, b"b", b"c"))
    peer.disconnect()
    assert next_number(bus) == 1
    peer = connect_version2(bus, publish(1, 1, b"b", b"c", b"d"), name="till", instance="one")
    assert confirms(peer.receive_replies()) == []
    bus.sync()
    assert confirms(peer.receive_replies()) == [(4, 2)]
    assert payloads(bus) == [b"a", b"b", b"c", b"d"]


def test_takeover_by_same_publisher_keeps_numbers(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    bus.sync()
    connect_version2(bus, publish(1, 0, b"a", b"b"), name="till", instance="one")
    bus.sync()
    connect_version2(bus, publish(1, 2, b"c"), name="till", instance="one")
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    assert next_number(bus) == 3


def test_forgotten_publisher_starts_again(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    connect_version2(bus, publish(1, 0, *numbered(5)), name="till").disconnect()
    bus.sync()
    bus.keeper.is_snapshot_due = True
    bus.sync()
    bus.broker.clock.now += 4000
    bus.tick()
    connect_version2(bus, publish(1, 0, b"new"), name="till")
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    assert next_number(bus) == 1


# Positions ---------------------------------------------------------------------------------------


def test_durable_resumes_after_restart(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing", max_in_flight=4))
    bus.sync()
    connect_version2(bus, publish(1, 0, *numbered(8)))
    assert reader.receive_message_ids() == [0, 1, 2, 3]
    reader.send(ack(5, 0, 1), ack(5, 2, 3))
    reader.read_bytes(0)
    bus.sync()
    bus.broker.clock.now += 1
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    assert [(m.message_id, m.attempt) for m in reader.receive_deliveries()] == [
        (1, 2), (3, 2), (4, 1), (5, 1), (6, 1), (7, 1),
    ]  # fmt: skip


def test_attempts_survive_restart(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing", max_deliveries=3))
    bus.sync()
    connect_version2(bus, publish(1, 0, b"poison", b"good"))
    reader.receive_message_ids()
    reader.send(nack(5, 0, 1, 0), ack(5, 1, 2))
    assert [message.attempt for message in reader.receive_deliveries()] == [2]
    bus.broker.clock.now += 1
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    bus.broker.clock.now += 12  # The time that it would have been in flight.
    bus.broker.run_due_wakeups()
    reader = connect_version2(bus, subscribe(1, 5, durable="billing", max_deliveries=3))
    assert [(m.message_id, m.attempt) for m in reader.receive_deliveries()] == [(0, 3)]
    reader.send(nack(5, 0, 1, 0))
    assert reader.receive_message_ids() == []
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    dead = bus.broker.store.class_id_by_name["dead.1"]
    assert len(bus.broker.classes[dead].ring) == 1


def test_delivery_policy_survives_restart(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    policy = {"max_deliveries": 7, "backoff": [2, 9], "ack_seconds": 4}
    connect_version2(bus, subscribe(1, 5, durable="billing", group="g", **policy))
    bus.sync()
    policies_before = [position.delivery_policy for position in bus.broker.classes[1].positions]
    bus = crash_and_recover(bus, tmp_path)
    [terms] = [position.delivery_policy for position in bus.broker.classes[1].positions]
    assert [terms] == policies_before
    assert (terms.ack_timeout_ticks, terms.deliveries_max, terms.backoff_ticks) == (4, 7, (2, 9))


def test_durable_receives_first_confirmed_message(
    tmp_path: Path,
) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus)
    bus.sync()
    connect_version2(bus, subscribe(1, 5, durable="billing", start="new", channels=["a.*"]))
    peer.send(publish_envelopes(1, 0, channel_envelope("a.b", b"x"), channel_envelope("b.b", b"y")))
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing", channels=["a.*"]))
    assert [message.content for message in reader.receive_deliveries()] == [
        channel_envelope("a.b", b"x")
    ]


def test_forgotten_durable_stays_forgotten(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    bus.sync()
    reader.send(unsubscribe(5, forget=True))
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    assert not bus.broker.classes[1].positions


def test_durable_group_redelivers_members_messages(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    members = [
        connect_version2(bus, subscribe(1, 5, durable="billing", group="tills", max_in_flight=2))
        for _ in range(2)
    ]
    bus.sync()
    connect_version2(bus, publish(1, 0, *numbered(6)))
    ids_of_members = [member.receive_message_ids() for member in members]
    assert sorted(ids_of_members[0] + ids_of_members[1]) == [0, 1, 2, 3]
    members[0].send(ack(5, ids_of_members[0][0], ids_of_members[0][0] + 1))
    bus.broker.clock.now += 1
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing", group="tills"))
    assert sorted(reader.receive_message_ids()) == sorted(
        {0, 1, 2, 3, 4, 5} - {ids_of_members[0][0]}
    )


def test_key_ordered_group_keeps_order_after_restart(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    options = {"durable": "billing", "group": "tills", "by_key": True}
    members = [connect_version2(bus, subscribe(1, 5, **options), name=name) for name in ("x", "y")]
    bus.sync()
    keys = [b"key %d" % (number % 8) for number in range(24)]
    connect_version2(bus, publish_envelopes(1, 0, *map(encode_with_key, keys)))
    holders = {id_: member for member in members for id_ in member.receive_message_ids()}
    assert sorted(holders) == list(range(8))
    holders[3].send(ack(5, 3, 4))
    assert holders[3].receive_message_ids() == [11]
    bus.broker.clock.now += 1
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    assert connect_version2(
        bus, subscribe(1, 5, durable="billing", group="tills")
    ).receive_error_codes() == ["subscription_mismatch"]
    reader = connect_version2(bus, subscribe(1, 5, **options))
    received = [(m.message_id, m.attempt) for m in reader.receive_deliveries()]
    assert sorted(received) == [(id_, 2) for id_ in (0, 1, 2, 4, 5, 6, 7, 11)]
    reader.send(ack(5, 0, 24))
    assert [(m.message_id, m.attempt) for m in reader.receive_deliveries()] == [
        (id_, 1) for id_ in (8, 9, 10, 12, 13, 14, 15, 19)
    ]


def test_unacked_plain_messages_wait_for_next_subscriber(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    first, second = (connect_version2(bus, subscribe(1, 5)) for _ in range(2))
    connect_version2(bus, publish(1, 0, *numbered(6)))
    first.receive_message_ids(), second.receive_message_ids()
    first.send(ack(5, 0, 4))
    second.send(ack(5, 0, 2), ack(5, 3, 5))
    bus.broker.clock.now += 1
    bus.sync()
    bus = crash_and_recover(bus, tmp_path)
    assert connect_version2(bus, subscribe(1, 5)).receive_message_ids() == [2, 4, 5]


def test_unwritten_ack_causes_redelivery(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"), publish(1, 0, b"a"))
    bus.sync()
    reader.receive_message_ids()
    reader.send(ack(5, 0, 1))
    bus = crash_and_recover(bus, tmp_path)
    assert connect_version2(bus, subscribe(1, 5, durable="billing")).receive_message_ids() == [0]


def test_recovers_repeatedly(tmp_path: Path) -> None:
    sent: list[bytes] = []
    for run in range(6):
        bus = KeptBus(tmp_path, segment_bytes=500)
        assert payloads(bus) == sent if sent else True
        peer: Version2Peer = connect_version2(bus, name="till")
        payloads_of_run = numbered(7, start=7 * run)
        peer.send(publish(1, next_number(bus), *payloads_of_run))
        sent += payloads_of_run
        bus.sync()
        bus.close() if run % 2 else bus.crash()
