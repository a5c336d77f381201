"""Report of a run: medians, spreads, ratios, tables and JSON.

A ratio is the median of the ratios of single rounds, never a ratio of medians. Every median has its
minimum and maximum beside it.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from load.measure import Sample
from simplebus.spark.jobs.report.summary import describe_machine, format_number

CORES_NEEDED = 3  # One each for publisher, broker and subscriber.


@dataclass(frozen=True)
class Target:
    """Target value of a quantity of one variant, or of its ratio to another variant in the same
    round.
    """

    title: str
    of: str
    against: str | None
    at_least: float | None
    reach: float | None
    quantity: str = "rate"
    unit: str = "x"
    less_is_better: bool = False


@dataclass(frozen=True)
class Row:
    """Measured and target value of one claim."""

    scenario: str
    title: str
    values: list[float]  # One per round.
    unit: str
    at_least: float | None = None
    reach: float | None = None
    less_is_better: bool = False
    note: str = ""

    @property
    def median(self) -> float:
        return median(self.values)

    def meets(self, target: float | None) -> bool:
        if target is None:
            return False
        return self.median <= target if self.less_is_better else self.median >= target

    @property
    def verdict(self) -> str:
        if self.at_least is None and self.reach is None:
            return ""
        if self.meets(self.reach):
            return "reached"
        return "at least" if self.meets(self.at_least) else "missed"


@dataclass
class Report:
    """Results of a run."""

    command: str
    versions: dict[str, str]
    rounds: int
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    titles: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "median": row.median, "verdict": row.verdict} for row in self.rows]
        return {**asdict(self), "rows": rows}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def print(self, console: Console) -> None:
        if self.samples:
            console.print(self._samples_table())
        if self.rows:
            console.print(self._targets_table())
        console.print(describe_machine(self.machine, self.versions), highlight=False)
        console.print(self.command, highlight=False)
        for note in self.notes:
            console.print(f"[yellow]note:[/] {note}", highlight=False)

    def _samples_table(self) -> Table:
        title = f"Measurements, median of {self.rounds} rounds"
        table = Table(title=title, title_justify="left")
        table.add_column("scenario")
        table.add_column("variant")
        for name in ("msgs/s or p50", "spread", "broker us/msg", "peak MB", "msgs/ack"):
            table.add_column(name, justify="right")
        for scenario, variants in self.samples.items():
            for index, (variant, samples) in enumerate(variants.items()):
                table.add_row(scenario if index == 0 else "", variant, *_cells(samples))
            table.add_section()
        return table

    def _targets_table(self) -> Table:
        table = Table(title="Targets", title_justify="left")
        for name in ("scenario", "claim"):
            table.add_column(name)
        for name in ("median", "spread", "at least", "reach for"):
            table.add_column(name, justify="right")
        table.add_column("")
        colors = {"reached": "green", "at least": "cyan", "missed": "red", "": "dim"}
        for row in self.rows:
            values = [format_number(value) + " " + row.unit for value in (row.median,)]
            targets = [
                "" if target is None else format_number(target)
                for target in (row.at_least, row.reach)
            ]
            color = colors[row.verdict]
            title = f"{row.title} ({row.note})" if row.note else row.title
            table.add_row(
                row.scenario,
                title,
                *values,
                spread(row.values),
                *targets,
                f"[{color}]{row.verdict}[/]",
            )
        return table


def _cells(samples: Sequence[Sample]) -> list[str]:
    latency = samples[0].p50_us > 0
    values = [sample.p50_us if latency else sample.rate for sample in samples]
    per_ack = median(sample.messages_per_ack for sample in samples)
    return [
        format_number(median(values)) + (" us" if latency else ""),
        spread(values),
        format_number(median(sample.cpu_us for sample in samples)),
        f"{max(sample.peak_bytes for sample in samples) / 1e6:,.0f}",
        format_number(per_ack) if per_ack else "",
    ]


def spread(values: Sequence[float]) -> str:
    return f"{format_number(min(values))} to {format_number(max(values))}"


def ratios(
    samples: Sequence[Sample], against: Sequence[Sample] | None, quantity: str
) -> list[float]:
    """Return the quantity by round, divided by the other variant's if there is one."""
    values = [float(getattr(sample, quantity)) for sample in samples]
    if against is None:
        return values
    baseline_values = [float(getattr(sample, quantity)) for sample in against]
    return [value / baseline for value, baseline in zip(values, baseline_values, strict=True)]


def machine() -> dict[str, Any]:
    cpu = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.system(),
        "kernel": platform.release().split("-")[0],
    }


def core_warning() -> str | None:
    cores = len(os.sched_getaffinity(0))
    if cores >= CORES_NEEDED:
        return None
    return (
        f"{cores} cores for a publisher, a broker and a subscriber: they take time from each "
        "other, so trust ratios of the same round, not absolute figures"
    )
