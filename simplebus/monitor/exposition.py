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
from prometheus_client.openmetrics.exposition import generate_latest as _generate_openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from simplebus.core.histogram import HistogramSnapshot
from simplebus.monitor.snapshot import Labels, Metric, MetricKind

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PREFIX = "simplebus_"
_PROCESS_PREFIX = "process_"
"""What these begin with has no prefix of ours: every client library calls them so."""
_OPENMETRICS_END = b"# EOF\n"
"""Of what an OpenMetrics encoder writes, each time."""


class Exposition:
    """Of one program."""

    def __init__(self) -> None:
        self._cache: dict[tuple[bool, str], tuple[Metric, bytes]] = {}
        """By format and name: a metric as it was last, and what was written of it."""

    def encode(self, metrics: Iterable[Metric], accept: str = "") -> tuple[str, Iterator[bytes]]:
        """The type of the format that an Accept header asks for, and what each metric is in it, to
        be joined: OpenMetrics 1.0 where it is named, or else the text format 0.0.4."""
        # The library's own choice fails at versions that are no numbers.
        is_openmetrics = "application/openmetrics-text" in accept
        parts = (self._encode_metric(metric, is_openmetrics) for metric in metrics)
        return (
            (OPENMETRICS_TYPE, chain(parts, [_OPENMETRICS_END]))
            if is_openmetrics
            else (TEXT_TYPE, parts)
        )

    def _encode_metric(self, metric: Metric, is_openmetrics: bool) -> bytes:
        cached, encoded = self._cache.get((is_openmetrics, metric.name), (None, b""))
        if metric != cached:
            encode: Callable[[Collector], bytes] = (
                _generate_openmetrics if is_openmetrics else generate_latest
            )
            encoded = encode(_SingleMetric(build_family(metric))).removesuffix(_OPENMETRICS_END)
            self._cache[is_openmetrics, metric.name] = metric, encoded
        return encoded


class _SingleMetric(Collector):
    """What the library's encoders take."""

    def __init__(self, build_family: Family) -> None:
        self.only = build_family

    def collect(self) -> Iterable[Family]:
        yield self.only


def build_family(metric: Metric) -> Family:
    """A metric with its values, in the library's words. Its values have the same labels."""
    name = metric_full_name(metric)
    names = [each for each, _ in metric.values[0][0]] if metric.values else []
    if metric.kind is MetricKind.HISTOGRAM:
        histograms = HistogramMetricFamily(name, metric.help, labels=names)
        for labels, value in metric.values:
            assert isinstance(value, HistogramSnapshot)
            histograms.add_metric(_label_values(labels), _cumulative_buckets(value), value.total)
        return histograms
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    numbers = kind(name, metric.help, labels=names)
    for labels, value in metric.values:
        assert not isinstance(value, HistogramSnapshot)
        numbers.add_metric(_label_values(labels), value)
    return numbers


def metric_full_name(metric: Metric) -> str:
    """Without what its kind adds."""
    return metric.name if metric.name.startswith(_PROCESS_PREFIX) else PREFIX + metric.name


def _cumulative_buckets(value: HistogramSnapshot) -> list[tuple[str, float]]:
    bounds = map(floatToGoString, (*value.bounds, float("inf")))
    return list(zip(bounds, accumulate(value.counts), strict=True))


def _label_values(labels: Labels) -> list[str]:
    """Values alone. Halves of characters, which no encoding has, are shown as question marks."""
    return [value.encode("utf-8", "replace").decode() for _, value in labels]
