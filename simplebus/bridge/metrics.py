"""Metrics and monitoring page of a bridge."""

from __future__ import annotations

from collections.abc import Sequence

from simplebus.bridge.copier import Copier, CopierStatistics
from simplebus.bridge.transform import SkipReason
from simplebus.monitor.metrics_builder import MetricsBuilder
from simplebus.monitor.snapshot import Column, Health, MonitorSnapshot, Note, Table, Tile

_LAG = "Messages of the source that the target has not confirmed."
_UP = (
    "1 if source and target are connected and the target accepts messages, else 0. Absent without "
    "bridges."
)
_OLDEST = "Seconds since the source accepted the oldest of these messages."


def bridge_snapshot(copiers: Sequence[Copier], *, subtitle: str = "") -> MonitorSnapshot:
    """Return the monitoring snapshot of some copiers: ready if all of them are up."""
    statistics = [copier.statistics() for copier in copiers]
    metrics = MetricsBuilder()
    for copier in statistics:
        _add_metrics(metrics, copier)
    down = [copier for copier in statistics if not copier.is_up]
    problem = "; ".join(f"{copier.name}: {_problem(copier)}" for copier in down[:3])
    return MonitorSnapshot(
        title="simplebus bridge",
        subtitle=subtitle,
        health=Health(ready=not down, reason=problem),
        metrics=metrics.build(),
        flows={"copied": sum(copier.copied for copier in statistics)},
        tiles=[
            Tile("Copiers up", len(statistics) - len(down)),
            Tile("Copiers down", len(down)),
            Tile("Lag", sum(copier.lag or 0 for copier in statistics)),
        ],
        tables=[_table(statistics)],
        notes=[Note(f"bridge {copier.name!r}", _problem(copier), is_bad=True) for copier in down],
    )


def _problem(copier: CopierStatistics) -> str:
    return copier.problem or "not connected to source and target yet"


def _add_metrics(metrics: MetricsBuilder, copier: CopierStatistics) -> None:
    name = copier.name
    metrics.gauge("bridge_up", _UP, copier.is_up, copier=name)
    if copier.lag is not None:
        metrics.gauge("bridge_lag_messages", _LAG, copier.lag, copier=name)
        metrics.gauge("bridge_lag_seconds", _OLDEST, copier.lag_seconds, copier=name)
    for metric, help, value in (
        ("bridge_copied_messages", "Messages that the target confirmed.", copier.copied),
        ("bridge_batches", "Batches that were sent to the target.", copier.batches),
        ("bridge_refused_messages", "Dead letters: the target refused them.", copier.refused),
        ("bridge_missed_messages", "Dropped at the source before they were copied.", copier.missed),
        ("bridge_odd_messages", "NATS messages that a bus cannot represent.", copier.altered),
        ("bridge_losses", "Lost connections and failed attempts.", copier.losses),
        ("bridge_doubts", "Discarded bridge records.", copier.discarded_records),
    ):
        metrics.counter(metric, help, value, copier=name)
    metrics.counter_by_reason(
        "bridge_left_messages",
        "Messages that were not to be copied, by reason.",
        copier.skipped,
        [reason.value for reason in SkipReason],
        copier=name,
    )


def _table(statistics: Sequence[CopierStatistics]) -> Table:
    return Table(
        "lanes",
        "Bridges",
        [
            Column("Copier"),
            Column("State"),
            Column("Copied", "count", "Messages that the target confirmed.", is_flow=True),
            Column("Lag", "count", _LAG),
            Column("Oldest", "seconds", _OLDEST),
            Column("Refused", "count", "Dead letters: the target refused them."),
            Column("Missed", "count", "Dropped at the source before they were copied."),
            Column("Skipped", "count", "Messages that were not to be copied."),
            Column("Losses", "count", "Lost connections and failed attempts."),
        ],
        [
            [
                copier.name,
                "up" if copier.is_up else _problem(copier),
                copier.copied,
                copier.lag,
                None if copier.lag is None else copier.lag_seconds,
                copier.refused,
                copier.missed,
                sum(copier.skipped.values()),
                copier.losses,
            ]
            for copier in statistics
        ],
    )
