"""Message ids survive a crash together with their messages, and not without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simplebus.core.limits import DUPLICATE_WINDOW_SECONDS
from simplebus.core.protocol import frames
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.envelope_batch import Envelope, encode
from simplebus.core.protocol.events import AckedRange, SubscribeRequested
from simplebus.core.protocol.requests import SubscribeRequest
from simplebus.core.session.session import Session
from tests.storage.journaled_broker import KeptBus

CLASS_ID = 1


def open_session(bus: KeptBus) -> Session:
    """Open the session of a NATS client."""
    if CLASS_ID not in bus.broker.classes:
        bus.broker.store.class_registry.create_classes([(CLASS_ID, "orders")])
    return bus.broker.open_local_session("a NATS client")


def publish(bus: KeptBus, session: Session, message_id: str) -> tuple[int, bool]:
    """Publish a message. Returns its sequence, and whether it is a duplicate."""
    content = encode(Envelope("a", headers=(("Nats-Msg-Id", message_id),)), b"x")
    frame = frames.encode(frames.ENVELOPE, class_id=CLASS_ID, content=content)
    stored = bus.broker.publish_or_refuse(
        session, CLASS_ID, "a", memoryview(frame), message_id.encode()
    )
    return stored.sequence, stored.is_duplicate


def ack_all(bus: KeptBus, session: Session) -> None:
    """Acknowledge everything, so that it is released."""
    bus.broker.apply_event(session, SubscribeRequested(0, CLASS_ID, 1, SubscribeRequest()))
    while data := session.outbox.peek(bus.broker.tick_number):
        session.outbox.mark_sent(len(data), bus.broker.tick_number)
    head = bus.broker.classes[CLASS_ID].ring.head
    bus.broker.apply_event(session, AckedRange(1, 0, head))
    bus.broker.apply_position_changes()
    assert len(bus.broker.classes[CLASS_ID].ring) == 0


def restart(bus: KeptBus, path: Path, seconds: float = 1.0, **options: object) -> KeptBus:
    now = bus.broker.clock.now + seconds
    bus.crash()
    return KeptBus(path, now=now, **options)  # type: ignore[arg-type]


def test_ids_of_acknowledged_messages_survive_crashes(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path, segment_bytes=100)
    session = open_session(bus)
    for number in range(20):
        assert publish(bus, session, str(number)) == (number, False)
        if number == 9:
            bus.keeper.is_snapshot_due = True
        bus.sync()
    ack_all(bus, session)
    bus.remove()
    bus.keeper.is_snapshot_due = True
    bus.remove()
    bus.remove()
    for _ in range(2):
        bus = restart(bus, tmp_path)
        session = open_session(bus)
        assert [publish(bus, session, str(n)) for n in range(20)] == [(n, True) for n in range(20)]
    assert publish(bus, session, "20") == (20, False)


def test_ids_expire_while_the_server_is_down(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    publish(bus, open_session(bus), "a")
    bus.sync()
    bus = restart(bus, tmp_path, DUPLICATE_WINDOW_SECONDS + 2)
    assert publish(bus, open_session(bus), "a") == (1, False)


@pytest.mark.parametrize("is_snapshot", [True, False])
def test_id_without_its_message_is_unused(tmp_path: Path, is_snapshot: bool) -> None:
    bus = KeptBus(tmp_path)
    session = open_session(bus)
    bus.sync()
    publish(bus, session, "a")
    bus.keeper.is_snapshot_due = is_snapshot
    bus.sync()
    publish(bus, session, "b")
    bus = restart(bus, tmp_path)
    session = open_session(bus)
    assert publish(bus, session, "b") == (1, False)
    assert publish(bus, session, "a") == (0, True)


def test_ids_are_dropped_if_messages_may_be_missing(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path, level=Durability.OS, boot="one")
    publish(bus, open_session(bus), "a")
    bus.sync()
    bus = restart(bus, tmp_path, level=Durability.OS, boot="two")  # After a power failure.
    assert publish(bus, open_session(bus), "a") == (1, False)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.sampled_from(["publish", "publish", "publish", "sync", "snapshot", "ack", "crash"]),
        max_size=40,
    )
)
def test_confirmed_messages_are_stored_once_through_crashes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    """Every message is published again after a crash, as by a publisher without a PubAck."""
    path = tmp_path_factory.mktemp("journal")
    bus = KeptBus(path, segment_bytes=300)
    session = open_session(bus)
    written: dict[str, int] = {}
    unwritten: dict[str, int] = {}
    count = 0
    for step in steps:
        match step:
            case "publish":
                sequence, is_duplicate = publish(bus, session, str(count))
                assert not is_duplicate
                unwritten[str(count)] = sequence
                count += 1
            case "sync" | "snapshot":
                bus.keeper.is_snapshot_due |= step == "snapshot"
                bus.remove()
                written |= unwritten
                unwritten.clear()
            case "ack":
                ack_all(bus, session)
                bus.broker.close_session(session)
                session = open_session(bus)
            case "crash":
                bus = restart(bus, path, segment_bytes=300)
                session = open_session(bus)
                for name, sequence in written.items():
                    assert publish(bus, session, name) == (sequence, True)
                for name in unwritten:
                    unwritten[name], is_duplicate = publish(bus, session, name)
                    assert not is_duplicate
    bus.crash()


def test_id_of_a_message_that_is_released_in_the_same_write_is_known(tmp_path: Path) -> None:
    bus = KeptBus(tmp_path)
    session = open_session(bus)
    bus.sync()
    assert publish(bus, session, "a") == (0, False)
    ack_all(bus, session)
    bus.broker.close_session(session)
    bus.sync()
    bus = restart(bus, tmp_path)
    assert publish(bus, open_session(bus), "a") == (0, True)
    bus.crash()
