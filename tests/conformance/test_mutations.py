"""Mutation tests: the conformance suite detects broken buses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from simplebus.client.core.publish_buffer import PublishBuffer
from simplebus.core.broker.acknowledge import AckHandler
from simplebus.core.group.group import Group
from simplebus.core.settings import Settings
from simplebus.core.store.store import Store
from simplebus.core.subscription.position import Position
from simplebus.core.subscription.unacked_messages import UnackedMessages
from simplebus.testing.conformance import BusConformance, Host, memory_host


class MutatedBusTests(BusConformance):
    """The conformance suite on a `MemoryBus` that a test breaks."""

    def host(self, settings: Settings) -> AbstractAsyncContextManager[Host]:
        return memory_host(settings)

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        trio.run(main, clock=MockClock(autojump_threshold=0))


def do_nothing(*args: Any, **options: Any) -> None:
    """Replace a method of the bus."""


BROKEN = {
    "acks are ignored": (
        (AckHandler, "ack_range"),
        "test_leaving_a_subscription_acknowledges_the_last_message",
    ),
    "nacks are ignored": (
        (Position, "nack"),
        "test_redelivers_nacked_message_after_the_requested_delay",
    ),
    "working is ignored": (
        (UnackedMessages, "extend_ack_timeout"),
        "test_working_restarts_the_ack_timeout",
    ),
    "overdue messages are not queued": (
        (UnackedMessages, "requeue_sets"),
        "test_redelivers_unacknowledged_messages_with_growing_backoff",
    ),
    "delayed messages are lost": (
        (Position, "delay_span"),
        "test_delayed_message_is_delivered_after_its_delay",
    ),
    "messages of a leaving member are lost": (
        (Group, "remove_member"),
        "test_messages_of_a_leaving_member_go_to_the_others",
    ),
    "dead letters are lost": (
        (Store, "dead_letter"),
        "test_dead_letter_is_stored_with_its_reason",
    ),
    "unconfirmed messages are not resent": (
        (PublishBuffer, "connection_lost"),
        "test_reconnects_without_loss_or_duplicates",
    ),
}


@pytest.mark.parametrize("mutation", BROKEN)
def test_suite_detects_a_broken_bus(monkeypatch: pytest.MonkeyPatch, mutation: str) -> None:
    (owner, method), test_name = BROKEN[mutation]
    run_test = getattr(MutatedBusTests(), test_name)
    run_test()
    monkeypatch.setattr(owner, method, do_nothing)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - whichever shows it first.
        run_test()
