"""Producer states after restarts, crashes and power failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core import checkpoint
from simplebus.core.checkpoint import Checkpointer
from simplebus.core.limits import CHECKPOINT_PAUSE_SECONDS, PRODUCER_TAKEOVER_STEP
from simplebus.core.protocol.durability import Durability
from simplebus.core.restore import StoredNumbers, find_next_number
from simplebus.core.snapshot import ProducerSnapshot, decode_changes
from tests.behaviour.wire_peer_v2 import Version2Peer, connect_request, connect_version2, publish
from tests.storage.journaled_broker import KeptBus
from tests.storage.test_journal import payloads
from tests.storage.test_recovery import segments


def connect_publisher(harness: KeptBus, **options: object) -> Version2Peer:
    peer = Version2Peer(harness, harness.broker.open_session())
    peer.send(connect_request(1, 2, name="till", **options))
    return peer


def after_a_gap(path: Path) -> KeptBus:
    """Recover a bus that has lost number 1 of a publisher's numbers 0 to 2."""
    bus = KeptBus(path)
    connect_version2(bus, publish(1, 0, b"a"), classes=(1, 2), name="till", instance="one")
    bus.sync()
    peer = connect_publisher(bus, instance="one")
    peer.send(publish(2, 1, b"b"), publish(1, 2, b"c"))
    bus.sync()
    bus.crash()
    for segment in (path / "classes" / "00002").iterdir():
        segment.unlink()
    return KeptBus(path)


def test_other_instance_is_detected_after_crash(tmp_path: Path) -> None:
    bus = after_a_gap(tmp_path)
    assert connect_publisher(bus, instance="one").receive_replies()[0].content["next"] == 1
    bus.crash()
    bus = KeptBus(tmp_path)
    peer = connect_publisher(bus, instance="two")
    assert peer.receive_replies()[0].content["next"] == 3
    peer.send(publish(1, 3, b"d"), publish(2, 4, b"e"))
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    reply = connect_publisher(bus, instance="two").receive_replies()[0].content
    assert (reply["next"], reply["lost"]) == (5, 0)


def test_lost_confirmed_messages_are_counted(
    tmp_path: Path,
) -> None:
    bus = after_a_gap(tmp_path)
    peer = connect_publisher(
        bus, instance="one", unconfirmed=3, bus=bus.broker.subscription_manager.identity
    )
    reply = peer.receive_replies()[0].content
    assert (reply["next"], reply["lost"]) == (3, 1)


@pytest.mark.parametrize("is_snapshot", [False, True])
@pytest.mark.parametrize("other_instance", ["two", None])
def test_numbers_of_other_instance_stay_separate(
    tmp_path: Path, other_instance: str | None, is_snapshot: bool
) -> None:
    bus = KeptBus(tmp_path)
    connect_version2(bus, publish(1, 0, b"a"), name="till", instance="one").disconnect()
    bus.sync()
    peer = connect_publisher(bus, instance=other_instance)
    peer.send(publish(9, 1, b"x", b"y"), publish(1, 3, b"z"))
    bus.keeper.is_snapshot_due = is_snapshot
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    peer = connect_publisher(
        bus, instance="one", unconfirmed=1, bus=bus.broker.subscription_manager.identity
    )
    reply = peer.receive_replies()[0].content
    assert (reply["next"], reply["lost"]) == (1 + PRODUCER_TAKEOVER_STEP, 0)
    peer.send(publish(1, reply["next"], b"b", b"c"))
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    assert (
        connect_publisher(bus, instance="one").receive_replies()[0].content["next"]
        == reply["next"] + 2
    )
    assert payloads(bus) == [b"a", b"z", b"b", b"c"]
    bus.crash()


@pytest.mark.parametrize("user", ["", "ann"])
def test_publisher_owner_survives_restart(tmp_path: Path, user: str) -> None:
    bus = KeptBus(tmp_path)
    for user_name, count in ((user, 2), ("bob", 3)):
        peer = Version2Peer(bus, bus.broker.open_session())
        peer.session.user = user_name
        peer.send(connect_request(1, name="till", instance="one"), publish(1, 0, *[b"x"] * count))
        peer.send(publish(9, count, b"refused"))
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    for user_name, next_number in ((user, 3), ("bob", 4), ("cid", 0)):
        peer = Version2Peer(bus, bus.broker.open_session())
        peer.session.user = user_name
        peer.send(connect_request(1, name="till", instance="one"))
        assert peer.receive_replies()[0].content["next"] == next_number
    bus.crash()


def test_unknown_publisher_lost_nothing_without_power_failure(tmp_path: Path) -> None:
    for boot, lost_count in (("before", 0), ("after", 5)):
        path = tmp_path / boot
        bus = KeptBus(path, level=Durability.OS, boot="before")
        bus.sync()
        bus.crash()
        bus = KeptBus(path, level=Durability.OS, boot=boot)
        peer = connect_publisher(
            bus, instance="one", unconfirmed=5, bus=bus.broker.subscription_manager.identity
        )
        reply = peer.receive_replies()[0].content
        assert (reply["next"], reply["lost"]) == (5, lost_count)
        bus.crash()


