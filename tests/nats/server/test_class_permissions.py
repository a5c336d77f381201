"""Class permissions of users, applied to subjects with and without classes."""

from __future__ import annotations

import pytest

from simplebus.core.protocol.requests import NamedClass
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import (
    REPLIES_CLASS,
    PermissionRule,
    PermissionRules,
    Permissions,
)
from simplebus.core.users.subject_permissions import SubjectPermissions as NatsPermissions
from simplebus.core.users.users import User, Users
from simplebus.nats.settings import NatsSettings
from tests.behaviour.wire_peer_v2 import channel_envelope, connect_version2, publish_envelopes
from tests.nats.bus.two_listeners import Client, NatsBrokerHarness

CLASSES = Permissions(
    publish=PermissionRules((PermissionRule("orders"),)),
    subscribe=PermissionRules((PermissionRule("*"),), (PermissionRule("hidden"),)),
)


def harness_with_users(
    permissions: NatsPermissions, classes: Permissions | None = CLASSES
) -> tuple[Client, Client]:
    """Return a restricted and an unrestricted client. `orders.>` and `hidden.>` are bound to
    classes.
    """
    restricted = User(
        "one", token=hash_token("1"), permissions=classes, subject_permissions=permissions
    )
    users = Users((restricted, User("all", token=hash_token("2"))))
    harness = NatsBrokerHarness(nats=NatsSettings(users=users))
    harness.broker.user_directory.replace_users(users)
    named_classes = [NamedClass(name=name, subjects=[f"{name}.>"]) for name in ("orders", "hidden")]
    harness.broker.store.class_registry.declare_classes(named_classes)
    return harness.client(auth_token="1"), harness.client(auth_token="2")


@pytest.mark.parametrize("classes", [CLASSES, None])
@pytest.mark.parametrize(
    ("subscribed", "queue", "expected"),
    [
        (">", "", ["free.a", "q.a"]),
        ("*.*", "", ["free.a", "q.a"]),
        ("secret.*", "", []),
        ("*.a", "workers", ["free.a"]),
        ("*.a", "others", ["free.a", "q.a"]),
    ],
)
def test_denied_subject_without_class_is_not_delivered(
    subscribed: str, queue: str, expected: list[str], classes: Permissions | None
) -> None:
    permissions = NatsPermissions(subscribe_deny=("secret.a", "q.> workers"))
    client, unrestricted = harness_with_users(permissions, classes)
    client.sub(subscribed, queue=queue)
    assert client.lines() == []
    for _ in range(2):  # The decision is cached.
        for subject in ("secret.a", "free.a", "q.a"):
            unrestricted.pub(subject, b"x")
        unrestricted.send(
            b"".join(b"PUB %s 1\r\nx\r\n" % s for s in (b"secret.a", b"free.a", b"q.a") * 30)
        )
    assert [message.subject for message in client.messages()] == expected * 62


def test_denied_class_cannot_be_requested() -> None:
    permissions = NatsPermissions(subscribe_deny=("secret.a", "$SB.SUB.orders.>", "$SB.SUB.x"))
    client, _ = harness_with_users(permissions)
    for subject in ("secret.a", "$SB.SUB.%6frders.d", "$SB.SUB.x.d", "$SB.SUB.hidden"):
        client.sub(subject)
        (line,) = client.lines()
        assert b"Permissions Violation for Subscription" in line, subject
    client.sub("$SB.SUB.other")
    assert client.lines() == []


def test_inboxes_of_other_users_are_not_readable() -> None:
    client, unrestricted = harness_with_users(NatsPermissions())
    for sid, subject in enumerate((">", f"{REPLIES_CLASS}.>", f"{REPLIES_CLASS}.ada", "class.*")):
        client.sub(subject, str(sid))
    names = [f"{REPLIES_CLASS}.ada", f"{REPLIES_CLASS}.bob"]
    frames = publish_envelopes(9, 0, *(channel_envelope(name, b"x") for name in names))
    replies = [{"id": 9, "name": REPLIES_CLASS}]
    reader = connect_version2(unrestricted.harness, frames, classes=replies, auth={"token": "2"})
    assert reader.receive_error_codes() == []
    assert client.messages() == []


def test_bound_subjects_use_class_permissions() -> None:
    client, unrestricted = harness_with_users(NatsPermissions(subscribe_deny=("orders.>",)))
    client.sub(">")
    for subject in ("orders.a", "hidden.a", "free"):
        unrestricted.pub(subject, b"x")
    assert [message.subject for message in client.messages()] == ["orders.a", "free"]


def subscriber_of(class_name: str, **subjects: tuple[str, ...]) -> User:
    """Return a user with the name and token of the only class that it may subscribe to."""
    everything, one_class = PermissionRule("*"), PermissionRule(class_name)
    return User(
        class_name,
        token=hash_token(class_name),
        permissions=Permissions(PermissionRules((everything,)), PermissionRules((one_class,))),
        subject_permissions=NatsPermissions(**subjects),  # type: ignore[arg-type]
    )


def harness_with_group(subject: str, *users: User) -> tuple[NatsBrokerHarness, list[Client]]:
    """Return a bus with a queue group of ten members of the first user, and one of each other."""
    table = Users((*users, User("all", token=hash_token("all"))))
    harness = NatsBrokerHarness(nats=NatsSettings(users=table))
    harness.broker.user_directory.replace_users(table)
    clients = [harness.client(auth_token=user.name) for user in users]
    for client, count in zip(clients, (10, *[1] * len(clients)), strict=False):
        for sid in range(count):
            client.sub(subject, str(sid), queue="group")
    return harness, clients


@pytest.mark.parametrize("count", [1, 40])
def test_binding_a_subject_changes_which_group_members_receive_it(count: int) -> None:
    denied = {"subscribe_deny": ("s",)}
    harness, (other, member) = harness_with_group(
        "*", subscriber_of("other", **denied), subscriber_of("orders", **denied)
    )
    publisher = harness.client(auth_token="all")
    publisher.send(b"PUB s 1\r\nx\r\n" * count)
    assert (other.messages(), member.messages()) == ([], [])
    harness.broker.store.class_registry.declare_classes([NamedClass(name="orders", subjects=["s"])])
    publisher.send(b"PUB s 1\r\nx\r\n" * count)
    assert other.messages() == []
    assert len(member.messages()) == count


def test_group_member_receives_messages_of_one_of_two_classes() -> None:
    harness, (other, member) = harness_with_group(
        "s", subscriber_of("other"), subscriber_of("orders")
    )
    classes = [{"id": 1, "name": "hidden"}, {"id": 2, "name": "orders"}]
    peer = connect_version2(harness, classes=classes, auth={"token": "all"})
    peer.send(publish_envelopes(1, 0, channel_envelope("s", b"a")))
    harness.flush()
    assert (other.messages(), member.messages()) == ([], [])
    peer.send(publish_envelopes(2, 1, channel_envelope("s", b"b")))
    harness.flush()
    assert other.messages() == []
    assert member.payloads() == [b"b"]
