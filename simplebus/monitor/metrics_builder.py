"""Builder for lists of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias, TypeVar

from simplebus.core.histogram import HistogramSnapshot
from simplebus.monitor.snapshot import Metric, MetricKind, Value

ReasonT = TypeVar("ReasonT", bound=str)
MetricField: TypeAlias = tuple[str, str, str]
"""Name of a metric, the field with its value, and the help text."""


class MetricsBuilder:
    """Collects metrics value by value, in the order in which they are added."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def counter(self, name: str, help: str, value: float, **labels: str) -> None:
        """Add a value that only grows."""
        self._add(MetricKind.COUNTER, name, help, value, labels)

    def counter_by_reason(
        self,
        name: str,
        help: str,
        counts: Mapping[ReasonT, float],
        reasons: Iterable[ReasonT],
        **labels: str,
    ) -> None:
        """Add a value for each reason that has occurred, and 0 for each of `reasons`.

        Prometheus sees a first increase only if the value before it was 0, not absent.
        """
        values, names = self._values_of(MetricKind.COUNTER, name, help), tuple(labels.items())
        for reason, value in (dict.fromkeys(reasons, 0) | dict(counts)).items():
            values.append(((*names, ("reason", str(reason))), value))

    def gauge(self, name: str, help: str, value: float, **labels: str) -> None:
        """Add a value that may grow and shrink."""
        self._add(MetricKind.GAUGE, name, help, value, labels)

    def histogram(self, name: str, help: str, value: HistogramSnapshot, **labels: str) -> None:
        """Add a histogram."""
        self._add(MetricKind.HISTOGRAM, name, help, value, labels)

    def fields(
        self, kind: MetricKind, source: object, fields: Iterable[MetricField], **labels: str
    ) -> None:
        """Add the values of fields of `source`."""
        names = tuple(labels.items())
        for name, field, help in fields:
            self._values_of(kind, name, help).append((names, getattr(source, field)))

    def _add(
        self, kind: MetricKind, name: str, help: str, value: Value, labels: Mapping[str, str]
    ) -> None:
        self._values_of(kind, name, help).append((tuple(labels.items()), value))

    def _values_of(
        self, kind: MetricKind, name: str, help: str
    ) -> list[tuple[tuple[tuple[str, str], ...], Value]]:
        """Return the list of the values of a metric, which is created if needed."""
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = Metric(name, kind, help, [])
        return metric.values

    def build(self) -> list[Metric]:
        """Return all metrics."""
        return list(self._metrics.values())
