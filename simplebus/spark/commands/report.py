"""`simplebus pipeline report`: prints tables, writes figures and a page, and draws a chart.

Output paths are checked before the job starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from simplebus.config.parse import option
from simplebus.console.errors import fail
from simplebus.spark.commands.shared import MasterOption, SettingsOption, spark_session
from simplebus.spark.jobs.session import LOCAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simplebus.spark.jobs.report.page import ReportTable
    from simplebus.spark.jobs.report.summary import ReportSummary, RoundSpread

HELP = (
    "Report rates, latencies, redeliveries, duplicates and losses.\n\n"
    "PATH has traces, written by load/run.py or by your own programs, or an archive. The report of "
    "an archive has message counts, times, the latency until archival, and missing or duplicate "
    "messages of each class.\n\n"
    "\b\n"
    "  simplebus pipeline report traces --chart rps.png\n"
    "  simplebus pipeline report /data/archive --html report.html"
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
    html: Annotated[
        Path | None,
        option(
            "--html",
            "Write tables and chart to this file, as a page for browsers.",
            metavar="FILE",
            show_default="no page",
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
    _check_targets({"--chart": chart, "--html": html}, figures)
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
    tables = build_tables(summarize(rows, _run_order(run)))
    _print_tables(tables)
    if chart is None and html is None:
        return
    from simplebus.spark.jobs.report.chart import draw_chart
    from simplebus.spark.jobs.report.page import render_page
    from simplebus.spark.jobs.report.panels import build_chart

    drawn = build_chart(rows, run, ", ".join(paths))
    image = draw_chart(drawn)
    if chart is not None:
        chart.write_bytes(image)
    if html is not None:
        html.write_text(render_page(drawn.title, drawn.subtitle, tables, image), "utf-8")


def _check_targets(files: dict[str, Path | None], figures: str | None) -> None:
    for name, file in files.items():
        if file is not None and not file.resolve().parent.is_dir():
            fail(f"{name} {file}: the folder {file.resolve().parent} does not exist", status=2)
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


def build_tables(found: Sequence[ReportSummary]) -> list[ReportTable]:
    """Return a table for each scenario or archive."""
    return [
        _build_table(
            scenario or "", [summary for summary in found if summary.key["scenario"] == scenario]
        )
        for scenario in dict.fromkeys(summary.key["scenario"] for summary in found)
    ]


def _build_table(title: str, found: Sequence[ReportSummary]) -> ReportTable:
    from simplebus.spark.jobs.report.page import ReportTable, TableCell

    rounds = max(summary.rounds for summary in found)
    if rounds > 1:
        title += f": medians of {rounds} rounds, counts of all of them"
    places = [name for name in found[0].key if _is_column_shown(name, found)]
    counts = [
        name for name in _COUNTS if any(summary.counts[name] is not None for summary in found)
    ]
    counts = [
        name
        for name in counts
        if name != "unsent" or any(summary.counts[name] for summary in found)
    ]
    rates = ("msgs/s", "least", "most") if rounds > 1 else ("msgs/s",)
    rows = [
        [
            *(TableCell(summary.key[name] or "") for name in places),
            *(TableCell(text) for text in _rate_cells(summary.rate, rounds)),
            *(
                TableCell(
                    _count_cell(name, summary.counts[name]),
                    is_error=bool(summary.counts[name]) and name in _ERROR_COUNTS,
                )
                for name in counts
            ),
            *(TableCell(_latency_cell(summary.latencies_us[name])) for name in _LATENCIES),
        ]
        for summary in found
    ]
    headers = [*places, *rates, *(_COUNTS[name] for name in counts), *_LATENCIES.values()]
    return ReportTable(title, headers, len(places), rows)


def _print_tables(tables: Sequence[ReportTable]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    for each in tables:
        table = Table(
            title=each.title,
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for index, header in enumerate(each.headers):
            justify: Literal["left", "right"] = "left" if index < each.text_columns else "right"
            table.add_column(header, justify=justify, overflow="fold")
        for row in each.rows:
            table.add_row(
                *(f"[red]{escape(c.text)}[/]" if c.is_error else escape(c.text) for c in row)
            )
        console.print(table)


def _is_column_shown(name: str, found: Sequence[ReportSummary]) -> bool:
    """Return True if the rows differ in the column, or it is always shown."""
    values = {summary.key[name] for summary in found}
    is_archive = any(summary.key["memory"] is not None for summary in found)
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
    if name in _ABBREVIATED and value >= _ABBREVIATED_FROM:
        return format_number(value)
    return f"{value:,}"


def _latency_cell(value: RoundSpread | None) -> str:
    from simplebus.spark.jobs.report.summary import format_time

    return "" if value is None else format_time(value.median_value)
