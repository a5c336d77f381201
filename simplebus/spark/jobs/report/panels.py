"""What a picture shows, before it is drawn: every number that becomes a bar, a line or a band.

Rule 1: pure. What is drawn can be tested here, without a pixel.
Rule 2: a picture shows only what was measured, and carries the machine, the versions and the exact
command where they are known, so that it can be doubted and repeated.
Rule 3: what acknowledged nothing is marked as such, by what it did, not by its name.

    load's own traces         rates by payload, broker CPU, then a lane for each variant
    any other traces          lanes of the largest runs
    an archive                lanes of the largest classes

A lane is one run from left to right: above its messages per second, below its latencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simplebus.spark.jobs.report.summary import (
    KEY,
    LATENCIES,
    Row,
    Spread,
    machine_line,
    middle_round,
    rates_by_round,
    short_time,
)

SIZES = (16, 128, 1024)
FLOW, STEADY = "flow-16", "steady"
"""load's scenarios of which lanes are shown: as fast as it goes, and all under the same load."""
FIRST = "simplebus"
LANES_MAX = 6
_LOOKS = {
    "simplebus": "#e4572e",
    "nats core": "#9aa5b1",
    "redis pub/sub": "#c3c9d1",
    "redis stream + XACK": "#5b8e7d",
    "JetStream, acks of 500": "#2e6f95",
    "JetStream, each acked": "#6fa8c9",
}
_OTHERS = ("#e4572e", "#2e6f95", "#5b8e7d", "#b5838d", "#6d597a", "#9aa5b1")
_CLASS = KEY.index("class")


@dataclass(frozen=True, slots=True)
class Bar:
    """One quantity of one variant."""

    name: str
    color: str
    acknowledged: bool
    value: Spread


@dataclass(frozen=True, slots=True)
class Lane:
    """One run, step by step; all sequences have one length."""

    name: str
    color: str
    note: str
    seconds: Sequence[float]
    """The middle of each step."""
    rates: Mapping[str, Sequence[float]]
    """Messages per second, by sent, delivered, acked; one that never happened is not there."""
    latencies_us: Mapping[str, Sequence[float | None]]
    """By LATENCIES; None where nothing came."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that is drawn, in the order in which it is."""

    title: str
    subtitle: str
    groups: Mapping[str, Sequence[Bar]] = field(default_factory=dict)
    """Messages per second, by payload."""
    costs: Sequence[Bar] = ()
    """Microseconds of the broker's CPU for a message."""
    courses_title: str = ""
    courses: Sequence[Lane] = ()
    latencies_title: str = ""
    latencies: Sequence[Lane] = ()
    footer: Sequence[str] = ()
    command: str = ""
    """The line of the footer that can be typed."""


def picture(rows: Sequence[Row], run: Mapping[str, Any] | None, source: str) -> Picture:
    """Of a report's rows, and of what a run of load's says of itself; `source` says where from."""
    if run and any(row["scenario"] == f"flow-{size}" for row in rows for size in SIZES):
        return _of_load(rows, run)
    return _of_anything(rows, run, source)


# Load's own runs ---------------------------------------------------------------------------------


def _of_load(rows: Sequence[Row], run: Mapping[str, Any]) -> Picture:
    order = list(dict.fromkeys(v for of in run["samples"].values() for v in of))
    names = [name for name in _LOOKS if name in order]
    groups = {}
    for size in SIZES:
        if bars := _rate_bars(rows, f"flow-{size}", names):
            groups[f"{size:,} B"] = bars
    samples, titles = run["samples"].get(FLOW, {}), {FLOW: FLOW, STEADY: STEADY} | run["titles"]
    costs = [
        Bar(name, _LOOKS[name], _acknowledges(rows, FLOW, name), Spread.of(values))
        for name in names
        if (values := [sample["cpu_us"] for sample in samples.get(name, [])])
    ]
    return Picture(
        title="simplebus, message by message",
        subtitle=(
            "One publisher, one subscriber, over loopback, every message verified. "
            "Solid: acknowledged (simplebus: in ranges). Hatched: nothing acknowledged."
        ),
        groups=groups,
        costs=costs,
        courses_title=f"Messages per second over a run, each on its own scale: {titles[FLOW]}",
        courses=_lanes_of(rows, FLOW, names),
        latencies_title=f"Latency from publish to delivery, all on one scale: {titles[STEADY]}",
        latencies=_lanes_of(rows, STEADY, names),
        footer=[
            f"Median of {run['rounds']} rounds, simplebus and its peers in turn; the lines on the "
            "bars go from the least to the most; a lane is the round in the middle.",
            machine_line(run["machine"], run["versions"]),
            run["command"],
        ],
        command=run["command"],
    )


