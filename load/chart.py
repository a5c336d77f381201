"""Draws rps.png from a run's figures: `python load/chart.py FIGURES.json [rps.png]`.

Rule 1: a picture shows only what the run measured, and carries the machine, the versions and the
exact command, so that it can be doubted and repeated.
Rule 2: what acknowledges every message is drawn solid, what acknowledges nothing is hatched.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # So that it runs by its path.

from load.report import machine_line, short

Figures = dict[str, Any]

SIZES = (16, 128, 1024)
LOOKS = {
    "simplebus": ("#e4572e", False),
    "nats core": ("#9aa5b1", True),
    "redis pub/sub": ("#c9ced6", True),
    "redis stream + XACK": ("#5b8e7d", False),
    "JetStream, acks of 500": ("#2e6f95", False),
    "JetStream, each acked": ("#6fa8c9", False),
}
"""Colour of each, and whether it delivers without acknowledgement."""
INK, PALE = "#22303c", "#e6e9ed"
BUCKETS_PER_S = 10
SIDE = 0.14  # Width of one bar; the groups are 1 apart.


def draw(figures: Figures, path: Path) -> None:
    """The picture of a run, written as PNG."""
    plt.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "text.color": INK,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "hatch.linewidth": 0.6,
        }
    )
    figure = plt.figure(figsize=(12, 9.2), dpi=110, facecolor="white")
    grid = figure.add_gridspec(
        2,
        2,
        height_ratios=(1.45, 1),
        width_ratios=(1.6, 1),
        left=0.065,
        right=0.98,
        top=0.87,
        bottom=0.145,
        hspace=0.3,
        wspace=0.42,
    )
    _draw_rates(figure.add_subplot(grid[0, :]), figures)
    _draw_course(figure.add_subplot(grid[1, 0]), figures)
    _draw_cpu(figure.add_subplot(grid[1, 1]), figures)
    figure.text(0.065, 0.955, "simplebus, message by message", fontsize=19, weight="bold")
    figure.text(
        0.065,
        0.925,
        "One publisher, one subscriber, over loopback, every message verified. "
        "Solid: acknowledged (simplebus: in ranges). Hatched: nothing acknowledged.",
        fontsize=10.5,
    )
    figure.text(
        0.065,
        0.068,
        f"Median of {figures['rounds']} rounds, simplebus and its peers in turn; the lines on the "
        "bars go from the least to the most.",
        fontsize=9,
    )
    figure.text(0.065, 0.044, machine_line(figures["machine"], figures["versions"]), fontsize=9)
    figure.text(0.065, 0.02, figures["command"], fontsize=9, family="DejaVu Sans Mono")
    figure.savefig(path)
    plt.close(figure)


def _samples(figures: Figures, size: int) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = figures["samples"].get(f"flow-{size}", {})
    return {name: found[name] for name in LOOKS if found.get(name)}


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11.5, weight="bold", pad=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(INK)
    axes.tick_params(which="both", length=0)
    axes.set_axisbelow(True)


def _draw_rates(axes: Axes, figures: Figures) -> None:
    """Bars by payload; the number on top is the median, the line from least to most."""
    for group, size in enumerate(SIZES):
        samples = _samples(figures, size)
        for index, (name, measured) in enumerate(samples.items()):
            rates = [sample["rate"] for sample in measured]
            middle, at = median(rates), group + (index - (len(samples) - 1) / 2) * SIDE
            color, unacked = LOOKS[name]
            axes.bar(
                at,
                middle,
                SIDE * 0.9,
                color=color,
                hatch="////" if unacked else None,
                edgecolor="white",
                linewidth=0.4,
                yerr=[[middle - min(rates)], [max(rates) - middle]],
                error_kw={"ecolor": INK, "elinewidth": 1.1, "capsize": 2.5},
            )
            axes.annotate(
                short(middle),
                (at, max(rates)),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                weight="bold" if name == "simplebus" else "normal",
            )
    axes.set_yscale("log")
    axes.set_xticks(range(len(SIZES)), [f"{size:,} B" for size in SIZES], fontsize=11)
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.grid(axis="y", color=PALE)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low / 2, 1e4), high * 3)
    _plain(axes, "Messages per second, by payload (logarithmic)")
    shown = dict.fromkeys(name for size in SIZES for name in _samples(figures, size))
    handles = [
        Patch(
            facecolor=LOOKS[name][0],
            hatch="////" if LOOKS[name][1] else None,
            edgecolor="white",
            label=name,
        )
        for name in shown
    ]
    axes.legend(handles=handles, ncols=len(handles), loc="upper right", frameon=False, fontsize=9)


def _draw_course(axes: Axes, figures: Figures) -> None:
    """The rate over a run, in tenths of a second: one line a round."""
    samples = _samples(figures, SIZES[0])
    for name in ("nats core", "simplebus"):
        for index, sample in enumerate(samples.get(name, [])):
            whole = sample["per_100ms"][:-1]  # The last is not a whole tenth.
            times = [(bucket + 0.5) / BUCKETS_PER_S for bucket in range(len(whole))]
            rates = [count * BUCKETS_PER_S / 1e6 for count in whole]
            axes.plot(
                times,
                rates,
                color=LOOKS[name][0],
                alpha=0.75,
                linewidth=1.5,
                label=name if index == 0 else None,
            )
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds", fontsize=9)
    axes.grid(axis="y", color=PALE)
    _plain(axes, f"Over a run, {SIZES[0]} B: million messages per second")
    if samples:
        axes.legend(frameon=False, fontsize=9, ncols=2, loc="center right")


def _draw_cpu(axes: Axes, figures: Figures) -> None:
    """What a message costs the broker."""
    samples = _samples(figures, SIZES[0])
    names = list(reversed(samples))
    costs = [median(sample["cpu_us"] for sample in samples[name]) for name in names]
    for at, (name, cost) in enumerate(zip(names, costs, strict=True)):
        color, unacked = LOOKS[name]
        axes.barh(at, cost, 0.7, color=color, hatch="////" if unacked else None, edgecolor="white")
        axes.annotate(
            short(cost),
            (cost, at),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            weight="bold" if name == "simplebus" else "normal",
        )
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_xscale("log")
    if costs:
        axes.set_xlim(min(costs) / 3, max(costs) * 4)
    axes.xaxis.set_visible(False)
    _plain(axes, f"Broker CPU, us per {SIZES[0]} B message")


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python load/chart.py FIGURES.json [rps.png]")
    draw(json.loads(Path(sys.argv[1]).read_text()), Path([*sys.argv, "rps.png"][2]))


if __name__ == "__main__":
    main()
