"""Metrics as Prometheus reads them, in the format that is asked for: its own library writes them.

Rule 1: values are plain: what was measured is turned into lines. They are kept until something else
is measured: most metrics stay as they were from one look to the next, and to write them takes long.
Rule 2: what comes from outside stands in label values only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain

from prometheus_client import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.exposition import generate_latest as _open
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from simplebus.core.histogram import HistogramSnapshot
from simplebus.monitor.facts import Kind, Labels, Metric

PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PREFIX = "simplebus_"
_STANDARD = "process_"
"""What these begin with has no prefix of ours: every client library calls them so."""
_END = b"# EOF\n"
"""Of what an OpenMetrics encoder writes, each time."""


class Exposition:
    """Of one program."""

    def __init__(self) -> None:
        self._written: dict[tuple[bool, str], tuple[Metric, bytes]] = {}
        """By format and name: a metric as it was last, and what was written of it."""

    def of(self, metrics: Iterable[Metric], accept: str = "") -> tuple[str, Iterator[bytes]]:
        """The type of the format that an Accept header asks for, and what each metric is in it, to
        be joined: OpenMetrics 1.0 where it is named, or else the text format 0.0.4."""
        # The library's own choice fails at versions that are no numbers.
        is_open = "application/openmetrics-text" in accept
        parts = (self._write(metric, is_open) for metric in metrics)
        return (OPEN_TYPE, chain(parts, [_END])) if is_open else (PLAIN_TYPE, parts)

    def _write(self, metric: Metric, is_open: bool) -> bytes:
        before, written = self._written.get((is_open, metric.name), (None, b""))
        if metric != before:
            encode: Callable[[Collector], bytes] = _open if is_open else generate_latest
            written = encode(_One(family(metric))).removesuffix(_END)
            self._written[is_open, metric.name] = metric, written
        return written


class _One(Collector):
    """What the library's encoders take."""

    def __init__(self, only: Family) -> None:
        self.only = only

    def collect(self) -> Iterable[Family]:
        yield self.only


def family(metric: Metric) -> Family:
    """A metric with its values, in the library's words. Its values have the same labels."""
    name = full_name(metric)
    names = [each for each, _ in metric.values[0][0]] if metric.values else []
    if metric.kind is Kind.HISTOGRAM:
        histograms = HistogramMetricFamily(name, metric.help, labels=names)
        for labels, value in metric.values:
            assert isinstance(value, HistogramSnapshot)
            histograms.add_metric(_texts(labels), _buckets(value), value.total)
        return histograms
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    figures = kind(name, metric.help, labels=names)
    for labels, value in metric.values:
        assert not isinstance(value, HistogramSnapshot)
        figures.add_metric(_texts(labels), value)
    return figures


def full_name(metric: Metric) -> str:
    """Without what its kind adds."""
    return metric.name if metric.name.startswith(_STANDARD) else PREFIX + metric.name


def _buckets(value: HistogramSnapshot) -> list[tuple[str, float]]:
    bounds = map(floatToGoString, (*value.bounds, float("inf")))
    return list(zip(bounds, accumulate(value.counts), strict=True))


def _texts(labels: Labels) -> list[str]:
    """Values alone. Halves of characters, which no encoding has, are shown as question marks."""
    return [value.encode("utf-8", "replace").decode() for _, value in labels]
