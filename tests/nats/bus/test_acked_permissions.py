"""Permissions for acked subscriptions and for bus messages on denied channels."""

from __future__ import annotations

import pytest

from simplebus.core.errors import Reason
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import PermissionRule, PermissionRules
from simplebus.core.users.permissions import Permissions as Rights
from simplebus.core.users.subject_permissions import ResponsePermission, SubjectPermissions
from simplebus.core.users.users import User, Users
from simplebus.nats.settings import NatsSettings
from tests.behaviour.wire_peer_v2 import channel_envelope, connect_version2, publish_envelopes
from tests.nats.bus.two_listeners import Client, NatsBrokerHarness


def one_with(permissions: SubjectPermissions) -> tuple[NatsBrokerHarness, Client]:
    """Return a client with these permissions and an unrestricted client `all`. `orders.>` is
    stored in
    class 1.
    """
    users = User("one", "p", subject_permissions=permissions), User("all", "p")
    harness = NatsBrokerHarness(nats=NatsSettings(users=Users(users)))
    harness.broker.store.class_registry.bind_subject("orders.>", 1)
    return harness, harness.client(user="one", **{"pass": "p"})


def published(harness: NatsBrokerHarness, *subjects: str) -> None:
    client = harness.client(user="all", **{"pass": "p"})
    for subject in subjects:
        client.pub(subject, b"x")
    assert client.lines() == []


def test_response_permission_allows_a_limited_number_of_acks() -> None:
    responses = ResponsePermission(max_responses=2)
    harness, client = one_with(SubjectPermissions(subscribe_allow=("$SB.>",), responses=responses))
    client.sub("$SB.SUB.1.d")
    published(harness, "orders.a", "orders.b")
    first, second = client.messages()
    client.pub(first.reply, b"+WPI")
    client.pub(first.reply, b"+ACK")
    assert client.lines() == []
    assert harness.statistics(1).acknowledged == 1
    client.pub(first.reply, b"+ACK")
    client.pub(second.reply.replace(".1.1.", ".1.2."), b"+ACK")
    assert [b"Permissions Violation for Publish" in line for line in client.lines()] == [True] * 2


DENIED = SubjectPermissions(
    subscribe_allow=("$SB.>", ">"),
    subscribe_deny=("orders.secret", "orders.plans workers", "$SB.SUB.payroll.>"),
)


@pytest.mark.parametrize(
    ("subject", "queue", "expected_error"),
    [
        ("1.d", "", "orders.secret is denied, expected a filter that excludes it"),
        ("1.d.filter.orders.*", "", "orders.secret is denied, and the filter orders.* overlaps it"),
        ("1.d.filter.orders.>", "g", "orders.secret is denied"),
        ("1.d.filter.orders.plans", "workers", "orders.plans is denied"),
        ("new", "", "is denied"),
    ],
)
def test_denied_channel_is_not_delivered_from_a_class(
    subject: str, queue: str, expected_error: str
) -> None:
    harness, client = one_with(DENIED)
    client.sub(f"$SB.SUB.{subject}", queue=queue)
    (line,) = client.lines()
    assert line.startswith(
        f'-ERR \'Permissions Violation for Subscription to "$SB.SUB.{subject}" ('.encode()
    )
    assert expected_error.encode() in line
    assert harness.broker.refusal_counts == {Reason.UNAUTHORIZED: 1}
    published(harness, "orders.secret", "orders.plans")
    assert client.messages() == []
    assert "new" not in harness.broker.store.class_id_by_name


@pytest.mark.parametrize(
    ("subject", "queue", "expected"),
    [
        ("1.d.filter.orders.eu.>", "", []),
        ("1.d.filter.orders.eu", "workers", ["orders.eu"]),
        ("1.d.filter.orders.plans", "", ["orders.plans"]),
        ("1.d.filter.orders.plans", "g", ["orders.plans"]),
    ],
)
def test_filter_that_excludes_denied_channels_is_allowed(
    subject: str, queue: str, expected: list[str]
) -> None:
    harness, client = one_with(DENIED)
    client.sub(f"$SB.SUB.{subject}", queue=queue)
    published(harness, "orders.secret", "orders.plans", "orders.eu")
    assert [message.subject for message in client.messages()] == expected


def test_single_class_can_be_denied() -> None:
    harness, client = one_with(
        SubjectPermissions(subscribe_allow=("$SB.>",), subscribe_deny=("$SB.SUB.payroll.>",))
    )
    client.sub("$SB.SUB.payroll.d", "1")
    assert len(client.lines()) == 1
    client.sub("$SB.SUB.1.d", "2")
    published(harness, "orders.a")
    assert [message.subject for message in client.messages()] == ["orders.a"]


@pytest.mark.parametrize("known_count", [0, 50])
def test_bus_message_on_a_denied_channel_is_not_delivered(known_count: int) -> None:
    denied = "orders.secret", "orders.plans workers"
    harness, client = one_with(SubjectPermissions(subscribe_deny=denied))
    published(harness, *(f"other.{number}" for number in range(known_count)))
    client.sub("orders.>", "1")
    client.sub("orders.>", "2", queue="workers")
    names = ["orders.secret", "orders.eu", "orders.plans", "orders.us"] * 5
    peer = connect_version2(
        harness, publish_envelopes(1, 0, *(channel_envelope(name, b"x") for name in names))
    )
    assert peer.receive_error_codes() == []
    received = [(message.sid, message.subject) for message in client.messages()]
    assert [name for sid, name in received if sid == "1"] == [n for n in names if "secret" not in n]
    eu_and_us = ["orders.eu", "orders.us"] * 5
    assert [name for sid, name in received if sid == "2"] == eu_and_us


@pytest.mark.parametrize(
    "rights", [Rights(), Rights(subscribe=PermissionRules(deny=(PermissionRule("hidden"),)))]
)
@pytest.mark.parametrize("covers", [("a.>",), None])
def test_user_does_not_receive_denied_subjects(
    rights: Rights, covers: tuple[str, ...] | None
) -> None:
    denied = SubjectPermissions(
        subscribe_allow=covers, subscribe_deny=("a.secret", "a.plans workers")
    )
    user = User("own", token=hash_token("o"), permissions=rights, subject_permissions=denied)
    users = Users([User("all", "p"), user])
    harness = NatsBrokerHarness(nats=NatsSettings(users=users))
    client = harness.client(auth_token="o")
    client.sub("a.>", "1")
    client.sub("a.*", "2", queue="workers")
    client.sub("a.secret", "3")
    assert len(client.lines()) == 1
    published(harness, "a.secret", "a.plans", "a.news")
    received = [(message.sid, message.subject) for message in client.messages()]
    assert received == [("1", "a.plans"), ("1", "a.news"), ("2", "a.news")]
