"""Each cell of the permission table (security.md, "Users and permissions") in version 2."""

from __future__ import annotations

from typing import Any

import pytest

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import NamedClass
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
    channel_envelope,
    connect_version2,
    json_request,
    publish_envelopes,
    subscribe,
)

SECRET, DEAD, UNKNOWN = 7, 8, 6
NAMES = {SECRET: "secret", DEAD: "dead.secret"}
ALL_RIGHTS = tuple((right, "*") for right in AdminRight)
EVERYTHING = {
    "name",
    "declare",
    "bind",
    "publish",
    "subscribe",
    "fetch",
    "purge",
    "inquire",
    "list",
}


def rules(allow: str | None, *deny: str) -> PermissionRules:
    """Return rules that allow nothing (""), one class, or everything (None)."""
    allowed = None if allow is None else tuple(map(PermissionRule.parse, (allow and [allow]) or ()))
    return PermissionRules(allowed, tuple(map(PermissionRule.parse, deny)))


def only(*admin: AdminRight, publish: str = "", subscribe: str = "") -> Permissions:
    rights = tuple((right, "*") for right in admin)
    return Permissions(rules(publish), rules(subscribe), rights)


def denied(*, publish: tuple[str, ...] = (), subscribe: tuple[str, ...] = ()) -> Permissions:
    """Return every permission except these denials."""
    return Permissions(rules(None, *publish), rules(None, *subscribe), ALL_RIGHTS)


TABLE: dict[str, tuple[Permissions | None, set[str]]] = {
    "no table": (None, EVERYTHING),
    "all rights": (denied(), EVERYTHING),
    "nothing": (only(), set()),
    "publish": (only(publish="*"), {"name", "publish"}),
    "subscribe": (only(subscribe="*"), {"name", "subscribe", "fetch"}),
    "subscribe to channels": (only(subscribe="* eu.#"), {"name", "subscribe"}),
    "inquire": (only(AdminRight.INQUIRE), {"name", "inquire", "list"}),
    "monitor": (only(AdminRight.MONITOR), {"name", "inquire", "list"}),
    "fetch": (only(AdminRight.FETCH), {"name", "fetch"}),
    "purge": (only(AdminRight.PURGE), {"name", "purge"}),
    "configure": (only(AdminRight.CONFIGURE), {"name", "declare", "bind"}),
    "denied": (denied(publish=("secret",), subscribe=("secret",)), set()),
    "denied by id": (denied(publish=("7",), subscribe=("7",)), set()),
    "subscribe denied": (denied(subscribe=("secret",)), {"name", "publish"}),
    "channel denied to subscribe": (
        denied(subscribe=("secret eu.test",)),
        {"name", "publish", "subscribe"},
    ),
    "publish denied": (
        denied(publish=("secret",)),
        {"name", "subscribe", "fetch", "inquire", "list"},
    ),
    "channel denied to publish": (
        denied(publish=("secret eu.test",)),
        {"name", "publish", "subscribe", "fetch", "inquire", "list"},
    ),
    "another class denied": (
        denied(publish=("audit",), subscribe=("audit",)),
        EVERYTHING - {"bind"},  # Messages of other classes may have the subject.
    ),
}


