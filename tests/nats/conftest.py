"""The server that tests of real clients share.

Rule 1: this folder is no package. It would be called `nats`, as the client library is, and hide it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nats.running_server import Door, door

BOUND = (
    "orders.>=orders",
    *(f"kept.{name}.>={name}" for name in ("words", "shared", "left", "end", "bad", "js", "late")),
)


@pytest.fixture(scope="session")
def shared_door() -> Iterator[Door]:
    """A server for all, with some subjects bound to classes. Those who use it keep to subjects of
    their own."""
    with door(*(f"--bind={each}" for each in BOUND)) as it:
        yield it
