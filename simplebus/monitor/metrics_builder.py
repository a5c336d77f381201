"""Metrics, gathered value by value.

Rule 1: a metric is named once, where its first value is added; its values come in the order in
which they are added.
"""

from __future__ import annotations

from collections.abc import Mapping

from simplebus.core.histogram import HistogramSnapshot
from simplebus.monitor.snapshot import Metric, MetricKind, Value


class MetricsBuilder:
    """Metrics that are being gathered."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def counter(self, name: str, help: str, value: float, **labels: str) -> None:
        """One value of what only grows."""
        self._add(name, MetricKind.COUNTER, help, value, labels)

    def gauge(self, name: str, help: str, value: float, **labels: str) -> None:
        """One value of what comes and goes."""
        self._add(name, MetricKind.GAUGE, help, value, labels)

    def histogram(self, name: str, help: str, value: HistogramSnapshot, **labels: str) -> None:
        """One histogram."""
        self._add(name, MetricKind.HISTOGRAM, help, value, labels)

    def _add(
        self, name: str, kind: MetricKind, help: str, value: Value, labels: Mapping[str, str]
    ) -> None:
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = Metric(name, kind, help, [])
        metric.values.append((tuple(labels.items()), value))

    def build(self) -> list[Metric]:
        """All of them."""
        return list(self._metrics.values())
