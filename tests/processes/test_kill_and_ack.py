"""Acknowledgements and deliveries before a server is killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

import simplebus
from simplebus.core.errors import BusConnectionError
from tests.client.conftest import Run, run
from tests.support.programs import PATIENCE_SECONDS, run_server

__all__ = ["run"]

COUNT = 300


def check_restarted_server(
    path: Path, durability: str, synced: set[int], delivered: set[int]
) -> None:
    """Start the server again: it delivers all messages but the synced ones."""
    unacked = set(range(COUNT)) - synced
    attempts: dict[int, int] = {}
    with (
        run_server("--data-dir", str(path), "--durability", durability) as (_, url),
        simplebus.connect_blocking(url) as bus,
    ):
        with bus.subscribe(1, durable="billing", ack_seconds=1) as messages:
            while not attempts.keys() >= unacked:
                message = messages.get(PATIENCE_SECONDS)
                attempts[int(message.payload)] = message.attempt
        bus.flush()
        [position] = bus.explain(1).positions
        assert position.floor == COUNT, "synced messages are not acknowledged"
    assert attempts.keys() == unacked
    assert all(attempts[number] >= 2 for number in unacked & delivered)


@pytest.mark.parametrize("durability", ["disk", "os"])
def test_acks_that_were_waited_for_survive_a_kill(
    tmp_path: Path, durability: str, run: Run
) -> None:
    synced, delivered = set[int](), set[int]()

    async def main() -> None:
        with run_server("--data-dir", str(tmp_path), "--durability", durability) as (server, url):
            async with (
                simplebus.connect(url, reconnect=0) as bus,
                bus.subscribe(1, durable="billing", auto_ack=False) as messages,
            ):
                for number in range(COUNT):
                    await bus.publish(b"%d" % number, class_id=1, confirm=number == COUNT - 1)
                for _ in range(20):
                    received = await messages.take(7)
                    delivered.update(int(message.payload) for message in received)
                    await messages.ack_sync(*received[:-1])
                    synced.update(int(message.payload) for message in received[:-1])
                server.process.kill()
                with pytest.raises(BusConnectionError):
                    await messages.ack_sync()

    try:
        run(main)
    except* BusConnectionError:
        pass
    check_restarted_server(tmp_path, durability, synced, delivered)


def test_blocking_acks_that_were_waited_for_survive_a_kill(tmp_path: Path) -> None:
    synced, delivered = set[int](), set[int]()
    with (
        suppress(BusConnectionError),  # Raised at the end of the blocks.
        run_server("--data-dir", str(tmp_path)) as (server, url),
        simplebus.connect_blocking(url, reconnect=0) as bus,
        bus.subscribe(1, durable="billing", auto_ack=False) as messages,
    ):
        bus.publish_many([b"%d" % number for number in range(COUNT)], class_id=1)
        for _ in range(20):
            received = messages.take(7)
            delivered.update(int(message.payload) for message in received)
            messages.ack_sync(*received[:-1])
            synced.update(int(message.payload) for message in received[:-1])
        server.process.kill()
        with pytest.raises(BusConnectionError):
            messages.ack_sync()
    check_restarted_server(tmp_path, "disk", synced, delivered)
