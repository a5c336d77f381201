"""Spans of a client, with W3C trace context in the headers of messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import Any

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

from simplebus.client.core.messages import Message
from simplebus.client.message_builder import Headers, header_pairs
from simplebus.core.errors import BusError
from simplebus.otel import conventions
from simplebus.otel.instruments import ClientInstruments

_SCOPE = "simplebus"
_LINKS_MAX = 128
"""Messages of a delivery whose contexts are linked, as many as the SDK keeps by default."""


class OpenTelemetryTracing:
    """Spans and metrics of clients, by OpenTelemetry's conventions for messaging.

    Pass it to `simplebus.connect`, `simplebus.connect_blocking` or `simplebus.MemoryBus`. Several
    clients may share it.

    Example:
        tracing = OpenTelemetryTracing()
        async with simplebus.connect(tracing=tracing) as bus:
            bus.handle("orders", send_mail)

    Args:
        tracer_provider: Provider of the tracer. None takes the global one.
        meter_provider: Provider of the meter. None takes the global one.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        meter = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
        self._instruments = ClientInstruments(meter)
        self._process_attributes: ContextVar[dict[str, str | int] | None] = ContextVar(
            "attributes of the present process span", default=None
        )

    @contextmanager
    def publish(
        self,
        destination: str,
        headers: Headers | None,
        *,
        operation: str = "publish",
        message_count: int | None = None,
    ) -> Iterator[Headers]:
        """Span around a publishing call. Yields the headers with the context of the span."""
        attributes = _describe_operation(operation, destination)
        span_attributes = {**attributes, conventions.OPERATION_TYPE: "send"}
        if message_count is not None:
            span_attributes[conventions.BATCH_MESSAGE_COUNT] = message_count
        started_at = perf_counter()
        with self._tracer.start_as_current_span(
            _name_span(operation, destination),
            kind=SpanKind.PRODUCER,
            attributes=span_attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield _inject_context(headers)
            except Exception as error:
                _record_error(span, error)
                attributes[conventions.ERROR_TYPE] = conventions.describe_error(error)
                raise
            finally:
                self._instruments.record_published(
                    1 if message_count is None else message_count,
                    perf_counter() - started_at,
                    attributes,
                )

    def receive(self, destination: str, messages: Iterable[Message[Any]]) -> None:
        """Record the delivery of messages, as one span that is linked to their publishers."""
        contexts, count = [], 0
        for count, message in enumerate(messages, 1):
            if count <= _LINKS_MAX:
                contexts.append(_extract_span_context(message))
        attributes = _describe_operation("receive", destination)
        self._instruments.record_received(count, attributes)
        self._tracer.start_span(
            _name_span("receive", destination),
            kind=SpanKind.CLIENT,
            attributes={
                **attributes,
                conventions.OPERATION_TYPE: "receive",
                conventions.BATCH_MESSAGE_COUNT: count,
            },
            links=[Link(context) for context in contexts if context.is_valid],
        ).end()

    @contextmanager
    def process(self, message: Message[Any], destination: str = "") -> Iterator[Span]:
        """Span around the processing of a message, a child of the span that published it.

        Handlers run inside such a span without a call. Use it in a loop over messages:

            async for message in orders.messages():
                with tracing.process(message, "orders"):
                    ...

        Args:
            message: The message.
            destination: Name of the class. Empty takes the id of the class.

        Yields:
            The span, for attributes of your own.
        """
        destination = destination or str(message.class_id)
        attributes = _describe_operation("process", destination)
        span_attributes = {
            **attributes,
            conventions.OPERATION_TYPE: "process",
            conventions.MESSAGE_ID: str(message.sequence),
            conventions.BODY_SIZE: len(message.payload),
            conventions.ATTEMPT: message.attempt,
        }
        context = _extract_context(message)
        if context is not None and message.channel:
            span_attributes[conventions.CHANNEL] = message.channel
        started_at = perf_counter()
        token = self._process_attributes.set(attributes)
        with self._tracer.start_as_current_span(
            _name_span("process", destination),
            context,
            kind=SpanKind.CONSUMER,
            attributes=span_attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except Exception as error:
                self.record_error(error)
                raise
            finally:
                self._process_attributes.reset(token)
                self._instruments.record_processed(perf_counter() - started_at, attributes)

    def record_error(self, error: Exception) -> None:
        """Record an error that a handler raised, in the current process span and its metric."""
        _record_error(trace.get_current_span(), error)
        if (attributes := self._process_attributes.get()) is not None:
            attributes[conventions.ERROR_TYPE] = conventions.describe_error(error)


def _describe_operation(operation: str, destination: str) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        conventions.SYSTEM: "simplebus",
        conventions.OPERATION_NAME: operation,
    }
    if destination:
        attributes[conventions.DESTINATION] = destination
    return attributes


def _name_span(operation: str, destination: str) -> str:
    return f"{operation} {destination}" if destination else operation


def _inject_context(headers: Headers | None) -> Headers:
    """Return the headers with the context of the current span instead of another one."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    replaced = {*carrier, "tracestate"} if "traceparent" in carrier else {*carrier}
    own_headers = [pair for pair in header_pairs(headers) if pair[0] not in replaced]
    return [*own_headers, *carrier.items()]


def _extract_context(message: Message[Any]) -> Context | None:
    """Return the context of the publisher; None if the metadata of the message is invalid."""
    try:
        return propagate.extract(dict(message.headers), Context())
    except BusError:
        return None


def _extract_span_context(message: Message[Any]) -> trace.SpanContext:
    context = _extract_context(message) or Context()
    return trace.get_current_span(context).get_span_context()


def _record_error(span: Span, error: Exception) -> None:
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, str(error)))
    span.set_attribute(conventions.ERROR_TYPE, conventions.describe_error(error))
