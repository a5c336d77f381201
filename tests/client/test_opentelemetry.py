"""Tests of OpenTelemetry contexts in message headers."""

from __future__ import annotations

from opentelemetry import propagate, trace

import simplebus
from tests.support.programs import run_server

SPAN = trace.SpanContext(0x1234, 0x56, is_remote=False, trace_flags=trace.TraceFlags(1))


def headers_within_span() -> dict[str, str]:
    """Return the headers of a message that is published within a span."""
    headers: dict[str, str] = {}
    with trace.use_span(trace.NonRecordingSpan(SPAN)):
        propagate.inject(headers)
    return headers


def parent_span(message: simplebus.Message) -> trace.SpanContext:
    """Return the parent span of a message."""
    context = propagate.extract(dict(message.headers))
    return trace.get_current_span(context).get_span_context()


async def test_headers_carry_the_span_of_the_publisher() -> None:
    async with simplebus.MemoryBus() as bus, bus.subscribe("orders") as orders:
        await bus.publish(b"x", class_id="orders", headers=headers_within_span())
        found = parent_span(await orders.get())
    assert (found.trace_id, found.span_id, found.is_remote) == (0x1234, 0x56, True)


def test_headers_carry_the_span_through_a_server() -> None:
    with (
        run_server("--no-nats", "--no-http") as (_, url),
        simplebus.connect_blocking(url, timeout=60) as bus,
        bus.subscribe("orders") as orders,
    ):
        bus.publish(b"x", class_id="orders", headers=headers_within_span())
        found = parent_span(orders.get(60))
    assert (found.trace_id, found.trace_flags) == (0x1234, 1)
