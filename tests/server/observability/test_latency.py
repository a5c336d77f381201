"""Tests of the latency measurement."""

from __future__ import annotations

from pathlib import Path

import trio
from prometheus_client.parser import text_string_to_metric_families

from simplebus.server.observability.latency import LatencyRecorder, RecentLatencies
from simplebus.server.run import RunningServer
from tests.support.http_peer import open_http_peer
from tests.support.running_server import ack, connect, message, serving, subscribe, wait_until


async def wait_for_metric(server: RunningServer, name: str) -> None:
    """Wait until /metrics shows an observation; its snapshot may be half a second old."""
    peer = await open_http_peer(server)
    while True:
        text = (await peer.request("/metrics")).body.decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        if any(s.name == f"simplebus_{name}_count" and s.value for s in samples):
            return
        await trio.sleep(0.05)


async def test_confirm_and_ack_latency_are_measured() -> None:
    async with serving(http_port=0) as server:
        peer = await connect(server, [1])
        await peer.send(subscribe() + message(b"x") * 3)
        await peer.read_messages(3)
        assert server.monitor is not None
        timing = server.monitor.collector.latency
        assert timing.ack_latency.snapshot().count == 0
        await peer.send(ack(0, 3))
        await wait_until(lambda: timing.ack_latency.snapshot().count == 1)
        assert timing.confirm_latency.snapshot().count >= 1
        await wait_for_metric(server, "publish_ack_seconds")


async def test_confirm_latency_includes_the_journal_write(tmp_path: Path) -> None:
    async with serving(http_port=0, data_dir=tmp_path) as server:
        peer = await connect(server, [1])
        await peer.send(message(b"x"))
        assert server.monitor is not None
        timing = server.monitor.collector.latency
        await wait_until(lambda: timing.confirm_latency.snapshot().count == 1)
        await wait_for_metric(server, "journal_write_seconds")


async def test_without_monitoring_no_latency_is_measured() -> None:
    async with serving() as server:
        assert server.server.latency is None
        peer = await connect(server, [1])
        await peer.send(subscribe() + message(b"x"))
        await peer.read_messages(1)
        await peer.send(ack(0, 1))
        await wait_until(lambda: server.server.broker.classes[1].statistics().acknowledged == 1)
        assert server.server.broker.classes[1].probe_observer is None


async def test_measures_event_loop_delay(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving() as server, trio.open_nursery() as nursery:
        timing = LatencyRecorder(server.server.broker)
        nursery.start_soon(timing.measure_loop_delay)
        await trio.sleep(1.05)
        before = timing.loop_delay.snapshot()
        assert before.count == 10
        assert before.quantile(1.0) <= 0.0001
        autojump_clock.jump(3.0)
        await trio.sleep(0.2)
        late = timing.loop_delay.snapshot().difference(before)
        assert late.quantile(1.0) > 2.5
        nursery.cancel_scope.cancel()


async def test_recent_latencies_cover_the_last_minute(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving() as server:
        timing, recent = LatencyRecorder(server.server.broker), RecentLatencies()
        recent.snapshot(timing)
        timing.loop_delay.observe(5.0)
        assert recent.snapshot(timing)[2].count == 1
        for _ in range(14):
            await trio.sleep(5)
            recent.snapshot(timing)
        assert recent.snapshot(timing)[2].count == 0
