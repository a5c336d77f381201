"""Conformance suite for a stateless server in front of a JetStream cluster.

NOT_PROMISED lists the exceptions, each with the row of protocol/engine.md that documents it.
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
    "backoff of returned messages",
    "explain",
)
"""Rows of the table."""
NOT_PROMISED = {
    "test_explain_describes_classes_channels_and_sessions": EXPLAIN,
    "test_key_ordered_group_delivers_a_key_to_one_member_in_order": BY_KEY,
    "test_key_ordered_group_redelivers_before_later_messages_of_the_key": BY_KEY,
    "test_subscription_begins_at_its_start_position": LAST_VALUES,
    "test_subscription_can_begin_with_last_values": LAST_VALUES,
    "test_slow_subscription_can_drop_oldest": SLOW,
    "test_slow_subscription_can_drop_newest": SLOW,
    "test_slow_subscription_can_be_disconnected": SLOW,
    "test_refused_message_raises_and_is_not_stored": FULL,
    "test_publish_many_raises_all_refusals": FULL,
    "test_block_that_raises_has_its_last_message_redelivered_after_a_backoff": PAUSES,
    "test_loop_that_raises_has_its_message_redelivered_after_a_backoff": PAUSES,
    "test_reconnects_without_loss_or_duplicates": SEQUENCES,
}
NOT_RUN = {PAUSES, SEQUENCES}
"""Tests that would wait until their timeout, or that pass only sometimes."""


class TestStatelessServerUnderTrio(BusConformance):
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
    # Marks are stored on the function, so this suite uses a copy.
    _test = getattr(BusConformance, _name)
    _own = FunctionType(_test.__code__, _test.__globals__, _name, closure=_test.__closure__)
    _own.__kwdefaults__, _own.__defaults__ = _test.__kwdefaults__, _test.__defaults__
    _own.__dict__.update(_test.__dict__, pytestmark=list(getattr(_test, "pytestmark", [])))
    setattr(TestStatelessServerUnderTrio, _name, _mark(_own))


def test_page_lists_every_skipped_conformance_test() -> None:
    page = (Path(__file__).parents[2] / "protocol" / "engine.md").read_text()
    for row in set(NOT_PROMISED.values()):
        assert f"| {row} |" in page, row