@pytest.fixture(params=[SECRET, DEAD], ids=lambda class_id: NAMES[class_id])
def class_id(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def create_bus(permissions: Permissions | None) -> BrokerHarness:
    bus = BrokerHarness()
    classes = [NamedClass(id=class_id, name=name) for class_id, name in NAMES.items()]
    bus.broker.store.class_registry.declare_classes([*classes, NamedClass(id=1, name="free")])
    user = User("till", token=hash_token("t"), permissions=permissions)
    users = Users([user, User("boss", token=hash_token("b"))])
    users.resolve_class_name = bus.broker.store.class_registry.find_dead_letter_sources
    bus.broker.user_directory.replace_users(users)
    return bus


def answer(bus: BrokerHarness, *requests: bytes) -> dict[str, Any]:
    """Return the content of the last reply to a new session of the user; empty without one."""
    peer = connect_version2(bus, *requests, classes=(), auth={"token": "t"})
    replies = peer.receive_replies()
    return replies[-1].content if replies and isinstance(replies[-1].content, dict) else {}


def can_name(bus: BrokerHarness, **named: object) -> bool:
    try:
        connect_version2(bus, classes=(named or (),), auth={"token": "t"})
    except RemoteProtocolError:
        return False
    return True


def abilities(bus: BrokerHarness, class_id: int) -> set[str]:
    """Return what the user can do with a class."""
    name = NAMES[class_id]
    answer(bus, publish_envelopes(class_id, 0, channel_envelope("eu.paid", b"x")))
    found = {
        "name": can_name(bus, name=name),
        "declare": can_name(bus, name=name, last_values=True),
        "bind": can_name(bus, name=name, subjects=["a.>"]),
        "publish": bus.broker.classes[class_id].ring.head == 1,
    }
    for ability, request in {
        "subscribe": subscribe(class_id, 1, channels=["eu.paid"]),
        "fetch": json_request(frames.FETCH, class_id, 8, first=0, last=9),
        "purge": json_request(frames.PURGE, class_id, 8, first=0, last=0),
        "inquire": json_request(frames.INQUIRE, 0, 8, about="class", **{"class": name}),
    }.items():
        found[ability] = "code" not in answer(bus, request)
    report = answer(bus, json_request(frames.INQUIRE, 0, 8, about="bus"))
    found["list"] = name in str(report.get("classes", ""))
    return {ability for ability, is_possible in found.items() if is_possible}


@pytest.mark.parametrize("row", TABLE)
def test_user_can_do_what_the_table_says(row: str, class_id: int) -> None:
    permissions, expected = TABLE[row]
    assert abilities(create_bus(permissions), class_id) == expected


@pytest.mark.parametrize("row", ["nothing", "denied"])
def test_invisible_class_has_the_error_of_an_unknown_one(row: str, class_id: int) -> None:
    bus = create_bus(TABLE[row][0])
    for frame_type in (frames.FETCH, frames.PURGE):
        reply, unknown_class_reply = (
            answer(bus, json_request(frame_type, each, 8, first=0, last=9))
            for each in (class_id, UNKNOWN)
        )
        assert str(reply).replace(str(class_id), "N") == str(unknown_class_reply).replace(
            str(UNKNOWN), "N"
        )
    requests = (
        json_request(frames.INQUIRE, 0, 8, about="class", **{"class": each})
        for each in (NAMES[class_id], "no.such")
    )
    reply, unknown_class_reply = (str(answer(bus, request)) for request in requests)
    assert reply.replace(NAMES[class_id], "N") == unknown_class_reply.replace("no.such", "N")


def connect_boss(bus: BrokerHarness, *requests: bytes) -> Version2Peer:
    return connect_version2(bus, *requests, classes=(SECRET, DEAD, 1), auth={"token": "b"})


def test_reports_leave_denied_classes_out() -> None:
    bus = create_bus(denied(subscribe=("secret",)))
    boss = connect_boss(
        bus,
        subscribe(SECRET, 1, channels=["plan.a"]),
        subscribe(DEAD, 2, channels=["plan.a"]),
        subscribe(1, 3, channels=["plan.a"]),
    )
    for question in (
        {"about": "bus"},
        {"about": "channel", "channel": "plan.a"},
        {"about": "session", "session": boss.session.session_id},
    ):
        report = answer(bus, json_request(frames.INQUIRE, 0, 8, **question))
        listed = report.get("positions") or report["classes"]
        assert isinstance(listed, list)
        assert [each.get("class_id", each.get("class")) for each in listed] == [1], question
        assert "secret" not in str(report)
    channel = json_request(frames.INQUIRE, 0, 8, about="channel", channel="a", **{"class": SECRET})
    assert answer(bus, channel)["code"] == "unknown_class"


def test_report_does_not_show_denied_dead_letters() -> None:
    bus = create_bus(denied(subscribe=("dead.secret",)))
    connect_boss(bus, publish_envelopes(DEAD, 0, channel_envelope("a", b"x")))
    request = json_request(frames.INQUIRE, 0, 8, about="class", **{"class": SECRET})
    report = answer(bus, request)
    assert (report.get("dead_class"), report.get("dead_letters", 0)) == (None, 0)
