"""Publishers that wait for slow NATS clients, on a running server."""

from __future__ import annotations

from typing import Any

import pytest

from simplebus.core.broker.broker import Settings
from simplebus.core.limits import Limits
from simplebus.nats.server.session import PublisherStall
from simplebus.nats.server.slow_consumers import SlowConsumerMonitor
from simplebus.server.connection import Connection
from tests.server.task_steps import counting_steps
from tests.support.nats_peer import connect_nats_peer
from tests.support.running_server import serving, wait_until


async def test_sends_to_one_slow_client_in_a_turn_after_a_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    retries: list[tuple[int, int]] = []

    def retry_send(connection: Connection[Any]) -> bool:
        """Make progress for the first two times."""
        client_id = connection.session.client_id
        retries.append((client_id, steps.count))
        return [each for each, _ in retries].count(client_id) < 3

    monkeypatch.setattr(SlowConsumerMonitor, "is_slow", lambda monitor, session: True)
    monkeypatch.setattr(Connection, "retry_send", retry_send)
    async with serving(nats_port=0) as server:
        assert server.nats_listener is not None
        for _ in range(4):
            await connect_nats_peer(server)
        publisher, *slow_sessions = server.nats_listener.nats_server.sessions.values()
        publisher.stall = PublisherStall(slow_sessions, False, 0.01)
        with counting_steps() as steps:
            await server.nats_listener.delay_read(publisher)
    clients = [client for client, _ in retries]
    assert clients == [session.client_id for session in slow_sessions for _ in range(3)]
    assert len({step for _, step in retries}) == len(retries)


async def test_total_limit_is_checked_without_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []
    find_over_memory = SlowConsumerMonitor.find_over_memory

    def find_counted(monitor: SlowConsumerMonitor) -> Any:
        checks.append(monitor)
        return find_over_memory(monitor)

    monkeypatch.setattr(SlowConsumerMonitor, "find_over_memory", find_counted)
    settings = Settings(Limits(pending_bytes=3 << 20, total_pending_bytes=3 << 20))
    async with serving(settings, nats_port=0) as server:
        peers = [await connect_nats_peer(server) for _ in range(5)]
        for peer in peers:
            await peer.send(b"PUB a 1000000\r\n" + bytes(900_000))
        await wait_until(lambda: bool(checks))
        assert server.nats_listener is not None
        nats_server = server.nats_listener.nats_server
        await wait_until(lambda: nats_server.slow_consumer_count > 0)
