"""From a report's rows to what is told of them: medians over rounds, with the least and the most.

Rule 1: pure, of plain rows (dicts, as simplebus.spark.jobs.report names their columns); no Spark.
Rule 2: what went wrong is summed over rounds, never averaged: a loss stays a loss.
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
"""From how many microseconds on a unit is taken, how many it has, and its name."""
COUNTS = ("sent", "delivered", "acked", "redelivered", "duplicates", "lost", "unsent")
LATENCIES = ("p50_us", "p90_us", "p99_us", "p999_us", "max_us")


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over rounds."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Summary:
    """What one subscriber got of one class, over all rounds; or what one memory gave an archive."""

    key: Mapping[str, str | None]
    """By KEY."""
    rounds: int
    counts: Mapping[str, int | None]
    """By COUNTS, summed; None where nobody can know."""
    rate: Spread
    latencies_us: Mapping[str, Spread | None]
    """By LATENCIES."""


def summaries(rows: Iterable[Row], order: Sequence[str] = ()) -> list[Summary]:
    """One for each that there is, by scenario and variant in this order, those that it does not
    name behind them. `order` has "scenario/variant"."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["span"] == "run":
            groups.setdefault(tuple(row[name] for name in KEY), []).append(row)
    places = {name: index for index, name in enumerate(order)}

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        return places.get(f"{key[0]}/{key[1]}", len(places)), *(part or "" for part in key)

    return [_summary(key, groups[key]) for key in sorted(groups, key=place)]


def _summary(key: tuple[Any, ...], rows: Sequence[Row]) -> Summary:
    return Summary(
        dict(zip(KEY, key, strict=True)),
        len(rows),
        {name: _sum([row[name] for row in rows]) for name in COUNTS},
        Spread.of([row["rate"] for row in rows]),
        {name: _spread([row[name] for row in rows]) for name in LATENCIES},
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread.of(known) if known else None


def rates_by_round(rows: Iterable[Row], scenario: str) -> dict[str, dict[int, float]]:
    """For each variant and round: messages per second of all classes, each by its slowest
    subscriber."""
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


def middle_round(rates: Mapping[int, float]) -> int:
    """The round whose rate is in the middle; the slower one of two."""
    return sorted(rates, key=lambda turn: (rates[turn], turn))[(len(rates) - 1) // 2]


def short(value: float) -> str:
    """Three digits that matter: 4.31 M, 812 k, 27.5, 0.09."""
    for factor, letter in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def short_time(us: float, *, among: float = 0.0) -> str:
    """A time in the unit that fits it, or the longest of those `among` which it stands: 85 us,
    1.3 ms, 100 s, 12.5 min."""
    for least, factor, unit in _TIMES:
        if max(abs(us), among) >= least:
            return f"{us / factor:.3g} {unit}"
    return f"{us:.3g} us"


def machine_line(found: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """The machine that a run was made on, and what ran there."""
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{found['cpu']}, {found['cores']} cores, {found['system']} {found['kernel']}; {names}"
