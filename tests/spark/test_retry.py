"""Tasks wait for a bus that is away, and not for one that will not have them."""

from __future__ import annotations

from typing import Any

import pytest

from simplebus.core.errors import BusConnectionError, Reason, RefusedError
from simplebus.spark.retry import patient_bus, patiently
from simplebus.testing.server import BusServer, until
from tests.client.faulty_bus import false_bus, proxy


def test_a_bus_that_is_away_is_tried_until_it_is_there(server: BusServer) -> None:
    with proxy(server.address) as way:
        way.is_shut = True
        attempts = []

        def connect(seconds: float) -> Any:
            attempts.append(seconds)
            way.is_shut = len(attempts) < 4
            with patient_bus(way.address, timeout=0.01 if way.is_shut else 60) as bus:
                return bus.class_of("orders")

        assert patiently(connect, 60.0) >= 0
        assert len(attempts) == 4
        assert 60.0 > attempts[0] > attempts[1]
        until(lambda: way.turned_away > 0)


def test_a_bus_that_says_no_is_asked_once() -> None:
    attempts = []

    def connect(seconds: float) -> Any:
        attempts.append(seconds)
        raise BusConnectionError("no") from RefusedError(Reason.TOO_MANY_CLASSES, "not today")

    with pytest.raises(BusConnectionError, match="no"):
        patiently(connect, 20.0)
    assert len(attempts) == 1


def test_a_bus_that_stays_away_is_an_error_that_says_where() -> None:
    with false_bus() as bus:
        place = bus.address
    with (
        pytest.raises(BusConnectionError, match=f"cannot connect to simplebus://{place}"),
        patient_bus(place, timeout=0.2),
    ):
        pass
