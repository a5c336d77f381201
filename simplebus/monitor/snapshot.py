"""State of a program as plain values: a bus, a bridge or a gateway.

The page, `simplebus top` and /metrics are made of the same snapshots. Names of metrics, labels and
tables come from this program; every other text may be untrusted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterable, Mapping
from operator import attrgetter
from typing import TypeAlias

import msgspec

from simplebus.core.histogram import HistogramSnapshot


class Health(msgspec.Struct, frozen=True):
    """Readiness of a program."""

    ready: bool = True
    """True if the program accepts work; False while it drains."""
    draining: bool = False
    reason: str = msgspec.field(default="", name="why")
    """Reason why it is not ready; empty if it is. The key is `why` in JSON."""

    @property
    def status(self) -> str:
        """ "ok", "draining" or "unavailable"."""
        return "draining" if self.draining else "ok" if self.ready else "unavailable"


class MetricKind(enum.StrEnum):
    """Type of a metric."""

    COUNTER = "counter"
    """Only grows while the program runs."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


Value: TypeAlias = float | HistogramSnapshot
Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Label names and values."""


class Metric(msgspec.Struct, frozen=True):
    """A metric with its values."""

    name: str
    """Name without the prefix "simplebus_" and the suffix of its kind: "published_messages"."""
    kind: MetricKind
    help: str
    values: list[tuple[Labels, Value]]


class Tile(msgspec.Struct, frozen=True):
    """A single number on the page."""

    title: str
    value: float
    unit: str = ""
    """"bytes", "seconds", or empty for a number."""


class Column(msgspec.Struct, frozen=True):
    """A column of a table."""

    title: str
    unit: str = "text"
    """"text", "count", "bytes" or "seconds"."""
    hint: str = ""
    """Explanation of the values, in one sentence."""
    is_flow: bool = False
    """True for counters: their rate is shown as well."""
    is_load: bool = False
    """True for present work. A row without work and without growing counters may be folded."""
    details: str = ""
    """Kind of the page of an item that the cell names: "class", "session" or "client"."""


class Table(msgspec.Struct, frozen=True):
    """A table with one row per item."""

    key: str
    """Stable name of the table."""
    title: str
    columns: list[Column]
    rows: list[list[str | float | None]]
    """One cell per column; None for an unknown value."""
    left_out: int = 0
    """Number of further rows that are not listed."""

    @classmethod
    def of(
        cls,
        key: str,
        title: str,
        items: Iterable[object],
        columns: Mapping[str, Column],
        *,
        left_out: int = 0,
    ) -> Table:
        """Return a table with one row per item, from columns by the attribute that they show.

        An attribute may be a path, such as "info.lag".
        """
        cells = [attrgetter(path) for path in columns]
        rows = [[get_cell(item) for get_cell in cells] for item in items]
        return cls(key, title, list(columns.values()), rows, left_out)


class Note(msgspec.Struct, frozen=True):
    """A sentence for operators about something slow or wrong."""

    about: str
    """Subject of the note, such as: class 'orders'."""
    sentence: str
    is_bad: bool = False
    """True if messages wait or are lost because of it."""


class MonitorSnapshot(msgspec.Struct, frozen=True):
    """State of a program at one moment."""

    title: str
    """Kind of program, such as: simplebus."""
    subtitle: str = ""
    """Name of this instance."""
    taken_at: float = 0.0
    """Time in seconds at which the counters were read, on a clock of this program. The difference
    to the previous snapshot is the time over which all counters have grown.
    """
    health: Health = Health()
    metrics: list[Metric] = []
    flows: dict[str, float] = {}
    """Counters by name; their rates are charted."""
    tiles: list[Tile] = []
    tables: list[Table] = []
    notes: list[Note] = []


SnapshotSteps: TypeAlias = Generator[None, None, MonitorSnapshot]
"""Generator that collects a snapshot and yields so that other tasks can run."""
SnapshotSource: TypeAlias = Callable[[bool], MonitorSnapshot | SnapshotSteps]
"""Called with whether tables and notes are wanted; returns a snapshot or its steps."""


def take_snapshot(source: SnapshotSource, *, detailed: bool) -> SnapshotSteps:
    """Take a snapshot in steps, whether or not the source uses steps."""
    result = source(detailed)
    if isinstance(result, MonitorSnapshot):
        yield
        return result
    return (yield from result)


def merge_snapshots(
    snapshot: MonitorSnapshot, component_snapshots: Iterable[MonitorSnapshot]
) -> MonitorSnapshot:
    """Append the data of components to a program's snapshot. The program's health stays."""
    for component in component_snapshots:
        snapshot = msgspec.structs.replace(
            snapshot,
            metrics=[*snapshot.metrics, *component.metrics],
            flows={**snapshot.flows, **component.flows},
            tiles=[*snapshot.tiles, *component.tiles],
            tables=[*snapshot.tables, *component.tables],
            notes=[*snapshot.notes, *component.notes],
        )
    return snapshot