def _rate_bars(rows: Sequence[Row], scenario: str, names: Iterable[str]) -> list[Bar]:
    rates = rates_by_round(rows, scenario)
    return [
        Bar(
            name,
            _LOOKS[name],
            _acknowledges(rows, scenario, name),
            Spread.of(list(rates[name].values())),
        )
        for name in names
        if name in rates
    ]


def _acknowledges(rows: Iterable[Row], scenario: str, variant: str) -> bool:
    return any(
        row["acked"]
        for row in rows
        if row["span"] == "run" and row["scenario"] == scenario and row["variant"] == variant
    )


def _lanes_of(rows: Sequence[Row], scenario: str, names: Iterable[str]) -> list[Lane]:
    rates = rates_by_round(rows, scenario)
    lanes = []
    for name in names:
        if name not in rates:
            continue
        turn = middle_round(rates[name])
        chosen = [
            row
            for row in rows
            if (row["scenario"], row["variant"], row["round"]) == (scenario, name, turn)
        ]
        lanes.append(_lane(chosen, name, _LOOKS[name]))
    return lanes


def _lane(rows: Sequence[Row], name: str, color: str) -> Lane:
    """Of the rows of one subscriber of one class in one run."""
    (whole,) = [row for row in rows if row["span"] == "run"]
    steps = sorted((row for row in rows if row["span"] == "step"), key=lambda row: row["begin_s"])
    steps = _gaps_filled(steps[:-1] if len(steps) > 1 else steps)  # The last one had no end.
    begin = steps[0]["begin_s"] if steps else 0.0
    rates = {
        kind: [(row[kind] or 0) / row["seconds"] for row in steps]
        for kind in ("sent", "delivered", "acked")
        if any(row[kind] for row in steps)
    }
    note = ""
    if whole["p50_us"] is not None:
        note = f"p50 {short_time(whole['p50_us'])}, p99 {short_time(whole['p99_us'])}"
    return Lane(
        name,
        color,
        note,
        [row["begin_s"] - begin + row["seconds"] / 2 for row in steps],
        rates,
        {which: [row[which] for row in steps] for which in LATENCIES},
    )


def _gaps_filled(steps: Sequence[Row]) -> list[Row]:
    """Between steps of which there is no row in between, nothing happened: a gap begins and ends
    with a step that says so."""
    found: list[Row] = []
    for row in steps:
        seconds = row["seconds"]
        begins = [found[-1]["begin_s"] + seconds, row["begin_s"] - seconds] if found else []
        if begins and begins[1] > begins[0] - seconds / 2:
            nothing = dict.fromkeys(row) | {"seconds": seconds}
            found += [nothing | {"begin_s": at} for at in dict.fromkeys(begins)]
        found.append(row)
    return found


# Anything else -----------------------------------------------------------------------------------


def _of_anything(rows: Sequence[Row], run: Mapping[str, Any] | None, source: str) -> Picture:
    lanes = []
    for index, (name, chosen) in enumerate(_largest(rows).items()):
        lanes.append(_lane(chosen, name, _OTHERS[index % len(_OTHERS)]))
    is_archive = any(row["memory"] is not None for row in rows)
    footer = [f"The {len(lanes)} with the most messages"]
    footer[0] += "." if is_archive else ", of each the round in the middle."
    if run:
        footer += [machine_line(run["machine"], run["versions"]), run["command"]]
    return Picture(
        title="What became of messages",
        subtitle=source,
        courses_title="Messages per second",
        courses=lanes,
        latencies_title=f"Latency from publish to {'archive' if is_archive else 'delivery'}",
        latencies=lanes,
        footer=footer,
        command=run["command"] if run else "",
    )


def _largest(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The runs with the most messages, by a name of each: what they differ in; their rows."""
    groups: dict[tuple[Any, ...], dict[Any, list[Row]]] = {}
    for row in rows:
        of = groups.setdefault(tuple(row[name] for name in KEY), {})
        of.setdefault(row["round"], []).append(row)
    chosen = {}
    for group, rounds in groups.items():
        rates = {
            turn: next(row["rate"] for row in some if row["span"] == "run")
            for turn, some in rounds.items()
        }
        chosen[group] = rounds[middle_round(rates)]

    def size(group: tuple[Any, ...]) -> float:
        return -max(float(row["delivered"]) for row in chosen[group] if row["span"] == "run")

    largest = sorted(chosen, key=size)[:LANES_MAX]
    differing = [i for i in range(len(KEY)) if len({group[i] for group in largest}) > 1]
    names: dict[str, list[Row]] = {}
    for group in largest:
        said = [i for i in differing or (_CLASS,) if group[i] is not None]
        parts = [f"class {group[i]}" if i == _CLASS else str(group[i]) for i in said]
        names[", ".join(parts)] = chosen[group]
    return names
