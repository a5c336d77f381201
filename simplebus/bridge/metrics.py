"""What lanes tell of themselves to operators."""

from __future__ import annotations

from collections.abc import Sequence

from simplebus.bridge.copier import Copier, CopierStatistics
from simplebus.monitor.counted import Counted
from simplebus.monitor.facts import Column, Facts, Health, Note, Table, Tile

_LAG = "Messages that are still to be copied: at the near end, and not confirmed by the far one."
_UP = "Whether a lane has both ends, and the far one takes what it is sent."
_OLDEST = "How long ago the first of them was accepted."


def facts_of(lanes: Sequence[Copier], *, subtitle: str = "") -> MonitorSnapshot:
    """A snapshot of all of them: not ready while one has lost an end, or is held up."""
    found = [lane.statistics() for lane in lanes]
    metrics_builder = MetricsBuilder()
    for lane in found:
        _count(metrics_builder, lane)
    down = [lane for lane in found if not lane.is_up]
    why = "; ".join(f"{lane.name}: {_problem(lane)}" for lane in down[:3])
    return MonitorSnapshot(
        title="simplebus bridge",
        subtitle=subtitle,
        health=Health(ready=not down, why=why),
        metrics=metrics_builder.metrics(),
        flows={"copied": sum(lane.copied for lane in found)},
        tiles=[
            Tile("Lanes up", len(found) - len(down)),
            Tile("Lanes down", len(down)),
            Tile("Behind", sum(lane.lag or 0 for lane in found)),
        ],
        tables=[_table(found)],
        notes=[Note(f"bridge {lane.name!r}", _problem(lane), is_bad=True) for lane in down],
    )


def _problem(lane: CopierStatistics) -> str:
    return lane.problem or "it has not reached both ends yet"


def _count(metrics_builder: MetricsBuilder, lane: CopierStatistics) -> None:
    name = lane.name
    metrics_builder.gauge("bridge_up", _UP, lane.is_up, lane=name)
    if lane.lag is not None:
        metrics_builder.gauge("bridge_lag_messages", _LAG, lane.lag, lane=name)
        metrics_builder.gauge("bridge_lag_seconds", _OLDEST, lane.lag_seconds, lane=name)
    for metric, help, value in (
        ("bridge_copied_messages", "Messages confirmed by the far end.", lane.copied),
        ("bridge_batches", "Batches of them.", lane.batches),
        ("bridge_refused_messages", "Refused by the far end: dead letters.", lane.refused),
        ("bridge_missed_messages", "Gone before they could be copied.", lane.missed),
        ("bridge_odd_messages", "Of NATS, copied otherwise than they are there.", lane.odd),
        ("bridge_losses", "How often an end was lost.", lane.losses),
        ("bridge_doubts", "How often an end was not what it had been.", lane.doubts),
    ):
        metrics_builder.counter(metric, help, value, lane=name)
    for reason, count in lane.left.items():
        help = "Messages that were not to be copied, by reason."
        metrics_builder.counter("bridge_left_messages", help, count, lane=name, reason=reason)


def _table(found: Sequence[CopierStatistics]) -> Table:
    return Table(
        "lanes",
        "Bridges",
        [
            Column("Lane"),
            Column("State"),
            Column("Copied", "count", "Messages confirmed by the far end.", is_flow=True),
            Column("Lag", "count", _LAG),
            Column("Oldest", "seconds", _OLDEST),
            Column("Refused", "count", "Refused by the far end: they are dead letters."),
            Column("Missed", "count", "Gone before they could be copied."),
            Column("Left", "count", "Messages that were not to be copied."),
            Column("Losses", "count", "How often an end was lost."),
        ],
        [
            [
                lane.name,
                "up" if lane.is_up else _problem(lane),
                lane.copied,
                lane.lag,
                None if lane.lag is None else lane.lag_seconds,
                lane.refused,
                lane.missed,
                sum(lane.left.values()),
                lane.losses,
            ]
            for lane in found
        ],
    )
