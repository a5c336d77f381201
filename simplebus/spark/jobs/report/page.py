"""Report as one HTML page without scripts: tables, and the chart as an image in the page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from simplebus.spark.jobs.report.chart import INK, PALE

_STYLE = f"""
body {{ margin: 2em auto; max-width: 1390px; padding: 0 1em;
  font: 15px "DejaVu Sans", Verdana, sans-serif; color: {INK}; background: white; }}
h1 {{ position: absolute; width: 1px; height: 1px; overflow: hidden; }}
h2 {{ font-size: 1.1em; margin: 2em 0 0.5em 5.8%; }}
img {{ width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; margin-left: 5.8%; }}
table {{ border-collapse: collapse; font-size: 0.9em; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.35em 0.8em 0.35em 0; text-align: right; white-space: nowrap; }}
th {{ border-bottom: 2px solid {INK}; }} td {{ border-bottom: 1px solid {PALE}; }}
.text {{ text-align: left; white-space: normal; }} .error {{ color: #b3261e; font-weight: bold; }}
"""


@dataclass(frozen=True, slots=True)
class TableCell:
    """Cell of a table."""

    text: str
    is_error: bool = False
    """True for a count that should be zero."""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Table of one scenario or archive."""

    title: str
    headers: Sequence[str]
    text_columns: int
    """Number of columns with texts; the others have numbers."""
    rows: Sequence[Sequence[TableCell]]


def render_page(title: str, subtitle: str, tables: Sequence[ReportTable], chart: bytes) -> str:
    """Return the page.

    Args:
        title: Title of the page.
        subtitle: Line below it. Both are visible in the chart only.
        tables: The tables, in order.
        chart: The chart as PNG.
    """
    image = base64.b64encode(chart).decode()
    body = "\n".join(map(_render_table, tables))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}: {escape(subtitle)}</h1>
<img alt="Rates and latencies of the tables below" src="data:image/png;base64,{image}">
{body}
</body>
</html>
"""


def _render_table(table: ReportTable) -> str:
    def render_row(tag: str, cells: Sequence[TableCell]) -> str:
        return "".join(
            f'<{tag} class="{_css_class(cell, index < table.text_columns)}">'
            f"{escape(cell.text)}</{tag}>"
            for index, cell in enumerate(cells)
        )

    head = render_row("th", [TableCell(text) for text in table.headers])
    rows = "\n".join(f"<tr>{render_row('td', row)}</tr>" for row in table.rows)
    return (
        f"<h2>{escape(table.title)}</h2>\n"
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _css_class(cell: TableCell, is_text: bool) -> str:
    return " ".join(["text"] * is_text + ["error"] * cell.is_error)
