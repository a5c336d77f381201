"""Spans of a server, of single messages."""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, TracerProvider

from simplebus.otel import conventions

_OPERATION = "deliver"
_NANOSECONDS = 1_000_000_000


class ServerSpans:
    """Recorder of spans from the acceptance of a message until all subscriptions acknowledge it.

    Args:
        tracer_provider: Provider of the tracer. None takes the global one.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("simplebus.server", tracer_provider=tracer_provider)

    def record_delivery(
        self, class_name: str, sequence: int, headers: Mapping[str, str], seconds: float
    ) -> None:
        """Make a span that ends now, as a child of the span that published the message."""
        ended_at = time.time_ns()
        self._tracer.start_span(
            f"{_OPERATION} {class_name}",
            propagate.extract(headers, Context()),
            kind=SpanKind.INTERNAL,
            attributes={
                conventions.SYSTEM: "simplebus",
                conventions.OPERATION_NAME: _OPERATION,
                conventions.DESTINATION: class_name,
                conventions.MESSAGE_ID: str(sequence),
            },
            start_time=ended_at - int(seconds * _NANOSECONDS),
        ).end(ended_at)
