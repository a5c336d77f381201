"""Server that the tests of real clients share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nats.running_server import NatsTestServer, start_server

BOUND = (
    "orders.>=orders",
    *(f"kept.{name}.>={name}" for name in ("words", "shared", "left", "end", "bad", "js", "late")),
    *(f"kept.confirmed.{name}=confirmed_{name}" for name in ("js", "c")),
)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[NatsTestServer]:
    """Server with some subjects bound to classes. Each test uses different subjects."""
    with start_server(*(f"--bind={each}" for each in BOUND)) as server:
        yield server
