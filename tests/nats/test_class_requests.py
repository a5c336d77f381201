"""Permissions apply to a class under every spelling of a request."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simplebus.core.errors import Reason
from simplebus.core.limits import CLASS_ID_MAX, Limits
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import Settings
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.core.users.users import User, Users
from simplebus.nats.bus.acked import parse_subscribe
from simplebus.nats.class_requests import encode_token, make_class_request, normalize_pattern
from simplebus.nats.settings import NatsSettings
from tests.nats.bus.two_listeners import Client, NatsBrokerHarness

NAMES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=5)


def harness_with(*users: User, classes: int = 100) -> NatsBrokerHarness:
    """Return a harness with class 12 named `secret` and an unrestricted user `boss`."""
    all_users = (User("boss", "p"), *users)
    limits = Limits(classes=classes)
    harness = NatsBrokerHarness(Settings(limits), nats=NatsSettings(users=Users(all_users)))
    harness.broker.store.class_registry.declare_classes([NamedClass(id=12, name="secret")])
    harness.broker.store.class_registry.declare_classes([NamedClass(id=13, name="open")])
    return harness


def client_of(harness: NatsBrokerHarness, name: str) -> Client:
    return harness.client(user=name, **{"pass": "p"})


def restricted_user(
    *, allow: tuple[str, ...] = (), deny: tuple[str, ...] = (), name: str = "one"
) -> User:
    return User(
        name,
        "p",
        subject_permissions=SubjectPermissions(subscribe_allow=allow, subscribe_deny=deny),
    )


WAYS = (
    "secret",
    "secret.-",
    "secret.d",
    "12",
    "12.d",
    "012.d",
    "%73ecret.d",
    "secre%74",
    "%31%32.d",
    "secret.d.start=earliest",
    "secret.d.start%3Dearliest",
    "secret.-.filter.x",
)
LETTERS = ("dead%2Esecret", "dead%2esecret.d", "dead%2E12.d", "d%65ad%2Esecret.d")


@pytest.mark.parametrize(
    "denied", ["$SB.SUB.secret.>", "$SB.SUB.%30%31%32.>", "$SB.SUB.%73ecret.>"]
)
def test_denied_class_is_denied_under_every_spelling(denied: str) -> None:
    harness = harness_with(restricted_user(allow=("$SB.SUB.>", ">"), deny=(denied,)))
    client = client_of(harness, "one")
    for spelling in WAYS + LETTERS:
        client.sub(f"$SB.SUB.{spelling}")
        (line,) = client.lines()
        assert b"(no permission to subscribe to class" in line, spelling
    assert not harness.broker.classes[12].positions
    assert harness.broker.refusal_counts == {Reason.UNAUTHORIZED: len(WAYS + LETTERS)}
    client.sub("$SB.SUB.open.d")
    assert client.lines() == []


@pytest.mark.parametrize("allowed", ["$SB.SUB.secret.>", "$SB.SUB.12.>", "$SB.SUB.0012.>"])
def test_allowed_class_is_allowed_under_every_spelling(allowed: str) -> None:
    for spelling in WAYS:
        client = client_of(harness_with(restricted_user(allow=(allowed,))), "one")
        client.sub(f"$SB.SUB.{spelling}")
        assert client.lines() == [], spelling
        client.sub("$SB.SUB.open.d", "2")
        assert len(client.lines()) == 1


def test_missing_class_is_checked_as_requested() -> None:
    harness = harness_with(restricted_user(allow=("$SB.SUB.new.>", "$SB.SUB.77.>")))
    client = client_of(harness, "one")
    [(class_id, _)] = harness.broker.store.class_registry.resolve_ids(["new"])
    client.sub(f"$SB.SUB.{class_id}.d")
    assert len(client.lines()) == 1
    client.sub("$SB.SUB.new.d")
    client.sub("$SB.SUB.77.d", "2")
    assert client.lines() == []


def test_naming_a_class_applies_deny_patterns_to_its_id() -> None:
    harness = harness_with(restricted_user(allow=("$SB.SUB.>",), deny=("$SB.SUB.payroll.>",)))
    harness.broker.store.class_registry.bind_subject("paid", 77)
    client, unrestricted = client_of(harness, "one"), client_of(harness, "boss")
    client.sub("$SB.SUB.77.d")
    unrestricted.pub("paid", b"x")
    assert len(client.messages()) == 1
    harness.broker.store.class_registry.declare_classes([NamedClass(id=77, name="payroll")])
    assert [error.reason for _, error in harness.broker.end_turn().close] == [Reason.UNAUTHORIZED]
    unrestricted.pub("paid", b"x")
    assert client.messages() == []


def test_patterns_can_name_durables_and_groups() -> None:
    harness = harness_with(
        restricted_user(allow=("$SB.SUB.open.*.>", "$SB.SUB.open.audit g"), deny=())
    )
    client = client_of(harness, "one")
    for asked_for, queue in (
        ("open", ""),
        ("open.audit", ""),
        ("13.other", "g"),
        ("13.audit", "h"),
    ):
        client.sub(f"$SB.SUB.{asked_for}", queue=queue)
        assert len(client.lines()) == 1, asked_for
    client.sub("$SB.SUB.13.%61udit", queue="g")
    assert client.lines() == []


@pytest.mark.parametrize(
    ("denied", "asked_for", "queue", "may"),
    [
        ("secret", "12.d", "", False),
        ("*.d", "12.%64.in_flight=1.filter.a", "", False),
        ("open.d", "open.e", "", True),
        ("open.*.filter.a", "13.d.filter.a", "", False),
        ("open.*.filter.a", "13.d.filter.a.b", "", True),
        ("open.d", "13.d.filter.>", "", False),
        ("open.* g", "13.d.filter.>", "g", False),
        ("open.*.start=earliest", "13.d.start=earliest.filter.a", "", False),
        ("open.d g", "13.d.in_flight=1", "g", False),
        ("open.d g", "13.d.in_flight=1", "h", True),
    ],
)
def test_deny_pattern_covers_longer_requests(
    denied: str, asked_for: str, queue: str, may: bool
) -> None:
    harness = harness_with(restricted_user(allow=("$SB.>",), deny=(f"$SB.SUB.{denied}",)))
    client = client_of(harness, "one")
    client.sub(f"$SB.SUB.{asked_for}", queue=queue)
    assert (client.lines() == []) is may


@given(NAMES, NAMES, st.booleans())
def test_requests_and_patterns_have_one_canonical_form(
    name: str, durable: str, is_hidden: bool
) -> None:
    def written(text: str) -> str:
        return "".join(f"%{b:02x}" for b in text.encode()) if is_hidden else encode_token(text)

    assume(not (name.isascii() and name.isdigit() and int(name) > CLASS_ID_MAX))
    pattern = f"$SB.SUB.{written(name)}.{written(durable)}"
    parsed = parse_subscribe(pattern.encode(), b"")
    assert (
        normalize_pattern(pattern)
        in make_class_request([parsed.class_ref], (), parsed.option_tokens).names
    )
    assert normalize_pattern(normalize_pattern(pattern)) == normalize_pattern(pattern)


# Users with permissions ---------------------------------------------------------------------------


def test_durable_of_another_user_is_refused() -> None:
    harness = harness_with(
        restricted_user(allow=("$SB.SUB.open.>",)), restricted_user(deny=("x",), name="two")
    )
    unrestricted = client_of(harness, "boss")
    unrestricted.sub("$SB.SUB.open.hers")
    unrestricted.close()
    thief = client_of(harness, "one")
    thief.sub("$SB.SUB.open.hers")
    (line,) = thief.lines()
    assert b"the durable `hers`: it belongs to another user" in line
    thief.sub("$SB.SUB.open.mine", "2")
    thief.close()
    resumed = client_of(harness, "one")
    resumed.sub("$SB.SUB.open.mine")
    assert resumed.lines() == []


def test_class_quota_of_a_user() -> None:
    harness = harness_with(restricted_user(allow=("$SB.SUB.>",)), classes=40)
    client = client_of(harness, "one")
    for n in range(12):
        client.sub(f"$SB.SUB.new{n}", str(n))
    lines = client.lines()
    assert len(lines) == 2
    assert b"has created 10 of at most 10" in lines[0]
    unrestricted = client_of(harness, "boss")
    unrestricted.sub("$SB.SUB.hers")
    assert unrestricted.lines() == []


def test_ack_reply_without_publish_permission_reaches_the_client_only() -> None:
    user = User(
        "one",
        "p",
        subject_permissions=SubjectPermissions(
            publish_allow=("$JS.ACK.>", "told.>"), subscribe_allow=("$SB.>", "_INBOX.>")
        ),
    )
    harness = harness_with(user)
    unrestricted, client = client_of(harness, "boss"), client_of(harness, "one")
    unrestricted.sub("not.its.business")
    unrestricted.sub("_INBOX.one", "2")
    unrestricted.sub("told.boss", "3")
    client.sub("$SB.SUB.open.d")
    client.sub("_INBOX.one", "2")
    harness.broker.store.class_registry.bind_subject("orders", 13)
    unrestricted.pub("orders", b"x")
    (message,) = client.messages()
    for reply in ("not.its.business", "_INBOX.one", "told.boss"):
        client.pub(message.reply, b"+ACK", reply)
    assert [received.subject for received in client.messages()] == ["_INBOX.one"]
    assert [received.subject for received in unrestricted.messages()] == ["told.boss"]
