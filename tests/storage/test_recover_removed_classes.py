"""Removed classes stay removed, and continue with their sequences when they are created again."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from simplebus.commands.journal import app
from simplebus.core.limits import CHECKPOINT_SECONDS, RING_IDLE_TICKS, Limits
from simplebus.core.settings import Settings
from tests.behaviour.wire_peer import advance_tick
from tests.behaviour.wire_peer_v2 import Version2Peer, ack, connect_request, publish, subscribe
from tests.storage.journaled_broker import KeptBus
from tests.storage.test_missing_files import damage_record

SETTINGS = Settings(idle_class_seconds=10)
ADDRESS = "10.0.0.1"


def start(path: Path) -> KeptBus:
    return KeptBus(path, settings=SETTINGS)


def restart(bus: KeptBus, path: Path, *, is_stopped: bool) -> KeptBus:
    bus.close() if is_stopped else bus.crash()
    return start(path)


def peer_of(bus: KeptBus, *classes: object) -> Version2Peer:
    peer = Version2Peer(bus, bus.broker.open_session("peer", address=ADDRESS))
    peer.send(connect_request(*classes))
    peer.receive_replies()
    return peer


def pass_messages(bus: KeptBus, name: str, count: int, first: int = 0) -> None:
    """Publish messages to a class, and have them consumed."""
    peer = peer_of(bus, name)
    class_id = bus.broker.store.class_id_by_name[name]
    peer.send(subscribe(class_id, 5), publish(class_id, 0, *[b"x"] * count))
    assert peer.receive_message_ids() == list(range(first, first + count))
    peer.send(ack(5, first, first + count))
    peer.disconnect()
    bus.broker.clock.now += 2 * CHECKPOINT_SECONDS  # A scan records the acks.
    bus.sync()


def remove_idle(bus: KeptBus) -> None:
    for _ in range(10 + 2 * RING_IDLE_TICKS + 2):
        advance_tick(bus)
        bus.sync()
    assert not bus.broker.classes


@pytest.mark.parametrize("is_repaired", [False, True])
@pytest.mark.parametrize("is_damaged_early", [False, True])
def test_gap_does_not_restore_a_removed_class(
    tmp_path: Path, is_damaged_early: bool, is_repaired: bool
) -> None:
    """The last file of a removed class stays, and may contain a gap."""
    bus = start(tmp_path)
    for number in range(4):
        pass_messages(bus, "orders", 1, first=number)
    class_id = bus.broker.store.class_id_by_name["orders"]
    (segment,) = (tmp_path / "classes" / f"{class_id:05}").iterdir()
    if is_damaged_early:
        bus.crash()
        damage_record(segment, 1)
        bus = start(tmp_path)
        assert f"skipped message 1 of class {bus.broker.classes[class_id].name}" in str(
            bus.found.problems
        )
    remove_idle(bus)
    bus.close()
    if not is_damaged_early:
        damage_record(segment, 1)
    if is_repaired:
        CliRunner().invoke(app, ["repair", str(tmp_path)])
    for is_recorded in (is_damaged_early or is_repaired, True):
        bus = start(tmp_path)
        assert (bus.broker.classes == {}, bool(bus.found.problems)) == (True, not is_recorded)
        assert bus.broker.store.class_registry.removed_classes[class_id].head == 4
        bus.crash()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_removed_class_stays_removed(tmp_path: Path, is_stopped: bool) -> None:
    bus = start(tmp_path)
    pass_messages(bus, "orders", 3)
    peer_of(bus, "empty").disconnect()
    class_id = bus.broker.store.class_id_by_name["orders"]
    bus.sync()
    remove_idle(bus)
    for _ in range(2):
        bus = restart(bus, tmp_path, is_stopped=is_stopped)
        assert not bus.broker.classes
        assert not bus.found.problems
        assert not bus.broker.store.class_registry.class_count_by_address
        bus.sync()
    pass_messages(bus, "orders", 2, first=3)
    assert bus.broker.store.class_id_by_name["orders"] == class_id
    bus = restart(bus, tmp_path, is_stopped=is_stopped)
    assert list(bus.broker.classes) == [class_id]
    assert bus.broker.classes[class_id].ring.head == 5
    assert bus.broker.store.class_registry.class_count_by_address == {ADDRESS: 1}
    bus.crash()


def test_removal_that_is_not_written_is_repeated(tmp_path: Path) -> None:
    bus = start(tmp_path)
    pass_messages(bus, "orders", 3)
    for _ in range(10 + 2 * RING_IDLE_TICKS + 2):
        advance_tick(bus)
    assert not bus.broker.classes
    bus.crash()
    bus = start(tmp_path)
    assert [cls.name for cls in bus.broker.classes.values()] == ["orders"]
    remove_idle(bus)
    bus.crash()


def test_messages_of_a_class_created_again_survive_without_its_record(tmp_path: Path) -> None:
    bus = start(tmp_path)
    pass_messages(bus, "orders", 3)
    class_id = bus.broker.store.class_id_by_name["orders"]
    remove_idle(bus)
    peer = peer_of(bus, "orders")
    peer.send(publish(class_id, 0, b"new"))
    batch = bus.keeper.build_write_batch()
    assert batch is not None
    batch.changes = b""  # The server ends between the two files.
    bus.journal.write(batch)
    bus.crash()
    bus = start(tmp_path)
    assert not bus.found.problems
    assert bus.broker.store.class_id_by_name == {"orders": class_id}
    reader = peer_of(bus, "orders")
    reader.send(subscribe(class_id, 5))
    assert reader.receive_message_ids() == [3]
    bus.crash()


def test_segments_of_removed_classes_are_removed(tmp_path: Path) -> None:
    bus = start(tmp_path)
    pass_messages(bus, "orders", 3)
    class_id = bus.broker.store.class_id_by_name["orders"]
    remove_idle(bus)
    bus.keeper.is_snapshot_due = True
    bus.remove(is_short=True)
    segments = list((tmp_path / "classes" / str(class_id)).iterdir())
    assert [segment.stat().st_size for segment in segments] == [0]
    bus = restart(bus, tmp_path, is_stopped=False)
    assert not bus.broker.classes
    assert not bus.found.problems
    pass_messages(bus, "orders", 1, first=3)
    bus.crash()


def test_removed_class_with_few_free_classes(tmp_path: Path) -> None:
    bus = start(tmp_path)
    pass_messages(bus, "orders", 3)
    remove_idle(bus)
    peer_of(bus, "a", "b").disconnect()
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path, settings=Settings(limits=Limits(classes=2)))
    assert {cls.name for cls in bus.broker.classes.values()} == {"a", "b"}
    bus.crash()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["pass", "declare", "remove", "crash", "stop"]), st.integers(0, 2)
        ),
        max_size=14,
    )
)
def test_sequences_and_ids_continue_whatever_happens(steps: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory)
        bus, heads, ids = start(path), dict.fromkeys("abc", 0), dict[str, int]()
        for step, number in steps:
            name = "abc"[number]
            match step:
                case "pass":
                    pass_messages(bus, name, number + 1, first=heads[name])
                    heads[name] += number + 1
                    ids.setdefault(name, bus.broker.store.class_id_by_name[name])
                case "declare":
                    peer_of(bus, name).disconnect()
                    bus.sync()
                case "remove":
                    remove_idle(bus)
                case _:
                    bus = restart(bus, path, is_stopped=step == "stop")
                    assert not bus.found.problems
            found = bus.broker.store.class_id_by_name
            assert {id_: found[id_] for id_ in ids if id_ in found}.items() <= ids.items()
            for cls in bus.broker.classes.values():
                assert cls.ring.head == heads[cls.name]
        bus.crash()
