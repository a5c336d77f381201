"""What a server says of its rates: a line a second for people, a line now and then for systemd.

Rule 1: a rate is the difference of two snapshots. Nothing is counted for it.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from simplebus.core.broker.broker import Broker
from simplebus.core.statistics import BrokerStatistics
from simplebus.nats.statistics import FrontStatistics
from simplebus.server.nats_listener import NatsDoor


class Rates:
    """Since this was asked last."""

    def __init__(self, broker: Broker, door: NatsDoor | None) -> None:
        self._broker, self._door = broker, door
        self._at = trio.current_time()
        self._before = broker.statistics()
        self._nats_before = door.front.statistics() if door else None

    def line(self) -> str:
        """One short line."""
        at, now = trio.current_time(), self._broker.statistics()
        seconds, before = max(at - self._at, 1e-9), self._before
        sent = now.delivered + now.redelivered - before.delivered - before.redelivered
        came, clients = now.published - before.published, now.sessions
        if self._door is not None and self._nats_before is not None:
            nats, nats_before = self._door.front.statistics(), self._nats_before
            came += nats.in_messages - nats_before.in_messages
            sent += nats.out_messages - nats_before.out_messages
            clients += nats.clients
            self._nats_before = nats
        self._at, self._before = at, now
        return (
            f"{came / seconds:,.0f} messages a second in, {sent / seconds:,.0f} out; "
            f"{clients:,} clients, {now.in_flight:,} in flight, {now.memory_bytes >> 20} MiB"
        )


async def print_rates(
    broker: Broker, door: NatsDoor | None, announce: Callable[[str], None]
) -> None:
    """One line a second, as the original prints."""
    front = door.front if door else None
    before, nats_before = broker.statistics(), front.statistics() if front else None
    while True:
        await trio.sleep(1)
        now = broker.statistics()
        line = rates_line(before, now)
        if front is not None and nats_before is not None:
            nats_now = front.statistics()
            line += " " + nats_rates(nats_before, nats_now)
            nats_before = nats_now
        announce(line)
        before = now


def rates_line(before: BrokerStatistics, now: BrokerStatistics) -> str:
    """What happened between two snapshots a second apart."""
    sent = now.delivered + now.redelivered - before.delivered - before.redelivered
    return (
        f"Received: {now.published - before.published:,}. Send: {sent:,}. "
        f"Acknowledged: {now.acknowledged - before.acknowledged:,}. "
        f"Redelivered: {now.redelivered - before.redelivered:,}. In flight: {now.in_flight:,}. "
        f"Dropped: {now.dropped - before.dropped:,}. "
        f"Sessions: {now.sessions}. Memory: {now.memory_bytes >> 20} MiB."
    )


def nats_rates(before: FrontStatistics, now: FrontStatistics) -> str:
    """The same of the NATS door."""
    return (
        f"NATS: received: {now.in_messages - before.in_messages:,}. "
        f"Sent: {now.out_messages - before.out_messages:,}. Clients: {now.clients}. "
        f"Slow: {now.slow_consumers - before.slow_consumers}."
    )
