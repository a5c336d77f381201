"""Collects the monitoring data of a server: metrics, tables and notes.

Collection is read-only. It yields between parts, and lists have maximum lengths, so that other
tasks are not delayed by many classes, positions or connections.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import nlargest
from itertools import islice

from simplebus.console.installation import installed_version
from simplebus.core.broker.inquire_positions import PositionReporter, truncate_text
from simplebus.core.errors import DISCONNECT_REASONS, IGNORED_REASONS, REFUSAL_REASONS
from simplebus.core.protocol.durability import Durability
from simplebus.monitor import bus_tables, class_metrics
from simplebus.monitor.class_metrics import BusMetrics
from simplebus.monitor.dashboard import Dashboard
from simplebus.monitor.metrics_builder import MetricsBuilder
from simplebus.monitor.snapshot import (
    Column,
    Health,
    MonitorSnapshot,
    Note,
    SnapshotSteps,
    Table,
    Tile,
    merge_snapshots,
)
from simplebus.nats.statistics import NatsServerStatistics
from simplebus.server import process
from simplebus.server.journal.pump import JournalStatistics
from simplebus.server.nats_listener import NatsListener
from simplebus.server.observability.latency import LatencyRecorder, RecentLatencies
from simplebus.server.observability.loop_watchdog import LoopWatchdog
from simplebus.server.server import Server

_CLIENTS_LISTED_MAX = 50
_LOOP_DELAY_WARNING_SECONDS = 0.25

ExtraSnapshot = Callable[[], MonitorSnapshot]
"""Returns the snapshot of a component of the server, such as a bridge."""


class ServerMonitor:
    """Monitoring data of one server."""

    def __init__(self, server: Server, nats_listener: NatsListener | None) -> None:
        self._server = server
        self._nats_listener = nats_listener
        self._position_reporter = PositionReporter(server.broker.store, server.broker.sessions)
        self.latency = LatencyRecorder(server.broker)
        server.latency = self.latency
        self.is_ready = self.is_draining = False
        self._listed_classes: set[int] = set()
        """Ids of the classes that the latest snapshot listed individually."""
        self.http_connections: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the open and the accepted HTTP connections."""
        self.http_seconds: Callable[[], float] = lambda: 0.0
        """Returns the CPU time of HTTP responses in seconds."""
        self.watchdog: LoopWatchdog | None = None
        self.extra_snapshots: list[ExtraSnapshot] = []
        self._recent_latencies = RecentLatencies()
        self._nats_statistics: NatsServerStatistics | None = None
        """Statistics of the NATS server at the latest snapshot."""
        self.version = installed_version() or ""
        self.dashboard = Dashboard(self.take_snapshot, self.health)

    def health(self) -> Health:
        """Return whether the server accepts work, and why not."""
        if self.is_draining:
            return Health(ready=False, draining=True, why="the server is stopping")
        if not self.is_ready:
            return Health(ready=False, why="not every listener accepts connections yet")
        commit_log, cluster = self._server.broker.commit_log, self._server.jetstream
        failure = commit_log.write_error if commit_log is not None else None
        if failure is not None:
            return Health(ready=False, why=f"{failure[0].value}: {failure[1]}")
        if cluster is not None and not cluster.link.is_ready:
            return Health(ready=False, why="no server of the JetStream cluster is reachable")
        return Health()

    def take_snapshot(self, detailed: bool) -> SnapshotSteps:
        """Collect a snapshot in steps; tables and notes of clients only if `detailed`."""
        broker, builder = self._server.broker, MetricsBuilder()
        if self._nats_listener is not None:
            self._nats_statistics = self._nats_listener.nats_server.statistics()
            yield
        bus_metrics = yield from class_metrics.collect_bus_metrics(
            broker.store, self._listed_classes
        )
        self._listed_classes = {each.class_id for each in bus_metrics.classes}
        class_metrics.add_bus_metrics(builder, bus_metrics)
        yield
        self._add_bus_metrics(builder, bus_metrics)
        self._add_connection_metrics(builder)
        self._add_journal_metrics(builder)
        process.add_process_metrics(builder)
        yield
        tables = [bus_tables.build_classes_table(bus_metrics)]
        notes: list[Note] = []
        if detailed:
            notes += self._build_notes(bus_metrics)
            positions, section_notes = yield from bus_tables.build_subscriptions_table(
                broker, self._position_reporter
            )
            tables.append(positions)
            notes += section_notes
            sessions, section_notes = yield from bus_tables.build_sessions_table(
                broker, self._position_reporter
            )
            tables.append(sessions)
            notes += section_notes
            if self._nats_listener is not None:
                tables.append((yield from self._build_clients_table()))
        dead_letters_table = bus_tables.build_dead_letters_table(bus_metrics)
        if dead_letters_table.rows:
            tables.append(dead_letters_table)
        builder.gauge("info", "Version of the server.", 1, version=self.version)
        snapshot = MonitorSnapshot(
            title="simplebus",
            subtitle=f"bus {broker.inquiry_handler.identity}",
            health=self.health(),
            metrics=builder.build(),
            flows=self._collect_flows(bus_metrics),
            tiles=self._build_tiles(bus_metrics),
            tables=tables,
            notes=notes,
        )
        return merge_snapshots(snapshot, [get_snapshot() for get_snapshot in self.extra_snapshots])

    def _collect_flows(self, bus_metrics: BusMetrics) -> dict[str, float]:
        total = bus_metrics.total
        flows: dict[str, float] = {
            "published": total.published,
            "delivered": total.delivered,
            "acknowledged": total.acknowledged,
            "redelivered": total.redelivered,
            "dropped": total.dropped.total(),
        }
        if (nats_statistics := self._nats_statistics) is not None:
            flows["NATS in"], flows["NATS out"] = (
                nats_statistics.in_messages,
                nats_statistics.out_messages,
            )
        return flows

    def _build_tiles(self, bus_metrics: BusMetrics) -> list[Tile]:
        broker, total = self._server.broker, bus_metrics.total
        confirmed, acked, _ = self._recent_latencies.snapshot(self.latency)
        tiles = [
            Tile("In flight", total.in_flight),
            Tile("Stored", total.stored),
            Tile("Message memory", broker.budget.used_bytes, "bytes"),
            Tile("Process memory", process.resident_bytes(), "bytes"),
            Tile("Connections", sum(count for _, count, _ in self._connection_counts())),
            Tile("Dead letters", bus_metrics.dead_letters),
            Tile("Publish to confirm, p99", confirmed.quantile(0.99), "seconds"),
            Tile("Publish to ack, p99", acked.quantile(0.99), "seconds"),
        ]
        if (journal_pump := self._server.journal_pump) is not None:
            write_seconds = journal_pump.statistics().write_seconds
            tiles.append(Tile("Journal write, p99", write_seconds.quantile(0.99), "seconds"))
        return tiles

    def _connection_counts(self) -> list[tuple[str, int, int]]:
        """Return the name, the open and the accepted connections of each listener."""
        server, nats = self._server, self._nats_listener
        connection_counts = [("tcp", len(server.connections), server.accepted_count)]
        if nats is not None:
            connection_counts.append(("nats", len(nats.connections), nats.accepted_count))
        return [*connection_counts, ("http", *self.http_connections())]

    def _build_notes(self, bus_metrics: BusMetrics) -> list[Note]:
        server = self._server
        notes = bus_tables.build_blocked_notes(server.broker, bus_metrics)
        notes += bus_tables.build_unavailable_notes(server.broker, bus_metrics)
        health = self.health()
        if health.why:
            notes.insert(0, Note("the server", health.why, is_bad=True))
        loop_delay_p99 = self._recent_latencies.snapshot(self.latency)[2].quantile(0.99)
        if loop_delay_p99 > _LOOP_DELAY_WARNING_SECONDS:
            sentence = f"99th percentile of the delay in the last minute: {loop_delay_p99:.2f} s"
            notes.append(Note("the event loop", sentence, is_bad=True))
        return notes

    def _build_clients_table(self) -> Generator[None, None, Table]:
        """List the NATS clients with the most pending bytes."""
        assert self._nats_listener is not None
        sessions = self._nats_listener.nats_server.sessions
        candidates = islice(sessions.values(), 10_000)
        chosen = nlargest(
            _CLIENTS_LISTED_MAX, candidates, key=lambda each: each.outbox.pending_bytes
        )
        yield
        return Table(
            "clients",
            "NATS clients",
            [
                Column("Client"),
                Column("Name"),
                Column("Peer"),
                Column("Library"),
                Column("Subscriptions", "count"),
                Column("Published", "count", "Messages published by the client.", is_flow=True),
                Column("Sent", "count", "Messages sent to the client.", is_flow=True),
                Column("Waiting", "bytes", "Bytes waiting to be sent to the client."),
            ],
            [
                [
                    f"{each.client_id}",
                    truncate_text(each.options.name),
                    truncate_text(each.peer),
                    truncate_text(f"{each.options.lang} {each.options.version}".strip()),
                    len(each.subscriptions),
                    each.in_messages,
                    each.out_messages,
                    each.outbox.pending_bytes,
                ]
                for each in chosen
            ],
            left_out=max(0, len(sessions) - len(chosen)),
        )

    # Metrics -------------------------------------------------------------------------------------

    def _add_bus_metrics(self, builder: MetricsBuilder, bus_metrics: BusMetrics) -> None:
        broker, latency = self._server.broker, self.latency
        builder.gauge("classes", "Message classes.", len(broker.classes))
        builder.gauge("sessions", "Open sessions.", len(broker.sessions))
        builder.gauge(
            "memory_bytes",
            "Memory used by the rings of all classes, in bytes.",
            broker.budget.used_bytes,
        )
        builder.gauge(
            "memory_limit_bytes", "Memory budget of all rings, in bytes.", broker.budget.limit_bytes
        )
        builder.gauge(
            "dead_letters", "Dead letters stored in dead-letter classes.", bus_metrics.dead_letters
        )
        builder.counter_by_reason(
            "refused_frames",
            "Frames and acks that the server refused or ignored, by reason.",
            broker.refusal_counts,
            (*REFUSAL_REASONS, *IGNORED_REASONS),
        )
        builder.histogram(
            "publish_confirm_seconds",
            "Time from reading a message until it is confirmed, in seconds (sampled).",
            latency.confirm_latency.snapshot(),
        )
        builder.histogram(
            "publish_ack_seconds",
            "Time from accepting a message until every subscription has acknowledged it, in "
            "seconds (sampled).",
            latency.ack_latency.snapshot(),
        )
        builder.histogram(
            "event_loop_delay_seconds",
            "Delay of timers in the event loop, in seconds.",
            latency.loop_delay.snapshot(),
        )
        if (watchdog := self.watchdog) is not None:
            builder.counter(
                "event_loop_stalls",
                "Stalls of the event loop longer than 1 s.",
                watchdog.stall_count,
            )
            help = "Total duration of the event loop stalls that have ended, in seconds."
            builder.counter("event_loop_stalled_seconds", help, watchdog.stalled_seconds)

    def _add_connection_metrics(self, builder: MetricsBuilder) -> None:
        for listener, open_count, accepted_count in self._connection_counts():
            builder.gauge(
                "connections", "Open connections, by listener.", open_count, door=listener
            )
            builder.counter(
                "connections_accepted",
                "Connections accepted since the start, by listener.",
                accepted_count,
                door=listener,
            )
        builder.counter(
            "http_answers_seconds",
            "CPU time of the event loop for HTTP responses and the periodic snapshot, in seconds.",
            self.http_seconds(),
        )
        builder.counter_by_reason(
            "disconnected",
            "Connections closed by the server, by reason.",
            self._server.disconnect_counts,
            (*DISCONNECT_REASONS, *REFUSAL_REASONS),
        )
        if (nats_statistics := self._nats_statistics) is not None:
            for name, help, value in (
                (
                    "nats_in_messages",
                    "Messages that NATS clients published.",
                    nats_statistics.in_messages,
                ),
                (
                    "nats_in_bytes",
                    "Header and payload bytes that NATS clients published.",
                    nats_statistics.in_bytes,
                ),
                (
                    "nats_out_messages",
                    "Messages sent to NATS clients.",
                    nats_statistics.out_messages,
                ),
                (
                    "nats_denied",
                    "Publishes and subscriptions of NATS clients denied by permissions.",
                    nats_statistics.denied,
                ),
                (
                    "nats_slow_consumers",
                    "NATS clients disconnected as slow consumers.",
                    nats_statistics.slow_consumers,
                ),
            ):
                builder.counter(name, help, value)
            builder.gauge(
                "nats_subscriptions",
                "Subscriptions of NATS clients.",
                nats_statistics.subscriptions,
            )
            builder.gauge(
                "nats_pending_bytes",
                "Bytes waiting to be sent to NATS clients.",
                nats_statistics.pending_bytes,
            )

    def _add_journal_metrics(self, builder: MetricsBuilder) -> None:
        server = self._server
        journal = None if server.journal_pump is None else server.journal_pump.statistics()
        builder.gauge(
            "journal_failing",
            "1 while the journal cannot be written, else 0.",
            journal is not None and bool(journal.failure),
        )
        if journal is not None:
            _add_journal_metrics(builder, journal)
        if server.jetstream is not None:
            cluster = server.jetstream
            publisher = cluster.publisher.statistics()
            builder.gauge(
                "engine_up",
                "1 if the JetStream cluster is connected, else 0.",
                cluster.link.is_ready,
            )
            builder.gauge(
                "engine_lots",
                "Write batches not yet confirmed by the JetStream cluster.",
                publisher.unstored_batch_count,
            )
            builder.gauge(
                "engine_under_way_messages",
                "Messages published to JetStream but not yet confirmed.",
                publisher.in_flight_count,
            )
            builder.gauge(
                "engine_refused_classes",
                "Classes whose stream refuses messages; their publishers wait.",
                len(cluster.refusals),
            )
            for name, help, value in (
                ("engine_stored_messages", "Messages confirmed by JetStream.", publisher.stored),
                (
                    "engine_duplicate_messages",
                    "Confirmed messages that JetStream had stored before.",
                    publisher.duplicates,
                ),
                (
                    "engine_refused_messages",
                    "Messages that JetStream refused; they are sent again.",
                    publisher.refused,
                ),
            ):
                builder.counter(name, help, value)


