"""Rate and connection limits of users and addresses, for NATS clients."""

from __future__ import annotations

import pytest

from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import PermissionRule, PermissionRules, Permissions
from simplebus.core.users.rate_limit import RateLimit
from simplebus.core.users.users import User, Users
from simplebus.nats.errors import NatsError
from simplebus.nats.settings import NatsSettings
from tests.nats.bus.two_listeners import Client, NatsBrokerHarness


def harness(*users: User) -> NatsBrokerHarness:
    users_ = Users(users)
    found = NatsBrokerHarness(nats=NatsSettings(users=users_))
    found.broker.user_directory.replace_users(users_)
    return found


def is_paused(bus: NatsBrokerHarness, client: Client) -> bool:
    return bus.nats_server.rate_limits.is_paused(client.session)


def test_fast_publisher_is_paused() -> None:
    first_user = User("ada", token=hash_token("t"), rate=RateLimit(10))
    bus = harness(first_user, User("bob", token=hash_token("u")))
    client, other_client = bus.client(auth_token="t"), bus.client(auth_token="u")
    assert client.session.next_read_bytes == 256
    client.send(b"PUB a 1\r\nx\r\n" * 9)
    assert not is_paused(bus, client)
    client.send(b"PUB a 1\r\nx\r\n" * 6)  # Messages that were read are processed and counted.
    assert bus.nats_server.statistics().in_messages == 15
    assert is_paused(bus, client)
    assert 0.5 < bus.nats_server.rate_limits.pause_seconds(client.session) <= 0.7
    # A second connection of the user.
    same_user_client = bus.client(b"PUB a 1\r\nx\r\n", auth_token="t")
    assert is_paused(bus, same_user_client)
    other_client.send(b"PUB a 1\r\nx\r\n" * 100)
    assert not is_paused(bus, other_client)
    bus.wait(1.0)
    assert not is_paused(bus, client)
    assert bus.nats_server.rate_limits.pause_seconds(client.session) == 0


def test_paused_client_is_not_pinged() -> None:
    bus = harness(User("ada", token=hash_token("t"), rate=RateLimit(1)))
    client = bus.client(b"PUB a 1\r\nx\r\n" * 10_000, auth_token="t")
    for minutes in range(1, 60):
        bus.nats_server.now = 60.0 * minutes
        bus.nats_server.tick()
    assert not client.session.is_disconnecting
    assert client.session.unanswered_ping_count == 0


def test_acks_do_not_count() -> None:
    bus = harness(User("ada", token=hash_token("t"), rate=RateLimit(2)))
    client = bus.client(b"SUB $SB.SUB.1 1\r\n", auth_token="t")
    client.send(*[b"PUB $JS.ACK.x.y.1.1.1.1.1 4\r\n+ACK\r\n"] * 50)
    assert not is_paused(bus, client)


def test_address_limit_applies_to_all_users() -> None:
    bus = NatsBrokerHarness()
    bus.broker.rate_limits.set_address_rate(RateLimit(bytes=100))
    session = bus.nats_server.open_session("a client", ip="10.0.0.1")
    client = Client(bus, session)
    client.send(b"PUB a 200\r\n" + b"x" * 200 + b"\r\n")
    assert is_paused(bus, client)
    bus.broker.rate_limits.remove_limits()
    assert bus.nats_server.rate_limits.pause_seconds(session) == 0


TOKENS = {"ada": "t", "bob": "u"}


def users_(*, first_user: int = 0, second_user: int = 0) -> NatsBrokerHarness:
    """Return users with connection limits. Only ada may subscribe to class 1."""
    no_permissions = Permissions(
        publish=PermissionRules((PermissionRule("*"),)), subscribe=PermissionRules(())
    )
    return harness(
        User("ada", token=hash_token(TOKENS["ada"]), connections=first_user),
        User(
            "bob",
            token=hash_token(TOKENS["bob"]),
            connections=second_user,
            permissions=no_permissions,
        ),
    )


def reconnect_as(client: Client, user: str) -> list[bytes]:
    """Send CONNECT as another user; returns the output before PONG."""
    client.send(b'CONNECT {"auth_token":"%s","verbose":false}\r\n' % TOKENS[user].encode())
    return client.lines()


def test_messages_to_classes_are_charged_once() -> None:
    bus = users_(first_user=2)
    first_client, second_client = bus.client(auth_token="t"), bus.client(auth_token="t")
    for client in (first_client, second_client):
        client.sub("$SB.SUB.1")
        assert client.lines() == []
    with pytest.raises(NatsError, match="user 'ada' has 2 connections, 2 are allowed"):
        bus.client(auth_token="t")
    first_client.close()
    bus.client(auth_token="t")


def test_repeated_connect_counts_for_the_new_user() -> None:
    bus = users_(first_user=1, second_user=1)
    first_user, second_user = bus.client(auth_token="t"), bus.client(auth_token="u")
    assert reconnect_as(first_user, "ada") == []  # The user is unchanged.
    with pytest.raises(NatsError, match="user 'bob' has 1 connections, 1 are allowed"):
        reconnect_as(first_user, "bob")
    first_user.close()
    assert reconnect_as(second_user, "ada") == []


def test_repeated_connect_changes_the_permissions() -> None:
    bus = users_()
    client = bus.client(auth_token="t")
    client.sub("$SB.SUB.1.hers")
    assert client.lines() == []
    assert reconnect_as(client, "bob") == []
    client.sub("$SB.SUB.1.other")
    (line,) = client.lines()
    assert b"user `bob` may not subscribe to class 1" in line
    assert reconnect_as(client, "ada") == []
    client.sub("$SB.SUB.1.hers")
    client.sub("$SB.SUB.2", "2")
    assert client.lines() == []
    assert [bus.broker.classes[2].creator] == ["ada"]
