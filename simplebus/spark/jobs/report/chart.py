"""Draws a picture, as PNG. What it shows is decided in panels; how it looks, here.

Rule 1: nothing is worked out here: every number that is drawn is one of the picture's.
Rule 2: what acknowledged is solid, what acknowledged nothing is hatched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from simplebus.spark.jobs.report.panels import Bar, Lane, Picture
from simplebus.spark.jobs.report.summary import short, short_time

INK, PALE, GREY = "#22303c", "#e6e9ed", "#6b7a88"
WIDTH_IN, DPI = 12.6, 110
_LEFT, _RIGHT = 0.058, 0.985
_HEAD_IN, _ROW_IN, _LANE_IN, _GAP_IN, _LINE_IN = 1.0, 3.7, 1.9, 1.05, 0.24
_TITLE_IN, _ABOVE_FOOTER_IN = 0.45, 0.2
_SIDE = 0.15
"""Width of one bar; the groups are 1 apart."""
_SPACE = 0.1
"""Between lanes, in widths of one."""
_NOTE_ROOM = 5
"""A latency's scale ends so many times above the highest: there stands the lane's note."""
_NAME_MAX = 28
_LANES_MIN = 3
"""So many fit beside each other even if there are fewer: a lane is no wider."""
_TICKS_BELOW = 0.86
"""Of the height: a number above would run into the lane's name."""
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.6,
}


