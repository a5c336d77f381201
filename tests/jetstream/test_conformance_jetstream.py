"""The promises, kept by a door before a JetStream cluster.

Rule 1: what it does not promise is listed in NOT_PROMISED, each with the row of protocol/engine.md
that says so; everything else is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import FunctionType

import pytest

from simplebus.core.settings import Settings
from simplebus.testing.conformance import BusConformance, Host
from simplebus.testing.hosts import ServerHost
from simplebus.testing.server import bus_server
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import options

SEQUENCES, LAST_VALUES, BY_KEY, SLOW, FULL, PAUSES, EXPLAIN = (
    "sequences",
    "last values",
    "by key",
    "`slow`",
    "the policy of a full class",
    "pauses of what is given back",
    "explain",
)
"""Rows of the table."""
NOT_PROMISED = {
    "test_who_asks_is_told_what_waits_for_what": EXPLAIN,
    "test_a_key_goes_to_one_member_one_message_after_the_other": BY_KEY,
    "test_what_comes_again_is_before_what_is_behind_it_of_its_key": BY_KEY,
    "test_a_subscription_begins_where_it_was_asked_to": LAST_VALUES,
    "test_who_comes_late_may_begin_with_the_last_value_of_each_channel": LAST_VALUES,
    "test_a_slow_subscription_may_lose_the_oldest": SLOW,
    "test_a_slow_subscription_may_lose_the_newest": SLOW,
    "test_a_slow_subscription_may_be_ended": SLOW,
    "test_a_refused_message_is_not_published_and_its_publisher_told": FULL,
    "test_what_is_refused_of_many_is_told_at_once": FULL,
    "test_block_that_raises_has_its_last_message_redelivered_after_a_backoff": PAUSES,
    "test_loop_that_raises_has_its_message_redelivered_after_a_backoff": PAUSES,
    "test_a_lost_connection_is_replaced_and_nothing_is_lost_or_doubled": SEQUENCES,
}
NOT_RUN = {PAUSES, SEQUENCES}
"""Those would wait for a message until their patience ends, or are kept now and then, by chance."""


class TestDoorUnderTrio(BusConformance):
    @pytest.fixture(autouse=True)
    def _server(self, jetstream_server: NatsServer) -> None:
        self.url = jetstream_server.url

    def host(self, settings: Settings) -> AbstractAsyncContextManager[Host]:
        return self._host(settings)

    @asynccontextmanager
    async def _host(self, settings: Settings) -> AsyncIterator[Host]:
        with bus_server(settings, cluster=options(self.url)) as server:
            yield ServerHost(server)


for _name, _row in NOT_PROMISED.items():
    _mark = pytest.mark.xfail(
        run=_row not in NOT_RUN, strict=True, reason=f"protocol/engine.md: {_row}"
    )
    # A mark stays with its function: this one is nobody else's.
    _test = getattr(BusConformance, _name)
    _own = FunctionType(_test.__code__, _test.__globals__, _name, closure=_test.__closure__)
    _own.__kwdefaults__, _own.__defaults__ = _test.__kwdefaults__, _test.__defaults__
    _own.__dict__.update(_test.__dict__, pytestmark=list(getattr(_test, "pytestmark", [])))
    setattr(TestDoorUnderTrio, _name, _mark(_own))


def test_the_page_has_a_row_for_each_that_is_not_promised() -> None:
    page = (Path(__file__).parents[2] / "protocol" / "engine.md").read_text()
    for row in set(NOT_PROMISED.values()):
        assert f"| {row} |" in page, row
