"""Replies about durables are sent only when they survive a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplebus.core import checkpoint as keeper_module
from simplebus.core.errors import Reason
from simplebus.core.protocol.durability import Durability
from simplebus.core.snapshot import decode_changes
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import Permissions
from simplebus.core.users.users import User, Users
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer_v2 import (
    CONNECT,
    Version2Peer,
    ack,
    connect_version2,
    json_request,
    publish,
    subscribe,
    unsubscribe,
)
from tests.storage.journaled_broker import KeptBus

KINDS = [{}, {"group": "g"}, {"group": "g", "by_key": True}]


def receive_reply_kinds(peer: Version2Peer) -> list[tuple[str, int]]:
    """Return the kind and the request id of each reply received."""
    return [(reply.kind, reply.message_id) for reply in peer.receive_replies()]


def durables(bus: KeptBus) -> list[str]:
    cls = bus.broker.classes.get(1)
    return [] if cls is None else sorted(position.durable for position in cls.positions)


@pytest.mark.parametrize("level", [Durability.OS, Durability.DISK])
@pytest.mark.parametrize("kind", KINDS)
def test_confirmed_durable_survives_crash(
    tmp_path: Path, kind: dict[str, object], level: Durability
) -> None:
    bus = KeptBus(tmp_path, level=level)
    bus.sync()
    peer = connect_version2(bus, subscribe(1, 5, request=3, durable="d", **kind))
    assert receive_reply_kinds(peer) == []
    bus.write()
    assert receive_reply_kinds(peer) == []
    bus.sync()
    assert receive_reply_kinds(peer) == [("subscribe", 3)]
    bus.crash()
    bus = KeptBus(tmp_path, level=level)
    assert durables(bus) == ["d"]
    connect_version2(bus, publish(1, 0, *numbered(3)))
    peer = connect_version2(bus, subscribe(1, 5, request=4, durable="d", **kind))
    messages, replies = peer.receive_all()
    # Sent at once: the durable is kept.
    assert [reply.content["resumed"] for reply in replies] == [True]
    assert [message.message_id for message in messages] == [0, 1, 2]
    bus.crash()


def test_messages_follow_the_reply_of_their_subscription(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(
        bus, subscribe(1, 4), subscribe(1, 5, request=3, durable="d"), name="till"
    )
    assert receive_reply_kinds(peer) == [("subscribe", 7)]
    peer.send(publish(1, 0, *numbered(3)), json_request(CONNECT, request=8, version=2))
    messages, replies = peer.receive_all()
    assert [(message.number, message.message_id) for message in messages] == [
        (4, 0),
        (4, 1),
        (4, 2),
    ]
    assert [(reply.kind, reply.message_id) for reply in replies] == [("connect", 8)]
    bus.tick(12)
    assert {message.number for message in peer.receive_deliveries()} == {4}
    bus.sync()
    data = peer.read_bytes(1 << 20)
    assert data.index(b'"resumed"') < data.index(b"0.")
    peer.send(ack(5, 0, 3), ack(4, 0, 3))
    bus.check_invariants()
    assert not len(bus.broker.classes[1].ring)
    bus.crash()


@pytest.mark.parametrize("kind", KINDS)
def test_unsubscribing_before_the_reply_keeps_reply_order(
    tmp_path: Path, kind: dict[str, object]
) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, subscribe(1, 5, request=3, durable="d", **kind))
    peer.send(publish(1, 0, b"a"), unsubscribe(5, request=4), subscribe(1, 5, request=6))
    assert receive_reply_kinds(peer) == []  # Every request has the same subscription number.
    bus.sync()
    messages, replies = peer.receive_all()
    told_of = [(reply.kind, reply.message_id) for reply in replies if reply.kind != "confirm"]
    assert told_of == [("subscribe", 3), ("unsubscribe", 4), ("subscribe", 6)]
    assert messages == []  # It waits for the durable; the other subscription started after it.
    assert durables(bus) == ["", "d"]
    bus.crash()


def test_every_member_of_new_group_waits_for_reply(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    members = [connect_version2(bus, subscribe(1, 5, durable="d", group="g")) for _ in range(3)]
    members.pop().disconnect()
    assert [receive_reply_kinds(member) for member in members] == [[], []]
    bus.sync()
    assert [receive_reply_kinds(member) for member in members] == [[("subscribe", 7)]] * 2
    late = connect_version2(bus, subscribe(1, 5, durable="d", group="g"))
    assert receive_reply_kinds(late) == [("subscribe", 7)]
    bus.crash()


def test_disconnected_requester_leaves_durable(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    connect_version2(bus, subscribe(1, 5, durable="d")).disconnect()
    bus.sync()
    assert durables(bus) == ["d"]
    assert receive_reply_kinds(connect_version2(bus, subscribe(1, 5, durable="d"))) == [
        ("subscribe", 7)
    ]
    bus.crash()


def test_forgotten_durable_stays_forgotten_after_crash(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, subscribe(1, 5, durable="d"), subscribe(1, 6, durable="e"))
    bus.sync()
    peer.receive_replies()
    peer.send(unsubscribe(5, request=4, forget=True))
    assert receive_reply_kinds(peer) == []
    peer.send(unsubscribe(6, request=5))  # Changes nothing, but follows the other reply.
    bus.sync()
    assert receive_reply_kinds(peer) == [("unsubscribe", 4), ("unsubscribe", 5)]
    bus.crash()
    bus = KeptBus(tmp_path)
    assert durables(bus) == ["e"]
    bus.crash()


def test_seek_survives_crash(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, subscribe(1, 4, durable="all"), publish(1, 0, *numbered(6)))
    peer.send(subscribe(1, 5, durable="d", start="new"), unsubscribe(5))
    bus.sync()
    peer.receive_all()
    peer.send(subscribe(1, 5, request=8, durable="d", start={"sequence": 2}, seek=True))
    assert receive_reply_kinds(peer) == []
    bus.sync()
    assert receive_reply_kinds(peer) == [("subscribe", 8)]
    bus.crash()
    bus = KeptBus(tmp_path)
    assert connect_version2(bus, subscribe(1, 5, durable="d")).receive_message_ids() == [2, 3, 4, 5]
    bus.crash()


def test_memory_durability_replies_at_once(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path, level=Durability.MEMORY)
    peer = connect_version2(bus, subscribe(1, 5, durable="d"), unsubscribe(5, forget=True))
    assert receive_reply_kinds(peer) == [("subscribe", 7), ("unsubscribe", 9)]
    bus.crash()


def test_waiting_client_is_warned_of_write_error(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    first = connect_version2(bus, subscribe(1, 5, durable="d"))
    bus.broker.journal_failed(Reason.DISK_FAILED, "the disk is gone")
    second = connect_version2(bus, subscribe(1, 5, durable="e"))
    for peer in (first, second):
        (warning,) = peer.receive_replies()
        assert (warning.kind, warning.content["code"], warning.last_field) == (
            "error",
            "disk_failed",
            0,
        )
    bus.sync()
    assert [receive_reply_kinds(peer) for peer in (first, second)] == [[("subscribe", 7)]] * 2
    bus.crash()


def test_new_durable_does_not_scan_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, *(subscribe(1, 1 + n, durable=f"d{n}") for n in range(50)))
    bus.sync()
    scanned: list[object] = []
    progress = keeper_module._position_state

    def record_scan(position: object) -> object:
        scanned.append(position)
        return progress(position)  # type: ignore[arg-type]

    monkeypatch.setattr(keeper_module, "_position_state", record_scan)
    peer.send(subscribe(1, 100, durable="new"), unsubscribe(7, forget=True))
    bus.write()
    (write_batch,) = bus.write_batches
    changes = decode_changes(write_batch.changes)
    assert [each.durable for each in changes.positions] == ["new"]
    assert changes.removed_positions == [(1, "d6", "")]
    assert len(scanned) == 1
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    assert durables(bus) == sorted({"new", *(f"d{n}" for n in range(50))} - {"d6"})
    bus.crash()


def test_durable_recreated_in_group_survives_crash(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, subscribe(1, 5, durable="d"))
    bus.sync()
    peer.send(unsubscribe(5, forget=True), subscribe(1, 6, durable="d", group="g"))
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    (position,) = bus.broker.classes[1].positions
    assert (position.durable, position.group) == ("d", "g")
    bus.crash()


def test_quota_usage_survives_crash(tmp_path: Path) -> None:
    users = Users([User("till", token=hash_token("till"), permissions=Permissions())])
    bus = KeptBus(tmp_path)
    bus.broker.user_directory.replace_users(users)
    connect_version2(
        bus, subscribe(1, 5, durable="d"), classes=[1, "orders"], auth={"token": "till"}
    )
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    assert [cls.creator for cls in bus.broker.classes.values()] == ["till", "till"]
    assert bus.broker.subscription_manager.quotas.position_count_by_user == {"till": 1}
    bus.crash()