@pytest.mark.parametrize("is_snapshot", [False, True])
@pytest.mark.parametrize("boot", ["before", "after"])
@pytest.mark.parametrize("level", [Durability.OS, Durability.DISK])
def test_power_failure_frees_unsynced_numbers(
    tmp_path: Path, level: Durability, boot: str, is_snapshot: bool
) -> None:
    """At level `os`, confirmed messages are stored; the publisher reuses the numbers after them."""
    bus = KeptBus(tmp_path, level=level, boot="before")
    bus.sync()
    connect_version2(
        bus, publish(1, 0, b"a"), publish(2, 1, b"b"), classes=(1, 2), name="till", instance="one"
    )
    bus.sync()
    bus.crash()
    for segment in (tmp_path / "classes" / "00001").iterdir():
        segment.unlink()
    bus = KeptBus(tmp_path, level=level, boot="before")
    peer = connect_publisher(bus, instance="one")
    assert peer.receive_replies()[0].content["next"] == 0
    if is_snapshot:  # From a process that knows that the second message is stored.
        bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path, level=level, boot=boot)
    peer = connect_publisher(bus, instance="one")
    assert peer.receive_replies()[0].content["next"] == 0
    peer.send(publish(1, 0, b"c"), publish(2, 1, b"d"))
    bus.sync()
    assert len(bus.broker.classes[2].ring) == (
        2 if level is Durability.OS and boot == "after" else 1
    )
    bus.crash()


def after_a_cut(path: Path, level: Durability, *, now: Durability | None = None) -> KeptBus:
    """Lose messages 1 and 2 of a publisher's 0 to 2 in a power failure, but not its state.

    The process is then killed twice.
    """
    bus = KeptBus(path, level=level, boot="before", segment_bytes=1)
    peer = connect_version2(bus, publish(1, 0, b"a"), name="till", instance="one")
    bus.sync()
    peer.send(publish(1, 1, b"b", b"c"))
    bus.keeper.is_snapshot_due = True
    bus.sync()
    bus.crash()
    segments(path)[-1].unlink()
    for _ in range(2):
        bus = KeptBus(path, level=level if now is None else now, boot="after")
        bus.sync()
        bus.crash()
    return KeptBus(path, level=level if now is None else now, boot="after")


@pytest.mark.parametrize(
    ("level", "now"),
    [
        (Durability.OS, Durability.OS),
        (Durability.OS, Durability.DISK),
        (Durability.MEMORY, Durability.MEMORY),
    ],
)
@pytest.mark.parametrize("unconfirmed", [1, 3, 4])
def test_publisher_is_trusted_after_power_failure(
    tmp_path: Path, unconfirmed: int, level: Durability, now: Durability
) -> None:
    bus = after_a_cut(tmp_path, level, now=now)
    bus.sync()  # The snapshot is older than the publisher's connection.
    known_state = {"unconfirmed": unconfirmed, "bus": bus.broker.subscription_manager.identity}
    peer = connect_publisher(bus, instance="one", **known_state)
    reply = peer.receive_replies()[0].content
    assert (reply["next"], reply["lost"]) == (unconfirmed, max(0, unconfirmed - 3))
    peer.send(publish(1, unconfirmed, b"b"))
    bus.sync()
    assert payloads(bus) == [b"a", b"b"]
    bus.crash()
    bus = KeptBus(tmp_path, level=now, boot="after")  # It is trusted from now on.
    assert (
        connect_publisher(bus, instance="one").receive_replies()[0].content["next"]
        == unconfirmed + 1
    )
    bus.crash()


@pytest.mark.parametrize(
    ("publisher", "next_number"), [({"instance": "one"}, 0), ({}, 3), ({"instance": "two"}, 3)]
)
def test_silent_publisher_is_forgotten_after_power_failure(
    tmp_path: Path, publisher: dict[str, str], next_number: int
) -> None:
    bus = after_a_cut(tmp_path, Durability.OS)
    assert connect_publisher(bus, **publisher).receive_replies()[0].content["next"] == next_number
    bus.crash()


@pytest.mark.parametrize("now", [Durability.MEMORY, Durability.OS, Durability.DISK])
def test_synced_state_is_trusted_after_power_failure(tmp_path: Path, now: Durability) -> None:
    bus = after_a_cut(tmp_path, Durability.DISK, now=now)
    known_state = {"unconfirmed": 1, "bus": bus.broker.subscription_manager.identity}
    assert (
        connect_publisher(bus, instance="one", **known_state).receive_replies()[0].content["next"]
        == 3
    )
    bus.crash()


def test_unreceived_refusal_is_sent_after_crash(tmp_path: Path) -> None:
    for keeps_all in (False, True):
        path = tmp_path / f"{keeps_all}"
        bus = KeptBus(path)
        peer = connect_version2(bus, publish(1, 0, b"a"), name="till", instance="one")
        peer.send(publish(9, 1, b"b", b"c"), publish(1, 3, b"d"))
        bus.sync()
        bus.keeper.is_snapshot_due = keeps_all
        bus.broker.clock.now += 1
        bus.sync()
        bus.crash()
        bus = KeptBus(path)
        known_state = {"unconfirmed": 1, "bus": bus.broker.subscription_manager.identity}
        peer = connect_publisher(bus, instance="one", **known_state)
        assert peer.receive_replies()[0].content["next"] == 1
        peer.send(publish(1, 1, b"b", b"c", b"d"))
        bus.sync()
        error, confirm = peer.receive_replies()
        assert (error.content["code"], error.message_id) == ("unknown_class", 1)
        assert error.content["count"] == 2
        assert (confirm.kind, confirm.message_id) == ("confirm", 4)


