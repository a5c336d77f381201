"""Buses that break a promise: the suite must notice each of them."""

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
        "test_a_nacked_message_comes_again_when_it_is_wanted",
    ),
    "nobody is at work": (
        (BrokerSubscription, "extend_ack_timeout"),
        "test_who_is_still_working_gets_more_time",
    ),
    "nothing is ever overdue": (
        (BrokerSubscription, "tick"),
        "test_what_is_not_acknowledged_comes_again_marked_and_after_growing_pauses",
    ),
    "what is put off is forgotten": (
        (BrokerSubscription, "_delay_span"),
        "test_a_delayed_message_comes_when_its_time_has_come",
    ),
    "a member takes its messages with it": (
        (Group, "remove_member"),
        "test_what_a_member_leaves_goes_to_the_others",
    ),
    "what is given up is nowhere": (
        (Store, "dead_letter"),
        "test_what_is_given_up_lies_in_the_dead_letters_of_its_class",
    ),
    "what was under way is not sent again": (
        (PublishBuffer, "connection_lost"),
        "test_a_lost_connection_is_replaced_and_nothing_is_lost_or_doubled",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_bus_that_does_not_do_it_is_noticed(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    (owner, method), promise = BROKEN[what]
    keep = getattr(Promises(), promise)
    keep()
    monkeypatch.setattr(owner, method, nothing)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - whichever shows it first.
        keep()
