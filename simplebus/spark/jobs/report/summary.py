"""Summary of report rows: medians over rounds, minimum and maximum, and number formats.

Rows are plain dicts with the columns of a report. Errors such as losses are summed over rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = Mapping[str, Any]

KEY = ("scenario", "variant", "class", "subscriber", "server", "memory")
_TIMES = (
    (48 * 3.6e9, 24 * 3.6e9, "d"),
    (2 * 3.6e9, 3.6e9, "h"),
    (2 * 6e7, 6e7, "min"),
    (1e6, 1e6, "s"),
    (1e3, 1e3, "ms"),
)
"""Smallest microseconds shown in a unit, microseconds per unit, and the unit's name."""
COUNTS = ("sent", "delivered", "acked", "redelivered", "duplicates", "lost", "unsent")
LATENCIES = ("p50_us", "p90_us", "p99_us", "p999_us", "max_us")


@dataclass(frozen=True, slots=True)
class RoundSpread:
    """Median, minimum and maximum over rounds."""

    median_value: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> RoundSpread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """Figures over all rounds: of one subscriber and class, or of one memory of an archive."""

    key: Mapping[str, str | None]
    """Values by KEY."""
    rounds: int
    counts: Mapping[str, int | None]
    """Sums by COUNTS; None if unknown."""
    rate: RoundSpread
    latencies_us: Mapping[str, RoundSpread | None]
    """Spreads by LATENCIES."""


def summarize(rows: Iterable[Row], order: Sequence[str] = ()) -> list[ReportSummary]:
    """Return a summary for each key.

    Args:
        rows: Rows of a report.
        order: "scenario/variant" in the order of the result; others follow.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["span"] == "run":
            groups.setdefault(tuple(row[name] for name in KEY), []).append(row)
    places = {name: index for index, name in enumerate(order)}

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        return places.get(f"{key[0]}/{key[1]}", len(places)), *(part or "" for part in key)

    return [_summary(key, groups[key]) for key in sorted(groups, key=place)]


def _summary(key: tuple[Any, ...], rows: Sequence[Row]) -> ReportSummary:
    return ReportSummary(
        dict(zip(KEY, key, strict=True)),
        len(rows),
        {name: _sum([row[name] for row in rows]) for name in COUNTS},
        RoundSpread.of([row["rate"] for row in rows]),
        {name: _spread([row[name] for row in rows]) for name in LATENCIES},
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known_values = [value for value in values if value is not None]
    return sum(known_values) if known_values else None


def _spread(values: Sequence[float | None]) -> RoundSpread | None:
    known_values = [value for value in values if value is not None]
    return RoundSpread.of(known_values) if known_values else None


def rates_by_round(rows: Iterable[Row], scenario: str) -> dict[str, dict[int, float]]:
    """Return messages per second by variant and round: the sum over classes of the slowest
    subscriber.
    """
    slowest: dict[tuple[str, int, str], float] = {}
    for row in rows:
        if row["span"] == "run" and row["scenario"] == scenario:
            key = (row["variant"], row["round"], row["class"])
            slowest[key] = min(slowest.get(key, float("inf")), row["rate"])
    found: dict[str, dict[int, float]] = {}
    for (variant, turn, _), rate in slowest.items():
        of = found.setdefault(variant, {})
        of[turn] = of.get(turn, 0.0) + rate
    return found


def median_round(rates: Mapping[int, float]) -> int:
    """Return the number of the round with the median rate; of two middle rounds, the slower one."""
    return sorted(rates, key=lambda turn: (rates[turn], turn))[(len(rates) - 1) // 2]


def format_number(value: float) -> str:
    """Format with three significant digits: 4.31 M, 812 k, 27.5, 0.09."""
    for factor, letter in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def format_time(us: float, *, among: float = 0.0) -> str:
    """Format microseconds: 85 us, 1.3 ms, 100 s, 12.5 min.

    `among` is the largest time of a scale, which then determines the unit.
    """
    factor, unit = time_unit(max(abs(us), among))
    return f"{us / factor:.3g} {unit}"


def time_unit(us: float) -> tuple[float, str]:
    """Return the unit in which a time is shown: microseconds per unit, and the unit's name."""
    for minimum, factor, unit in _TIMES:
        if us >= minimum:
            return factor, unit
    return 1.0, "us"


def describe_machine(found: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """Return one line with the machine of a run and the versions of its programs."""
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{found['cpu']}, {found['cores']} cores, {found['system']} {found['kernel']}; {names}"
