"""Metrics of a client through the API of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.metrics import Meter

from simplebus.otel import conventions

Attributes = Mapping[str, str | int]


class ClientInstruments:
    """Counters and histograms of a client. Without a configured SDK they record nothing."""

    def __init__(self, meter: Meter) -> None:
        boundaries = conventions.DURATION_BOUNDARIES
        self._sent = meter.create_counter(
            conventions.SENT_MESSAGES, unit="{message}", description="Published messages."
        )
        self._consumed = meter.create_counter(
            conventions.CONSUMED_MESSAGES, unit="{message}", description="Delivered messages."
        )
        self._operation_seconds = meter.create_histogram(
            conventions.OPERATION_DURATION,
            unit="s",
            description="Duration of publishing calls.",
            explicit_bucket_boundaries_advisory=boundaries,
        )
        self._process_seconds = meter.create_histogram(
            conventions.PROCESS_DURATION,
            unit="s",
            description="Duration of the processing of a message.",
            explicit_bucket_boundaries_advisory=boundaries,
        )

    def record_published(self, count: int, seconds: float, attributes: Attributes) -> None:
        """Record one publishing call."""
        self._sent.add(count, attributes)
        self._operation_seconds.record(seconds, attributes)

    def record_received(self, count: int, attributes: Attributes) -> None:
        """Record delivered messages."""
        self._consumed.add(count, attributes)

    def record_processed(self, seconds: float, attributes: Attributes) -> None:
        """Record the processing of one message."""
        self._process_seconds.record(seconds, attributes)
