"""Drawing of the report's chart as PNG.

All numbers come from `panels`. Bars of variants with acks are solid, others hatched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from simplebus.spark.jobs.report.panels import ChartBar, ChartSeries, ReportChart
from simplebus.spark.jobs.report.summary import format_number, format_time, time_unit

INK, PALE, GREY = "#22303c", "#e6e9ed", "#6b7a88"
WIDTH_IN, DPI = 12.6, 110
_LEFT, _RIGHT = 0.058, 0.985
_HEAD_IN, _ROW_IN, _SERIES_IN, _GAP_IN, _LINE_IN = 1.0, 3.7, 1.9, 1.05, 0.24
_TITLE_IN, _ABOVE_FOOTER_IN = 0.45, 0.2
_BAR_WIDTH = 0.15
"""Width of one bar; groups are 1 apart."""
_SERIES_GAP = 0.1
"""Gap between series, as a fraction of their width."""
_NOTE_SCALE_FACTOR = 5
"""A latency scale ends at this multiple of its maximum, to leave space for the note."""
_NAME_MAX = 28
_SERIES_COLUMNS_MIN = 3
"""Minimum number of columns, so that few series are not too wide."""
_TICK_HEIGHT_MAX = 0.86
"""Fraction of the height; a label above it would overlap the series' name."""
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.6,
}


