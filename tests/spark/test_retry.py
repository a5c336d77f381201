"""Tasks retry an unreachable bus, but not a bus that refuses them."""

from __future__ import annotations

from typing import Any

import pytest

from simplebus.core.errors import BusConnectionError, Reason, RefusedError
from simplebus.spark.retry import connect_with_retry, retry_connect
from simplebus.testing.server import BusServer, until
from tests.client.faulty_server import fake_server, faulty_proxy


def test_unreachable_server_is_retried(server: BusServer) -> None:
    with faulty_proxy(server.address) as way:
        way.is_refusing = True
        attempts = []

        def connect(seconds: float) -> Any:
            attempts.append(seconds)
            way.is_refusing = len(attempts) < 4
            with connect_with_retry(way.address, timeout=0.01 if way.is_refusing else 60) as bus:
                return bus.resolve_class_id("orders")

        assert retry_connect(connect, 60.0) >= 0
        assert len(attempts) == 4
        assert 60.0 > attempts[0] > attempts[1]
        until(lambda: way.refused_count > 0)


def test_refusal_is_not_retried() -> None:
    attempts = []

    def connect(seconds: float) -> Any:
        attempts.append(seconds)
        raise BusConnectionError("no") from RefusedError(Reason.TOO_MANY_CLASSES, "not today")

    with pytest.raises(BusConnectionError, match="no"):
        retry_connect(connect, 20.0)
    assert len(attempts) == 1


def test_permanently_unreachable_server_is_named_in_the_error() -> None:
    with fake_server() as bus:
        place = bus.address
    with (
        pytest.raises(BusConnectionError, match=f"cannot connect to simplebus://{place}"),
        connect_with_retry(place, timeout=0.2),
    ):
        pass
