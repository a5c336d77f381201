"""Conversion of storage times when clocks differ or are changed."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
import trio

import simplebus
from simplebus.core.protocol.envelope_batch import Envelope, encode
from simplebus.jetstream import stream_clock
from simplebus.jetstream.stream_clock import ANSWER_VALID_SECONDS, RECENT_SECONDS, StreamClock
from tests.jetstream.consume.test_feed import ENVELOPE, FakeServer, message
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import PATIENCE_SECONDS, address, options, stateless_server

NOW = 2_000_000.0
"""Time of the server's clock."""


def said_at(time: float) -> dict[str, str]:
    return {"ts": datetime.fromtimestamp(time, UTC).isoformat()}


def date(clock: StreamClock, stored: float, came_at: float = NOW) -> float | None:
    found = clock.to_local_times(np.array([stored]), came_at)
    return None if found is None else float(found[0])


def test_recent_message_needs_no_time_query() -> None:
    clock = StreamClock()
    assert date(clock, NOW - RECENT_SECONDS / 2) == NOW - RECENT_SECONDS / 2
    assert not clock.begin_query()
    assert date(clock, NOW - 2 * RECENT_SECONDS) is None
    assert date(clock, NOW + 2 * RECENT_SECONDS) is None


@pytest.mark.parametrize("ahead", [-3600.0, -60.0, 60.0, 3600.0])
@pytest.mark.parametrize("age", [0.0, 5.0, 90.0])
def test_converts_times_by_stream_clock(ahead: float, age: float) -> None:
    clock, stored = StreamClock(), NOW + ahead - age
    assert date(clock, stored) is None
    assert clock.begin_query()
    clock.finish_query(NOW + 0.1, NOW + 0.3, said_at(NOW + ahead + 0.2))
    assert date(clock, stored) == pytest.approx(NOW - age, abs=0.2)
    # From now on, immediate deliveries are dated without a request.
    assert date(clock, NOW + ahead + 10, NOW + 10) == pytest.approx(NOW + 10, abs=0.2)
    assert not clock.begin_query()


def test_queries_time_once_and_again_for_later_messages() -> None:
    clock = StreamClock()
    assert date(clock, NOW - 90) is None
    assert (clock.begin_query(), clock.begin_query(), clock.needs_answer) == (True, False, True)
    assert date(clock, NOW - 80) is None
    assert not clock.begin_query()
    assert date(clock, NOW - 80, NOW + 1) is None  # Arrived after the request.
    clock.finish_query(NOW, NOW + 2, said_at(NOW + 1))
    assert (date(clock, NOW - 90), date(clock, NOW - 80)) == (NOW - 90, NOW - 80)
    assert date(clock, NOW - 80, NOW + ANSWER_VALID_SECONDS) is not None
    assert date(clock, NOW - 80, NOW + 1) is None
    assert clock.begin_query()
    clock.finish_query(NOW + 3, NOW + 4, None)  # The server did not answer.
    assert not clock.needs_answer
    assert date(clock, NOW - 80, NOW + 1) is None
    assert clock.begin_query()


@pytest.mark.parametrize("info", [{}, {"ts": 7}, {"ts": "soon"}, {"ts": "0001-01-01T00:00:00"}])
def test_server_without_time_blocks_nothing(info: dict[str, str]) -> None:
    clock = StreamClock()
    assert date(clock, NOW - 90) is None
    clock.finish_query(NOW, NOW, info)
    assert date(clock, NOW - 90) is not None


def envelope(sequence: int, *, stored: float, **times: int) -> bytes:
    content = encode(Envelope(**times), b"%d" % sequence)
    return message(sequence, content, head=ENVELOPE, stored=round(stored * 1e9))


def test_timed_messages_wait_for_stream_time() -> None:
    stateless_server = FakeServer()
    clock, server_clock = stateless_server.feed.cls.clock, stateless_server.broker.clock
    server_clock.now = NOW  # The stream's clock is set back by an hour.
    fresh_time, old = (NOW - 3600 - age for age in (0, 31))
    stateless_server.receive_from_consumer(
        message(1),
        envelope(2, stored=fresh_time, expires_ms=30_000),
        envelope(3, stored=old, expires_ms=30_000),
        message(4),
    )
    assert stateless_server.drain_sent_messages() == [(0, b"1")]
    stateless_server.ack(0, 1)
    assert not stateless_server.feed.is_busy  # The subscriber has received nothing,
    assert not stateless_server.feed.has_all({})  # and not everything has arrived.
    assert clock.begin_query()
    clock.finish_query(NOW, NOW, said_at(NOW - 3600))
    stateless_server.feed.fill()
    stateless_server.broker.subscription_manager.notify_position(stateless_server.feed.position)
    assert [payload for _, payload in stateless_server.drain_sent_messages()] == [b"2", b"4"]
    server_clock.now += 5
    stateless_server.receive_from_consumer(envelope(5, stored=fresh_time + 5, not_before_ms=10_000))
    assert stateless_server.drain_sent_messages() == []
    server_clock.now += 10
    stateless_server.broker.run_due_wakeups()
    assert [payload for _, payload in stateless_server.drain_sent_messages()] == [b"5"]
    assert not clock.needs_answer


async def test_delivers_waiting_messages_after_time_query(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is idle otherwise."""
    monkeypatch.setattr(stream_clock, "RECENT_SECONDS", -1.0)  # Each message needs a request.
    payloads = [b"%d" % number for number in range(500)]
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            stateless_server(options(jetstream_server.url)) as server,
            simplebus.connect(address(server)) as bus,
        ):
            await bus.publish_many(payloads, class_id=1, expires=3600)
            await bus.flush()
            received: list[bytes] = []
            async with bus.subscribe(1) as messages:
                async for batch in messages.batches():
                    received += batch.payloads
                    if len(received) == len(payloads):
                        break
    assert received == payloads
