"""`simplebus top`: the dashboard of a server, bridge or gateway in a terminal.

Titles, units and tables come from the HTTP listener, so that this module is independent of their
meaning. Texts are printed without control characters and markup.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from simplebus.commands.operate.http_client import HTTP_URL, HttpClient, http_url_option
from simplebus.config.parse import option, parse_seconds
from simplebus.console.errors import USAGE_STATUS, fail

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

HELP = (
    "Watch a server, a bridge or a gateway in the terminal.\n\n\b\n"
    "  simplebus top\n"
    "  simplebus top --url http://bus:8222\n"
    "  simplebus top --once                print a snapshot as text\n"
    "  simplebus top --json                print a snapshot as JSON\n\n"
    "It shows the live page: rates, classes, slow subscribers and the reasons. Stop it with Ctrl-C."
)
_URL_OPTION = http_url_option(
    "HTTP address of a server (`serve --http-port`), or of a bridge or gateway (--http)."
)
_BLOCKS = " ▁▂▃▄▅▆▇█"
_LINE_CHARACTERS = 40
_ROWS_ONCE = 1000
_WIDTH_ONCE = 160
_FRAME = 4
"""Width of the frame in characters."""
_COLUMNS_AT = 100
"""Minimum width for values in columns."""
_TEXT_CHARACTERS = 24
"""Width to which a text is cut before another column is left out."""

Speeds: TypeAlias = dict[str, list[float | None]]
"""Growth per second of the cells of each row, by the row's first cells; None for no number."""


class DashboardClient:
    """HTTP client that fetches snapshots of a dashboard."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for an invalid URL, OSError for an unusable certificate."""
        self._client = HttpClient(url)
        self._before: dict[str, tuple[float, dict[str, list[Any]], Speeds]] = {}
        """Time, rows and rates of the previous snapshot, by table."""

    def fetch(self) -> dict[str, Any]:
        """Return a snapshot. Raises OSError with an error message."""
        snapshot = self._client.request("/facts")
        if "facts" not in snapshot:
            raise self._client.not_simplebus_error()
        return snapshot

    def growth_rates(self, snapshot: dict[str, Any]) -> dict[str, Speeds]:
        """Return the growth of each table's cells since the previous snapshot, per second."""
        facts = snapshot["facts"]
        taken_at = facts.get("taken_at", 0.0)  # Older servers do not send it.
        return {table["key"]: self._rates(table, taken_at) for table in facts["tables"]}

    def _rates(self, table: dict[str, Any], taken_at: float) -> Speeds:
        rows = {_key(row): row for row in table["rows"]}
        before, old_rows, rates = self._before.get(table["key"], (taken_at, {}, {}))
        if taken_at != before:
            elapsed = taken_at - before
            rates = {
                key: [
                    max(0.0, (value - old) / elapsed)
                    if isinstance(value, int | float) and isinstance(old, int | float)
                    else None
                    for value, old in zip(row, old_rows[key], strict=True)
                ]
                for key, row in rows.items()
                if key in old_rows and taken_at > before  # A restarted server has a new clock.
            }
        self._before[table["key"]] = taken_at, rows, rates
        return rates


def _key(row: list[Any]) -> str:
    return "\n".join(cell for cell in row[:2] if isinstance(cell, str))


