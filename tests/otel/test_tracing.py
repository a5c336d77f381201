"""Tests of tracing and metrics with OpenTelemetry's SDK."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

import simplebus
from simplebus.otel import OpenTelemetryTracing
from tests.support.programs import run_server


@dataclass
class Order:
    """A typed message."""

    number: int


class Recorder:
    """Tracing whose spans and metrics are kept in memory."""

    def __init__(self, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**options)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.tracing = OpenTelemetryTracing(
            self.provider, MeterProvider(metric_readers=[self._reader])
        )

    def find_spans(self, operation: str) -> list[ReadableSpan]:
        """Return the ended spans of an operation."""
        return [
            finished_span
            for finished_span in self._exporter.get_finished_spans()
            if (finished_span.attributes or {}).get("messaging.operation.name") == operation
        ]

    def find_span(self, operation: str) -> ReadableSpan:
        (span,) = self.find_spans(operation)
        return span

    def read_metrics(self) -> dict[str, list[Any]]:
        """Return the data points by metric."""
        data: Any = self._reader.get_metrics_data()
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return {
        name.removeprefix("messaging."): value for name, value in (span.attributes or {}).items()
    }


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return (
        span.parent is not None
        and parent.context is not None
        and span.context is not None
        and (span.parent.span_id, span.context.trace_id)
        == (parent.context.span_id, parent.context.trace_id)
    )


async def test_handler_continues_the_trace_of_the_publisher(recorder: Recorder) -> None:
    async with simplebus.MemoryBus(tracing=recorder.tracing) as bus:

        async def forward(message: simplebus.Message) -> None:
            await bus.publish(message.payload, class_id="mails")

        bus.handle("orders", forward)
        await bus.publish(b"7 books", class_id="orders", channel="eu.paid")
    publish, forwarded = recorder.find_spans("publish")
    process = recorder.find_span("process")
    assert (publish.name, publish.kind) == ("publish orders", SpanKind.PRODUCER)
    assert (process.name, process.kind) == ("process orders", SpanKind.CONSUMER)
    assert is_child(process, publish)
    assert is_child(forwarded, process)
    assert attributes_of(publish) == {
        "system": "simplebus",
        "operation.name": "publish",
        "operation.type": "send",
        "destination.name": "orders",
    }
    assert attributes_of(process) == {
        "system": "simplebus",
        "operation.name": "process",
        "operation.type": "process",
        "destination.name": "orders",
        "message.id": "0",
        "message.body.size": 7,
        "simplebus.channel": "eu.paid",
        "simplebus.attempt": 1,
    }


async def test_delivery_is_linked_to_the_publishers(recorder: Recorder) -> None:
    async with simplebus.MemoryBus(tracing=recorder.tracing) as bus, bus.subscribe("a") as orders:
        await bus.publish_many([b"1", b"2"], class_id="a")
        batch = await anext(orders.batches())
        assert [message.payload for message in batch] == [b"1", b"2"]
    publish, receive = recorder.find_span("publish"), recorder.find_span("receive")
    assert publish.context is not None
    assert (receive.name, receive.kind) == ("receive a", SpanKind.CLIENT)
    assert [link.context.span_id for link in receive.links] == [publish.context.span_id] * 2
    assert attributes_of(publish)["batch.message_count"] == 2
    assert attributes_of(receive)["batch.message_count"] == 2


async def take_by_get(orders: Any, count: int) -> list[Any]:
    return [(await orders.get(60)).payload for _ in range(count)]


async def take_by_loop(orders: Any, count: int) -> list[Any]:
    found = []
    async for message in orders.messages():
        found.append(message.payload)
        if len(found) == count:
            return found
    raise AssertionError


async def take_by_batches(orders: Any, count: int) -> list[Any]:
    found: list[Any] = []
    async for batch in orders.batches():
        found += [message.payload for message in batch]
        if len(found) == count:
            return found
    raise AssertionError


async def take_by_values(orders: Any, count: int) -> list[Any]:
    found = []
    async for value in orders:
        found.append(b'{"number":%d}' % value.number)
        if len(found) == count:
            return found
    raise AssertionError


@pytest.mark.parametrize("take", [take_by_get, take_by_loop, take_by_batches, take_by_values])
async def test_every_way_to_messages_is_counted(
    recorder: Recorder, take: Callable[[Any, int], Any]
) -> None:
    registry = simplebus.Registry()
    registry.bind(Order, name="orders")
    memory = simplebus.MemoryBus(tracing=recorder.tracing, registry=registry)
    async with memory as bus, bus.subscribe(Order) as orders:
        for number in range(3):
            await bus.publish(Order(number))
        await bus.publish_many([Order(3), Order(4)])
        found = await take(orders, 5)
    assert found == [b'{"number":%d}' % number for number in range(5)]
    receives = recorder.find_spans("receive")
    assert sum(attributes_of(each)["batch.message_count"] for each in receives) == 5
    assert sum(len(each.links) for each in receives) == 5
    metrics = recorder.read_metrics()
    for name in ("sent", "consumed"):
        points = metrics[f"messaging.client.{name}.messages"]
        assert sum(point.value for point in points) == 5
        assert {point.attributes["messaging.destination.name"] for point in points} == {"orders"}
    assert sum(each.count for each in metrics["messaging.client.operation.duration"]) == 4


async def test_error_of_a_handler_is_recorded(recorder: Recorder) -> None:
    def fail(message: object) -> None:
        raise LookupError("no such customer")

    memory = simplebus.MemoryBus(tracing=recorder.tracing, raise_errors=False)
    async with memory as bus:
        bus.handle("orders", fail, max_deliveries=1)
        await bus.publish(b"x", class_id="orders")
    process = recorder.find_span("process")
    assert process.status.status_code is StatusCode.ERROR
    assert process.status.description == "no such customer"
    assert attributes_of(process)["error.type"] == "LookupError"
    assert [event.name for event in process.events] == ["exception"]
    (point,) = recorder.read_metrics()["messaging.process.duration"]
    assert point.attributes["error.type"] == "LookupError"


async def test_error_of_a_publisher_is_recorded(recorder: Recorder) -> None:
    async with simplebus.MemoryBus(tracing=recorder.tracing) as bus:
        with pytest.raises(ValueError, match="channel"):
            await bus.publish(b"x", class_id="orders", channel="a..b")
    assert recorder.find_span("publish").status.status_code is StatusCode.ERROR


async def test_loop_continues_the_trace_by_a_call(recorder: Recorder) -> None:
    tracing = recorder.tracing
    async with simplebus.MemoryBus(tracing=tracing) as bus, bus.subscribe("a") as orders:
        await bus.publish(b"x", class_id="a")
        message = await orders.get(60)
        with tracing.process(message, "a") as span:
            span.set_attribute("customer", 7)
    process = recorder.find_span("process")
    assert is_child(process, recorder.find_span("publish"))
    assert attributes_of(process)["customer"] == 7


async def test_own_headers_stay_and_old_contexts_are_replaced(recorder: Recorder) -> None:
    headers = [
        ("by", "ada"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("tracestate", "old=1"),
    ]
    async with (
        simplebus.MemoryBus(tracing=recorder.tracing) as bus,
        bus.subscribe("a") as orders,
    ):
        await bus.publish(b"x", class_id="a", headers=headers)
        message = await orders.get(60)
    context = recorder.find_span("publish").context
    assert context is not None
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    assert message.headers == (("by", "ada"), ("traceparent", traceparent))


async def test_tracestate_is_passed_on(recorder: Recorder) -> None:
    state = trace.TraceState([("vendor", "1")])
    parent = trace.SpanContext(0x1234, 0x56, True, trace.TraceFlags(1), state)
    async with (
        simplebus.MemoryBus(tracing=recorder.tracing) as bus,
        bus.subscribe("a") as orders,
    ):
        with trace.use_span(trace.NonRecordingSpan(parent)):
            await bus.publish(b"x", class_id="a")
        headers = dict((await orders.get(60)).headers)
    assert headers["tracestate"] == "vendor=1"
    assert headers["traceparent"].startswith(f"00-{0x1234:032x}-")


async def test_unsampled_publisher_is_passed_on() -> None:
    recorder = Recorder(sampler=ALWAYS_OFF)
    async with (
        simplebus.MemoryBus(tracing=recorder.tracing) as bus,
        bus.subscribe("a") as orders,
    ):
        await bus.publish(b"x", class_id="a")
        headers = dict((await orders.get(60)).headers)
    assert not int(headers["traceparent"][-2:], 16) & trace.TraceFlags.SAMPLED
    assert not recorder.find_spans("publish") + recorder.find_spans("receive")


async def test_request_has_a_span(recorder: Recorder) -> None:
    async with simplebus.MemoryBus(tracing=recorder.tracing) as bus:
        bus.handle("sums", lambda message: message.payload * 2)
        reply = await bus.request(b"x", class_id="sums")
        assert reply.payload == b"xx"
    request = recorder.find_span("request")
    assert request.name == "request sums"
    assert is_child(recorder.find_span("process"), request)


async def test_without_a_provider_messages_have_no_context() -> None:
    provider = trace.NoOpTracerProvider()
    tracing = OpenTelemetryTracing(provider)
    async with simplebus.MemoryBus(tracing=tracing) as bus, bus.subscribe("a") as orders:
        await bus.publish(b"x", class_id="a")
        bus.publish_nowait(b"y", class_id="a", headers={"by": "ada"})
        assert [(await orders.get(60)).headers for _ in range(2)] == [(), (("by", "ada"),)]


async def test_handlers_that_run_together_have_their_own_spans(recorder: Recorder) -> None:
    arrived = 0
    all_arrived = anyio.Event()

    async def wait_for_others(message: simplebus.Message) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 3:
            all_arrived.set()
        await all_arrived.wait()
        await bus.publish(message.payload, class_id="done")

    async with simplebus.MemoryBus(tracing=recorder.tracing) as bus:
        bus.handle("orders", wait_for_others, concurrency=3)
        for payload in (b"0", b"1", b"2"):
            await bus.publish(payload, class_id="orders")
    processes = recorder.find_spans("process")
    publishes = recorder.find_spans("publish")
    originals = [each for each in publishes if each.name == "publish orders"]
    forwarded = [each for each in publishes if each.name == "publish done"]
    for group, parents in ((processes, originals), (forwarded, processes)):
        found = [next(parent for parent in parents if is_child(span, parent)) for span in group]
        assert len(set(map(id, found))) == 3


def use_blocking_bus(url: str, tracing: OpenTelemetryTracing) -> None:
    """Publish, receive, request and handle messages, with one failure of a handler."""

    def fail(message: simplebus.Message) -> None:
        raise LookupError("no such customer")

    with simplebus.connect_blocking(url, timeout=60, tracing=tracing) as bus:
        with bus.subscribe("orders") as orders:
            bus.publish(b"x", class_id="orders")
            assert orders.get(60).payload == b"x"
        bus.publish_many([b"1", b"2"], class_id="orders", confirm=False)
        with bus.subscribe("orders", start="earliest") as orders:
            assert len(next(iter(orders.batches()))) == 2
        with pytest.raises(TimeoutError):
            bus.request(b"x", class_id="sums", timeout=0.0)
        bus.handle("failing", fail, max_deliveries=1)
        bus.publish_nowait(b"y", class_id="failing")
        bus.drain()


def test_blocking_client_through_a_server(recorder: Recorder) -> None:
    with (
        run_server("--no-nats", "--no-http") as (_, url),
        pytest.raises(ExceptionGroup, match="handlers failed 1 time"),
    ):
        use_blocking_bus(url, recorder.tracing)
    assert len(recorder.find_spans("publish")) == 3
    assert recorder.find_span("request").status.status_code is StatusCode.ERROR
    assert len(recorder.find_spans("receive")) == 3
    assert recorder.find_span("process").status.status_code is StatusCode.ERROR


async def test_async_client_through_a_server(recorder: Recorder) -> None:
    with run_server("--no-nats", "--no-http") as (_, url):
        async with simplebus.connect(url, timeout=60, tracing=recorder.tracing) as bus:
            bus.handle("orders", lambda message: None)
            await bus.publish(b"x", class_id="orders")
            await bus.drain()
    assert is_child(recorder.find_span("process"), recorder.find_span("publish"))


def test_works_under_asyncio(recorder: Recorder) -> None:
    anyio.run(test_handler_continues_the_trace_of_the_publisher, recorder)
