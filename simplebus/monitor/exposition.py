"""Metrics in the Prometheus text formats, encoded with the Prometheus client library.

Encoded metrics are cached until their values change: encoding is slow and most metrics do not
change between two scrapes. Untrusted text appears in label values only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain

from msgspec import structs
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
"""Prefix of the standard metrics of all client libraries, which get no prefix of ours."""
VALUES_PER_PART = 100
"""Values that are encoded at once. The caller encodes several parts in one step of the event loop.
"""
_OPENMETRICS_END = b"# EOF\n"
"""End mark that the OpenMetrics encoder writes after each metric."""


class Exposition:
    """Encodes the metrics of one program and caches the results."""

    def __init__(self) -> None:
        self._cache: dict[tuple[bool, str, int], tuple[Metric, bytes]] = {}
        """Latest part of a metric and its encoding, by format, name and index of the part."""

    def encode(self, metrics: Iterable[Metric], accept: str = "") -> tuple[str, Iterator[bytes]]:
        """Return the content type and the encoded metrics.

        The format is OpenMetrics 1.0 if the Accept header `accept` names it, else text format
        0.0.4.
        """
        # The library's own choice fails at versions that are no numbers.
        is_openmetrics = "application/openmetrics-text" in accept
        parts = (part for metric in metrics for part in self._encode_metric(metric, is_openmetrics))
        return (
            (OPENMETRICS_TYPE, chain(parts, [_OPENMETRICS_END]))
            if is_openmetrics
            else (TEXT_TYPE, parts)
        )

    def _encode_metric(self, metric: Metric, is_openmetrics: bool) -> Iterator[bytes]:
        """Encode a metric in parts with a limited number of values."""
        for first in range(0, max(1, len(metric.values)), VALUES_PER_PART):
            part = structs.replace(metric, values=metric.values[first : first + VALUES_PER_PART])
            cached, encoded = self._cache.get((is_openmetrics, metric.name, first), (None, b""))
            if part != cached:
                encoded = _encode_part(part, is_openmetrics)
                if first:  # The lines about the whole metric stand in the first part.
                    lines = encoded.splitlines(keepends=True)
                    encoded = b"".join(line for line in lines if not line.startswith(b"# "))
                self._cache[is_openmetrics, metric.name, first] = part, encoded
            yield encoded


def _encode_part(metric: Metric, is_openmetrics: bool) -> bytes:
    encode: Callable[[Collector], bytes] = (
        _generate_openmetrics if is_openmetrics else generate_latest
    )
    return encode(_SingleMetric(build_family(metric))).removesuffix(_OPENMETRICS_END)


class _SingleMetric(Collector):
    """Collector with one metric, as the library's encoders expect."""

    def __init__(self, build_family: Family) -> None:
        self.only = build_family

    def collect(self) -> Iterable[Family]:
        yield self.only


def build_family(metric: Metric) -> Family:
    """Convert a metric to the library's type. All its values must have the same label names."""
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
    """Return the name with the prefix, without the suffix of its kind."""
    return metric.name if metric.name.startswith(_PROCESS_PREFIX) else PREFIX + metric.name


def _cumulative_buckets(value: HistogramSnapshot) -> list[tuple[str, float]]:
    bounds = map(floatToGoString, (*value.bounds, float("inf")))
    return list(zip(bounds, accumulate(value.counts), strict=True))


def _label_values(labels: Labels) -> list[str]:
    """Return the label values. Lone surrogates are replaced by question marks."""
    return [value.encode("utf-8", "replace").decode() for _, value in labels]
