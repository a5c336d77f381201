"""Ownership of durables and groups: resuming, moving and removing them."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import (
    AdminRight,
    PermissionRule,
    PermissionRules,
    Permissions,
)
from simplebus.core.users.users import User, Users
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    connect_version2,
    publish,
    subscribe,
    unsubscribe,
)
from tests.core.authorization.users import create_user

BOSS = User("boss", token=hash_token("boss"))
USERS = Users(
    [
        BOSS,
        create_user("ada"),
        create_user("bob"),
        create_user("eu", "1 eu.#"),
        create_user("eu2", "1 eu.#"),
        create_user("keeper", admin=((AdminRight.CONFIGURE, "*"),)),
    ]
)


@pytest.fixture
def bus() -> BrokerHarness:
    found = BrokerHarness()
    found.broker.user_directory.replace_users(USERS)
    return found


def connect_user(bus: BrokerHarness, name: str, *requests: bytes) -> Version2Peer:
    return connect_version2(bus, *requests, auth={"token": name})


def subscribe_error(bus: BrokerHarness, user_name: str, **options: object) -> str:
    """Return the error text of a Subscribe, or "" if it is granted. The peer disconnects."""
    found = connect_user(bus, user_name, subscribe(1, 1, **options))
    (reply,) = found.receive_replies()
    found.disconnect()
    return "" if reply.kind == "subscribe" else str(reply.content["message"])


def test_durable_belongs_to_its_creator(bus: BrokerHarness) -> None:
    for owner in ("ada", "eu"):
        assert subscribe_error(bus, owner, durable=owner) == ""
        refused = subscribe_error(bus, "bob", durable=owner)
        assert refused == (
            f"user 'bob' may not use the durable {owner!r}: it belongs to another user"
        )
        for other_name in (owner, "keeper", "boss"):
            assert subscribe_error(bus, other_name, durable=owner) == ""


def test_resume_is_refused_if_owner_sees_more(bus: BrokerHarness) -> None:
    for maker in ("boss", "ada"):
        assert subscribe_error(bus, maker, durable="d", group="g") == ""
        error = subscribe_error(bus, "eu", durable="d", group="g")
        assert error == (
            "user 'eu' may not use the durable 'd': it receives messages that this user may not see"
        )
        assert subscribe_error(bus, "bob", durable="d", group="g") == ""


def test_group_is_open_to_users_with_same_scope(bus: BrokerHarness) -> None:
    first = connect_user(bus, "eu", subscribe(1, 1, group="g"))
    assert subscribe_error(bus, "eu2", group="g") == ""
    assert "shared by users who may see other channels" in subscribe_error(bus, "ada", group="g")
    assert [reply.kind for reply in first.receive_replies()] == ["subscribe"]


def test_only_owner_and_configurers_may_move_or_remove(bus: BrokerHarness) -> None:
    subscribe_error(bus, "ada", durable="p")
    error = subscribe_error(bus, "bob", durable="p", seek=True, start="new")
    assert error == (
        "user 'bob' may not move or remove the durable 'p': it belongs to another user"
    )
    for user_name in ("keeper", "ada"):
        assert subscribe_error(bus, user_name, durable="p", seek=True, start="new") == ""
    subscribe_error(bus, "ada", durable="d", group="g")
    bob = connect_user(
        bus, "bob", subscribe(1, 1, durable="d", group="g"), unsubscribe(1, forget=True)
    )
    granted, refused = bob.receive_replies()
    assert (granted.kind, refused.content["code"]) == ("subscribe", Reason.UNAUTHORIZED)
    bob.send(unsubscribe(1))
    assert [reply.kind for reply in bob.receive_replies()] == ["unsubscribe"]
    bob.disconnect()
    for options in ({"durable": "d", "group": "g"}, {"durable": "p"}):
        ada = connect_user(bus, "ada", subscribe(1, 1, **options), unsubscribe(1, forget=True))
        assert [reply.kind for reply in ada.receive_replies()] == ["subscribe", "unsubscribe"]
    assert not bus.broker.classes[1].named_positions


@pytest.mark.parametrize(
    "options",
    [
        {"idle_seconds": 0.001},
        {"slow": "drop_oldest", "max_pending": 1},
        {"max_deliveries": 1, "ack_seconds": 0.1},
    ],
)
def test_only_owner_and_configurers_may_change_policy(
    bus: BrokerHarness, options: dict[str, object]
) -> None:
    subscribe_error(bus, "ada", durable="d", group="g", idle_seconds=9)
    [position] = bus.broker.classes[1].named_positions.values()
    before = position.delivery_policy
    assert subscribe_error(bus, "bob", durable="d", group="g", **options) == ""
    assert (position.delivery_policy, position.idle_seconds) == (before, 9)
    for user_name in ("keeper", "ada"):
        assert (
            subscribe_error(
                bus, user_name, durable="d", group="g", idle_seconds=8, max_deliveries=3
            )
            == ""
        )
        assert (position.delivery_policy.deliveries_max, position.idle_seconds) == (3, 8)
        subscribe_error(bus, "ada", durable="d", group="g", idle_seconds=9)


def test_durable_without_owner_is_adopted_by_user_who_sees_all(bus: BrokerHarness) -> None:
    bus.broker.user_directory.replace_users(None)
    anybody = connect_version2(bus, subscribe(1, 1, durable="d"))
    anybody.disconnect()
    bus.broker.user_directory.replace_users(USERS)
    assert subscribe_error(bus, "eu", durable="d") == (
        "user 'eu' may not use the durable 'd': it receives messages that this user may not see"
    )
    assert subscribe_error(bus, "ada", durable="d") == ""
    assert subscribe_error(bus, "bob", durable="d") == (
        "user 'bob' may not use the durable 'd': it belongs to another user"
    )


def test_naming_a_class_reapplies_permissions(bus: BrokerHarness) -> None:
    secret = PermissionRules(deny=(PermissionRule.parse("secret*"),))
    spy = User("spy", token=hash_token("spy"), permissions=Permissions(subscribe=secret))
    bus.broker.user_directory.replace_users(Users([BOSS, spy]))
    listener = connect_version2(bus, subscribe(7, 1), classes=[7], auth={"token": "spy"})
    boss = connect_version2(bus, classes=[{"id": 7, "name": "secret7"}, 8], auth={"token": "boss"})
    boss.send(publish(7, 0, b"TOPSECRET"))
    assert listener.receive_deliveries() == []
    ((cut, error),) = bus.broker.end_turn().close
    assert cut is listener.session
    assert error.reason is Reason.UNAUTHORIZED


def test_denied_class_denies_its_dead_letters(
    bus: BrokerHarness,
) -> None:
    def denied(user_name: str, rule: str) -> User:
        rules = PermissionRules(deny=(PermissionRule.parse(rule),))
        return User(
            user_name, token=hash_token(user_name), permissions=Permissions(subscribe=rules)
        )

    users = Users([BOSS, denied("by-id", "7"), denied("by-name", "orders")])
    bus.broker.user_directory.replace_users(users)
    users.resolve_class_name = bus.broker.store.class_registry.find_dead_letter_sources
    early = connect_version2(bus, classes=["dead.7"], auth={"token": "by-name"})
    dead_of_7 = bus.broker.store.class_id_by_name["dead.7"]
    early.send(subscribe(dead_of_7, 1))
    assert [reply.kind for reply in early.receive_replies()] == ["subscribe"]
    connect_version2(bus, classes=[{"id": 7, "name": "orders"}], auth={"token": "boss"})
    ((cut, error),) = bus.broker.end_turn().close
    assert (cut, error.sentence) == (early.session, "class 7 has the name 'orders' now")
    connect_version2(bus, classes=["dead.orders"], auth={"token": "boss"})
    for user_name in ("by-id", "by-name"):
        for name in ("dead.7", "dead.orders"):
            peer = connect_version2(bus, classes=[1], auth={"token": user_name})
            peer.send(subscribe(bus.broker.store.class_id_by_name[name], 1))
            assert [reply.content["code"] for reply in peer.receive_replies()] == [
                Reason.UNAUTHORIZED
            ]


def test_denied_long_class_name_denies_its_dead_letters(
    bus: BrokerHarness,
) -> None:
    long = "x" * 198
    rules = PermissionRules(deny=(PermissionRule.parse(long),))
    spy = User("spy", token=hash_token("spy"), permissions=Permissions(subscribe=rules))
    users = Users([BOSS, spy])
    bus.broker.user_directory.replace_users(users)
    users.resolve_class_name = bus.broker.store.class_registry.find_dead_letter_sources
    connect_version2(bus, classes=[long], auth={"token": "boss"})
    dead = bus.broker.store.class_registry.open_dead_letter_class(long)
    peer = connect_version2(bus, classes=[1], auth={"token": "spy"})
    peer.send(subscribe(dead.class_id, 1))
    assert [reply.content["code"] for reply in peer.receive_replies()] == [Reason.UNAUTHORIZED]
