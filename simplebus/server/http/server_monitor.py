"""What a server tells of itself: the facts of its engine and of its doors.

Rule 1: it looks and counts, and changes nothing.
Rule 2: whatever grows with the number of classes, positions or connections is told in pieces, and
cut at so many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import nlargest
from itertools import islice

from simplebus.console.installation import installed_version
from simplebus.core.broker.inquire_positions import PositionReporter, truncate_text
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
"""Facts of something that is part of this server."""


class ServerMonitor:
    """Of one server."""

    def __init__(self, server: Server, nats_listener: NatsListener | None) -> None:
        self._server = server
        self._nats_door = nats_listener
        self._position_reporter = PositionReporter(server.broker.store, server.broker.sessions)
        self.latency = LatencyRecorder(server.broker)
        server.latency = self.latency
        self.is_ready = self.is_draining = False
        self._listed_classes: set[int] = set()
        """Those that were told one by one last."""
        self.http_connections: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.http_seconds: Callable[[], float] = lambda: 0.0
        """How many are open at the HTTP door, and were ever."""
        self.watchdog: LoopWatchdog | None = None
        self.extra_snapshots: list[ExtraSnapshot] = []
        self._recent_latencies = RecentLatencies()
        self._nats_statistics: NatsServerStatistics | None = None
        """Of the NATS door, as it was looked at last."""
        self.version = installed_version() or ""
        self.dashboard = Dashboard(self.take_snapshot, self.health)

    def health(self) -> Health:
        """Whether the server takes work."""
        if self.is_draining:
            return Health(ready=False, draining=True, why="the server is stopping")
        if not self.is_ready:
            return Health(ready=False, why="not every door is open yet")
        commit_log, cluster = self._server.broker.commit_log, self._server.jetstream
        failure = commit_log.write_error if commit_log is not None else None
        if failure is not None:
            return Health(ready=False, why=f"{failure[0].value}: {failure[1]}")
        if cluster is not None and not cluster.link.is_ready:
            return Health(ready=False, why="no server of the cluster can be reached")
        return Health()

    def take_snapshot(self, detailed: bool) -> SnapshotSteps:
        """Everything, in pieces."""
        broker, builder = self._server.broker, MetricsBuilder()
        if self._nats_door is not None:
            self._nats_statistics = self._nats_door.nats_server.statistics()
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
            if self._nats_door is not None:
                tables.append((yield from self._build_clients_table()))
        dead_letters_table = bus_tables.build_dead_letters_table(bus_metrics)
        if dead_letters_table.rows:
            tables.append(dead_letters_table)
        builder.gauge("info", "What runs here.", 1, version=self.version)
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
            Tile("Memory of messages", broker.budget.used_bytes, "bytes"),
            Tile("Memory of the process", process.resident_bytes(), "bytes"),
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
        """Each door, how many connections it has, and ever had."""
        server, nats = self._server, self._nats_door
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
            sentence = f"in the last minute one in a hundred things was {loop_delay_p99:.2f} s late, or more"
            notes.append(Note("the event loop", sentence, is_bad=True))
        return notes

    def _build_clients_table(self) -> Generator[None, None, Table]:
        """NATS clients, those for which most waits."""
        assert self._nats_door is not None
        sessions = self._nats_door.nats_server.sessions
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
                Column("Published", "count", "Messages that it has published.", is_flow=True),
                Column("Sent", "count", "Messages that were sent to it.", is_flow=True),
                Column("Waiting", "bytes", "Bytes that it has not taken yet."),
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
        builder.gauge("classes", "Classes that there are.", len(broker.classes))
        builder.gauge("sessions", "Sessions open.", len(broker.sessions))
        builder.gauge("memory_bytes", "Memory of all rings.", broker.budget.used_bytes)
        builder.gauge("memory_limit_bytes", "What it may be.", broker.budget.limit_bytes)
        builder.gauge(
            "dead_letters", "Messages that were given up and lie there.", bus_metrics.dead_letters
        )
        for reason, count in broker.refusal_counts.items():
            builder.counter(
                "refused_frames",
                "What peers asked for or said in vain, by reason.",
                count,
                reason=reason.value,
            )
        builder.histogram(
            "publish_confirm_seconds",
            "From reading what was published until it is confirmed; some of all.",
            latency.confirm_latency.snapshot(),
        )
        builder.histogram(
            "publish_ack_seconds",
            "From accepting a message until every subscription has acknowledged it; some of all.",
            latency.ack_latency.snapshot(),
        )
        builder.histogram(
            "event_loop_delay_seconds",
            "How much later than it could the event loop had time for something.",
            latency.loop_delay.snapshot(),
        )
        if (watchdog := self.watchdog) is not None:
            builder.counter(
                "event_loop_stalls", "How often it stood still for long.", watchdog.stall_count
            )
            help = "For how long altogether, as far as it is over."
            builder.counter("event_loop_stalled_seconds", help, watchdog.stalled_seconds)

    def _add_connection_metrics(self, builder: MetricsBuilder) -> None:
        for listener, open_count, accepted_count in self._connection_counts():
            builder.gauge("connections", "Connections open.", open_count, listener=listener)
            builder.counter(
                "connections_accepted", "Connections ever made.", accepted_count, listener=listener
            )
        builder.counter(
            "http_answers_seconds",
            "Processor time of the event loop for answers at the HTTP port, and for looking at the "
            "figures once a second.",
            self.http_seconds(),
        )
        for reason, count in self._server.disconnect_counts.items():
            builder.counter(
                "disconnected",
                "Connections closed by the bus, by reason.",
                count,
                reason=reason.value,
            )
        if (nats_statistics := self._nats_statistics) is not None:
            for name, help, value in (
                (
                    "nats_in_messages",
                    "Messages that NATS clients published.",
                    nats_statistics.in_messages,
                ),
                ("nats_in_bytes", "Their headers and payloads.", nats_statistics.in_bytes),
                (
                    "nats_out_messages",
                    "Messages sent to NATS clients.",
                    nats_statistics.out_messages,
                ),
                ("nats_denied", "What permissions did not allow.", nats_statistics.denied),
                (
                    "nats_slow_consumers",
                    "Clients that took too little.",
                    nats_statistics.slow_consumers,
                ),
            ):
                builder.counter(name, help, value)
            builder.gauge("nats_subscriptions", "Of NATS clients.", nats_statistics.subscriptions)
            builder.gauge(
                "nats_pending_bytes", "Waiting for NATS clients.", nats_statistics.pending_bytes
            )

    def _add_journal_metrics(self, builder: MetricsBuilder) -> None:
        server = self._server
        if server.journal_pump is not None:
            _add_journal_metrics(builder, server.journal_pump.statistics())
        if server.jetstream is not None:
            cluster = server.jetstream
            uplink = cluster.uplink.statistics()
            builder.gauge("engine_up", "Whether the cluster is reached.", cluster.link.is_ready)
            builder.gauge("engine_lots", "Lots that have not reached it.", uplink.lots)
            builder.gauge(
                "engine_under_way_messages", "Published there, not confirmed.", uplink.under_way
            )
            builder.gauge(
                "engine_refused_classes",
                "Classes of which it takes nothing: their publishers wait.",
                len(cluster.refusals),
            )
            for name, help, value in (
                ("engine_stored_messages", "Messages that it has confirmed.", uplink.stored),
                ("engine_duplicate_messages", "Of these, it had them already.", uplink.duplicates),
                ("engine_refused_messages", "Not stored, and sent again.", uplink.refused),
            ):
                builder.counter(name, help, value)


def _add_journal_metrics(builder: MetricsBuilder, journal: JournalStatistics) -> None:
    builder.gauge(
        "journal_level",
        "What a confirm promises: 0 memory, 1 the operating system, 2 the disk.",
        Durability(journal.level),
    )
    builder.gauge("journal_failing", "Whether nothing can be written now.", bool(journal.failure))
    for name, help, value in (
        ("journal_lots", "Lots written.", journal.written_batch_count),
        ("journal_written_bytes", "Bytes of records of messages.", journal.written_bytes),
        ("journal_syncs", "How often files were synced.", journal.sync_count),
        ("journal_failures", "How often something could not be written.", journal.failure_count),
        ("journal_read_bytes", "Bytes of frames read back.", journal.read_bytes),
        ("journal_read_failures", "How often they could not be.", journal.read_failure_count),
    ):
        builder.counter(name, help, value)
    for name, help, value in (
        ("journal_pending_lots", "Lots under way.", journal.pending_batch_count),
        ("journal_held_bytes", "Bytes of frames not written yet.", journal.held_bytes),
        ("journal_lagging_sessions", "Sessions not read from.", journal.lagging_session_count),
        (
            "journal_behind",
            "Subscriptions that are sent what is read back.",
            journal.spill_reader_count,
        ),
    ):
        builder.gauge(name, help, value)
    builder.histogram(
        "journal_write_seconds",
        "How long writing and syncing took, of what was written at once.",
        journal.write_seconds,
    )
