"""The server that tests of both drivers talk to; it is shipped for users' tests too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from simplebus.testing.server import PATIENCE_SECONDS, BusServer, bus_server, until

__all__ = ["PATIENCE_SECONDS", "BusServer", "bus_server", "loops_give", "until"]

T = TypeVar("T")


def loops_give(messages: Iterable[T], count: int) -> list[T]:
    """What loops over a subscription give that end when nothing comes for a moment: so many of
    them as it takes until there are `count` messages."""
    got: list[T] = []

    def enough() -> bool:
        for each in messages:
            got.append(each)
        return len(got) >= count

    until(enough)
    return got
