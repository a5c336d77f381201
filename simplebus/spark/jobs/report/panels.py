"""Content of the report's chart: every number that becomes a bar, a line or a band.

Pure, so that tests need no pixels. The chart shows only measured values, with machine, versions and
command where known. Variants without acks are marked by their measured acks, not by their name.

    traces of the load programs    rates by payload, broker CPU, then a series for each variant
    other traces                   series of the largest runs
    an archive                     series of the largest classes

A series is one run: messages per second above, latencies below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simplebus.spark.jobs.report.summary import (
    KEY,
    LATENCIES,
    RoundSpread,
    Row,
    describe_machine,
    format_time,
    median_round,
    rates_by_round,
)

SIZES = (16, 128, 1024)
FLOW_SCENARIO, STEADY_SCENARIO = "flow-16", "steady"
"""Load scenarios shown as series: at full speed, and all variants at the same rate."""
FIRST = "simplebus"
SERIES_MAX = 6
_COLORS = {
    "simplebus": "#e4572e",
    "nats core": "#9aa5b1",
    "redis pub/sub": "#c3c9d1",
    "redis stream + XACK": "#5b8e7d",
    "JetStream, acks of 500": "#2e6f95",
    "JetStream, each acked": "#6fa8c9",
}
_OTHER_COLORS = ("#e4572e", "#2e6f95", "#5b8e7d", "#b5838d", "#6d597a", "#9aa5b1")
_CLASS = KEY.index("class")


@dataclass(frozen=True, slots=True)
class ChartBar:
    """One quantity of one variant."""

    name: str
    color: str
    is_acknowledged: bool
    value: RoundSpread


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """One run by step; sequences of equal length."""

    name: str
    color: str
    note: str
    seconds: Sequence[float]
    """Middle of each step."""
    rates: Mapping[str, Sequence[float]]
    """Messages per second, by sent, delivered and acked; kinds without messages are absent."""
    latencies_us: Mapping[str, Sequence[float | None]]
    """Latencies by LATENCIES; None if nothing was delivered."""


@dataclass(frozen=True, slots=True)
class ReportChart:
    """Content of the chart, in drawing order."""

    title: str
    subtitle: str
    groups: Mapping[str, Sequence[ChartBar]] = field(default_factory=dict)
    """Messages per second, by payload."""
    costs: Sequence[ChartBar] = ()
    """CPU microseconds of the broker per message."""
    rate_series_title: str = ""
    rate_series: Sequence[ChartSeries] = ()
    latency_series_title: str = ""
    latency_series: Sequence[ChartSeries] = ()
    footer: Sequence[str] = ()
    command: str = ""
    """Footer line with the command that repeats the run."""


def build_chart(rows: Sequence[Row], run: Mapping[str, Any] | None, source: str) -> ReportChart:
    """Return the chart of a report.

    Args:
        rows: Rows of the report.
        run: Content of the traces' RUN_FILE, if any.
        source: Paths of the report, for the subtitle.
    """
    if run and any(row["scenario"] == f"flow-{size}" for row in rows for size in SIZES):
        return _build_load_chart(rows, run)
    return _build_generic_chart(rows, run, source)


# Runs of the load programs -----------------------------------------------------------------------


def _build_load_chart(rows: Sequence[Row], run: Mapping[str, Any]) -> ReportChart:
    order = list(dict.fromkeys(v for of in run["samples"].values() for v in of))
    names = [name for name in _COLORS if name in order]
    groups = {}
    for size in SIZES:
        if bars := _rate_bars(rows, f"flow-{size}", names):
            groups[f"{size:,} B"] = bars
    samples, titles = (
        run["samples"].get(FLOW_SCENARIO, {}),
        {FLOW_SCENARIO: FLOW_SCENARIO, STEADY_SCENARIO: STEADY_SCENARIO} | run["titles"],
    )
    costs = [
        ChartBar(name, _COLORS[name], _has_acks(rows, FLOW_SCENARIO, name), RoundSpread.of(values))
        for name in names
        if (values := [sample["cpu_us"] for sample in samples.get(name, [])])
    ]
    return ReportChart(
        title="simplebus, message by message",
        subtitle=(
            "One publisher, one subscriber, over loopback, every message verified. "
            "Solid: acknowledged (simplebus: in ranges). Hatched: nothing acknowledged."
        ),
        groups=groups,
        costs=costs,
        rate_series_title=(
            f"Messages per second over a run, each on its own scale: {titles[FLOW_SCENARIO]}"
        ),
        rate_series=_build_series_list(rows, FLOW_SCENARIO, names),
        latency_series_title=(
            f"Latency from publish to delivery, all on one scale: {titles[STEADY_SCENARIO]}"
        ),
        latency_series=_build_series_list(rows, STEADY_SCENARIO, names),
        footer=[
            f"Median of {run['rounds']} rounds, simplebus and its peers in turn; error bars from "
            "minimum to maximum; each series shows the median round.",
            describe_machine(run["machine"], run["versions"]),
            run["command"],
        ],
        command=run["command"],
    )


def _rate_bars(rows: Sequence[Row], scenario: str, names: Iterable[str]) -> list[ChartBar]:
    rates = rates_by_round(rows, scenario)
    return [
        ChartBar(
            name,
            _COLORS[name],
            _has_acks(rows, scenario, name),
            RoundSpread.of(list(rates[name].values())),
        )
        for name in names
        if name in rates
    ]


def _has_acks(rows: Iterable[Row], scenario: str, variant: str) -> bool:
    return any(
        row["acked"]
        for row in rows
        if row["span"] == "run" and row["scenario"] == scenario and row["variant"] == variant
    )


def _build_series_list(
    rows: Sequence[Row], scenario: str, names: Iterable[str]
) -> list[ChartSeries]:
    rates = rates_by_round(rows, scenario)
    series = []
    for name in names:
        if name not in rates:
            continue
        turn = median_round(rates[name])
        chosen = [
            row
            for row in rows
            if (row["scenario"], row["variant"], row["round"]) == (scenario, name, turn)
        ]
        series.append(_build_series(chosen, name, _COLORS[name]))
    return series


def _build_series(rows: Sequence[Row], name: str, color: str) -> ChartSeries:
    """Return the series of one run, from the rows of one subscriber and class."""
    (whole,) = [row for row in rows if row["span"] == "run"]
    steps = sorted((row for row in rows if row["span"] == "step"), key=lambda row: row["begin_s"])
    steps = _fill_gaps(steps[:-1] if len(steps) > 1 else steps)  # The last one is incomplete.
    begin = steps[0]["begin_s"] if steps else 0.0
    rates = {
        kind: [(row[kind] or 0) / row["seconds"] for row in steps]
        for kind in ("sent", "delivered", "acked")
        if any(row[kind] for row in steps)
    }
    note = ""
    if whole["p50_us"] is not None:
        note = f"p50 {format_time(whole['p50_us'])}, p99 {format_time(whole['p99_us'])}"
    return ChartSeries(
        name,
        color,
        note,
        [row["begin_s"] - begin + row["seconds"] / 2 for row in steps],
        rates,
        {latency: [row[latency] for row in steps] for latency in LATENCIES},
    )


def _fill_gaps(steps: Sequence[Row]) -> list[Row]:
    """Mark each gap between steps by empty steps at its start and end."""
    found: list[Row] = []
    for row in steps:
        seconds = row["seconds"]
        begins = [found[-1]["begin_s"] + seconds, row["begin_s"] - seconds] if found else []
        if begins and begins[1] > begins[0] - seconds / 2:
            empty_step = dict.fromkeys(row) | {"seconds": seconds}
            found += [empty_step | {"begin_s": at} for at in dict.fromkeys(begins)]
        found.append(row)
    return found


# Other traces and archives -----------------------------------------------------------------------


def _build_generic_chart(
    rows: Sequence[Row], run: Mapping[str, Any] | None, source: str
) -> ReportChart:
    series = []
    for index, (name, chosen) in enumerate(_largest_runs(rows).items()):
        series.append(_build_series(chosen, name, _OTHER_COLORS[index % len(_OTHER_COLORS)]))
    is_archive = any(row["memory"] is not None for row in rows)
    count = len({tuple(row[name] for name in KEY) for row in rows})
    footer = []
    if count > len(series):
        footer.append(f"The {len(series)} of {count} runs with the most messages.")
    if not is_archive:
        footer.append("Each run shows its median round.")
    if run:
        footer += [describe_machine(run["machine"], run["versions"]), run["command"]]
    return ReportChart(
        title="Message rates and latencies",
        subtitle=source,
        rate_series_title="Messages per second",
        rate_series=series,
        latency_series_title=f"Latency from publish to {'archive' if is_archive else 'delivery'}",
        latency_series=series,
        footer=footer,
        command=run["command"] if run else "",
    )


def _largest_runs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of the runs with the most messages, by a name made of their differences."""
    groups: dict[tuple[Any, ...], dict[Any, list[Row]]] = {}
    for row in rows:
        of = groups.setdefault(tuple(row[name] for name in KEY), {})
        of.setdefault(row["round"], []).append(row)
    chosen = {}
    for group, rounds in groups.items():
        rates = {
            turn: next(row["rate"] for row in round_rows if row["span"] == "run")
            for turn, round_rows in rounds.items()
        }
        chosen[group] = rounds[median_round(rates)]

    def size(group: tuple[Any, ...]) -> float:
        return -max(float(row["delivered"]) for row in chosen[group] if row["span"] == "run")

    largest = sorted(chosen, key=size)[:SERIES_MAX]
    differing = [i for i in range(len(KEY)) if len({group[i] for group in largest}) > 1]
    names: dict[str, list[Row]] = {}
    for group in largest:
        shown = [i for i in differing or (_CLASS,) if group[i] is not None]
        parts = [f"class {group[i]}" if i == _CLASS else str(group[i]) for i in shown]
        names[", ".join(parts)] = chosen[group]
    return names
