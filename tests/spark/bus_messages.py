"""Publishes, consumes and reads the messages of a bus outside of Spark."""

from __future__ import annotations

import simplebus
from simplebus.testing.server import BusServer
from tests.spark import competing_consumer


def publish_numbers(server: BusServer, first: int, last: int, class_id: int | str = 1) -> None:
    with simplebus.connect_blocking(server.address) as bus:
        bus.publish_many([b"%d" % n for n in range(first, last)], class_id=class_id)


def consume_messages(server: BusServer, count: int) -> None:
    """Take `count` messages of class 1 and acknowledge them."""
    with simplebus.connect_blocking(server.address) as bus, bus.subscribe(1) as messages:
        competing_consumer.take(messages, count)


def stored_payloads(server: BusServer, class_id: int | str = 1) -> list[bytes]:
    with simplebus.connect_blocking(server.address) as bus:
        return [message.payload for message in bus.fetch(class_id)]
