"""Metrics as Prometheus reads them: its text format 0.0.4, and OpenMetrics 1.0 where that is asked
for.

Rule 1: values are plain: what was measured is turned into lines, and nothing is kept.
Rule 2: what comes from outside stands in label values only, escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from simplebus.core.histogram import HistogramSnapshot
from simplebus.monitor.facts import Kind, Labels, Metric

PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PREFIX = "simplebus_"
_STANDARD = "process_"
"""What these begin with has no prefix of ours: every client library calls them so."""
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def wants_open(accept: str) -> bool:
    """Whether an Accept header asks for OpenMetrics."""
    return "application/openmetrics-text" in accept


def exposition(metrics: Iterable[Metric], *, is_open: bool = False) -> Iterator[str]:
    """The lines of each metric, joined."""
    for metric in metrics:
        yield "".join(_lines(metric, is_open=is_open))
    if is_open:
        yield "# EOF\n"


def full_name(metric: Metric) -> str:
    """Without what its kind adds."""
    return metric.name if metric.name.startswith(_STANDARD) else PREFIX + metric.name


def _lines(metric: Metric, *, is_open: bool) -> Iterator[str]:
    name = full_name(metric)
    total = f"{name}_total" if metric.kind is Kind.COUNTER else name
    described = name if is_open else total
    yield f"# HELP {described} {_help(metric.help)}\n# TYPE {described} {metric.kind.value}\n"
    for labels, value in metric.values:
        if isinstance(value, HistogramSnapshot):
            yield from _histogram(name, labels, value)
        else:
            yield f"{total}{_labels(labels)} {number(value)}\n"


def _histogram(name: str, labels: Labels, value: HistogramSnapshot) -> Iterator[str]:
    bounds = [*map(number, value.bounds), "+Inf"]
    count = 0
    for bound, count in zip(bounds, accumulate(value.counts), strict=True):
        yield f"{name}_bucket{_labels((*labels, ('le', bound)))} {count}\n"
    yield f"{name}_sum{_labels(labels)} {number(value.total)}\n"
    yield f"{name}_count{_labels(labels)} {count}\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels) + "}"


def escaped(value: str) -> str:
    """A label's value between its quotes. Halves of characters, which no encoding has, are shown
    as question marks."""
    return value.translate(_ESCAPED).encode("utf-8", "replace").decode()


def _help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def number(value: float) -> str:
    """As Prometheus reads it: whole ones without a point."""
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
