"""Test server for both drivers. It is shipped in `simplebus.testing` for users' tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from simplebus.testing.server import PATIENCE_SECONDS, BusServer, bus_server, until

__all__ = ["PATIENCE_SECONDS", "BusServer", "bus_server", "read_until_count", "until"]

T = TypeVar("T")


def read_until_count(messages: Iterable[T], count: int) -> list[T]:
    """Iterate over a subscription with `idle_seconds` repeatedly until `count` messages were
    received.
    """
    received: list[T] = []

    def enough() -> bool:
        for message in messages:
            received.append(message)
        return len(received) >= count

    until(enough)
    return received
