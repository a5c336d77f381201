"""`simplebus pipeline report`: options in, a table, figures and a picture out.

Rule 1: nothing of Spark and nothing that draws is imported before the command runs.
Rule 2: what cannot be written is said before anything is worked out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.config.parse import option
from simplebus.console.errors import fail
from simplebus.spark.commands.shared import Master, Set, spark_session
from simplebus.spark.jobs.session import LOCAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from simplebus.spark.jobs.report.summary import Spread, Summary

HELP = (
    "Say what became of messages: rates, latencies, redeliveries, duplicates, losses.\n\n"
    "PATH has traces, which load/run.py writes and programs of your own may, or an archive. From "
    "an archive it says how many messages a class has, when they came, how long it took until they "
    "were archived, and which are missing or there twice.\n\n"
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
            help="Folders with traces or archives, or what Spark reads from, such as hdfs://….",
        ),
    ],
    chart: Annotated[
        Path | None,
        option(
            "--chart",
            "Draw a picture of it here, as PNG.",
            metavar="FILE",
            show_default="no picture",
        ),
    ] = None,
    figures: Annotated[
        str | None,
        option(
            "--figures",
            "Write all figures here, as Parquet: a new folder, with what runs did as a whole below "
            "span=run, and their steps below span=step.",
            metavar="PATH",
            show_default="no figures",
        ),
    ] = None,
    step: Annotated[
        float | None,
        option(
            "--step",
            "How long a step is, in seconds: rates and latencies over time are told for each.",
            metavar="SECONDS",
            min=0.001,
            show_default="0.1; for an archive a two-hundredth of its time",
        ),
    ] = None,
    master: Master = LOCAL,
    settings: Set = None,
) -> None:
    """Options in, one call out."""
    _check_targets(chart, figures)
    with spark_session("simplebus report", master, settings) as spark:
        from simplebus.spark.jobs.progress import work
        from simplebus.spark.jobs.report.report import read, read_run
        from simplebus.spark.jobs.report.summary import summaries

        runs = [run for path in paths if (run := read_run(spark, path))]
        found = read(spark, *paths, step_s=step).persist()
        rows = work(spark, "reading", found.toArrow).to_pylist()
        if figures is not None:
            one_file = found.coalesce(1).write.partitionBy("span")
            work(spark, "writing", lambda: one_file.parquet(figures))
    run = runs[0] if len(runs) == 1 else None
    _print_tables(summaries(rows, _order(run)))
    if chart is not None:
        from simplebus.spark.jobs.report.chart import draw
        from simplebus.spark.jobs.report.panels import picture

        chart.write_bytes(draw(picture(rows, run, ", ".join(paths))))


def _check_targets(chart: Path | None, figures: str | None) -> None:
    if chart is not None and not chart.resolve().parent.is_dir():
        fail(f"--chart {chart}: there is no folder {chart.resolve().parent}", status=2)
    if figures is not None and _SCHEMES not in figures and Path(figures).exists():
        fail(f"--figures {figures}: there is something already", status=2)


def _order(run: dict[str, Any] | None) -> list[str]:
    """As the run did it."""
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
_LARGE = ("delivered", "acked")
"""Told by three digits where they have more than five; the figures have them all."""
_SHORTENED = 100_000
_BAD = ("duplicates", "lost", "unsent")
_LATENCIES = {"p50_us": "p50", "p99_us": "p99", "p999_us": "p99.9", "max_us": "most"}
_WIDTH = 130
"""Of the table, where there is no terminal to ask."""


def _print_tables(found: Sequence[Summary]) -> None:
    """One for each scenario or archive."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for scenario in dict.fromkeys(one.key["scenario"] for one in found):
        some = [one for one in found if one.key["scenario"] == scenario]
        console.print(_table(scenario or "", some))


def _table(title: str, found: Sequence[Summary]) -> Table:
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
    places = [name for name in found[0].key if _is_said(name, found)]
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


def _is_said(name: str, found: Sequence[Summary]) -> bool:
    """Whether rows differ in it. The table is of one scenario; who did what is always said."""
    values = {one.key[name] for one in found}
    is_archive = any(one.key["memory"] is not None for one in found)
    always = name == ("class" if is_archive else "variant")
    return name != "scenario" and (len(values) > 1 or always)


def _rate_cells(rate: Spread, rounds: int) -> list[str]:
    from simplebus.spark.jobs.report.summary import short

    of = (rate.middle, rate.least, rate.most) if rounds > 1 else (rate.middle,)
    return [short(value) for value in of]


def _count_cell(name: str, value: int | None) -> str:
    from simplebus.spark.jobs.report.summary import short

    if value is None:
        return ""
    text = short(value) if name in _LARGE and value >= _SHORTENED else f"{value:,}"
    return f"[red]{text}[/]" if value and name in _BAD else text


def _latency_cell(value: Spread | None) -> str:
    from simplebus.spark.jobs.report.summary import short_time

    return "" if value is None else short_time(value.middle)
