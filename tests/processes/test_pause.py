"""A server process that is stopped by SIGSTOP and continues, as on a suspended machine."""

from __future__ import annotations

import signal
import threading
import time

import pytest

import simplebus
from tests.support.programs import PATIENCE_SECONDS, run_server

COUNT = 200
HEARTBEAT_SECONDS = 0.2
IN_FLIGHT = 10


@pytest.mark.parametrize("pause_seconds", [0.1, 1.0], ids=["unnoticed", "clients reconnect"])
def test_nothing_is_lost_or_stored_twice_when_the_server_is_paused(pause_seconds: float) -> None:
    with run_server("--no-nats", "--no-http", "--heartbeat", "0") as (program, url):
        confirmed: list[int] = []

        def publish() -> None:
            with simplebus.connect_blocking(
                url, name="shop", heartbeat=HEARTBEAT_SECONDS, timeout=PATIENCE_SECONDS
            ) as bus:
                for number in range(COUNT):
                    bus.publish(b"%d" % number, class_id=1)
                    confirmed.append(number)

        with (
            simplebus.connect_blocking(
                url, heartbeat=HEARTBEAT_SECONDS, timeout=PATIENCE_SECONDS
            ) as bus,
            bus.subscribe(1, durable="billing", max_in_flight=IN_FLIGHT) as messages,
        ):
            publishing = threading.Thread(target=publish)
            publishing.start()
            received, redelivered = [], 0
            while len(set(received)) < COUNT:
                message = messages.get(PATIENCE_SECONDS)
                redelivered += message.attempt > 1
                received.append(int(message.payload))
                if len(received) == COUNT // 4:
                    program.signal(signal.SIGSTOP)
                    time.sleep(pause_seconds)
                    program.signal(signal.SIGCONT)
            publishing.join(PATIENCE_SECONDS)
        assert confirmed == list(range(COUNT))
        first_deliveries = list(dict.fromkeys(received))
        assert first_deliveries == list(range(COUNT))
        assert len(received) - COUNT <= IN_FLIGHT
        assert redelivered <= IN_FLIGHT