def top(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", show_default=False, help="Short form of the option --url."),
    ] = None,
    url: Annotated[str, _URL_OPTION] = HTTP_URL,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one snapshot as JSON and exit.")
    ] = False,
    interval: Annotated[
        float,
        option(
            "--interval",
            "Interval between two snapshots in seconds.",
            parser=parse_seconds,
            metavar="SECONDS",
            show_default="1",
        ),
    ] = 1.0,
) -> None:
    if address is not None:
        source = context.get_parameter_source("url")
        if source is not None and source.name == "COMMANDLINE" and url != address:
            fail(f"expected one address, got {address} and {url}", status=USAGE_STATUS)
        url = address
    try:
        client = DashboardClient(url)
        snapshot = client.fetch()
    except (OSError, ValueError) as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps(snapshot, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console()
    if once or not console.is_terminal:
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = _WIDTH_ONCE
        console.print(render_snapshot(snapshot, client.growth_rates(snapshot), rows=_ROWS_ONCE))
        return
    _watch(console, client, snapshot, max(0.1, interval))


def _watch(
    console: Console, client: DashboardClient, snapshot: dict[str, Any], interval: float
) -> None:
    from rich.live import Live

    problem = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                snapshot, problem = client.fetch(), ""
            except OSError as error:
                problem = str(error)
            rates = client.growth_rates(snapshot)
            live.update(fit_to_screen(console, snapshot, rates, problem), refresh=True)
            time.sleep(interval)


def fit_to_screen(
    console: Console, snapshot: dict[str, Any], rates: dict[str, Speeds], problem: str = ""
) -> Panel:
    """Render a snapshot with as many rows per table as the screen can show.

    `problem` is the reason why there is no newer snapshot.
    """
    from rich.text import Text

    low, high = 1, console.height
    best = render_snapshot(snapshot, rates, rows=1, width=console.width)
    while low < high:
        rows = (low + high + 1) // 2
        candidate = render_snapshot(snapshot, rates, rows=rows, width=console.width)
        if len(console.render_lines(candidate)) <= console.height:
            best, low = candidate, rows
        else:
            high = rows - 1
    if problem:
        best.title = Text(escape_controls(problem), style="bold red")
    return best


def render_snapshot(
    snapshot: dict[str, Any], speeds: dict[str, Speeds], *, rows: int, width: int | None = None
) -> Panel:
    """Render a snapshot with at most `rows` rows per table.

    With `width`, each row is one line, and the least important columns are left out.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    facts = snapshot["facts"]
    health = facts["health"]
    word = "draining" if health["draining"] else "ready" if health["ready"] else "not ready"
    colour = {"ready": "green", "draining": "yellow", "not ready": "red"}[word]
    inner_width = None if width is None else width - _FRAME
    parts: list[RenderableType] = [
        _rates(snapshot["rates"], inner_width),
        _tiles(facts["tiles"], inner_width),
    ]
    for note in facts["notes"][:rows]:
        style, marker = ("red", "▲ ") if note["is_bad"] else ("yellow", "• ")
        subject = Text(f"{escape_controls(note['about'])}: ", style="bold")
        parts.append(Text(marker, style=style) + subject + escape_controls(note["sentence"]))
    for table in facts["tables"]:
        if table["rows"]:
            parts.append(_table(table, speeds.get(table["key"], {}), rows, inner_width))
    if health["why"]:
        word = f"{word}: {escape_controls(health['why'])}"
    title = Text(f"● {word} ", style=colour) + Text(escape_controls(facts["title"]), style="bold")
    title += Text(f" {escape_controls(facts['subtitle'])}", style="dim")
    return Panel(Group(*parts), title=title, title_align="left")


def _rates(rates: dict[str, Any], width: int | None) -> RenderableType:
    from rich.table import Table

    lines = [
        (escape_controls(name), f"{format_value(line[-1] or 0.0 if line else 0.0, 'rate')}/s", line)
        for name, line in rates["flows"].items()
    ]
    chart_width = _LINE_CHARACTERS
    if width is not None:
        used_width = sum(
            max((len(line[index]) for line in lines), default=0) + 2 for index in range(2)
        )
        chart_width = max(0, min(chart_width, width - used_width))
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column()
    for name, now, line in lines:
        recent = [value or 0.0 for value in line[len(line) - chart_width :]]
        grid.add_row(name, now, sparkline(recent) if chart_width else "")
    return grid


def sparkline(values: list[float]) -> str:
    """Return a bar chart of the values in one line."""
    highest = max(values, default=0.0)
    if highest <= 0:
        return _BLOCKS[1] * len(values)
    return "".join(_BLOCKS[1 + round(value / highest * (len(_BLOCKS) - 2))] for value in values)


def _tiles(tiles: list[dict[str, Any]], width: int | None) -> RenderableType:
    from rich.columns import Columns
    from rich.text import Text

    texts = [
        Text(format_value(tile["value"], tile["unit"] or "count"), style="bold")
        + Text(f" {escape_controls(tile['title'])}", style="dim")
        for tile in tiles
    ]
    if width is None or width >= _COLUMNS_AT:
        return Columns(texts, padding=(0, 3))
    lines: list[list[Text]] = [[]]
    for text in texts:
        if lines[-1] and sum(len(shown) + 3 for shown in lines[-1]) + len(text) > width:
            lines.append([])
        lines[-1].append(text)
    return Text("\n").join(Text("   ").join(line) for line in lines)


def _table(table: dict[str, Any], speeds: Speeds, rows: int, width: int | None) -> Table:
    from rich.table import Table
    from rich.text import Text

    left_out = table["left_out"] + max(0, len(table["rows"]) - rows)
    title = escape_controls(table["title"]) + (f", and {left_out:,} more" if left_out else "")
    table_view = Table(
        title=Text(title, style="italic"),
        title_justify="left",
        box=None,
        padding=(0, 1),
        header_style="bold underline",
    )
    columns = table["columns"]
    cells = [_cells(row, columns, speeds.get(_key(row), [])) for row in table["rows"][:rows]]
    widths = _column_widths(columns, cells, width)
    for index, characters in widths.items():
        is_text = columns[index]["unit"] == "text"
        table_view.add_column(
            escape_controls(columns[index]["title"]),
            justify="left" if is_text else "right",
            overflow="fold" if width is None else "ellipsis",
            no_wrap=width is not None,
            width=characters,
        )
    for line in cells:
        table_view.add_row(*(line[index] for index in widths))
    return table_view


def _cells(row: list[Any], columns: list[dict[str, Any]], speeds: list[float | None]) -> list[Text]:
    from rich.text import Text

    texts = []
    for index, (cell, column) in enumerate(zip(row, columns, strict=True)):
        text = Text(format_value(cell, column["unit"]))
        if column["is_flow"] and speeds and speeds[index]:
            unit = "bytes" if column["unit"] == "bytes" else "rate"
            text += Text(f" {format_value(speeds[index], unit)}/s", style="dim")
        texts.append(text)
    return texts


def _column_widths(
    columns: list[dict[str, Any]], cells: list[list[Text]], width: int | None
) -> dict[int, int | None]:
    """Return the columns that fit, with their widths; None for any width.

    Empty columns are left out first, then the last columns; texts are cut.
    """
    if width is None:
        return dict.fromkeys(range(len(columns)))
    longest = [
        max(len(column["title"]), *(len(line[index]) for line in cells))
        for index, column in enumerate(columns)
    ]
    widths: dict[int, int | None] = {
        index: min(size, _TEXT_CHARACTERS) if columns[index]["unit"] == "text" else size
        for index, size in enumerate(longest)
    }

    def free_width() -> int:
        return width - sum((size or 0) + 2 for size in widths.values())

    empty = [
        index for index in widths if all(line[index].plain in ("0", "–", "0 B") for line in cells)
    ]
    last = [index for index in widths if index not in empty]
    for index in (*reversed(empty), *reversed(last[1:])):
        if free_width() >= 0:
            break
        del widths[index]
    for index, size in widths.items():
        widths[index] = (size or 0) + max(0, min(free_width(), longest[index] - (size or 0)))
    return widths


def format_value(value: Any, unit: str) -> str:
    """Return the text of a cell with its unit."""
    if value is None or value == "":
        return "–"
    if isinstance(value, str):
        return escape_controls(value)
    if unit == "bytes":
        return _bytes(value)
    if unit == "seconds":
        return _seconds(value)
    if unit == "rate" and 0 < value < 10:
        return f"{value:.1f}"
    return f"{value:,.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _seconds(value: float) -> str:
    if not value:
        return "–"
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        if value < size * 1000:
            return f"{value / size:.3g} {unit}"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


def escape_controls(text: str) -> str:
    """Return the text with control characters as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )
