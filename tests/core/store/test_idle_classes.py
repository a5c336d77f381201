"""Removal of unused classes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from simplebus.core.limits import RING_IDLE_TICKS
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import Settings
from tests.behaviour.wire_peer import BrokerHarness, advance_tick, connect
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    connect_request,
    connect_version2,
    publish,
    subscribe,
    unsubscribe,
)

IDLE_SECONDS = 100
LONG = IDLE_SECONDS + 2 * RING_IDLE_TICKS + 2
"""Ticks after which an unused class has certainly been removed."""


def create_bus(**options: object) -> BrokerHarness:
    return BrokerHarness(Settings(**{"idle_class_seconds": IDLE_SECONDS, **options}))  # type: ignore[arg-type]


def advance(bus: BrokerHarness, ticks: int = LONG) -> None:
    for _ in range(ticks):
        advance_tick(bus)


def names(bus: BrokerHarness) -> set[str]:
    return {cls.label for cls in bus.broker.classes.values()}


def test_unused_class_is_removed_after_the_time() -> None:
    bus = create_bus()
    connect_version2(bus, classes=["orders", 7]).disconnect()
    advance(bus, IDLE_SECONDS)
    assert names(bus) == {"orders", "7"}
    advance(bus, 1)
    assert not bus.broker.classes
    assert not bus.broker.store.class_id_by_name
    assert set(bus.broker.idle_classes.pop_removed()) == {"orders", "7"}


def test_use_restarts_the_time() -> None:
    bus = create_bus()
    connect_version2(bus, classes=["orders"]).disconnect()
    advance(bus, IDLE_SECONDS)
    connect_version2(bus, classes=["orders"]).disconnect()
    advance(bus, IDLE_SECONDS)
    assert names(bus) == {"orders"}
    advance(bus, 2)
    assert not bus.broker.classes


def test_clock_that_is_set_back_restarts_the_time() -> None:
    bus = create_bus()
    bus.broker.clock.now = 10_000.0
    connect_version2(bus, classes=["orders"]).disconnect()
    advance(bus, IDLE_SECONDS)
    bus.broker.clock.now -= 5000
    advance(bus, IDLE_SECONDS)
    assert names(bus) == {"orders"}
    advance(bus, 2)
    assert not bus.broker.classes


def test_connected_client_keeps_its_classes() -> None:
    bus = create_bus()
    peer = connect_version2(bus, classes=["orders"], heartbeat=0)
    bus.broker.settings = replace(bus.broker.settings, heartbeat_seconds=0)
    session = peer.session
    for _ in range(LONG):
        bus.broker.clock.now += 1
        bus.broker.idle_classes.tick()
    assert names(bus) == {"orders"}
    bus.broker.close_session(session)
    advance(bus)
    assert not bus.broker.classes


def test_version1_client_keeps_its_classes() -> None:
    bus = create_bus()
    peer = bus.peer(connect(5))
    for _ in range(LONG):
        bus.broker.clock.now += 1
        bus.broker.idle_classes.tick()
    assert names(bus) == {"5"}
    bus.broker.close_session(peer.session)
    advance(bus)
    assert not bus.broker.classes


def test_stored_message_keeps_the_class() -> None:
    bus = create_bus()
    connect_version2(bus, publish(1, 0, b"x"), classes=[1]).disconnect()
    advance(bus)
    assert names(bus) == {"1"}
    reader = connect_version2(bus, subscribe(1, 5))
    assert reader.receive_message_ids() == [0]
    reader.send(ack(5, 0, 1))
    reader.disconnect()
    advance(bus)
    assert not bus.broker.classes


def test_durable_keeps_the_class() -> None:
    bus = create_bus()
    connect_version2(bus, subscribe(1, 5, durable="billing")).disconnect()
    advance(bus)
    assert names(bus) == {"1"}
    peer = connect_version2(bus, subscribe(1, 5, durable="billing"))
    peer.send(unsubscribe(5, forget=True))
    peer.disconnect()
    advance(bus)
    assert not bus.broker.classes


def test_bound_and_declared_classes_stay() -> None:
    bus = create_bus()
    registry = bus.broker.store.class_registry
    registry.declare_operator_classes([NamedClass(id=3, name="declared")])
    registry.bind_subject("orders.>", 4)
    advance(bus)
    assert names(bus) == {"declared", "4"}
    registry.declare_operator_classes([])
    registry.subject_bindings.unbind(4, "orders.>")
    advance(bus)
    assert not bus.broker.classes


@pytest.mark.parametrize("options", [{"declare_only": True}, {"idle_class_seconds": 0.0}], ids=str)
def test_settings_keep_all_classes(options: dict[str, object]) -> None:
    bus = create_bus(**options)
    bus.broker.store.class_registry.declare_classes(["orders"])
    advance(bus)
    assert names(bus) == {"orders"}


def test_class_continues_with_its_id_and_sequence() -> None:
    bus = create_bus()
    peer = connect_version2(bus, classes=["orders"])
    class_id = bus.broker.store.class_id_by_name["orders"]
    peer.send(subscribe(class_id, 5), publish(class_id, 0, b"x", b"y"))
    assert peer.receive_message_ids() == [0, 1]
    peer.send(ack(5, 0, 2))
    peer.disconnect()
    advance(bus)
    assert not bus.broker.classes
    # The name that would get the id first gets another one.
    second = connect_version2(bus, classes=[{"name": "news"}, {"id": class_id - 1}])
    second.send(publish(class_id - 1, 0, b"z"))
    connect_version2(bus, classes=["orders"])
    assert bus.broker.store.class_id_by_name["orders"] == class_id
    reader = connect_version2(bus, subscribe(class_id, 5, start="earliest"), classes=[class_id])
    connect_version2(bus, publish(class_id, 0, b"w"), classes=[class_id])
    assert reader.receive_message_ids() == [2]


def test_removed_class_does_not_count_for_its_creator() -> None:
    bus = create_bus()
    session = bus.broker.open_session("peer", address="10.0.0.1")
    Version2Peer(bus, session).send(connect_request("orders"))
    counts = bus.broker.store.class_registry.class_count_by_address
    assert counts == {"10.0.0.1": 1}
    bus.broker.close_session(session)
    advance(bus)
    assert not counts


class IdleClassesMachine(RuleBasedStateMachine):
    """A class that something refers to exists, and always keeps its id and its sequences."""

    NAMES = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.bus = create_bus(idle_class_seconds=3.0, heartbeat_seconds=0.0)
        self.peers: list[tuple[Version2Peer, set[str]]] = []
        self.ids: dict[str, int] = {}
        self.heads: dict[str, int] = {}
        self.stored: dict[str, int] = dict.fromkeys(self.NAMES, 0)
        """Messages that nobody has acknowledged."""
        self.durables: set[str] = set()

    def id_of(self, name: str) -> int:
        return self.bus.broker.store.class_id_by_name[name]

    @rule(name=st.sampled_from(NAMES), is_staying=st.booleans())
    def declare(self, name: str, is_staying: bool) -> None:
        peer = connect_version2(self.bus, classes=[name])
        cls = self.bus.broker.classes[self.id_of(name)]
        if self.heads.get(name):  # Without messages there is nothing to confuse.
            assert cls.class_id == self.ids[name]
        self.ids[name] = cls.class_id
        assert cls.ring.head == self.heads.setdefault(name, 0)
        if is_staying:
            self.peers.append((peer, {name}))
        else:
            peer.disconnect()

    @rule(name=st.sampled_from(NAMES))
    def publish(self, name: str) -> None:
        self.declare(name, False)
        class_id = self.id_of(name)
        connect_version2(self.bus, publish(class_id, 0, b"x"), classes=[name]).disconnect()
        self.heads[name] += 1
        self.stored[name] += 1

    @rule(name=st.sampled_from(NAMES))
    def consume(self, name: str) -> None:
        self.declare(name, False)
        reader = connect_version2(self.bus, subscribe(self.id_of(name), 5), classes=[name])
        sequences = reader.receive_message_ids()
        assert len(sequences) == self.stored[name] * (name not in self.durables)
        if sequences:
            reader.send(ack(5, sequences[0], sequences[-1] + 1))
            self.stored[name] = 0
        reader.disconnect()

    @rule(name=st.sampled_from(NAMES))
    def leave_durable(self, name: str) -> None:
        if self.stored[name]:
            return
        self.declare(name, False)
        request = subscribe(self.id_of(name), 5, durable="d")
        connect_version2(self.bus, request, classes=[name]).disconnect()
        self.durables.add(name)

    @rule(name=st.sampled_from(NAMES))
    def forget_durable(self, name: str) -> None:
        if name not in self.durables:
            return
        peer = connect_version2(
            self.bus, subscribe(self.id_of(name), 5, durable="d"), classes=[name]
        )
        sequences = peer.receive_message_ids()
        if sequences:
            peer.send(ack(5, sequences[0], sequences[-1] + 1))
        peer.send(unsubscribe(5, forget=True))
        peer.disconnect()
        self.durables.discard(name)
        self.stored[name] = 0

    @rule()
    def leave(self) -> None:
        if self.peers:
            self.peers.pop(0)[0].disconnect()

    @rule(ticks=st.sampled_from([1, 5, LONG]))
    def wait(self, ticks: int) -> None:
        advance(self.bus, ticks)
        if ticks == LONG:
            assert names(self.bus) == self.used_names()

    def used_names(self) -> set[str]:
        declared = {name for _, peer_names in self.peers for name in peer_names}
        return declared | self.durables | {name for name, count in self.stored.items() if count}

    @invariant()
    def used_classes_exist(self) -> None:
        assert self.used_names() <= names(self.bus)


TestIdleClasses = IdleClassesMachine.TestCase
TestIdleClasses.settings = hypothesis_settings(stateful_step_count=30)
