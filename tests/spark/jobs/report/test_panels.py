"""Content of the report's chart: medians, series, and variants with acks."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from simplebus.spark.commands import report as command
from simplebus.spark.jobs.report.panels import ChartBar, ChartSeries, ReportChart, build_chart
from simplebus.spark.jobs.report.report import NAMES
from simplebus.spark.jobs.report.summary import (
    LATENCIES,
    RoundSpread,
    format_number,
    format_time,
    median_round,
    rates_by_round,
    summarize,
)

RATES = {"simplebus": (900.0, 1000.0, 1200.0), "nats core": (400.0, 300.0, 500.0)}
ACKED = {"simplebus"}
STEPS = 4


def row(**values: Any) -> dict[str, Any]:
    return {**dict.fromkeys(NAMES), **values}


def rows_of(scenario: str) -> list[dict[str, Any]]:
    """Return runs of STEPS steps; the last one failed and the middle one has no figures."""
    found = []
    for variant, rates in RATES.items():
        for turn, rate in enumerate(rates):
            key = {"scenario": scenario, "variant": variant, "round": turn}
            key |= {"class": "1", "subscriber": "1"}
            acked = 40 if variant in ACKED else 0
            counts = {"sent": 40, "delivered": 40, "acked": acked, "redelivered": turn}
            late = {"p50_us": rate, "p90_us": rate, "p99_us": 9e3, "p999_us": 9e3, "max_us": 9e3}
            whole = {**counts, "duplicates": 0, "lost": 1, "unsent": 0, "rate": rate, **late}
            found.append(row(span="run", begin_s=0.0, seconds=0.4, **key, **whole))
            for step in range(STEPS):
                counts = {"sent": 10 + step, "delivered": 10, "acked": acked // 4, "rate": 100.0}
                of = {} if step == 1 else late
                span = {"span": "step", "begin_s": step / 10, "seconds": 0.1}
                found.append(row(**span, **key, **counts, **of))
    return found[::-1]  # Spark promises no order.


ROWS = [*rows_of("flow-16"), *rows_of("flow-128"), *rows_of("steady")]
RUN = {
    "rounds": 3,
    "titles": {"flow-16": "16 B", "steady": "50,000 a second"},
    "machine": {"cpu": "CPU", "cores": 2, "system": "Linux", "kernel": "6"},
    "versions": {"python": "3"},
    "command": "python load/run.py",
    "samples": {"flow-16": {name: [{"cpu_us": n} for n in (3, 1, 2)] for name in RATES}},
}


def test_table_has_medians_and_sums_of_failures() -> None:
    order = ["flow-16/nats core", "flow-16/simplebus"]
    found = summarize(ROWS, order)
    assert [f"{summary.key['scenario']}/{summary.key['variant']}" for summary in found] == [
        *order,
        *(f"{scenario}/{name}" for scenario in ("flow-128", "steady") for name in sorted(RATES)),
    ]
    summary = found[1]
    assert (summary.rounds, summary.rate) == (3, RoundSpread(1000.0, 900.0, 1200.0))
    assert (summary.counts["lost"], summary.counts["redelivered"], summary.counts["sent"]) == (
        3,
        3,
        120,
    )
    assert summary.latencies_us["p50_us"] == RoundSpread(1000.0, 900.0, 1200.0)


def test_rate_is_that_of_the_slowest_subscriber() -> None:
    of = {"span": "run", "scenario": "s", "variant": "v", "round": 0}
    rates = [("1", "a", 5.0), ("1", "b", 3.0), ("2", "a", 4.0)]
    rows = [
        row(**of, subscriber=subscriber, rate=rate, **{"class": c}) for c, subscriber, rate in rates
    ]
    assert rates_by_round(rows, "s") == {"v": {0: 7.0}}
    assert median_round({0: 5.0, 1: 9.0, 2: 7.0}) == 2
    assert median_round({0: 5.0, 1: 9.0}) == 0


def test_load_run_is_drawn_as_bars_and_series() -> None:
    shown = build_chart(ROWS, RUN, "traces")
    assert list(shown.groups) == ["16 B", "128 B"]
    assert [(bar.name, bar.is_acknowledged, bar.value) for bar in shown.groups["16 B"]] == [
        ("simplebus", True, RoundSpread(1000.0, 900.0, 1200.0)),
        ("nats core", False, RoundSpread(400.0, 300.0, 500.0)),
    ]
    assert [(bar.name, bar.value.median_value) for bar in shown.costs] == [
        ("simplebus", 2),
        ("nats core", 2),
    ]
    first, second = shown.rate_series
    assert (first.name, second.name) == ("simplebus", "nats core")
    assert list(first.seconds) == pytest.approx([0.05, 0.15, 0.25])  # Omits the last step.
    assert first.rates["sent"] == pytest.approx([100, 110, 120])
    assert set(first.rates) == {"sent", "delivered", "acked"}
    assert set(second.rates) == {"sent", "delivered"}
    assert first.latencies_us["p50_us"] == [1000.0, None, 1000.0]  # From the median round.
    assert shown.latency_series[1].note == "p50 400 us, p99 9 ms"
    assert (shown.footer[-1], shown.command) == (RUN["command"], RUN["command"])


def test_other_traces_are_drawn_as_series() -> None:
    rows = [
        row(span="run", scenario="s", variant="v", round=0, subscriber="x", delivered=n, rate=1.0)
        | {"class": str(n)}
        for n in range(9)
    ]
    shown = build_chart(rows, None, "mine")
    assert [run.name for run in shown.rate_series] == [f"class {n}" for n in (8, 7, 6, 5, 4, 3)]
    assert (shown.groups, shown.subtitle, shown.command) == ({}, "mine", "")
    assert shown.footer[0] == "The 6 of 9 runs with the most messages."
    assert build_chart(rows[:6], None, "mine").footer == ["Each run shows its median round."]


def test_archive_rate_is_zero_without_messages() -> None:
    place = {"scenario": "a", "server": "h:1", "memory": "m", "class": "1"}
    rows = [row(span="run", delivered=40, rate=4.0, p50_us=9e9, p99_us=9e9, **place)] + [
        row(span="step", begin_s=float(at), seconds=10.0, delivered=10, p50_us=1.0, **place)
        for at in (100, 110, 130, 180, 190)
    ]
    (run,) = build_chart(rows, None, "a").rate_series
    assert run.seconds == [5.0, 15.0, 25.0, 35.0, 45.0, 75.0, 85.0]
    assert run.rates == {"delivered": [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]}
    assert run.latencies_us["p50_us"] == [1.0, 1.0, None, 1.0, None, None, 1.0]
    assert (run.name, run.note) == ("class 1", "p50 2.5 h, p99 2.5 h")


def test_all_panels_are_drawn() -> None:
    from simplebus.spark.jobs.report.chart import DPI, WIDTH_IN, build_figure, draw_chart

    shown = build_chart(ROWS, RUN, "traces")
    figure = build_figure(shown)
    rates, costs, *series = figure.axes
    heights = [bar.get_height() for bar in rates.patches]
    assert heights == [1000.0, 400.0, 1000.0, 400.0]
    assert [bool(bar.get_hatch()) for bar in rates.patches] == [False, True] * 2
    assert [bar.get_width() for bar in costs.patches] == [2, 2]
    assert len(series) == 4
    for axes, run in zip(series[:2], shown.rate_series, strict=True):
        drawn = [list(line.get_ydata()) for line in axes.lines]
        assert drawn == list(run.rates.values())
    for axes in series[2:]:
        (median,) = axes.lines
        assert len(axes.collections) == 3
        assert median.get_ydata()[0] in (1000.0, 400.0)
        assert axes.get_ylim() == series[2].get_ylim()  # Compared charts share a scale.
    texts = {text.get_text() for text in figure.texts}
    assert {shown.title, shown.subtitle, *shown.footer} <= texts

    png = draw_chart(shown)
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    inches = (WIDTH_IN, figure.get_figheight())
    assert (width, height) == pytest.approx([side * DPI for side in inches], abs=1)
    assert len(draw_chart(build_chart([], None, "nothing"))) > 1_000
    alone = ReportChart(
        "t", "s", groups={"1 B": [ChartBar("x", "#000000", True, RoundSpread(1, 1, 1))]}
    )
    assert draw_chart(alone)


def test_table_has_a_row_per_variant_with_failures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command._print_tables(command.build_tables(summarize(ROWS)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip().startswith("flow-128: medians of 3 rounds")
    (first, *_) = [line.split() for line in lines if line.strip().startswith("simplebus")]
    assert first[:4] == ["simplebus", "1", "k", "900"]
    assert first[-10:] == ["3", "0", "3", "1", "ms", "9", "ms", "9", "ms", "9", "ms"][-10:]


@pytest.mark.parametrize(
    ("value", "text"),
    [(4_312_000, "4.31 M"), (811_900, "812 k"), (27.46, "27.5"), (0.0932, "0.0932")],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("latencies", "labels"),
    [
        ((57e6, 87e6), {"50 s"}),
        ((1e3, 1e3), {"1 ms"}),
        ((30.0, 4e6), {"100 us", "10 ms", "1 s"}),
    ],
)
def test_latencies_have_labels(latencies: tuple[float, ...], labels: set[str]) -> None:
    from simplebus.spark.jobs.report.chart import build_figure

    series = ChartSeries("a", "#000000", "", [1.0, 2.0], {}, dict.fromkeys(LATENCIES, latencies))
    (axes,) = build_figure(ReportChart("t", "s", latency_series=[series])).axes
    assert labels <= {text.get_text() for text in axes.texts}


@pytest.mark.parametrize(
    ("end", "ticks"),
    [
        (0.3, [0, 0.1, 0.2]),
        (25, [0, 10, 20]),
        (125, [0, 60]),
        (250, [0, 120]),
        (9000, [0, 3600, 7200]),
    ],
)
def test_ticks_of_times_are_round(end: float, ticks: list[float]) -> None:
    from simplebus.spark.jobs.report.chart import time_ticks

    assert time_ticks(end) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("us", "text"),
    [(85.4, "85.4 us"), (1_300, "1.3 ms"), (1e8, "100 s"), (9e9, "2.5 h"), (0, "0 us")],
)
def test_times_have_suitable_units(us: float, text: str) -> None:
    assert format_time(us) == text
    assert format_time(us, among=1e6).endswith(" s") or us > 1e6
