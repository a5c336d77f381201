"""`simplebus pipeline report`: prints a table, writes figures and draws a chart.

Output paths are checked before the job starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.config.parse import option
from simplebus.console.errors import fail
from simplebus.spark.commands.shared import MasterOption, SettingsOption, spark_session
from simplebus.spark.jobs.session import LOCAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from simplebus.spark.jobs.report.summary import ReportSummary, RoundSpread

HELP = (
    "Report rates, latencies, redeliveries, duplicates and losses.\n\n"
    "PATH has traces, written by load/run.py or by your own programs, or an archive. The report of "
    "an archive has message counts, times, the latency until archival, and missing or duplicate "
    "messages of each class.\n\n"
    "\b\n"
    "  simplebus pipeline report traces --chart rps.png\n"
    "  simplebus pipeline report /data/archive --figures figures"
)
_SCHEMES = "://"


def command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            show_default=False,
            help="Folders with traces or archives, or URLs that Spark can read, such as hdfs://….",
        ),
    ],
    chart: Annotated[
        Path | None,
        option(
            "--chart",
            "Write a chart to this file, as PNG.",
            metavar="FILE",
            show_default="no chart",
        ),
    ] = None,
    figures: Annotated[
        str | None,
        option(
            "--figures",
            "Write all figures to this new folder, as Parquet: whole runs below span=run, their "
            "steps below span=step.",
            metavar="PATH",
            show_default="no figures",
        ),
    ] = None,
    step: Annotated[
        float | None,
        option(
            "--step",
            "Length of a step in seconds, for rates and latencies over time.",
            metavar="SECONDS",
            min=0.001,
            show_default="0.1; 1/200 of an archive's time span",
        ),
    ] = None,
    master: MasterOption = LOCAL,
    settings: SettingsOption = None,
) -> None:
    """Run the command."""
    _check_targets(chart, figures)
    with spark_session("simplebus report", master, settings) as spark:
        from simplebus.spark.jobs.progress import run_job
        from simplebus.spark.jobs.report.report import read, read_run
        from simplebus.spark.jobs.report.summary import summarize

        runs = [run for path in paths if (run := read_run(spark, path))]
        found = read(spark, *paths, step_s=step).persist()
        rows = run_job(spark, "reading", found.toArrow).to_pylist()
        if figures is not None:
            one_file = found.coalesce(1).write.partitionBy("span")
            run_job(spark, "writing", lambda: one_file.parquet(figures))
    run = runs[0] if len(runs) == 1 else None
    _print_tables(summarize(rows, _run_order(run)))
    if chart is not None:
        from simplebus.spark.jobs.report.chart import draw_chart
        from simplebus.spark.jobs.report.panels import build_chart

        chart.write_bytes(draw_chart(build_chart(rows, run, ", ".join(paths))))


def _check_targets(chart: Path | None, figures: str | None) -> None:
    if chart is not None and not chart.resolve().parent.is_dir():
        fail(f"--chart {chart}: the folder {chart.resolve().parent} does not exist", status=2)
    if figures is not None and _SCHEMES not in figures and Path(figures).exists():
        fail(f"--figures {figures} exists already; expected a new folder", status=2)


def _run_order(run: dict[str, Any] | None) -> list[str]:
    """Return "scenario/variant" in the order of the run."""
    samples = (run or {}).get("samples", {})
    return [f"{scenario}/{variant}" for scenario, of in samples.items() for variant in of]


# The table ---------------------------------------------------------------------------------------

_COUNTS = {
    "delivered": "delivered",
    "acked": "acked",
    "redelivered": "again",
    "duplicates": "twice",
    "lost": "lost",
    "unsent": "unsent",
}
_ABBREVIATED = ("delivered", "acked")
"""Counts shown with three digits from 100,000 on."""
_ABBREVIATED_FROM = 100_000
_ERROR_COUNTS = ("duplicates", "lost", "unsent")
_LATENCIES = {"p50_us": "p50", "p99_us": "p99", "p999_us": "p99.9", "max_us": "most"}
_TABLE_WIDTH = 130
"""Width of the table if standard output is not a terminal."""


def _print_tables(found: Sequence[ReportSummary]) -> None:
    """Print a table for each scenario or archive."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    for scenario in dict.fromkeys(one.key["scenario"] for one in found):
        some = [one for one in found if one.key["scenario"] == scenario]
        console.print(_table(scenario or "", some))


def _table(title: str, found: Sequence[ReportSummary]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rounds = max(one.rounds for one in found)
    if rounds > 1:
        title += f": medians of {rounds} rounds, counts of all of them"
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    places = [name for name in found[0].key if _is_column_shown(name, found)]
    counts = [name for name in _COUNTS if any(one.counts[name] is not None for one in found)]
    counts = [name for name in counts if name != "unsent" or any(one.counts[name] for one in found)]
    for name in places:
        table.add_column(name, overflow="fold")
    rates = ("msgs/s", "least", "most") if rounds > 1 else ("msgs/s",)
    for name in (*rates, *(_COUNTS[name] for name in counts), *_LATENCIES.values()):
        table.add_column(name, justify="right", overflow="fold")
    for one in found:
        table.add_row(
            *(one.key[name] or "" for name in places),
            *_rate_cells(one.rate, rounds),
            *(_count_cell(name, one.counts[name]) for name in counts),
            *(_latency_cell(one.latencies_us[name]) for name in _LATENCIES),
        )
    return table


def _is_column_shown(name: str, found: Sequence[ReportSummary]) -> bool:
    """Return True if the rows differ in the column, or it is always shown."""
    values = {one.key[name] for one in found}
    is_archive = any(one.key["memory"] is not None for one in found)
    always = name == ("class" if is_archive else "variant")
    return name != "scenario" and (len(values) > 1 or always)


def _rate_cells(rate: RoundSpread, rounds: int) -> list[str]:
    from simplebus.spark.jobs.report.summary import format_number

    of = (rate.median_value, rate.minimum, rate.maximum) if rounds > 1 else (rate.median_value,)
    return [format_number(value) for value in of]


def _count_cell(name: str, value: int | None) -> str:
    from simplebus.spark.jobs.report.summary import format_number

    if value is None:
        return ""
    text = (
        format_number(value)
        if name in _ABBREVIATED and value >= _ABBREVIATED_FROM
        else f"{value:,}"
    )
    return f"[red]{text}[/]" if value and name in _ERROR_COUNTS else text


def _latency_cell(value: RoundSpread | None) -> str:
    from simplebus.spark.jobs.report.summary import format_time

    return "" if value is None else format_time(value.median_value)
