"""Replies to requests: who may not do everything hears those to itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.users.passwords import quick_hash
from simplebus.core.users.permissions import REPLIES, Permissions, Right, Rule, Rules, is_private
from simplebus.core.users.users import User, Users
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    json_request,
    publish_envelopes,
    channel_envelope,
    connect_version2,
    subscribe,
)

TO_ADA, TO_BOB = f"{REPLIES}.ada", f"{REPLIES}.bob"
NAMED = NamedClass(id=9, name=REPLIES)


def user(name: str, *rules: str, admin: tuple[tuple[Right, str], ...] = ()) -> User:
    may = Permissions(Rules(()), Rules(tuple(map(Rule.parse, rules)) or None), admin)
    return User(name, token=quick_hash(name), permissions=may)


@pytest.fixture
def bus() -> BrokerHarness:
    found = BrokerHarness()
    found.broker.users = Users(
        [
            User("boss", token=quick_hash("boss")),
            user("ada", REPLIES),
            user("eve", f"{REPLIES} {REPLIES}.#"),
            user("any"),
            user("log", admin=((Right.FETCH, "*"),)),
        ]
    )
    return found


def named(bus: BrokerHarness) -> None:
    bus.broker.store.class_registry.declare_classes([NAMED])


def peer(bus: BrokerHarness, name: str, *said: bytes) -> Version2Peer:
    return connect_version2(bus, *said, classes=[9], auth={"token": name})


def test_which_classes_have_channels_that_are_private() -> None:
    assert is_private(REPLIES)
    assert is_private(f"dead.{REPLIES}")
    assert not is_private(TO_ADA)


def test_each_hears_replies_on_channels_that_it_knows(bus: BrokerHarness) -> None:
    named(bus)
    boss = peer(bus, "boss")
    ada = peer(bus, "ada", subscribe(9, 1, channels=[TO_ADA]))
    log = peer(bus, "log", subscribe(9, 1))
    boss.send(publish_envelopes(9, 0, *(channel_envelope(name, b"x") for name in (TO_BOB, TO_ADA))))
    assert len(ada.receive_deliveries()) == 1
    assert len(log.receive_deliveries()) == 2
    everything = peer(bus, "boss", subscribe(9, 1, channels=[f"{REPLIES}.#"]))
    assert everything.receive_replies()[-1].kind == "subscribe"


@pytest.mark.parametrize("who", ["ada", "eve", "any"])
@pytest.mark.parametrize("channels", [[], [f"{REPLIES}.#"], ["#"], [TO_ADA, f"{REPLIES}.*"]])
def test_nobody_listens_to_replies_to_others(bus: BrokerHarness, who: str, channels: list[str]) -> None:
    named(bus)
    found = peer(bus, who, subscribe(9, 1, channels=channels))
    refused = found.receive_replies()[-1]
    assert refused.content["code"] == Reason.UNAUTHORIZED
    assert "by whole channels only" in str(refused.content["message"])


@pytest.mark.parametrize("who", ["ada", "any"])
def test_nobody_fetches_replies_to_others(bus: BrokerHarness, who: str) -> None:
    named(bus)
    boss = peer(bus, "boss", publish_envelopes(9, 0, channel_envelope(TO_BOB, b"x")))
    assert boss.receive_error_codes() == []
    asks = json_request(frames.FETCH, 9, first=0, last=9)
    assert [said.content["code"] for said in peer(bus, who, asks).receive_replies()] == [Reason.UNAUTHORIZED]
    assert "code" not in peer(bus, "log", asks).receive_replies()[-1].content


def test_who_may_by_the_id_of_a_class_may_name_it_by_its_name(bus: BrokerHarness) -> None:
    named(bus)
    by_id = Permissions(Rules((Rule("9"),)), Rules(()))
    denied = Permissions(Rules(), Rules((), (Rule("9"),)))
    bus.broker.users = Users(
        [
            User("svc", token=quick_hash("svc"), permissions=by_id),
            User("no", token=quick_hash("no"), permissions=replace(denied, publish=Rules(()))),
        ]
    )
    assert peer2(bus, classes=[REPLIES], auth={"token": "svc"}).errors() == []
    with pytest.raises(RemoteProtocolError, match="has nothing to do with class 'simplebus"):
        peer2(bus, classes=[REPLIES], auth={"token": "no"})


def test_who_listened_before_the_class_had_its_name_has_to_come_again(bus: BrokerHarness) -> None:
    spy = peer(bus, "any", subscribe(9, 1))
    fine = peer(bus, "any", subscribe(9, 1, channels=[TO_ADA]))
    boss = peer(bus, "boss")
    named(bus)
    boss.send(publish_envelopes(9, 0, channel_envelope(TO_ADA, b"x")))
    assert (spy.receive_deliveries(), len(fine.receive_deliveries())) == ([], 1)
    assert [session for session, _ in bus.broker.drain_closing()] == [spy.session]
