"""What one user may have made: classes, durables and groups."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import Permissions
from simplebus.core.users.users import User, Users
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    connect_version2,
    subscribe,
    unsubscribe,
)

STAY = "; classes stay once they are made, and max-classes in its user's table says how many"


def user(name: str, **about: int) -> User:
    return User(name, token=hash_token(name), permissions=Permissions(), **about)


USERS = [
    User("boss", token=hash_token("boss")),
    user("ada"),
    user("bob", classes_max=1, durables_max=1),
    user("free", classes_max=0, durables_max=0),
]


def served(**limits: int) -> BrokerHarness:
    bus = BrokerHarness(**limits)
    bus.broker.users = Users(USERS)
    return bus


def peer(
    bus: BrokerHarness, who: str, *said: bytes, classes: tuple[int | str, ...] = (1,)
) -> Version2Peer:
    return connect_version2(bus, *said, auth={"token": who}, classes=list(classes))


def refusal(bus: BrokerHarness, who: str, *classes: int | str) -> str:
    """Why somebody is not let in who names these classes."""
    with pytest.raises(RemoteProtocolError) as caught:
        peer(bus, who, classes=classes)
    assert caught.value.reason is Reason.TOO_MANY_CLASSES
    return caught.value.sentence


def told(peer: Version2Peer, *said: bytes) -> list[str]:
    """What a peer hears: the kind of an answer, or the sentence of an Error."""
    peer.send(*said)
    return [e.content["message"] if e.kind == "error" else e.kind for e in peer.receive_replies()]


@pytest.mark.parametrize(
    ("who", "most"), [("boss", 8), ("ada", 2), ("bob", 1), ("free", 8)], ids=str
)
def test_a_user_makes_so_many_classes(who: str, most: int) -> None:
    bus = served(classes=8)
    for number in range(most):
        peer(bus, who, classes=(f"c{number}",)).disconnect()
    said = refusal(bus, who, "more")
    if most < 8:
        told = f"user {who!r} names 1 new classes; it has made {most}, and may make {most}"
        assert said == f"{told}{STAY}"
    assert len(bus.broker.classes) == most
    peer(bus, who, classes=("c0",)).disconnect()  # Those that are there are nobody's share.


def test_who_names_too_many_at_once_has_none() -> None:
    bus = served(classes=8)
    said = refusal(bus, "ada", "a", "b", "c")
    assert said == f"user 'ada' names 3 new classes; it has made 0, and may make 2{STAY}"
    assert not bus.broker.classes
    peer(bus, "boss", classes=("a", "b", "c"))
    peer(bus, "ada", classes=("a", "b", "c", "d", "e"))
    assert [cls.creator for cls in bus.broker.classes.values()] == [*["boss"] * 3, *["ada"] * 2]


def test_all_who_may_not_do_everything_leave_some_classes() -> None:
    bus = served(classes=16)
    bus.broker.users = Users([*USERS, *(user(f"u{n}") for n in range(4))])
    for n in range(14):
        peer(bus, f"u{n // 4}", classes=(f"c{n}",)).disconnect()
    assert refusal(bus, "ada", "more") == (
        "user 'ada' names 1 new classes; 14 of 16 exist, and the last 2 are for who may do "
        f"everything{STAY}"
    )
    peer(bus, "bob", classes=("said so",)).disconnect()  # Its user says how many.
    peer(bus, "boss", classes=("orders",)).disconnect()


@pytest.mark.parametrize("how", ["durable", "group"])
@pytest.mark.parametrize(
    ("who", "most"), [("boss", 8), ("ada", 2), ("bob", 1), ("free", 8)], ids=str
)
def test_a_user_has_so_many_durables_and_groups(who: str, most: int, how: str) -> None:
    bus = served(durables=8)
    peer(bus, "boss", classes=(1, 2))
    one = peer(bus, who, classes=(1, 2))
    for number in range(most):
        assert told(one, subscribe(1, number + 1, **{how: f"d{number}"})) == ["subscribe"]
    elsewhere = 2 if most < 8 else 1
    (said,) = told(one, subscribe(elsewhere, 50, **{how: "more"}))
    assert said.endswith(
        f"has {most} durables and groups in all classes, and may have {most}"
        if most < 8
        else "class 1 has 8 durables and groups"
    )
    assert told(one, unsubscribe(1, forget=True)) == ["unsubscribe"]
    assert told(one, subscribe(elsewhere, 51, **{how: "more"})) == ["subscribe"]
    for number in [*range(2, most + 1), 51]:
        one.send(unsubscribe(number, forget=True))
    assert not bus.broker.subscription_manager.quotas.position_count_by_user
    assert not bus.broker.subscription_manager.quotas.durable_count


def test_a_durable_that_is_moved_or_taken_up_counts_once() -> None:
    bus = served()
    boss = peer(bus, "boss", subscribe(1, 1, durable="d"), unsubscribe(1))
    for seek in (True, False):
        boss.send(subscribe(1, 1, durable="d", seek=seek, start="new"), unsubscribe(1))
    assert bus.broker.subscription_manager.quotas.position_count_by_user == {"boss": 1}
    bus.broker.users = None
    connect_version2(bus, subscribe(1, 1, durable="nobodys")).disconnect()
    bus.broker.users = Users(USERS)
    peer(bus, "ada", subscribe(1, 1, durable="nobodys"))
    assert bus.broker.subscription_manager.quotas.position_count_by_user == {"boss": 1, "ada": 1}


def test_subscriptions_without_a_name_are_no_share() -> None:
    bus = served(durables=4)
    one = peer(bus, "bob")  # Of a class that it has made.
    for number in range(4):
        assert told(one, subscribe(1, number + 1)) == ["subscribe"]
    assert not bus.broker.subscription_manager.quotas.position_count_by_user


def test_what_turns_out_to_be_another_ones_is_no_share_of_who_asked_for_it() -> None:
    bus = served()
    ada = peer(bus, "ada")
    assert told(ada, subscribe(1, 1, durable="d"), subscribe(1, 2)) == ["subscribe", "subscribe"]
    shares = bus.broker.subscription_manager.quotas
    named, plain = bus.broker.classes[1].subscriptions
    for owner, made in (("bob", {"bob": 1}), ("", {}), ("bob", {"bob": 1}), ("bob", {"bob": 1})):
        for position in (named, plain):
            shares.change_owner(position, owner)
            assert position.owner == owner
        assert shares.position_count_by_user == made
    shares.remove_position(named)
    shares.remove_position(plain)
    assert not shares.position_count_by_user
