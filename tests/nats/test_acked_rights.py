"""What permissions say of acknowledged delivery."""

from __future__ import annotations

from two_doors import Client, Doors

from simplebus.nats.auth import NatsAuth, User
from simplebus.nats.permissions import Permissions, Responses
from simplebus.nats.settings import NatsSettings


def one_with(permissions: Permissions) -> tuple[Doors, Client]:
    """A client that may do this, at doors where all below orders is kept in class 1; a client
    `all` may do everything."""
    users = User("one", "p", permissions=permissions), User("all", "p")
    doors = Doors(nats=NatsSettings(auth=NatsAuth(users)))
    doors.broker.store.bind("orders.>", 1)
    return doors, doors.client(user="one", **{"pass": "p"})


def published(doors: Doors, *subjects: str) -> None:
    client = doors.client(user="all", **{"pass": "p"})
    for subject in subjects:
        client.pub(subject, b"x")
    assert client.lines() == []


def test_who_may_only_answer_may_acknowledge_what_it_was_sent_so_many_times() -> None:
    responses = Responses(most=2)
    doors, client = one_with(Permissions(subscribe_allow=("$SB.>",), responses=responses))
    client.sub("$SB.SUB.1.d")
    published(doors, "orders.a", "orders.b")
    first, second = client.messages()
    client.pub(first.reply, b"+WPI")
    client.pub(first.reply, b"+ACK")
    assert client.lines() == []
    assert doors.statistics(1).acknowledged == 1
    client.pub(first.reply, b"+ACK")
    client.pub(second.reply.replace(".1.1.", ".1.2."), b"+ACK")
    assert [b"Permissions Violation for Publish" in line for line in client.lines()] == [True] * 2
