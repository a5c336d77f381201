"""Notification that everything stored has arrived, with a scripted cluster."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from simplebus.core.errors import BusConnectionError
from simplebus.jetstream.consume.ack_all import AckAllConsumer
from simplebus.jetstream.consume.catch_up import (
    PATIENCE_SECONDS,
    SHARED_SECONDS,
    notify_when_caught_up,
)
from simplebus.jetstream.names import JetStreamNames
from simplebus.nats.client.jetstream_codec import JetStreamError
from tests.jetstream.consume.test_feed import FakeServer, message


class FakeLink:
    """Link to a stream with messages 1 to `last`, of which the consumer has delivered `sent`."""

    def __init__(self) -> None:
        self.last = 3
        self.sent = 0
        self.error: Exception | None = None

    async def wait_ready(self) -> None:
        pass

    async def api_request(self, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        if subject.startswith("STREAM.MSG.GET."):
            if not self.last:
                raise JetStreamError(10037, "no message found")
            return {"message": {"seq": self.last}}
        return {"delivered": {"stream_seq": self.sent, "consumer_seq": self.sent}}


class CatchUpCase:
    """Feed of a scripted cluster; records whether it was notified."""

    def __init__(self, *, is_ack_all: bool) -> None:
        self.server = FakeServer()
        self.link = FakeLink()
        if is_ack_all:
            self.server.feed.ack_all = AckAllConsumer()
        self.notified_at: float | None = None

    def notify(self) -> None:
        self.notified_at = trio.current_time()

    async def wait(self) -> None:
        await notify_when_caught_up(self.link, JetStreamNames(), "c", self.server.feed, self.notify)  # type: ignore[arg-type]

    def receive_and_ack(self, *numbers: int) -> None:
        """Receive these messages and acknowledge them."""
        self.server.receive_from_consumer(*(message(number) for number in numbers))
        self.server.drain_sent_messages()
        self.server.ack(0, self.server.feed.position.ring.head)


@pytest.mark.parametrize("is_ack_all", [True, False])
async def test_notifies_when_last_message_arrived(
    autojump_clock: MockClock, is_ack_all: bool
) -> None:
    case = CatchUpCase(is_ack_all=is_ack_all)
    case.receive_and_ack(1, 2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(case.wait)
        await trio.sleep(1.0)
        assert case.notified_at is None  # The consumer has not sent the third message.
        case.link.sent = 3
        await trio.sleep(SHARED_SECONDS / 2)
        assert case.notified_at is None  # The third message is in flight.
        case.receive_and_ack(3)
    assert case.notified_at is not None
    assert case.notified_at - 1.0 < SHARED_SECONDS


async def test_waits_only_a_moment_for_shared_consumer(autojump_clock: MockClock) -> None:
    case = CatchUpCase(is_ack_all=False)
    case.link.sent = 3
    await case.wait()
    assert case.notified_at is not None
    assert SHARED_SECONDS <= case.notified_at < SHARED_SECONDS + 1.0


async def test_does_not_wait_for_messages_delivered_before(autojump_clock: MockClock) -> None:
    case = CatchUpCase(is_ack_all=False)
    case.link.sent = case.server.feed.delivered_to_others = 3
    await case.wait()
    assert case.notified_at == 0.0


async def test_empty_stream_is_caught_up(autojump_clock: MockClock) -> None:
    case = CatchUpCase(is_ack_all=True)
    case.link.last = 0
    await case.wait()
    assert case.notified_at == 0.0


async def test_notifies_at_once_while_subscriber_has_messages(autojump_clock: MockClock) -> None:
    case = CatchUpCase(is_ack_all=True)
    case.server.receive_from_consumer(message(1))
    case.server.drain_sent_messages()
    await case.wait()
    assert case.notified_at == 0.0


@pytest.mark.parametrize(
    "error", [BusConnectionError("it is gone"), JetStreamError(503, "it has no leader")]
)
async def test_gives_up_if_cluster_does_not_answer(
    autojump_clock: MockClock, error: Exception
) -> None:
    case = CatchUpCase(is_ack_all=True)
    case.link.error = error
    await case.wait()
    assert case.notified_at == PATIENCE_SECONDS


async def test_missing_consumer_is_caught_up(autojump_clock: MockClock) -> None:
    case = CatchUpCase(is_ack_all=True)
    case.link.error = JetStreamError(10014, "consumer not found")
    await case.wait()
    assert case.notified_at == 0.0


async def test_unexpected_error_while_catching_up_still_notifies(
    autojump_clock: MockClock,
) -> None:
    case = CatchUpCase(is_ack_all=True)
    case.link.error = ValueError("on purpose")
    await case.wait()
    assert case.notified_at == 0.0
