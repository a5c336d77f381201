"""Delayed reads: acks may be read later only if no publisher waits for them."""

from __future__ import annotations

from typing import NoReturn

from simplebus.core.limits import (
    ACK_READ_DELAY_MESSAGES_MAX,
    PLAIN_FRAMES_MAX,
    RECENT_PUBLISH_TICKS,
)
from simplebus.core.message_class.message_class import MessageClass
from tests.behaviour.wire_peer import BrokerHarness, ack, connect, publish, subscribe


def test_read_may_be_delayed_once_after_few_acks() -> None:
    bus = BrokerHarness()
    publisher, subscriber = bus.peer(connect(1)), bus.peer(connect(1), subscribe(1))
    assert not bus.broker.can_delay_read(subscriber.session)
    publisher.send(publish(1, b"a", b"b"))
    subscriber.receive_messages()
    subscriber.send(ack(1, 0, 2))
    assert bus.broker.can_delay_read(subscriber.session)
    assert not bus.broker.can_delay_read(subscriber.session)


def test_read_is_not_delayed_after_many_acks() -> None:
    bus = BrokerHarness()
    count = ACK_READ_DELAY_MESSAGES_MAX + 1
    publisher, subscriber = bus.peer(connect(1)), bus.peer(connect(1), subscribe(1))
    publisher.send(publish(1, *[b"x"] * count))
    subscriber.receive_messages()
    subscriber.send(ack(1, 0, count))
    assert not bus.broker.can_delay_read(subscriber.session)


def test_recent_acks_are_counted_by_message() -> None:
    bus = BrokerHarness()
    ranges = [(i * 10, i * 10 + 10) for i in range(PLAIN_FRAMES_MAX + 1)]
    bus.peer(connect(1), publish(1, *[b"x"] * 10 * len(ranges)))
    subscriber = bus.peer(subscribe(1))
    subscriber.receive_messages()
    subscriber.send(b"".join(ack(1, first, last) for first, last in ranges))
    assert subscriber.session.recent_ack_count == 10 * len(ranges)
    assert not bus.broker.can_delay_read(subscriber.session)


def test_read_is_not_delayed_for_recent_publisher() -> None:
    bus = BrokerHarness()
    peer = bus.peer(connect(1), subscribe(1), publish(1, b"to myself", b"again"))
    peer.receive_messages()
    peer.send(ack(1, 0, 1))
    assert not bus.broker.can_delay_read(peer.session)
    bus.tick(RECENT_PUBLISH_TICKS)
    peer.send(ack(1, 1, 2))
    assert bus.broker.can_delay_read(peer.session)


def test_blocking_check_does_not_iterate_all_classes() -> None:
    bus = BrokerHarness(class_messages=2)
    publisher, subscriber = bus.peer(connect(1)), bus.peer(connect(1, 2), subscribe(1))
    publisher.send(publish(1, b"a", b"b", b"waits"))

    class Classes(dict[int, MessageClass]):
        def values(self) -> NoReturn:
            raise AssertionError("all classes are walked over")

    bus.broker.classes = Classes(bus.broker.classes)
    assert bus.broker.is_blocking_publishers(subscriber.session)
    assert not bus.broker.is_blocking_publishers(publisher.session)


def test_read_is_not_delayed_if_it_blocks_a_full_class() -> None:
    bus = BrokerHarness(class_messages=2)
    publisher, subscriber = bus.peer(connect(1)), bus.peer(connect(1), subscribe(1))
    publisher.send(publish(1, b"a", b"b", b"waits", b"waits too"))
    subscriber.receive_messages()
    subscriber.send(ack(1, 0, 1))
    assert not bus.broker.can_delay_read(subscriber.session)
