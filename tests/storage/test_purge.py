"""Purged messages do not return."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplebus.core import checkpoint
from simplebus.core.limits import (
    CHECKPOINT_PAUSE_SECONDS,
    CHECKPOINT_SECONDS,
    PROGRESS_SECONDS,
)
from simplebus.core.message_class import purge as message_class_purge
from simplebus.core.settings import Retention, Settings
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer_v2 import (
    FETCH,
    PURGE,
    ack,
    connect_version2,
    json_request,
    publish,
    subscribe,
)
from tests.storage.journaled_broker import KeptBus


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("in_peace", [False, True])
def test_purge_survives_restart(tmp_path: Path, in_peace: bool, times: int) -> None:
    bus = KeptBus(tmp_path, settings=Settings(keep=Retention(messages=100)))
    reader = connect_version2(bus, subscribe(1, 5, durable="billing", max_in_flight=1))
    bus.sync()
    peer = connect_version2(bus, publish(1, 0, *numbered(10)), name="till")
    assert reader.receive_message_ids() == [0]
    bus.sync()
    peer.send(json_request(PURGE, 1, 4, first=2, last=4))
    peer.receive_replies()
    bus.sync()
    peer.send(json_request(PURGE, 1, 4, first=6, last=7))
    peer.receive_replies()
    bus.sync()
    for _ in range(times):
        bus.close() if in_peace else bus.crash()
        bus = KeptBus(tmp_path)
        bus.sync()
    assert bus.statistics(1).dropped == {}
    peer = connect_version2(bus, json_request(FETCH, 1, 3))
    assert [reply.content["purged"] for reply in peer.receive_replies()] == [[[2, 4], [6, 7]]]
    reader = connect_version2(bus, subscribe(1, 5, durable="billing", max_in_flight=100))
    assert reader.receive_message_ids() == [0, 1, 4, 5, 7, 8, 9]
    assert connect_version2(bus, subscribe(1, 5, start="earliest")).receive_message_ids() == [
        0,
        1,
        4,
        5,
        7,
        8,
        9,
    ]
    reader.send(ack(5, 0, 10))
    bus.crash()


def test_purges_backlog_without_subscription(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, publish(1, 0, *numbered(10)), name="till")
    bus.sync()
    peer.send(json_request(PURGE, 1, 4))
    peer.receive_replies()
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    assert len(bus.broker.classes[1].ring) == 0
    connect_version2(bus, publish(1, 0, b"next"), name="other")
    assert connect_version2(bus, subscribe(1, 5)).receive_message_ids() == [10]
    bus.crash()


def test_purge_survives_crash_that_loses_an_ack(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    peer = connect_version2(bus, publish(1, 0, *numbered(3)), name="till")
    bus.sync()
    assert reader.receive_message_ids() == [0, 1, 2]
    reader.send(ack(5, 0, 2))
    peer.send(json_request(PURGE, 1, 4, first=0, last=1))
    peer.receive_replies()
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    ids = connect_version2(bus, subscribe(1, 5, durable="billing")).receive_message_ids()
    assert 0 not in ids
    assert 2 in ids
    bus.crash()


def test_purge_does_not_affect_reused_sequences(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    peer = connect_version2(bus, publish(1, 0, b"safe"), name="till")
    bus.sync()
    written = (tmp_path / "classes" / "00001" / f"{0:020}.log").read_bytes()
    peer.send(publish(1, 1, b"lost"), json_request(PURGE, 1, 4, first=1))
    bus.sync()
    bus.crash()
    path = tmp_path / "classes" / "00001" / f"{0:020}.log"
    path.write_bytes(written)
    bus = KeptBus(tmp_path)
    bus.sync()
    connect_version2(bus, publish(1, 0, b"new"), name="other")
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    assert connect_version2(bus, subscribe(1, 5)).receive_message_ids() == [0, 1]
    bus.crash()


def test_recovery_does_not_limit_purged_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ack frees a purged range, and another purge takes its place before the next scan."""
    monkeypatch.setattr(message_class_purge, "PURGED_RANGES_MAX", 2)
    bus = KeptBus(tmp_path)
    reader = connect_version2(bus, subscribe(1, 5, durable="billing"))
    bus.sync()
    peer = connect_version2(bus, publish(1, 0, *numbered(8)), name="till")
    assert reader.receive_message_ids() == list(range(8))
    bus.sync()
    for first in (1, 3):
        peer.send(json_request(PURGE, 1, 4, first=first, last=first + 1))
    peer.receive_replies()
    bus.broker.clock.now += CHECKPOINT_SECONDS
    bus.sync()
    reader.send(ack(5, 0, 1))
    peer.send(json_request(PURGE, 1, 4, first=5, last=6))
    assert [reply.content for reply in peer.receive_replies()] == [{"purged": 1}]
    bus.broker.clock.now += PROGRESS_SECONDS
    bus.sync()
    bus.crash()
    bus = KeptBus(tmp_path)
    ids = connect_version2(bus, subscribe(1, 5, durable="billing")).receive_message_ids()
    assert ids == [2, 4, 6, 7]
    bus.crash()


def sync_later(bus: KeptBus) -> None:
    """Sync when the next portion of a scan is due."""
    bus.broker.clock.now += CHECKPOINT_PAUSE_SECONDS
    bus.sync()


@pytest.mark.parametrize("is_begun", [False, True])
def test_purge_during_a_snapshot_survives_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    """The snapshot is collected in portions. With `is_begun` the purge begins before it, otherwise
    after the durables were collected; in both cases it is completed before the last portion.
    """
    monkeypatch.setattr(message_class_purge, "PURGED_POSITIONS_PER_TURN", 1)
    monkeypatch.setattr(checkpoint, "CHECKPOINT_POSITIONS_PER_TURN", 1)
    durables = ["audit", "billing", "stock"]
    bus = KeptBus(tmp_path)
    reader = connect_version2(
        bus, *[subscribe(1, number, durable=name) for number, name in enumerate(durables, 1)]
    )
    bus.sync()
    peer = connect_version2(bus, publish(1, 0, *numbered(3)), name="till")
    bus.sync()
    peer.receive_replies()
    peer.session.allow_split_reads()
    assert reader.receive_message_ids() == [0, 1, 2] * len(durables)
    bus.sync()
    if is_begun:
        peer.send(json_request(PURGE, 1, 4))
        assert peer.receive_replies() == []
        bus.sync()
    bus.keeper.is_snapshot_due = True
    for _ in ("class", *durables):
        sync_later(bus)
    assert bus.keeper.is_snapshot_begun
    if not is_begun:
        peer.send(json_request(PURGE, 1, 4))
    while not (replies := peer.receive_replies()):
        bus.broker.run_due_wakeups()
    assert [reply.content["purged"] for reply in replies] == [3]
    sync_later(bus)
    assert not bus.keeper.is_snapshot_begun
    bus.crash()
    bus = KeptBus(tmp_path)
    for name in durables:
        assert connect_version2(bus, subscribe(1, 1, durable=name)).receive_message_ids() == []
    assert len(bus.broker.classes[1].ring) == 0
    bus.crash()
