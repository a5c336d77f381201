"""Message rates of a server, as lines of text.

A rate is the difference between two statistics snapshots, so no extra counters are needed.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from simplebus.core.broker.broker import Broker
from simplebus.core.statistics import BrokerStatistics
from simplebus.nats.nats_server import NatsServer
from simplebus.nats.statistics import NatsServerStatistics


class MessageRates:
    """Rates since the previous call of `status_line`, for the systemd status."""

    def __init__(self, broker: Broker, nats_server: NatsServer | None) -> None:
        self._broker, self._nats_server = broker, nats_server
        self._last_time = trio.current_time()
        self._last_statistics = broker.statistics()
        self._last_nats_statistics = nats_server.statistics() if nats_server else None

    def status_line(self) -> str:
        """Return one short line with the rates, the clients and the memory in use."""
        now, statistics = trio.current_time(), self._broker.statistics()
        seconds, before = max(now - self._last_time, 1e-9), self._last_statistics
        sent = statistics.delivered + statistics.redelivered - before.delivered - before.redelivered
        received, clients = statistics.published - before.published, statistics.sessions
        if self._nats_server is not None and self._last_nats_statistics is not None:
            nats, nats_before = self._nats_server.statistics(), self._last_nats_statistics
            received += nats.in_messages - nats_before.in_messages
            sent += nats.out_messages - nats_before.out_messages
            clients += nats.clients
            self._last_nats_statistics = nats
        self._last_time, self._last_statistics = now, statistics
        return (
            f"{received / seconds:,.0f} messages/s in, {sent / seconds:,.0f} messages/s out; "
            f"{clients:,} clients, {statistics.in_flight:,} in flight, "
            f"{statistics.memory_bytes >> 20} MiB"
        )


async def print_rates(
    broker: Broker, nats_server: NatsServer | None, announce: Callable[[str], None]
) -> None:
    """Print one line per second in the format of the original server, until cancelled."""
    before, nats_before = broker.statistics(), nats_server.statistics() if nats_server else None
    while True:
        await trio.sleep(1)
        now = broker.statistics()
        line = format_rates(before, now)
        if nats_server is not None and nats_before is not None:
            nats_now = nats_server.statistics()
            line += " " + format_nats_rates(nats_before, nats_now)
            nats_before = nats_now
        announce(line)
        before = now


def format_rates(before: BrokerStatistics, now: BrokerStatistics) -> str:
    """Format the difference of two broker snapshots that are one second apart."""
    sent = now.delivered + now.redelivered - before.delivered - before.redelivered
    return (
        f"Received: {now.published - before.published:,}. Send: {sent:,}. "
        f"Acknowledged: {now.acknowledged - before.acknowledged:,}. "
        f"Redelivered: {now.redelivered - before.redelivered:,}. In flight: {now.in_flight:,}. "
        f"Dropped: {now.dropped - before.dropped:,}. "
        f"Sessions: {now.sessions}. Memory: {now.memory_bytes >> 20} MiB."
    )


def format_nats_rates(before: NatsServerStatistics, now: NatsServerStatistics) -> str:
    """Format the difference of two snapshots of the NATS server."""
    return (
        f"NATS: received: {now.in_messages - before.in_messages:,}. "
        f"Sent: {now.out_messages - before.out_messages:,}. Clients: {now.clients}. "
        f"Slow: {now.slow_consumers - before.slow_consumers}."
    )
