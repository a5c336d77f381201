"""Tests of the spans of a server."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import simplebus
from simplebus.commands.serve.command import parse_arguments
from simplebus.commands.serve.settings import build_plan
from simplebus.otel.server_spans import ServerSpans
from simplebus.server.observability.message_spans import MessageSpans
from tests.support.running_server import serving, wait_until

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED, UNSAMPLED = (f"00-{TRACE_ID}-00f067aa0ba902b7-{flags}" for flags in ("01", "00"))


def make_spans() -> tuple[ServerSpans, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return ServerSpans(provider), exporter


def test_span_is_a_child_of_the_publisher() -> None:
    spans, exporter = make_spans()
    spans.record_delivery("orders", 7, {"traceparent": SAMPLED}, 2.0)
    (span,) = exporter.get_finished_spans()
    assert span.name == "deliver orders"
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == TRACE_ID
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == 2_000_000_000
    assert span.attributes == {
        "messaging.system": "simplebus",
        "messaging.operation.name": "deliver",
        "messaging.destination.name": "orders",
        "messaging.message.id": "7",
    }


def test_unsampled_traces_have_no_span() -> None:
    spans, exporter = make_spans()
    spans.record_delivery("orders", 7, {"traceparent": UNSAMPLED}, 2.0)
    assert not exporter.get_finished_spans()


class Recorder:
    """Keeps the deliveries that a server selects."""

    def __init__(self) -> None:
        self.deliveries: list[tuple[str, int, str]] = []

    def record_delivery(
        self, class_name: str, sequence: int, headers: Mapping[str, str], seconds: float
    ) -> None:
        assert seconds >= 0
        self.deliveries.append((class_name, sequence, headers["traceparent"]))


async def test_server_selects_acknowledged_messages_with_a_context() -> None:
    recorder = Recorder()
    async with (
        serving(http_port=0, span_recorder=recorder) as server,
        simplebus.connect(server.addresses[0]) as bus,
        bus.subscribe("orders", auto_ack=False) as orders,
    ):
        await bus.publish(b"\x3c\r\nx", class_id="orders", headers={"traceparent": SAMPLED})
        message = await orders.get(60)
        assert not recorder.deliveries
        message.ack()
        await wait_until(lambda: bool(recorder.deliveries))
    assert recorder.deliveries == [("orders", 0, SAMPLED)]


async def test_messages_without_a_context_have_no_span() -> None:
    recorder = Recorder()
    async with (
        serving(http_port=0, span_recorder=recorder) as server,
        simplebus.connect(server.addresses[0]) as bus,
        bus.subscribe("orders") as orders,
    ):
        for headers in (None, {"by": "ada"}):
            await bus.publish(b"x", class_id="orders", headers=headers)
            await orders.get(60)
        await bus.flush()
        latency = server.server.latency
        assert latency is not None
        await wait_until(lambda: latency.ack_latency.snapshot().count > 0)
    assert not recorder.deliveries


async def test_at_most_ten_messages_a_second_are_considered() -> None:
    recorder = Recorder()
    spans = MessageSpans(recorder)
    async with (
        serving(http_port=0) as server,
        simplebus.connect(server.addresses[0]) as bus,
        bus.subscribe("orders", auto_ack=False),
    ):
        await bus.publish(b"x", class_id="orders", headers={"traceparent": SAMPLED})
        (cls,) = (cls for cls in server.server.broker.classes.values() if cls.name == "orders")
        counts = []
        for seconds in (0.0, 0.05, 0.09, 0.11, 0.2, 0.22):
            spans.record(cls, cls.probe_accepted_at + seconds)
            counts.append(len(recorder.deliveries))
    assert counts == [1, 1, 1, 2, 2, 3]


def test_option_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build_plan(parse_arguments(["--trace-messages"]))
    assert isinstance(plan.options.span_recorder, ServerSpans)
    assert build_plan(parse_arguments([])).options.span_recorder is None
    monkeypatch.setitem(sys.modules, "simplebus.otel.server_spans", None)
    with pytest.raises(ValueError, match="--trace-messages needs OpenTelemetry"):
        build_plan(parse_arguments(["--trace-messages"]))


def test_option_needs_the_http_port() -> None:
    with pytest.raises(ValueError, match="--trace-messages needs the HTTP port"):
        build_plan(parse_arguments(["--trace-messages", "--no-http"]))


def test_global_provider_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    ServerSpans().record_delivery("orders", 7, {"traceparent": SAMPLED}, 2.0)
    assert [span.name for span in exporter.get_finished_spans()] == ["deliver orders"]