def draw(shown: Picture) -> bytes:
    """The picture as PNG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with rc_context(_STYLE):
        figure = compose(shown)
        found = BytesIO()
        FigureCanvasAgg(figure).print_png(found)
    return found.getvalue()


def compose(shown: Picture) -> Any:
    """The picture as a matplotlib figure, which nobody else knows of."""
    from matplotlib.figure import Figure

    height = _height(shown)
    figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI, facecolor="white")
    figure.text(_LEFT, 1 - 0.42 / height, shown.title, fontsize=19, weight="bold")
    figure.text(_LEFT, 1 - 0.72 / height, shown.subtitle, fontsize=10.5)
    top = height - _HEAD_IN
    for row, drawer in _rows(shown):
        top -= _TITLE_IN
        drawer(figure, (top - row) / height, top / height)
        top -= row + _GAP_IN - _TITLE_IN
    for index, line in enumerate(reversed(shown.footer)):
        family = "DejaVu Sans Mono" if line == shown.command else "DejaVu Sans"
        at = (0.14 + index * _LINE_IN) / height
        figure.text(_LEFT, at, line, fontsize=9, family=family)
    return figure


def _rows(shown: Picture) -> list[tuple[float, Callable[[Any, float, float], None]]]:
    """What stands below each other: how high it is, in inches, and who draws it."""
    found: list[tuple[float, Callable[[Any, float, float], None]]] = []
    if shown.groups:
        found.append((_ROW_IN, lambda figure, low, high: _draw_bars(figure, shown, low, high)))
    for title, lanes, fill in (
        (shown.courses_title, shown.courses, _draw_course),
        (shown.latencies_title, shown.latencies, _draw_latency),
    ):
        if lanes:
            found.append((_LANE_IN, _lanes_drawer(title, lanes, fill)))
    return found


def _height(shown: Picture) -> float:
    rows = sum(height + _GAP_IN for height, _ in _rows(shown))
    return _HEAD_IN + rows + _LINE_IN * len(shown.footer) - _ABOVE_FOOTER_IN


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


def _hatch(bar: Bar) -> dict[str, Any]:
    return {
        "facecolor": bar.color,
        "hatch": None if bar.acknowledged else "////",
        "edgecolor": "white",
        "linewidth": 0.4,
    }


# Bars --------------------------------------------------------------------------------------------


def _draw_bars(figure: Any, shown: Picture, low: float, high: float) -> None:
    split = 0.7 if shown.costs else _RIGHT
    _title(figure, _LEFT, high + 0.02, "Messages per second, by payload (logarithmic)")
    _draw_rates(_axes(figure, _LEFT, low, split, high), shown)
    if shown.costs:
        _title(figure, split + 0.035, high + 0.02, "Broker CPU, us per 16 B message")
        _draw_costs(_axes(figure, split + 0.15, low, _RIGHT, high), shown.costs)


def _draw_rates(axes: Any, shown: Picture) -> None:
    """The number on top is the median, the line goes from the least to the most."""
    from matplotlib.patches import Patch

    for group, bars in enumerate(shown.groups.values()):
        for index, bar in enumerate(bars):
            at, value = group + (index - (len(bars) - 1) / 2) * _SIDE, bar.value
            axes.bar(
                at,
                value.middle,
                _SIDE * 0.9,
                **_hatch(bar),
                yerr=[[value.middle - value.least], [value.most - value.middle]],
                error_kw={"ecolor": INK, "elinewidth": 1.1, "capsize": 2.2},
            )
            _number(axes, short(value.middle), (at, value.most), (0, 4), index == 0)
    axes.set_yscale("log")
    axes.set_xticks(range(len(shown.groups)), list(shown.groups), fontsize=11)
    axes.set_xlim(-0.55, len(shown.groups) - 0.45)
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.grid(axis="y", color=PALE)
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom / 2, 1e4), top * 1.3)
    first = {bar.name: bar for bars in shown.groups.values() for bar in bars}
    patches = [Patch(**_hatch(bar), label=name) for name, bar in first.items()]
    axes.legend(
        handles=patches, ncols=2, loc="upper right", frameon=False, fontsize=9, borderaxespad=0
    )


def _draw_costs(axes: Any, costs: Sequence[Bar]) -> None:
    for at, bar in enumerate(reversed(costs)):
        axes.barh(at, bar.value.middle, 0.66, **_hatch(bar))
        first = at == len(costs) - 1
        _number(axes, short(bar.value.middle), (bar.value.middle, at), (4, -3), first, "left")
    axes.set_yticks(range(len(costs)), [bar.name for bar in reversed(costs)], fontsize=9)
    axes.set_xscale("log")
    middles = [bar.value.middle for bar in costs]
    axes.set_xlim(min(middles) / 3, max(middles) * 5)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def _number(
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


# Lanes -------------------------------------------------------------------------------------------

_BANDS = (("max_us", "to the most", 0.13), ("p99_us", "to p99", 0.22), ("p90_us", "to p90", 0.35))
"""From the median to which latency, what it is called, and how dense it is."""


def _lines(color: str) -> dict[str, dict[str, Any]]:
    """Three lines that mostly lie on each other: each can be seen beside or through the others."""
    return {
        "sent": {"color": GREY, "linewidth": 3.4, "alpha": 0.35},
        "delivered": {"color": color, "linewidth": 1.6},
        "acked": {"color": INK, "linewidth": 1.2, "linestyle": (0, (1.2, 2.2))},
    }


def _lanes_drawer(
    title: str, lanes: Sequence[Lane], fill: Callable[[Any, Lane], None]
) -> Callable[[Any, float, float], None]:
    def draw_lanes(figure: Any, low: float, high: float) -> None:
        from matplotlib.ticker import MaxNLocator

        above = high + 24 / 72 / figure.get_figheight()
        _title(figure, _LEFT, above, title)
        handles = _line_handles() if fill is _draw_course else _band_handles()
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
        pitch = (_RIGHT - _LEFT) / max(len(lanes), _LANES_MIN)
        for index, lane in enumerate(lanes):
            left = _LEFT + index * pitch
            axes = _axes(figure, left, low, left + pitch * (1 - _SPACE), high)
            weight = "bold" if index == 0 else "normal"
            axes.set_title(_fitting(lane.name), loc="left", fontsize=9.5, weight=weight, pad=6)
            axes.grid(axis="y", color=PALE)
            fill(axes, lane)
            end = lane.seconds[-1] + lane.seconds[0] if lane.seconds else 1.0
            axes.set_xlim(0, end)
            axes.xaxis.set_major_locator(MaxNLocator(3, prune="upper"))
            axes.xaxis.set_major_formatter(_seconds_among(end))
            axes.tick_params(labelsize=8, pad=2)
        if fill is _draw_latency:
            _share_scale(figure.axes[-len(lanes) :])

    return draw_lanes


def _seconds_among(end: float) -> Callable[[float, int], str]:
    """Seconds, or whatever is longer and fits the end of the scale."""
    among = max(end, 1.0) * 1e6
    return lambda at, _: short_time(at * 1e6, among=among) if at else "0"


def _fitting(name: str) -> str:
    """As much of it as stands above a lane."""
    return name if len(name) <= _NAME_MAX else f"{name[: _NAME_MAX - 1]}…"


def _line_handles() -> list[Any]:
    from matplotlib.lines import Line2D

    return [Line2D([], [], label=kind, **look) for kind, look in _lines(INK).items()]


def _band_handles() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bands = [Patch(color=INK, alpha=alpha, lw=0, label=label) for _, label, alpha in _BANDS[::-1]]
    return [Line2D([], [], color=INK, linewidth=1.3, label="p50"), *bands]


def _draw_course(axes: Any, lane: Lane) -> None:
    for kind, look in _lines(lane.color).items():
        if kind in lane.rates:
            axes.plot(lane.seconds, lane.rates[kind], **look)
    if filled := lane.rates.get("delivered"):
        axes.fill_between(lane.seconds, filled, color=lane.color, alpha=0.12, linewidth=0)
    top = 1.22 * max((max(of) for of in lane.rates.values()), default=1.0) or 1.0
    axes.set_ylim(0, top)
    axes.locator_params(axis="y", nbins=4)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 < tick < _TICKS_BELOW * top])
    _number_lines(axes, short)


def _draw_latency(axes: Any, lane: Lane) -> None:
    """The line is the median; the bands end at percentiles above it."""
    values = {
        name: [float("nan") if value is None else max(value, 1.0) for value in of]
        for name, of in lane.latencies_us.items()
    }
    for name, _, alpha in _BANDS:
        axes.fill_between(
            lane.seconds, values["p50_us"], values[name], color=lane.color, alpha=alpha, linewidth=0
        )
    axes.plot(lane.seconds, values["p50_us"], color=INK, linewidth=1.3)
    axes.set_yscale("log")
    axes.annotate(
        lane.note, (0, 1), (0, -1), "axes fraction", "offset points", fontsize=8, va="top"
    )


def _number_lines(axes: Any, text: Callable[[float], str]) -> None:
    """The scale's numbers within the lane, each on its line, readable whatever lies below it."""
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


def _share_scale(lanes: Sequence[Any]) -> None:
    """One scale for all: what is compared must be comparable."""
    low = min(axes.get_ylim()[0] for axes in lanes)
    high = max(axes.get_ylim()[1] for axes in lanes)
    for axes in lanes:
        axes.set_ylim(low / 1.5, high * _NOTE_ROOM)
        axes.set_yticks([tick for tick in axes.get_yticks() if low / 1.5 < tick < high])
        axes.minorticks_off()
        _number_lines(axes, short_time)