def _add_journal_metrics(builder: MetricsBuilder, journal: JournalStatistics) -> None:
    builder.gauge(
        "journal_level",
        "Durability that a confirm promises: 0 memory, 1 os, 2 disk.",
        Durability(journal.level),
    )
    for name, help, value in (
        ("journal_lots", "Write batches written.", journal.written_batch_count),
        ("journal_written_bytes", "Bytes of message records written.", journal.written_bytes),
        ("journal_syncs", "File syncs.", journal.sync_count),
        ("journal_failures", "Failed journal writes.", journal.failure_count),
        ("journal_read_bytes", "Frame bytes read back from disk.", journal.read_bytes),
        ("journal_read_failures", "Failed reads from disk.", journal.read_failure_count),
    ):
        builder.counter(name, help, value)
    for name, help, value in (
        (
            "journal_pending_lots",
            "Write batches that are not durable yet.",
            journal.pending_batch_count,
        ),
        ("journal_held_bytes", "Frame bytes that are not durable yet.", journal.held_bytes),
        (
            "journal_lagging_sessions",
            "Sessions that are not read from until the journal has caught up.",
            journal.lagging_session_count,
        ),
        (
            "journal_behind",
            "Subscriptions whose messages are read back from disk.",
            journal.spill_reader_count,
        ),
    ):
        builder.gauge(name, help, value)
    builder.histogram(
        "journal_write_seconds",
        "Time to write and sync the batches written together, in seconds.",
        journal.write_seconds,
    )
