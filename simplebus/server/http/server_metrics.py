"""Metrics of a server, made from its facts."""

from __future__ import annotations

from simplebus.core.errors import DISCONNECT_REASONS, IGNORED_REASONS, REFUSAL_REASONS
from simplebus.monitor.bus_metrics import add_bus_metrics
from simplebus.monitor.metrics_builder import MetricsBuilder
from simplebus.monitor.snapshot import Metric, MetricKind
from simplebus.server import process
from simplebus.server.http.facts import ServerFacts, Steps

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

_BROKER_GAUGES = (
    ("classes", "class_count", "Message classes."),
    ("sessions", "session_count", "Open sessions."),
    ("memory_bytes", "memory_bytes", "Memory used by the rings of all classes, in bytes."),
    ("memory_limit_bytes", "memory_limit_bytes", "Memory budget of all rings, in bytes."),
)
_LATENCY_HISTOGRAMS = (
    (
        *("publish_confirm_seconds", "confirm"),
        "Time from reading a message until it is confirmed, in seconds (sampled).",
    ),
    (
        *("publish_ack_seconds", "ack"),
        "Time from accepting a message until every subscription has acknowledged it, in seconds "
        "(sampled).",
    ),
    ("event_loop_delay_seconds", "loop_delay", "Delay of timers in the event loop, in seconds."),
)
_STALL_COUNTERS = (
    ("event_loop_stalls", "stall_count", "Stalls of the event loop longer than 1 s."),
    (
        *("event_loop_stalled_seconds", "seconds"),
        "Total duration of the event loop stalls that have ended, in seconds.",
    ),
)
_NATS_COUNTERS = (
    ("nats_in_messages", "in_messages", "Messages that NATS clients published."),
    ("nats_in_bytes", "in_bytes", "Header and payload bytes that NATS clients published."),
    ("nats_out_messages", "out_messages", "Messages sent to NATS clients."),
    ("nats_denied", "denied", "Publishes and subscriptions of NATS clients denied by permissions."),
    ("nats_slow_consumers", "slow_consumers", "NATS clients disconnected as slow consumers."),
)
_NATS_GAUGES = (
    ("nats_subscriptions", "subscriptions", "Subscriptions of NATS clients."),
    ("nats_pending_bytes", "pending_bytes", "Bytes waiting to be sent to NATS clients."),
)
_JOURNAL_COUNTERS = (
    ("journal_lots", "written_batch_count", "Write batches written."),
    ("journal_written_bytes", "written_bytes", "Bytes of message records written."),
    ("journal_syncs", "sync_count", "File syncs."),
    ("journal_failures", "failure_count", "Failed journal writes."),
    ("journal_read_bytes", "read_bytes", "Frame bytes read back from disk."),
    ("journal_read_failures", "read_failure_count", "Failed reads from disk."),
)
_JOURNAL_GAUGES = (
    ("journal_level", "level", "Durability that a confirm promises: 0 memory, 1 os, 2 disk."),
    ("journal_pending_lots", "pending_batch_count", "Write batches that are not durable yet."),
    ("journal_held_bytes", "held_bytes", "Frame bytes that are not durable yet."),
    ("journal_disk_bytes", "disk_bytes", "Size of the file system of the data directory."),
    ("journal_disk_free_bytes", "disk_free_bytes", "Free bytes of this file system."),
    (
        *("journal_lagging_sessions", "lagging_session_count"),
        "Sessions that are not read from until the journal has caught up.",
    ),
    (
        *("journal_behind", "spill_reader_count"),
        "Subscriptions whose messages are read back from disk.",
    ),
)
_JOURNAL_HISTOGRAMS = (
    (
        *("journal_write_seconds", "write_seconds"),
        "Time to write and sync the batches written together, in seconds.",
    ),
)
_CLUSTER_GAUGES = (
    ("engine_up", "is_up", "1 if the JetStream cluster is connected, else 0."),
    (
        *("engine_refused_classes", "refused_class_count"),
        "Classes whose stream refuses messages; their publishers wait.",
    ),
)
_CLUSTER_PUBLISHER_GAUGES = (
    (
        *("engine_lots", "unstored_batch_count"),
        "Write batches not yet confirmed by the JetStream cluster.",
    ),
    (
        *("engine_under_way_messages", "in_flight_count"),
        "Messages published to JetStream but not yet confirmed.",
    ),
)
_CLUSTER_PUBLISHER_COUNTERS = (
    ("engine_stored_messages", "stored", "Messages confirmed by JetStream."),
    (
        *("engine_duplicate_messages", "duplicates"),
        "Confirmed messages that JetStream had stored before.",
    ),
    (
        *("engine_refused_messages", "refused"),
        "Messages that JetStream refused; they are sent again.",
    ),
)


def build_metrics(facts: ServerFacts, version: str) -> Steps[list[Metric]]:
    """Build all metrics of a server with this version of the package, in steps."""
    builder, journal = MetricsBuilder(), facts.journal
    yield from add_bus_metrics(builder, facts.bus)
    builder.fields(_GAUGE, facts, _BROKER_GAUGES)
    builder.counter(
        "http_answers_seconds",
        "CPU time of the event loop for HTTP responses and the periodic snapshot, in seconds.",
        facts.http_seconds,
    )
    builder.gauge(
        "dead_letters", "Dead letters stored in dead-letter classes.", facts.bus.dead_letters
    )
    builder.counter_by_reason(
        "refused_frames",
        "Frames and acks that the server refused or ignored, by reason.",
        facts.refused,
        (*REFUSAL_REASONS, *IGNORED_REASONS),
    )
    builder.counter_by_reason(
        "disconnected",
        "Connections closed by the server, by reason.",
        facts.disconnected,
        (*DISCONNECT_REASONS, *REFUSAL_REASONS),
    )
    for listener, open_count, accepted_count in facts.listeners:
        builder.gauge(
            "connections", "Open connections, by listener.", open_count, listener=listener
        )
        builder.counter(
            "connections_accepted",
            "Connections accepted since the start, by listener.",
            accepted_count,
            listener=listener,
        )
    is_failing = journal is not None and bool(journal.failure)
    builder.gauge("journal_failing", "1 while the journal cannot be written, else 0.", is_failing)
    publisher = facts.cluster.publisher if facts.cluster is not None else None
    for kind, source, fields in (
        (_HISTOGRAM, facts.latencies, _LATENCY_HISTOGRAMS),
        (_COUNTER, facts.stalls, _STALL_COUNTERS),
        (_COUNTER, facts.nats, _NATS_COUNTERS),
        (_GAUGE, facts.nats, _NATS_GAUGES),
        (_COUNTER, journal, _JOURNAL_COUNTERS),
        (_GAUGE, journal, _JOURNAL_GAUGES),
        (_HISTOGRAM, journal, _JOURNAL_HISTOGRAMS),
        (_GAUGE, facts.cluster, _CLUSTER_GAUGES),
        (_GAUGE, publisher, _CLUSTER_PUBLISHER_GAUGES),
        (_COUNTER, publisher, _CLUSTER_PUBLISHER_COUNTERS),
    ):
        if source is not None:
            builder.fields(kind, source, fields)
    process.add_process_metrics(builder)
    builder.gauge("info", "Version of the server.", 1, version=version)
    return builder.build()
