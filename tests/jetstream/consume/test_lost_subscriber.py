"""The messages of a disconnected subscriber go to the next one at once, before the ack wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio

from simplebus.core.protocol import frames
from simplebus.jetstream.consume.consumers import ConsumerManager
from simplebus.jetstream.consume.feed import OpenedConsumer
from simplebus.jetstream.consume.returned_messages import ExpectedRedeliveries
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    cluster_of,
    options,
    stateless_server,
    until,
)
from tests.support import running_server


async def test_returned_messages_arrive_despite_trim(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that removes messages drops pending redeliveries of later messages."""
    resume = ConsumerManager._resume
    cluster = options(jetstream_server.url, ack_wait_seconds=10 * PATIENCE_SECONDS)
    async with (
        stateless_server(cluster) as first_server,
        stateless_server(cluster) as second_server,
    ):
        first, second = (
            await running_server.connect(first_server, [3]),
            await running_server.connect(second_server, [3]),
        )
        await first.send(frames.encode(frames.SUBSCRIBE, class_id=3))
        for number in range(5):
            content = b"%d" % number
            await second.send(frames.encode(frames.MESSAGE, class_id=3, content=content))
        assert len(await first.read_messages(5)) == 5
        await first.send(frames.encode_ack(class_id=3, timer_index=0, first=0, last=1))
        await first.stream.aclose()
        await until(
            lambda: not (first_server.server.broker.sessions or cluster_of(first_server).is_busy)
        )

        async def trimmed(
            self: ConsumerManager, class_id: int, *args: Any, **kwargs: Any
        ) -> OpenedConsumer:
            found = await resume(self, class_id, *args, **kwargs)
            await cluster_of(first_server).consumers.trim(class_id)
            return found

        monkeypatch.setattr(ConsumerManager, "_resume", trimmed)
        await second.send(frames.encode(frames.SUBSCRIBE, class_id=3))
        with trio.fail_after(PATIENCE_SECONDS):
            assert [each for _, each in await second.read_messages(4)] == [b"1", b"2", b"3", b"4"]


def test_repeats_return_of_overdue_messages() -> None:
    awaited = ExpectedRedeliveries({4: b"four", 5: b"five"})
    assert not awaited.retry_overdue(0.0, has_request=True)
    assert not awaited.retry_overdue(0.9, has_request=False)  # Messages arrive only on request.
    assert not awaited.retry_overdue(1.0, has_request=True)
    awaited.remove_received(np.array([9]))
    retried = awaited.retry_overdue(2.0, has_request=True)
    assert (retried.count(b"PUB four "), retried.count(b"PUB five ")) == (1, 1)
    awaited.remove_received(np.array([4]))
    assert not awaited.retry_overdue(3.0, has_request=True)  # The deadline starts then.
    assert awaited.retry_overdue(5.0, has_request=True).count(b"PUB") == 1
    later_retries = [awaited.retry_overdue(now, has_request=True) for now in range(6, 1000)]
    assert sum(map(bool, later_retries)) == 3
