"""Who hears a channel at the NATS door, for those who ask the bus."""

from __future__ import annotations

from simplebus.core.protocol.inquiry import (
    ChannelInfo,
    ChannelInquiry,
    ListenerInfo,
    SessionInfo,
    SessionInquiry,
)
from tests.nats.bus.two_listeners import Doors


def heard(doors: Doors, channel: str) -> ChannelInfo:
    said = doors.broker.inquiry_handler.build_report(ChannelInquiry(channel))
    assert isinstance(said, ChannelInfo)
    return said


def test_lists_subscriptions_and_queue_groups() -> None:
    doors = Doors()
    doors.client(b"SUB orders.* 1\r\nSUB orders.eu q 2\r\nSUB shops 3\r\n")
    doors.client(b"SUB orders.eu q 1\r\nSUB orders.> q 2\r\nSUB \xc3\xbc.> r 3\r\n")
    said = heard(doors, "orders.eu").listeners
    assert sorted(said, key=lambda one: one.queue) == [
        ListenerInfo(pattern="orders.*", peer="a client"),
        ListenerInfo(pattern="orders.eu", queue="q", members=3, peer="a client"),
    ]
    assert [(one.pattern, one.queue) for one in heard(doors, "ü.x").listeners] == [("ü.>", "r")]
    assert heard(doors, "elsewhere").listeners == []


def test_counts_listeners_above_the_maximum() -> None:
    doors = Doors()
    doors.client(b"".join(b"SUB a %d\r\n" % n for n in range(100)))
    said = heard(doors, "a")
    assert (len(said.listeners), said.listeners_left_out) == (64, 36)


def test_bound_and_requested_classes_are_not_listed() -> None:
    doors = Doors()
    doors.broker.store.class_registry.bind_subject("orders.>", 7)
    client = doors.client(b"SUB $SB.SUB.7 1\r\n")
    assert heard(doors, "orders.eu").listeners == []
    [said] = heard(doors, "orders.eu").classes
    assert (said.class_id, said.subjects) == (7, ["orders.>"])
    client.say(b"PUB orders.eu 1\r\nx\r\n")
    assert heard(doors, "orders.eu").classes[0].stored == 1


def test_acked_subscription_is_listed_as_a_session() -> None:
    doors = Doors()
    doors.client(b"SUB $SB.SUB.7 1\r\n")
    [number] = doors.broker.sessions
    said = doors.broker.inquiry_handler.build_report(SessionInquiry(number))
    assert isinstance(said, SessionInfo)
    assert (said.version, [position.class_id for position in said.positions]) == (-1, [7])