NAMES = st.sampled_from(["ann", "bob", "cid"])
ACTIONS = st.one_of(
    st.tuples(st.just("connect"), NAMES, st.sampled_from(["one", "two"])),
    st.tuples(st.sampled_from(["publish", "publish", "refuse", "disconnect"]), NAMES),
    st.tuples(st.sampled_from(["snapshot", "sync", "sync", "remove"])),
)


def present_producers(bus: KeptBus) -> dict[str, tuple[object, ...]]:
    """Return the states of all publishers, from a snapshot that is not divided."""
    batch = Checkpointer(bus.broker).build_write_batch()
    assert batch is not None
    states: dict[str, tuple[object, ...]] = {}
    for producer in decode_changes(batch.snapshot).producers:
        stored = StoredNumbers()
        for first, count in producer.stored_ranges:
            stored.add_range(first, count)
        next_number, ahead = find_next_number(producer.next_number, stored)
        assert ahead is None
        refused = [
            number
            for refusal in producer.refusals
            for number in range(refusal.first_number, refusal.first_number + refusal.count)
        ]
        states[producer.name] = next_number, producer.instance, refused
    return states


@settings(max_examples=100)
@given(st.lists(ACTIONS, min_size=10, max_size=40))
def test_snapshot_of_publishers_in_portions_and_later_numbers_equal_the_state(
    actions: list[Sequence[str]],
) -> None:
    with (
        TemporaryDirectory() as directory,
        mock.patch.object(checkpoint, "CHECKPOINT_PRODUCERS_PER_TURN", 1),
    ):
        bus = KeptBus(Path(directory), segment_bytes=1)
        peers: dict[str, Version2Peer] = {}
        for action, *names in [*actions, ("sync",)]:
            peer = peers.get(names[0]) if names else None
            match action:
                case "connect":
                    instance = names[1]
                    if peer is not None:
                        peer.disconnect()
                    bus.sync()  # A batch does not tell refusals before and after a new instance.
                    peer = peers[names[0]] = Version2Peer(bus, bus.broker.open_session())
                    peer.send(connect_request(1, 2, name=names[0], instance=instance))
                case "publish" | "refuse" if peer is not None:
                    decoder = peer.session.version2
                    assert decoder is not None
                    class_id = 9 if action == "refuse" else 1
                    peer.send(publish(class_id, decoder.next_number, b"x", b"y"))
                case "disconnect" if peer is not None:
                    peers.pop(names[0]).disconnect()
                case "snapshot":
                    bus.keeper.is_snapshot_due = True
                case "sync" | "remove":
                    bus.broker.clock.now += CHECKPOINT_PAUSE_SECONDS
                    if action == "sync":
                        bus.sync()
                    else:
                        bus.remove()
        expected = present_producers(bus)
        bus.crash()
        bus = KeptBus(Path(directory))
        assert present_producers(bus) == expected
        bus.crash()


def test_snapshot_collects_publishers_in_bounded_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    portion, count = 10, 35
    monkeypatch.setattr(checkpoint, "CHECKPOINT_PRODUCERS_PER_TURN", portion)
    bus = KeptBus(tmp_path)
    for number in range(count):
        connect_version2(bus, name=f"publisher {number}").disconnect()
    bus.sync()
    bus.keeper.is_snapshot_due = True
    added: list[str] = []

    def add_producer(name: str, *values: Any) -> ProducerSnapshot:
        added.append(name)
        return ProducerSnapshot(name, *values)

    monkeypatch.setattr(checkpoint, "ProducerSnapshot", add_producer)
    turn_count = 0
    while (batch := bus.keeper.build_write_batch()) is None:
        assert len(added) <= portion
        added.clear()
        bus.broker.clock.now += CHECKPOINT_PAUSE_SECONDS
        turn_count += 1
    assert turn_count == -(-count // portion)
    assert len(decode_changes(batch.snapshot).producers) == count
    bus.crash()


@pytest.mark.parametrize("instance", [None, "two"])
def test_new_run_of_a_publisher_loses_no_message(tmp_path: Path, instance: str | None) -> None:
    """A former run ended before the journal had stored its messages, so none was confirmed."""
    bus = KeptBus(tmp_path)
    connect_version2(bus, publish(1, 0, b"a", b"b"), name="till").disconnect()
    bus.sync()
    run = {} if instance is None else {"instance": instance}
    peer = connect_publisher(bus, **run)
    assert peer.receive_replies()[0].content["next"] == 2
    peer.send(publish(1, 2, b"c"))
    bus.sync()
    assert payloads(bus) == [b"a", b"b", b"c"]
