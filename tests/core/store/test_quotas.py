"""Quotas: classes, durables and groups that one user may create."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import Permissions
from simplebus.core.users.users import User, Users
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    connect_request,
    connect_version2,
    subscribe,
    unsubscribe,
)

HINT = (
    "; unused ones are removed after 3600 s; set max-classes in the table of the user to change "
    "the limit"
)


def user(name: str, **about: int) -> User:
    return User(name, token=hash_token(name), permissions=Permissions(), **about)


USERS = [
    User("boss", token=hash_token("boss")),
    user("ada"),
    user("bob", classes_max=1, durables_max=1),
    user("free", classes_max=0, durables_max=0),
]


def bus_with_users(**limits: int) -> BrokerHarness:
    bus = BrokerHarness(**limits)
    bus.broker.user_directory.replace_users(Users(USERS))
    return bus


def peer(
    bus: BrokerHarness, user_name: str, *frames: bytes, classes: tuple[int | str, ...] = (1,)
) -> Version2Peer:
    return connect_version2(bus, *frames, auth={"token": user_name}, classes=list(classes))


def refusal(bus: BrokerHarness, user_name: str, *classes: int | str) -> str:
    """Return the error of a Connect that declares these classes."""
    with pytest.raises(RemoteProtocolError) as caught:
        peer(bus, user_name, classes=classes)
    assert caught.value.reason is Reason.TOO_MANY_CLASSES
    return caught.value.sentence


def replies_to(peer: Version2Peer, *frames: bytes) -> list[str]:
    """Return the kinds of the replies, or the messages of errors."""
    peer.send(*frames)
    return [e.content["message"] if e.kind == "error" else e.kind for e in peer.receive_replies()]


@pytest.mark.parametrize(
    ("user_name", "most"), [("boss", 8), ("ada", 2), ("bob", 1), ("free", 8)], ids=str
)
def test_class_quota_of_users(user_name: str, most: int) -> None:
    bus = bus_with_users(classes=8)
    for number in range(most):
        peer(bus, user_name, classes=(f"c{number}",)).disconnect()
    error = refusal(bus, user_name, "more")
    if most < 8:
        detail = (
            f"user {user_name!r} declares 1 new classes, but has created {most} of at most {most}"
        )
        assert error == f"{detail}{HINT}"
    assert len(bus.broker.classes) == most
    peer(bus, user_name, classes=("c0",)).disconnect()  # Existing classes do not count.


def test_connect_above_the_quota_creates_no_class() -> None:
    bus = bus_with_users(classes=8)
    error = refusal(bus, "ada", "a", "b", "c")
    assert error == f"user 'ada' declares 3 new classes, but has created 0 of at most 2{HINT}"
    assert not bus.broker.classes
    peer(bus, "boss", classes=("a", "b", "c"))
    peer(bus, "ada", classes=("a", "b", "c", "d", "e"))
    assert [cls.creator for cls in bus.broker.classes.values()] == [*["boss"] * 3, *["ada"] * 2]


def test_restricted_users_leave_reserved_classes() -> None:
    bus = bus_with_users(classes=16)
    bus.broker.user_directory.replace_users(Users([*USERS, *(user(f"u{n}") for n in range(4))]))
    for n in range(14):
        peer(bus, f"u{n // 4}", classes=(f"c{n}",)).disconnect()
    assert refusal(bus, "ada", "more") == (
        "user 'ada' declares 1 new classes, but 14 of 16 exist, and the last 2 are reserved for "
        f"users without restrictions{HINT}"
    )
    peer(bus, "bob", classes=("own quota",)).disconnect()  # The quota of its user is set.
    peer(bus, "boss", classes=("orders",)).disconnect()


@pytest.mark.parametrize("option", ["durable", "group"])
@pytest.mark.parametrize(
    ("user_name", "most"), [("boss", 8), ("ada", 2), ("bob", 1), ("free", 8)], ids=str
)
def test_durable_quota_of_users(user_name: str, most: int, option: str) -> None:
    bus = bus_with_users(durables=8)
    peer(bus, "boss", classes=(1, 2))
    client = peer(bus, user_name, classes=(1, 2))
    for number in range(most):
        assert replies_to(client, subscribe(1, number + 1, **{option: f"d{number}"})) == [
            "subscribe"
        ]
    other_class = 2 if most < 8 else 1
    (reply,) = replies_to(client, subscribe(other_class, 50, **{option: "more"}))
    assert reply.endswith(
        f"has {most} durables and groups in all classes, at most {most} are allowed"
        if most < 8
        else "class 1 has 8 durables and groups, at most 8 are allowed"
    )
    assert replies_to(client, unsubscribe(1, forget=True)) == ["unsubscribe"]
    assert replies_to(client, subscribe(other_class, 51, **{option: "more"})) == ["subscribe"]
    for number in [*range(2, most + 1), 51]:
        client.send(unsubscribe(number, forget=True))
    assert not bus.broker.subscription_manager.quotas.position_count_by_user
    assert not bus.broker.subscription_manager.quotas.durable_count


def test_moved_or_resumed_durable_counts_once() -> None:
    bus = bus_with_users()
    boss = peer(bus, "boss", subscribe(1, 1, durable="d"), unsubscribe(1))
    for seek in (True, False):
        boss.send(subscribe(1, 1, durable="d", seek=seek, start="new"), unsubscribe(1))
    assert bus.broker.subscription_manager.quotas.position_count_by_user == {"boss": 1}
    bus.broker.user_directory.replace_users(None)
    connect_version2(bus, subscribe(1, 1, durable="unowned")).disconnect()
    bus.broker.user_directory.replace_users(Users(USERS))
    peer(bus, "ada", subscribe(1, 1, durable="unowned"))
    assert bus.broker.subscription_manager.quotas.position_count_by_user == {"boss": 1, "ada": 1}


def test_subscriptions_without_names_do_not_count() -> None:
    bus = bus_with_users(durables=4)
    client = peer(bus, "bob")
    for number in range(4):
        assert replies_to(client, subscribe(1, number + 1)) == ["subscribe"]
    assert not bus.broker.subscription_manager.quotas.position_count_by_user


def test_change_owner_moves_the_count() -> None:
    bus = bus_with_users()
    ada = peer(bus, "ada")
    assert replies_to(ada, subscribe(1, 1, durable="d"), subscribe(1, 2)) == [
        "subscribe",
        "subscribe",
    ]
    quotas = bus.broker.subscription_manager.quotas
    named, plain = bus.broker.classes[1].positions
    for owner, counts in (("bob", {"bob": 1}), ("", {}), ("bob", {"bob": 1}), ("bob", {"bob": 1})):
        for position in (named, plain):
            quotas.change_owner(position, owner)
            assert position.owner == owner
        assert quotas.position_count_by_user == counts
    quotas.remove_position(named)
    quotas.remove_position(plain)
    assert not quotas.position_count_by_user


def declare(bus: BrokerHarness, address: str, *classes: object) -> str:
    """Declare classes on a new connection and end it. Returns the sentence of a refusal."""
    peer = Version2Peer(bus, bus.broker.open_session("peer", address=address))
    try:
        peer.send(connect_request(*classes))
    except RemoteProtocolError as error:
        return error.sentence
    finally:
        peer.disconnect()
    return ""


def test_address_leaves_classes_to_others() -> None:
    bus = BrokerHarness(classes=16)
    for n in range(8):
        assert declare(bus, "10.0.0.1", f"c{n}") == ""
    assert declare(bus, "10.0.0.1", "more") == (
        "a client without a user declares 1 new classes, but clients of 10.0.0.1 have created 8 "
        "of at most 8; unused ones are removed after 3600 s; set --max-classes-per-address to "
        "change the limit"
    )
    assert declare(bus, "10.0.0.1", "c0") == ""  # Existing classes do not count.
    assert declare(bus, "10.0.0.2", "orders") == ""


def test_connection_may_create_a_part_of_the_classes_of_its_address() -> None:
    bus = BrokerHarness(classes=16)
    assert declare(bus, "10.0.0.1", *range(4)) == ""
    assert declare(bus, "10.0.0.1", *range(4, 9)) == (
        "a client without a user declares 5 new classes, but the connection has created 0 of at "
        "most 4; unused ones are removed after 3600 s; set --max-classes-per-connection to change "
        "the limit"
    )
    assert len(bus.broker.classes) == 4


def test_addresses_of_a_network_share_the_quota() -> None:
    bus = BrokerHarness(classes=16, classes_per_address=1)
    assert declare(bus, "2001:db8::1", "a") == ""
    assert "clients of 2001:db8::/64" in declare(bus, "2001:db8::2", "b")


@pytest.mark.parametrize("address", ["", "10.0.0.1"])
def test_clients_in_the_process_and_limit_0_have_no_quota(address: str) -> None:
    bus = BrokerHarness(classes=16, classes_per_address=0, classes_per_connection=0)
    if not address:
        bus = BrokerHarness(classes=16)
    assert declare(bus, address, *range(16)) == ""
    assert declare(bus, address, "more").startswith(
        "a Connect named 1 new classes; 16 of at most 16 classes exist"
    )


def test_address_leaves_durables_to_others() -> None:
    bus = BrokerHarness(durables=4)
    greedy = Version2Peer(bus, bus.broker.open_session("peer", address="10.0.0.1"))
    greedy.send(connect_request(1, 2))
    greedy.receive_replies()
    requests = [subscribe(1 + n % 2, n, durable=f"d{n}") for n in (1, 2, 3)]
    assert replies_to(greedy, *requests) == [
        "subscribe",
        "subscribe",
        "clients of 10.0.0.1 without a user have 2 durables and groups in all classes, at most 2 "
        "are allowed; set --max-durables-per-address to change the limit",
    ]
    innocent = Version2Peer(bus, bus.broker.open_session("peer", address="10.0.0.2"))
    innocent.send(connect_request(1))
    innocent.receive_replies()
    assert replies_to(innocent, subscribe(1, 1, durable="billing")) == ["subscribe"]
    assert replies_to(greedy, unsubscribe(1, forget=True), subscribe(1, 3, group="g")) == [
        "unsubscribe",
        "subscribe",
    ]
    quotas = bus.broker.subscription_manager.quotas
    assert quotas.position_count_by_address == {"10.0.0.1": 2, "10.0.0.2": 1}
    greedy.send(unsubscribe(3), unsubscribe(2, forget=True))
    assert quotas.position_count_by_address == {"10.0.0.2": 1}
