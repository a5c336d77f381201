"""The delivery policy of a durable or group applies at every server."""

from __future__ import annotations

import pytest

import simplebus
from simplebus.core.errors import RefusedError
from simplebus.jetstream.consume.durable_check import DurableCheck
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.server.run import RunningServer
from tests.jetstream.consume.test_durable_owners import two_servers_with_users
from tests.jetstream.faulty_api import asked_in_vain
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import (
    address,
    cluster_of,
    options,
    stateless_server,
    two_servers,
    wait_until_idle,
)

FIRST = {"ack_seconds": 7.0, "max_deliveries": 3, "backoff": [1.0, 2.0]}
OTHER = {"ack_seconds": 9.0, "max_deliveries": 5}
NAMES = [{"durable": "d"}, {"group": "g"}, {"durable": "d", "group": "g"}]


def terms_at(up: RunningServer) -> tuple[int, int, tuple[int, ...]]:
    """Return the delivery terms of the only position. One tick is one second."""
    [position] = cluster_of(up).feeds
    terms = position.delivery_policy
    return terms.ack_timeout_ticks, terms.deliveries_max, terms.backoff_ticks


@pytest.mark.parametrize("names", NAMES)
async def test_delivery_policy_applies_while_durable_is_used(
    jetstream_server: NatsServer, names: dict[str, str]
) -> None:
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (one, other, here, there):
        async with here.subscribe(1, **names, **FIRST):
            assert terms_at(one) == (7, 3, (1, 2))
            async with there.subscribe(1, **names, **OTHER):
                assert terms_at(other) == (7, 3, (1, 2))
            await wait_until_idle(other)
        await wait_until_idle(one)
        async with there.subscribe(1, **names, **OTHER):
            assert terms_at(other) == (9, 5, ())
            async with here.subscribe(1, **names, **FIRST):
                assert terms_at(one) == (9, 5, ())


async def test_user_without_right_gets_the_creators_policy(
    jetstream_server: NatsServer,
) -> None:
    async with two_servers_with_users(jetstream_server) as (one, other):
        for up, who, asked, found in (
            (one, "ada", FIRST, (7, 3, (1, 2))),
            (other, "bob", OTHER, (7, 3, (1, 2))),
            (other, "ada", OTHER, (9, 5, ())),
            (one, "keeper", FIRST, (7, 3, (1, 2))),
        ):
            async with (
                simplebus.connect(address(up), token=who) as bus,
                bus.subscribe(1, group="g", **asked),
            ):
                assert terms_at(up) == found
            await wait_until_idle(up)


async def test_durable_has_one_group_at_all_servers(jetstream_server: NatsServer) -> None:
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (_, _, here, there):
        for durable, group, wrong in (("a", "g", "h"), ("b", "g", None), ("c", None, "g")):
            async with here.subscribe(1, durable=durable, group=group):
                pass
            for bus in here, there:
                with pytest.raises(RefusedError, match=f"subscription_mismatch.*{durable!r}"):
                    async with bus.subscribe(1, durable=durable, group=wrong):
                        raise AssertionError
                async with bus.subscribe(1, durable=durable, group=group):
                    pass


async def test_concurrent_creation_with_other_channels_is_refused_once(
    jetstream_server: NatsServer,
) -> None:
    cluster, blind = options(jetstream_server.url), [True]

    def meddle(subject: str) -> JetStreamError | None:
        if blind and subject.startswith("CONSUMER.INFO"):
            blind.clear()
            return JetStreamError(10014, "consumer not found")
        return None

    async with (
        two_servers(cluster) as (_, other, here, there),
        here.subscribe(1, "eu.#", durable="d"),
    ):
        with (
            asked_in_vain(cluster_of(other).link, meddle),
            pytest.raises(RefusedError, match="subscription_mismatch"),
        ):
            async with there.subscribe(1, "us.#", durable="d"):
                raise AssertionError
        assert not blind


@pytest.mark.parametrize("said", ["", "{", "[]", '{"ack":-1}', '{"ack":1,"deliveries":1e9}'])
async def test_ignores_invalid_policy_metadata(jetstream_server: NatsServer, said: str) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as up,
        simplebus.connect(address(up)) as bus,
        bus.subscribe(1, durable="d", **FIRST),
    ):
        [position] = cluster_of(up).feeds
        DurableCheck(cluster_of(up)._broker).apply_policy(position, said)
        assert terms_at(up) == (7, 3, (1, 2))
