"""NATS subjects that are bound to classes, by API, by configuration and by Connect."""

from __future__ import annotations

import pytest

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.channel.pattern import matches
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import SUBJECT_BINDINGS_MAX
from simplebus.core.message_class.subject_bindings import ClassSubjectBindings
from simplebus.core.protocol.requests import NamedClass
from simplebus.server.run import ServeOptions, serve
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import CONNECT, connect_version2, json_request


def refusal_reason(bindings: ClassSubjectBindings, *pairs: tuple[int, str]) -> Reason:
    before = len(bindings)
    with pytest.raises(RemoteProtocolError) as caught:
        bindings.check_bindings(pairs)
    assert len(bindings) == before
    return caught.value.reason


def test_observers_receive_existing_and_new_bindings() -> None:
    bindings = ClassSubjectBindings()
    early: list[tuple[int, str, bool]] = []
    late: list[tuple[int, str, bool]] = []
    bindings.add_observer(lambda *change: early.append(change))
    bindings.bind(7, "orders.>")
    bindings.bind(7, "orders.>")
    bindings.bind(8, "orders.>")
    bindings.bind(7, "*.paid")
    bindings.unbind(8, "orders.>")
    bindings.add_observer(lambda *change: late.append(change))
    assert late == [(7, "orders.>", True), (7, "*.paid", True)]
    assert early == [
        (7, "orders.>", True),
        (8, "orders.>", True),
        (7, "*.paid", True),
        (8, "orders.>", False),
    ]
    assert bindings.subjects_of(7) == ("orders.>", "*.paid")
    assert bindings.subjects_of(8) == ()
    with pytest.raises(KeyError, match=r"'orders\.>' is not bound to class 8"):
        bindings.unbind(8, "orders.>")


@pytest.mark.parametrize(
    "subject",
    ["", "a..b", "a b", "a.>.b", "orders.#", "#", "x" * 5000, "$JS.ACK.>", "_INBOX.a"],
)
def test_invalid_subject_cannot_be_bound(subject: str) -> None:
    bindings = ClassSubjectBindings()
    assert refusal_reason(bindings, (1, "fine"), (1, subject)) is Reason.BAD_CHANNEL
    with pytest.raises(RemoteProtocolError, match="cannot bind the subject"):
        bindings.bind(1, subject)


def test_channel_wildcard_in_subject_is_explained() -> None:
    with pytest.raises(RemoteProtocolError, match=r"'orders.#': # is a wildcard.*expected >"):
        ClassSubjectBindings().bind(1, "orders.#")
    ClassSubjectBindings().bind(1, "orders.a#b.>")
    assert matches("orders.a#b.>", "orders.a#b.c")


def test_number_of_bindings_is_limited() -> None:
    bindings = ClassSubjectBindings()
    for number in range(SUBJECT_BINDINGS_MAX):
        bindings.bind(number % 3, f"s.{number}")
    bindings.check_bindings([(0, "s.0")])
    assert refusal_reason(bindings, (0, "s.1")) is Reason.BAD_REQUEST


def test_bind_subject_creates_class() -> None:
    broker = Broker()
    assert broker.store.class_registry.bind_subject("orders.>", 7) == 7
    named = broker.store.class_registry.bind_subject("orders.eu.>", "orders")
    assert named == broker.store.class_id_by_name["orders"]
    assert broker.store.class_registry.bind_subject("more", "orders") == named
    assert broker.store.subject_bindings.subjects_of(named) == ("orders.eu.>", "more")
    with pytest.raises(RemoteProtocolError):
        broker.store.class_registry.bind_subject("#", "never")
    assert "never" not in broker.store.class_id_by_name


def test_conflicting_declarations_create_nothing() -> None:
    broker = Broker()
    for two in (
        [NamedClass(id=1, name="a", subjects=["x"]), NamedClass(id=1, name="b")],
        [NamedClass(name="a", subjects=["x"]), NamedClass(id=2, subjects=["a..b"])],
        [NamedClass(id=1, subjects=["x"]), NamedClass()],
    ):
        with pytest.raises(RemoteProtocolError):
            broker.store.class_registry.declare_classes(two)
    assert not broker.classes
    assert len(broker.store.subject_bindings) == 0


async def test_server_does_not_start_with_conflicting_classes() -> None:
    classes = NamedClass(id=1, name="a"), NamedClass(id=1, name="b")
    with pytest.raises(RemoteProtocolError, match="the class 'b' was named with id 1"):
        await serve(Settings(), ServeOptions(port=0, classes=classes))


def test_connect_binds_subjects() -> None:
    bus = BrokerHarness()
    connect_version2(
        bus, classes=[{"name": "orders", "subjects": ["orders.>", "paid"]}, {"id": 9}, 10]
    )
    orders = bus.broker.store.class_id_by_name["orders"]
    assert bus.broker.store.subject_bindings.subjects_of(orders) == ("orders.>", "paid")
    assert len(bus.broker.store.subject_bindings) == 2


def test_connect_with_invalid_subject_changes_nothing() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus)
    two = [{"name": "fine", "subjects": ["fine"]}, {"id": 5, "subjects": ["a..b"]}]
    peer.send(json_request(CONNECT, request=3, version=2, classes=two))
    assert peer.receive_error_codes() == ["bad_channel"]
    assert set(bus.broker.classes) == {1}
    assert len(bus.broker.store.subject_bindings) == 0
    peer.send(json_request(CONNECT, request=4, version=2, classes=[{"id": 5, "subjects": "a"}]))
    assert peer.receive_error_codes() == ["bad_connect"]


def test_address_leaves_bindings_to_others() -> None:
    bindings = ClassSubjectBindings()
    quota = SUBJECT_BINDINGS_MAX // 2
    for number in range(quota):
        bindings.bind(1, f"a.{number}", "10.0.0.1")
    sentence = (
        "cannot bind 1 more subjects to classes: clients of 10.0.0.1 without a user have bound "
        f"{quota} of at most {quota}"
    )
    with pytest.raises(RemoteProtocolError, match=sentence):
        bindings.bind(1, "more", "10.0.0.1")
    bindings.bind(1, "more", "10.0.0.2")
    bindings.unbind(1, "a.0")
    bindings.bind(1, "most", "10.0.0.1")
