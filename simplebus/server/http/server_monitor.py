"""Monitoring data of a server for the page: tiles, tables and notes, made from its facts."""

from __future__ import annotations

from collections.abc import Callable

from simplebus.console.installation import installed_version
from simplebus.monitor import bus_tables
from simplebus.monitor.dashboard import Dashboard
from simplebus.monitor.snapshot import (
    Column,
    MonitorSnapshot,
    Note,
    SnapshotSteps,
    Table,
    Tile,
    merge_snapshots,
)
from simplebus.server import process
from simplebus.server.http.facts import FactsCollector, ServerFacts
from simplebus.server.http.server_metrics import build_metrics

_LOOP_DELAY_WARNING_SECONDS = 0.25
_CLIENT_COLUMNS = {
    "client_id": Column("Client", details="client"),
    "label": Column("Name"),
    "peer": Column("Peer"),
    "library": Column("Library"),
    "subscriptions": Column("Subscriptions", "count"),
    "in_msgs": Column("Published", "count", "Messages published by the client.", is_flow=True),
    "out_msgs": Column("Sent", "count", "Messages sent to the client.", is_flow=True),
    "pending_bytes": Column("Waiting", "bytes", "Bytes waiting to be sent to the client."),
}

ExtraSnapshot = Callable[[], MonitorSnapshot]
"""Returns the snapshot of a component of the server, such as a bridge."""


class ServerMonitor:
    """Monitoring data of one server."""

    def __init__(self, collector: FactsCollector) -> None:
        self.collector = collector
        self.extra_snapshots: list[ExtraSnapshot] = []
        self.version = installed_version() or ""
        self.dashboard = Dashboard(self.take_snapshot, self.collector.health)

    def take_snapshot(self, detailed: bool) -> SnapshotSteps:
        """Collect a snapshot in steps; tables and notes of clients only if `detailed`."""
        facts = yield from self.collector.collect(detailed=detailed)
        yield
        metrics = yield from build_metrics(facts, self.version)
        yield
        snapshot = MonitorSnapshot(
            title="simplebus",
            subtitle=f"bus {facts.identity}",
            health=facts.health,
            metrics=metrics,
            flows=_build_flows(facts),
            tiles=_build_tiles(facts),
            tables=_build_tables(facts, detailed=detailed),
            notes=_build_notes(facts) if detailed else [],
        )
        return merge_snapshots(snapshot, [get_snapshot() for get_snapshot in self.extra_snapshots])


def _build_flows(facts: ServerFacts) -> dict[str, float]:
    total, nats = facts.bus.total, facts.nats
    flows: dict[str, float] = {
        "published": total.published,
        "delivered": total.delivered,
        "acknowledged": total.acknowledged,
        "redelivered": total.redelivered,
        "dropped": total.dropped_count,
        "dead-lettered": total.dead_lettered_count,
    }
    return (
        flows
        if nats is None
        else {**flows, "NATS in": nats.in_messages, "NATS out": nats.out_messages}
    )


def _build_tiles(facts: ServerFacts) -> list[Tile]:
    total, latencies = facts.bus.total, facts.recent_latencies
    tiles = [
        Tile("In flight", total.in_flight),
        Tile("Stored", total.stored),
        Tile("Message memory", facts.memory_bytes, "bytes"),
        Tile("Process memory", process.resident_bytes(), "bytes"),
        Tile("Connections", sum(each.open_count for each in facts.listeners)),
        Tile("Dead letters", facts.bus.dead_letters),
        Tile("Publish to confirm, p99", latencies.confirm.quantile(0.99), "seconds"),
        Tile("Publish to ack, p99", latencies.ack.quantile(0.99), "seconds"),
    ]
    if facts.journal is not None:
        write_seconds = facts.journal.write_seconds.quantile(0.99)
        tiles.append(Tile("Journal write, p99", write_seconds, "seconds"))
    return tiles


def _build_tables(facts: ServerFacts, *, detailed: bool) -> list[Table]:
    tables = [bus_tables.build_classes_table(facts.bus)]
    if detailed:
        tables.append(bus_tables.build_subscriptions_table(facts.slow))
        tables.append(bus_tables.build_sessions_table(facts.slow))
        if facts.nats is not None:
            left_out = facts.clients_left_out
            tables.append(
                Table.of(
                    "clients", "NATS clients", facts.clients, _CLIENT_COLUMNS, left_out=left_out
                )
            )
    dead_letters_table = bus_tables.build_dead_letters_table(facts.bus)
    return [*tables, dead_letters_table] if dead_letters_table.rows else tables


def _build_notes(facts: ServerFacts) -> list[Note]:
    notes = bus_tables.build_notes(facts.bus, facts.slow)
    if reason := facts.health.reason:
        notes.insert(0, Note("the server", reason, is_bad=True))
    loop_delay_p99 = facts.recent_latencies.loop_delay.quantile(0.99)
    if loop_delay_p99 > _LOOP_DELAY_WARNING_SECONDS:
        sentence = f"99th percentile of the delay in the last minute: {loop_delay_p99:.2f} s"
        notes.append(Note("the event loop", sentence, is_bad=True))
    return notes
