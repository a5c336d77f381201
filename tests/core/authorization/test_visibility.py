"""Visibility of the class of replies: users without full permissions see only their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import (
    REPLIES_CLASS,
    AdminRight,
    PermissionRule,
    PermissionRules,
    Permissions,
    has_private_channels,
    reply_channel_prefix,
)
from simplebus.core.users.users import User, Users
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    channel_envelope,
    connect_version2,
    json_request,
    publish_envelopes,
    subscribe,
)

TO_ADA, TO_BOB = reply_channel_prefix("ada") + "1", reply_channel_prefix("bob") + "1"
NAMED = NamedClass(id=9, name=REPLIES_CLASS)


def create_user(name: str, *rules: str, admin: tuple[tuple[AdminRight, str], ...] = ()) -> User:
    may = Permissions(
        PermissionRules(()), PermissionRules(tuple(map(PermissionRule.parse, rules)) or None), admin
    )
    return User(name, token=hash_token(name), permissions=may)


@pytest.fixture
def bus() -> BrokerHarness:
    found = BrokerHarness()
    found.broker.user_directory.replace_users(
        Users(
            [
                User("boss", token=hash_token("boss")),
                create_user("ada", REPLIES_CLASS),
                create_user("eve", f"{REPLIES_CLASS} {REPLIES_CLASS}.#"),
                create_user("any"),
                create_user("log", admin=((AdminRight.FETCH, "*"),)),
                create_user("eye", admin=((AdminRight.INQUIRE, "*"),)),
            ]
        )
    )
    return found


def declare_replies_class(bus: BrokerHarness) -> None:
    bus.broker.store.class_registry.declare_classes([NAMED])


def connect_user(bus: BrokerHarness, name: str, *requests: bytes) -> Version2Peer:
    return connect_version2(bus, *requests, classes=[9], auth={"token": name})


def test_private_classes() -> None:
    assert has_private_channels(REPLIES_CLASS)
    assert has_private_channels(f"dead.{REPLIES_CLASS}")
    assert not has_private_channels(TO_ADA)


def test_users_receive_replies_on_their_own_channels(bus: BrokerHarness) -> None:
    declare_replies_class(bus)
    boss = connect_user(bus, "boss")
    ada = connect_user(bus, "ada", subscribe(9, 1, channels=[TO_ADA]))
    boss.send(publish_envelopes(9, 0, *(channel_envelope(name, b"x") for name in (TO_BOB, TO_ADA))))
    assert len(ada.receive_deliveries()) == 1
    wide_reader = connect_user(bus, "boss", subscribe(9, 1, channels=[f"{REPLIES_CLASS}.#"]))
    assert wide_reader.receive_replies()[-1].kind == "subscribe"


@pytest.mark.parametrize("user_name", ["ada", "eve", "any", "log"])
@pytest.mark.parametrize(
    "channels", [[], [f"{REPLIES_CLASS}.#"], ["#"], [TO_ADA, f"{REPLIES_CLASS}.*"]]
)
def test_wildcard_subscription_to_replies_is_refused(
    bus: BrokerHarness, user_name: str, channels: list[str]
) -> None:
    declare_replies_class(bus)
    found = connect_user(bus, user_name, subscribe(9, 1, channels=channels))
    refused = found.receive_replies()[-1]
    assert refused.content["code"] == Reason.UNAUTHORIZED
    assert "only subscribe to single channels" in str(refused.content["message"])


@pytest.mark.parametrize("user_name", ["ada", "any", "log"])
def test_fetch_of_replies_is_refused(bus: BrokerHarness, user_name: str) -> None:
    declare_replies_class(bus)
    boss = connect_user(bus, "boss", publish_envelopes(9, 0, channel_envelope(TO_BOB, b"x")))
    assert boss.receive_error_codes() == []
    asks = json_request(frames.FETCH, 9, first=0, last=9)
    assert [
        reply.content["code"] for reply in connect_user(bus, user_name, asks).receive_replies()
    ] == [Reason.UNAUTHORIZED]


def test_reply_channel_of_another_user_is_refused(bus: BrokerHarness) -> None:
    declare_replies_class(bus)
    ada = connect_user(bus, "ada", subscribe(9, 1, channels=[TO_ADA]))
    second_ada = connect_user(bus, "ada", subscribe(9, 1, channels=[TO_ADA]))
    spy = connect_user(bus, "any", subscribe(9, 1, channels=[TO_BOB, TO_ADA]))
    boss = connect_user(bus, "boss", subscribe(9, 1, channels=[TO_ADA]))
    for peer, codes in ((ada, []), (second_ada, []), (spy, [Reason.UNAUTHORIZED]), (boss, [])):
        assert peer.receive_error_codes() == codes


def test_late_reply_is_not_for_another_user(bus: BrokerHarness) -> None:
    declare_replies_class(bus)
    ada = connect_user(bus, "ada", subscribe(9, 1, channels=[TO_ADA]))
    ada.disconnect()
    connect_user(bus, "boss", publish_envelopes(9, 0, channel_envelope(TO_ADA, b"x")))
    spy = connect_user(bus, "any", subscribe(9, 1, channels=[TO_ADA]))
    assert spy.receive_error_codes() == [Reason.UNAUTHORIZED]


def test_connect_reply_names_the_channels_of_replies(bus: BrokerHarness) -> None:
    declare_replies_class(bus)
    prefixes = {}
    for user in ("ada", "any", "boss"):
        asks = json_request(frames.CONNECT, 0, 8)
        (reply,) = connect_user(bus, user, asks).receive_replies()
        prefixes[user] = reply.content["replies"]
    assert TO_ADA.startswith(prefixes["ada"])
    assert not TO_ADA.startswith(prefixes["any"])
    assert prefixes["boss"] == f"{REPLIES_CLASS}."


def test_reports_do_not_show_channels_of_replies(bus: BrokerHarness) -> None:
    declare_replies_class(bus)
    ada = connect_user(bus, "ada", subscribe(9, 1, channels=[TO_ADA]))
    for user_name, is_shown in (("eye", False), ("boss", True)):
        for question in (
            {"about": "class", "class": 9},
            {"about": "session", "session": ada.session.session_id},
            {"about": "channel", "channel": TO_ADA},
            {"about": "channel", "channel": TO_ADA[:-2]},
        ):
            asks = json_request(frames.INQUIRE, 0, 8, **question)
            (report,) = connect_user(bus, user_name, asks).receive_replies()
            shown = str(report.content).replace(f"'channel': '{question.get('channel')}'", "")
            assert (TO_ADA in shown) == is_shown, (user_name, question)


def test_permission_by_id_allows_naming_the_class(bus: BrokerHarness) -> None:
    declare_replies_class(bus)
    by_id = Permissions(PermissionRules((PermissionRule("9"),)), PermissionRules(()))
    denied = Permissions(PermissionRules(), PermissionRules((), (PermissionRule("9"),)))
    bus.broker.user_directory.replace_users(
        Users(
            [
                User("svc", token=hash_token("svc"), permissions=by_id),
                User(
                    "no",
                    token=hash_token("no"),
                    permissions=replace(denied, publish=PermissionRules(())),
                ),
            ]
        )
    )
    assert (
        connect_version2(bus, classes=[REPLIES_CLASS], auth={"token": "svc"}).receive_error_codes()
        == []
    )
    with pytest.raises(RemoteProtocolError, match="has no permissions in class 'simplebus"):
        connect_version2(bus, classes=[REPLIES_CLASS], auth={"token": "no"})


def test_wildcard_subscriber_is_closed_when_class_becomes_private(bus: BrokerHarness) -> None:
    spy = connect_user(bus, "any", subscribe(9, 1))
    fine = connect_user(bus, "any", subscribe(9, 1, channels=[TO_ADA]))
    boss = connect_user(bus, "boss")
    declare_replies_class(bus)
    boss.send(publish_envelopes(9, 0, channel_envelope(TO_ADA, b"x")))
    assert (spy.receive_deliveries(), len(fine.receive_deliveries())) == ([], 1)
    assert [session for session, _ in bus.broker.end_turn().close] == [spy.session]
