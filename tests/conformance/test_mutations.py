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
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.testing.conformance import BusConformance, Host, memory_host


class Promises(BusConformance):
    """Kept, or broken, by a bus in this process."""

    def host(self, settings: Settings) -> AbstractAsyncContextManager[Host]:
        return memory_host(settings)

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        trio.run(main, clock=MockClock(autojump_threshold=0))


def nothing(*args: Any, **options: Any) -> None:
    """What a bus does that forgets to do it."""


BROKEN = {
    "acks are forgotten": (
        (AckHandler, "ack_range"),
        "test_leaving_a_subscription_acknowledges_the_last_message",
    ),
    "nacks are forgotten": (
        (BrokerSubscription, "nack"),
        "test_redelivers_nacked_message_after_the_requested_delay",
    ),
    "nobody is at work": (
        (BrokerSubscription, "extend_ack_timeout"),
        "test_working_restarts_the_ack_timeout",
    ),
    "nothing is ever overdue": (
        (BrokerSubscription, "tick"),
        "test_redelivers_unacknowledged_messages_with_growing_backoff",
    ),
    "what is put off is forgotten": (
        (BrokerSubscription, "_delay_span"),
        "test_delayed_message_is_delivered_after_its_delay",
    ),
    "a member takes its messages with it": (
        (Group, "remove_member"),
        "test_messages_of_a_leaving_member_go_to_the_others",
    ),
    "what is given up is nowhere": (
        (Store, "dead_letter"),
        "test_dead_letter_is_stored_with_its_reason",
    ),
    "what was under way is not sent again": (
        (PublishBuffer, "connection_lost"),
        "test_reconnects_without_loss_or_duplicates",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_suite_detects_a_broken_bus(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    (owner, method), promise = BROKEN[what]
    keep = getattr(Promises(), promise)
    keep()
    monkeypatch.setattr(owner, method, nothing)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - whichever shows it first.
        keep()
