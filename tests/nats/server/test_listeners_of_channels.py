"""NATS subscriptions in the reply to the explain request."""

from __future__ import annotations

import pytest

from simplebus.core.protocol.inquiry import (
    ChannelInfo,
    ChannelInquiry,
    ListenerInfo,
    SessionInfo,
    SessionInquiry,
)
from simplebus.nats.server import routes
from tests.nats.bus.two_listeners import NatsBrokerHarness


def channel_info(harness: NatsBrokerHarness, channel: str) -> ChannelInfo:
    report = harness.broker.inquiry_handler.build_report(ChannelInquiry(channel))
    assert isinstance(report, ChannelInfo)
    return report


@pytest.fixture(autouse=True, params=[2, 1024])
def listeners_per_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_LISTENERS_PER_STEP", request.param)


def test_lists_subscriptions_and_queue_groups() -> None:
    harness = NatsBrokerHarness()
    harness.client(b"SUB orders.* 1\r\nSUB orders.eu q 2\r\nSUB shops 3\r\n")
    harness.client(b"SUB orders.eu q 1\r\nSUB orders.> q 2\r\nSUB \xc3\xbc.> r 3\r\n")
    report = channel_info(harness, "orders.eu").listeners
    assert sorted(report, key=lambda listener: listener.queue) == [
        ListenerInfo(pattern="orders.*", peer="a client"),
        ListenerInfo(pattern="orders.eu", queue="q", members=3, peer="a client"),
    ]
    assert [
        (listener.pattern, listener.queue) for listener in channel_info(harness, "ü.x").listeners
    ] == [("ü.>", "r")]
    assert channel_info(harness, "elsewhere").listeners == []


def test_counts_listeners_above_the_maximum() -> None:
    harness = NatsBrokerHarness()
    harness.client(b"".join(b"SUB a %d\r\n" % n for n in range(100)))
    report = channel_info(harness, "a")
    assert (len(report.listeners), report.listeners_left_out) == (64, 36)


def test_bound_and_requested_classes_are_not_listed() -> None:
    harness = NatsBrokerHarness()
    harness.broker.store.class_registry.bind_subject("orders.>", 7)
    client = harness.client(b"SUB $SB.SUB.7 1\r\n")
    assert channel_info(harness, "orders.eu").listeners == []
    [report] = channel_info(harness, "orders.eu").classes
    assert (report.class_id, report.subjects) == (7, ["orders.>"])
    client.send(b"PUB orders.eu 1\r\nx\r\n")
    assert channel_info(harness, "orders.eu").classes[0].stored == 1


def test_acked_subscription_is_listed_as_a_session() -> None:
    harness = NatsBrokerHarness()
    harness.client(b"SUB $SB.SUB.7 1\r\n")
    [number] = harness.broker.sessions
    report = harness.broker.inquiry_handler.build_report(SessionInquiry(number))
    assert isinstance(report, SessionInfo)
    assert (report.version, [position.class_id for position in report.positions]) == (-1, [7])
