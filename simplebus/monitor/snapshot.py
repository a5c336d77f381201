"""What a program says of itself: a bus, a bridge or a gateway, all in the same words.

Rule 1: plain values. Who shows them knows nothing of what they are about, and who tells them knows
nothing of who shows them: the page, `simplebus top` and /metrics are made of the same facts.
Rule 2: names of metrics, of their labels and of tables are ours; every other text may be hostile.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias

import msgspec

from simplebus.core.histogram import HistogramSnapshot


class Health(msgspec.Struct, frozen=True):
    """Whether a program is there, and does its work."""

    ready: bool = True
    """Whether it takes work. One that drains does not."""
    draining: bool = False
    why: str = ""
    """Why it is not ready; empty while it is."""

    @property
    def status(self) -> str:
        """One word."""
        return "draining" if self.draining else "ok" if self.ready else "unavailable"


class MetricKind(enum.StrEnum):
    """What a metric is."""

    COUNTER = "counter"
    """It only grows while the program runs."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


Value: TypeAlias = float | HistogramSnapshot
Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values."""


class Metric(msgspec.Struct, frozen=True):
    """One metric, and its values."""

    name: str
    """Without "simplebus_" in front, and without what its kind adds: "published_messages"."""
    kind: MetricKind
    help: str
    values: list[tuple[Labels, Value]]


class Tile(msgspec.Struct, frozen=True):
    """One figure that stands for itself."""

    title: str
    value: float
    unit: str = ""
    """"bytes", "seconds", or empty for a number."""


class Column(msgspec.Struct, frozen=True):
    """One column of a table."""

    title: str
    unit: str = "text"
    """"text", "count" for a number, "bytes" or "seconds"."""
    hint: str = ""
    """What the figures are, in a sentence."""
    is_flow: bool = False
    """Whether they only grow: how fast is shown, too."""


class Table(msgspec.Struct, frozen=True):
    """Rows of the same things."""

    key: str
    """Stable: what the page knows it by."""
    title: str
    columns: list[Column]
    rows: list[list[str | float | None]]
    """As many cells each as there are columns; None where there is nothing to say."""
    left_out: int = 0
    """Rows that there are besides."""


class Note(msgspec.Struct, frozen=True):
    """One sentence that somebody should read: what is slow, or wrong, and why."""

    about: str
    """Such as: class 'orders'."""
    sentence: str
    is_bad: bool = False
    """Whether messages wait or are lost because of it."""


class MonitorSnapshot(msgspec.Struct, frozen=True):
    """A snapshot of a program."""

    title: str
    """What it is, such as: simplebus."""
    subtitle: str = ""
    """Which one."""
    health: Health = Health()
    metrics: list[Metric] = []
    flows: dict[str, float] = {}
    """What only grows, by what it is: its change per second makes the chart."""
    tiles: list[Tile] = []
    tables: list[Table] = []
    notes: list[Note] = []


SnapshotSteps: TypeAlias = Generator[None, None, MonitorSnapshot]
"""Facts that are told in pieces: others have their turn wherever it yields."""
SnapshotSource: TypeAlias = Callable[[bool], MonitorSnapshot | SnapshotSteps]
"""Called when facts are wanted; with whether the sentences are wanted too, which take longer."""


def take_snapshot(source: SnapshotSource, *, detailed: bool) -> SnapshotSteps:
    """The facts of a teller, in pieces, whether it tells them so or not."""
    result = source(detailed)
    if isinstance(result, MonitorSnapshot):
        yield
        return result
    return (yield from result)


def merge_snapshots(
    snapshot: MonitorSnapshot, others: Iterable[MonitorSnapshot]
) -> MonitorSnapshot:
    """A program's facts, with those of what is part of it behind them. It is as healthy as it says
    itself."""
    for other in others:
        snapshot = msgspec.structs.replace(
            snapshot,
            metrics=[*snapshot.metrics, *other.metrics],
            flows={**snapshot.flows, **other.flows},
            tiles=[*snapshot.tiles, *other.tiles],
            tables=[*snapshot.tables, *other.tables],
            notes=[*snapshot.notes, *other.notes],
        )
    return snapshot