def draw_chart(chart: ReportChart) -> bytes:
    """Return the chart as PNG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with rc_context(_STYLE):
        figure = build_figure(chart)
        found = BytesIO()
        FigureCanvasAgg(figure).print_png(found)
    return found.getvalue()


def build_figure(chart: ReportChart) -> Any:
    """Return the chart as a matplotlib figure."""
    from matplotlib.figure import Figure

    height = _height(chart)
    figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI, facecolor="white")
    figure.text(_LEFT, 1 - 0.42 / height, chart.title, fontsize=19, weight="bold")
    figure.text(_LEFT, 1 - 0.72 / height, chart.subtitle, fontsize=10.5)
    top = height - _HEAD_IN
    for row, draw_row in _chart_rows(chart):
        top -= _TITLE_IN
        draw_row(figure, (top - row) / height, top / height)
        top -= row + _GAP_IN - _TITLE_IN
    for index, line in enumerate(reversed(chart.footer)):
        family = "DejaVu Sans Mono" if line == chart.command else "DejaVu Sans"
        at = (0.14 + index * _LINE_IN) / height
        figure.text(_LEFT, at, line, fontsize=9, family=family)
    return figure


def _chart_rows(chart: ReportChart) -> list[tuple[float, Callable[[Any, float, float], None]]]:
    """Return the rows of the chart: height in inches, and a function that draws the row."""
    found: list[tuple[float, Callable[[Any, float, float], None]]] = []
    if chart.groups:
        found.append((_ROW_IN, lambda figure, low, high: _draw_bars(figure, chart, low, high)))
    for title, series, draw_one in (
        (chart.rate_series_title, chart.rate_series, _draw_rate_series),
        (chart.latency_series_title, chart.latency_series, _draw_latency_series),
    ):
        if series:
            found.append((_SERIES_IN, _series_drawer(title, series, draw_one)))
    return found


def _height(chart: ReportChart) -> float:
    rows = sum(height + _GAP_IN for height, _ in _chart_rows(chart))
    return _HEAD_IN + rows + _LINE_IN * len(chart.footer) - _ABOVE_FOOTER_IN


def _axes(figure: Any, left: float, low: float, right: float, high: float) -> Any:
    axes = figure.add_axes((left, low, right - left, high - low))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(INK)
    axes.tick_params(which="both", length=0)
    axes.set_axisbelow(True)
    return axes


def _title(figure: Any, x: float, high: float, text: str) -> None:
    points = 9 / 72 / figure.get_figheight()
    figure.text(x, high + points, text, fontsize=11.5, weight="bold")


def _hatch(bar: ChartBar) -> dict[str, Any]:
    return {
        "facecolor": bar.color,
        "hatch": None if bar.is_acknowledged else "////",
        "edgecolor": "white",
        "linewidth": 0.4,
    }


# Bars --------------------------------------------------------------------------------------------


def _draw_bars(figure: Any, chart: ReportChart, low: float, high: float) -> None:
    split = 0.7 if chart.costs else _RIGHT
    _title(figure, _LEFT, high + 0.02, "Messages per second, by payload (logarithmic)")
    _draw_rates(_axes(figure, _LEFT, low, split, high), chart)
    if chart.costs:
        _title(figure, split + 0.035, high + 0.02, "Broker CPU, us per 16 B message")
        _draw_costs(_axes(figure, split + 0.15, low, _RIGHT, high), chart.costs)


def _draw_rates(axes: Any, chart: ReportChart) -> None:
    """Draw bars with the median; error bars show minimum and maximum."""
    from matplotlib.patches import Patch

    for group, bars in enumerate(chart.groups.values()):
        for index, bar in enumerate(bars):
            at, value = group + (index - (len(bars) - 1) / 2) * _BAR_WIDTH, bar.value
            axes.bar(
                at,
                value.median_value,
                _BAR_WIDTH * 0.9,
                **_hatch(bar),
                yerr=[[value.median_value - value.minimum], [value.maximum - value.median_value]],
                error_kw={"ecolor": INK, "elinewidth": 1.1, "capsize": 2.2},
            )
            _annotate_value(
                axes, format_number(value.median_value), (at, value.maximum), (0, 4), index == 0
            )
    axes.set_yscale("log")
    axes.set_xticks(range(len(chart.groups)), list(chart.groups), fontsize=11)
    axes.set_xlim(-0.55, len(chart.groups) - 0.45)
    axes.yaxis.set_major_formatter(lambda value, _: format_number(value))
    axes.grid(axis="y", color=PALE)
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom / 2, 1e4), top * 1.3)
    first = {bar.name: bar for bars in chart.groups.values() for bar in bars}
    patches = [Patch(**_hatch(bar), label=name) for name, bar in first.items()]
    axes.legend(
        handles=patches, ncols=2, loc="upper right", frameon=False, fontsize=9, borderaxespad=0
    )


def _draw_costs(axes: Any, costs: Sequence[ChartBar]) -> None:
    for at, bar in enumerate(reversed(costs)):
        axes.barh(at, bar.value.median_value, 0.66, **_hatch(bar))
        first = at == len(costs) - 1
        _annotate_value(
            axes,
            format_number(bar.value.median_value),
            (bar.value.median_value, at),
            (4, -3),
            first,
            "left",
        )
    axes.set_yticks(range(len(costs)), [bar.name for bar in reversed(costs)], fontsize=9)
    axes.set_xscale("log")
    middles = [bar.value.median_value for bar in costs]
    axes.set_xlim(min(middles) / 3, max(middles) * 5)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def _annotate_value(
    axes: Any,
    text: str,
    at: tuple[float, float],
    by: tuple[int, int],
    first: bool,
    ha: str = "center",
) -> None:
    axes.annotate(
        text,
        at,
        by,
        textcoords="offset points",
        ha=ha,
        fontsize=8.5,
        weight="bold" if first else "normal",
    )


# Series ------------------------------------------------------------------------------------------

_BANDS = (("max_us", "to maximum", 0.13), ("p99_us", "to p99", 0.22), ("p90_us", "to p90", 0.35))
"""Bands above the median: upper latency, label and opacity."""


def _line_styles(color: str) -> dict[str, dict[str, Any]]:
    """Return styles of three mostly overlapping lines that remain distinguishable."""
    return {
        "sent": {"color": GREY, "linewidth": 3.4, "alpha": 0.35},
        "delivered": {"color": color, "linewidth": 1.6},
        "acked": {"color": INK, "linewidth": 1.2, "linestyle": (0, (1.2, 2.2))},
    }


def _series_drawer(
    title: str, series: Sequence[ChartSeries], draw_one: Callable[[Any, ChartSeries], None]
) -> Callable[[Any, float, float], None]:
    def draw_series(figure: Any, low: float, high: float) -> None:
        above = high + 24 / 72 / figure.get_figheight()
        _title(figure, _LEFT, above, title)
        is_rate = draw_one is _draw_rate_series
        handles = _line_handles(series) if is_rate else _band_handles()
        figure.legend(
            handles=handles,
            loc="lower right",
            bbox_to_anchor=(_RIGHT, above),
            ncols=len(handles),
            frameon=False,
            fontsize=8.5,
            borderpad=0,
            borderaxespad=0.4,
        )
        pitch = (_RIGHT - _LEFT) / max(len(series), _SERIES_COLUMNS_MIN)
        for index, run in enumerate(series):
            left = _LEFT + index * pitch
            axes = _axes(figure, left, low, left + pitch * (1 - _SERIES_GAP), high)
            weight = "bold" if index == 0 else "normal"
            axes.set_title(_shorten_name(run.name), loc="left", fontsize=9.5, weight=weight, pad=6)
            axes.grid(axis="y", color=PALE)
            draw_one(axes, run)
            end = run.seconds[-1] + run.seconds[0] if run.seconds else 1.0
            axes.set_xlim(0, end)
            axes.set_xticks(time_ticks(end))
            axes.xaxis.set_major_formatter(_seconds_formatter(end))
            axes.tick_params(labelsize=8, pad=2)
        if draw_one is _draw_latency_series:
            _use_common_scale(figure.axes[-len(series) :])

    return draw_series


def time_ticks(end: float) -> list[float]:
    """Return up to four ticks of a scale that ends at `end` seconds, round in its unit."""
    from matplotlib.ticker import MaxNLocator

    unit = time_unit(max(end, 1.0) * 1e6)[0] / 1e6
    ticks = MaxNLocator(3, steps=[1, 2, 5, 10]).tick_values(0, end / unit)
    return [float(tick) * unit for tick in ticks if 0 <= tick * unit < 0.95 * end]


def _seconds_formatter(end: float) -> Callable[[float, int], str]:
    """Return a formatter of seconds, with the unit that fits the end of the scale."""
    among = max(end, 1.0) * 1e6
    return lambda at, _: format_time(at * 1e6, among=among) if at else "0"


def _shorten_name(name: str) -> str:
    """Return a name cut to the width of a series."""
    return name if len(name) <= _NAME_MAX else f"{name[: _NAME_MAX - 1]}…"


def _line_handles(series: Sequence[ChartSeries]) -> list[Any]:
    """Return the legend of the lines that any of the series has."""
    from matplotlib.lines import Line2D

    shown = {kind for run in series for kind in run.rates}
    styles = {kind: style for kind, style in _line_styles(INK).items() if kind in shown}
    return [Line2D([], [], label=kind, **style) for kind, style in styles.items()]


def _band_handles() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bands = [Patch(color=INK, alpha=alpha, lw=0, label=label) for _, label, alpha in _BANDS[::-1]]
    return [Line2D([], [], color=INK, linewidth=1.3, label="p50"), *bands]


def _draw_rate_series(axes: Any, run: ChartSeries) -> None:
    for kind, style in _line_styles(run.color).items():
        if kind in run.rates:
            axes.plot(run.seconds, run.rates[kind], **style)
    if filled := run.rates.get("delivered"):
        axes.fill_between(run.seconds, filled, color=run.color, alpha=0.12, linewidth=0)
    top = 1.22 * max((max(of) for of in run.rates.values()), default=1.0) or 1.0
    axes.set_ylim(0, top)
    axes.locator_params(axis="y", nbins=4)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 < tick < _TICK_HEIGHT_MAX * top])
    _label_grid_lines(axes, format_number)


def _draw_latency_series(axes: Any, run: ChartSeries) -> None:
    """Draw the median as a line, and bands up to higher percentiles."""
    values = {
        name: [float("nan") if value is None else max(value, 1.0) for value in of]
        for name, of in run.latencies_us.items()
    }
    for name, _, alpha in _BANDS:
        axes.fill_between(
            run.seconds, values["p50_us"], values[name], color=run.color, alpha=alpha, linewidth=0
        )
    axes.plot(run.seconds, values["p50_us"], color=INK, linewidth=1.3)
    axes.set_yscale("log")
    axes.annotate(run.note, (0, 1), (0, -1), "axes fraction", "offset points", fontsize=8, va="top")


def _label_grid_lines(axes: Any, text: Callable[[float], str]) -> None:
    """Write the scale's numbers on its grid lines, with an outline that keeps them readable."""
    from matplotlib.patheffects import withStroke

    for tick in axes.get_yticks():
        axes.annotate(
            text(tick),
            (0, tick),
            (0, 1.5),
            ("axes fraction", "data"),
            "offset points",
            fontsize=7.5,
            color=GREY,
            path_effects=[withStroke(linewidth=2.5, foreground="white", alpha=0.8)],
        )
    axes.tick_params(axis="y", labelleft=False)


def _use_common_scale(series: Sequence[Any]) -> None:
    """Give all series one scale, so that they can be compared."""
    from matplotlib.ticker import LogLocator

    low = min(axes.get_ylim()[0] for axes in series) / 1.5
    high = max(axes.get_ylim()[1] for axes in series)
    ticks: list[float] = []
    for steps in ((1.0,), (1.0, 2.0, 3.0, 5.0)):  # A scale of one decade needs smaller steps.
        if len(ticks) < 2:
            values = LogLocator(subs=steps).tick_values(low, high)
            ticks = [float(tick) for tick in values if low < tick < high]
    for axes in series:
        axes.set_ylim(low, high * _NOTE_SCALE_FACTOR)
        axes.set_yticks(ticks)
        axes.minorticks_off()
        _label_grid_lines(axes, format_time)
