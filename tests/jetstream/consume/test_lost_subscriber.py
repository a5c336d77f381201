"""What a subscriber had that was cut off comes to the next one at once, not after the ack wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio

from simplebus.core.protocol import frames
from simplebus.jetstream.consume.consumers import Positions
from simplebus.jetstream.consume.feed import Found
from simplebus.jetstream.consume.give_back import Awaited
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import PATIENCE_SECONDS, door, options
from tests.jetstream.test_two_servers import cluster_of, until
from tests.support import running_server


async def test_what_is_given_back_comes_at_once_though_the_stream_is_trimmed_meanwhile(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that removes messages forgets what was to be sent again behind them."""
    again = Positions._again
    cluster = options(jetstream_server.url, ack_wait_seconds=10 * PATIENCE_SECONDS)
    async with door(cluster) as one, door(cluster) as other:
        first, second = (
            await running_server.connect(one, [3]),
            await running_server.connect(other, [3]),
        )
        await first.send(frames.encode(frames.SUBSCRIBE, class_id=3))
        for number in range(5):
            content = b"%d" % number
            await second.send(frames.encode(frames.MESSAGE, class_id=3, content=content))
        assert len(await first.read_messages(5)) == 5
        await first.send(frames.encode_ack(class_id=3, timer_index=0, first=0, last=1))
        await first.stream.aclose()
        await until(lambda: not (one.server.broker.sessions or cluster_of(one).is_busy))

        async def trimmed(self: Positions, class_id: int, *given: Any, **more: Any) -> Found:
            found = await again(self, class_id, *given, **more)
            await cluster_of(one).positions.trim(class_id)
            return found

        monkeypatch.setattr(Positions, "_again", trimmed)
        await second.send(frames.encode(frames.SUBSCRIBE, class_id=3))
        with trio.fail_after(PATIENCE_SECONDS):
            assert [each for _, each in await second.read_messages(4)] == [b"1", b"2", b"3", b"4"]


def test_what_does_not_come_is_given_back_a_few_times_while_it_is_owed() -> None:
    awaited = Awaited({4: b"four", 5: b"five"})
    assert not awaited.late(0.0, is_owed=True)
    assert not awaited.late(0.9, is_owed=False)  # What is not asked for does not come.
    assert not awaited.late(1.0, is_owed=True)
    awaited.came(np.array([9]))
    said = awaited.late(2.0, is_owed=True)
    assert (said.count(b"PUB four "), said.count(b"PUB five ")) == (1, 1)
    awaited.came(np.array([4]))
    assert not awaited.late(3.0, is_owed=True)  # It is looked at from then on.
    assert awaited.late(5.0, is_owed=True).count(b"PUB") == 1
    later = [awaited.late(now, is_owed=True) for now in range(6, 1000)]
    assert sum(map(bool, later)) == 3
