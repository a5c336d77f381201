"""Message rates of a server, as lines of text.

A rate is the difference between two statistics snapshots, so no extra counters are needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import trio

from simplebus.core.broker.broker import Broker
from simplebus.core.statistics import BrokerStatistics
from simplebus.logs.configure import write_line
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


async def print_rates(broker: Broker, nats_server: NatsServer | None) -> None:
    """Write one line per second in the format of the original server, until cancelled."""
    before, nats_before = broker.statistics(), nats_server.statistics() if nats_server else None
    while True:
        await trio.sleep(1)
        now = broker.statistics()
        rates = measure_rates(before, now)
        line = format_rates(rates)
        if nats_server is not None and nats_before is not None:
            nats_now = nats_server.statistics()
            nats_rates = measure_nats_rates(nats_before, nats_now)
            line += " " + format_nats_rates(nats_rates)
            rates |= {f"nats_{name}": value for name, value in nats_rates.items()}
            nats_before = nats_now
        write_line(line, "rates.measured", rates)
        before = now


def measure_rates(before: BrokerStatistics, now: BrokerStatistics) -> dict[str, int]:
    """Return the difference of two broker snapshots that are one second apart, by field."""
    return {
        "received": now.published - before.published,
        "sent": now.delivered + now.redelivered - before.delivered - before.redelivered,
        "acknowledged": now.acknowledged - before.acknowledged,
        "redelivered": now.redelivered - before.redelivered,
        "in_flight": now.in_flight,
        "dropped": now.dropped - before.dropped,
        "sessions": now.sessions,
        "memory_bytes": now.memory_bytes,
    }


def format_rates(rates: Mapping[str, int]) -> str:
    """Format the result of `measure_rates`."""
    return (
        "Received: {received:,}. Send: {sent:,}. Acknowledged: {acknowledged:,}. "
        "Redelivered: {redelivered:,}. In flight: {in_flight:,}. Dropped: {dropped:,}. "
        "Sessions: {sessions}. Memory: {mib} MiB."
    ).format(mib=rates["memory_bytes"] >> 20, **rates)


def measure_nats_rates(before: NatsServerStatistics, now: NatsServerStatistics) -> dict[str, int]:
    """Return the difference of two snapshots of the NATS server, by field."""
    return {
        "received": now.in_messages - before.in_messages,
        "sent": now.out_messages - before.out_messages,
        "clients": now.clients,
        "slow_consumers": now.slow_consumers - before.slow_consumers,
    }


def format_nats_rates(rates: Mapping[str, int]) -> str:
    """Format the result of `measure_nats_rates`."""
    return (
        "NATS: received: {received:,}. Sent: {sent:,}. Clients: {clients}. Slow: {slow_consumers}."
    ).format(**rates)
