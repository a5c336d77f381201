"""The delivery policy of a durable or group applies at every server."""

from __future__ import annotations

import pytest

import simplebus
from simplebus.core.errors import RefusedError
from simplebus.jetstream.consume.durable_check import DurableCheck
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.server.run import RunningServer
from tests.jetstream.consume.test_durable_owners import two_servers_with_users
from tests.jetstream.faulty_api import failing_requests
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


def terms_at(server: RunningServer) -> tuple[int, int, tuple[int, ...]]:
    """Return the delivery terms of the only position. One tick is one second."""
    [position] = cluster_of(server).feeds
    terms = position.delivery_policy
    return terms.ack_timeout_ticks, terms.deliveries_max, terms.backoff_ticks


@pytest.mark.parametrize("names", NAMES)
async def test_delivery_policy_applies_while_durable_is_used(
    jetstream_server: NatsServer, names: dict[str, str]
) -> None:
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (first_server, second_server, first_bus, second_bus):
        async with first_bus.subscribe(1, **names, **FIRST):
            assert terms_at(first_server) == (7, 3, (1, 2))
            async with second_bus.subscribe(1, **names, **OTHER):
                assert terms_at(second_server) == (7, 3, (1, 2))
            await wait_until_idle(second_server)
        await wait_until_idle(first_server)
        async with second_bus.subscribe(1, **names, **OTHER):
            assert terms_at(second_server) == (9, 5, ())
            async with first_bus.subscribe(1, **names, **FIRST):
                assert terms_at(first_server) == (9, 5, ())


async def test_user_without_right_gets_the_creators_policy(
    jetstream_server: NatsServer,
) -> None:
    async with two_servers_with_users(jetstream_server) as (first_server, second_server):
        for server, user, requested, found in (
            (first_server, "ada", FIRST, (7, 3, (1, 2))),
            (second_server, "bob", OTHER, (7, 3, (1, 2))),
            (second_server, "ada", OTHER, (9, 5, ())),
            (first_server, "keeper", FIRST, (7, 3, (1, 2))),
        ):
            async with (
                simplebus.connect(address(server), token=user) as bus,
                bus.subscribe(1, group="g", **requested),
            ):
                assert terms_at(server) == found
            await wait_until_idle(server)


async def test_durable_has_one_group_at_all_servers(jetstream_server: NatsServer) -> None:
    cluster = options(jetstream_server.url)
    async with two_servers(cluster) as (_, _, first_bus, second_bus):
        for durable, group, other_group in (("a", "g", "h"), ("b", "g", None), ("c", None, "g")):
            async with first_bus.subscribe(1, durable=durable, group=group):
                pass
            for bus in first_bus, second_bus:
                with pytest.raises(RefusedError, match=f"subscription_mismatch.*{durable!r}"):
                    async with bus.subscribe(1, durable=durable, group=other_group):
                        raise AssertionError
                async with bus.subscribe(1, durable=durable, group=group):
                    pass


async def test_concurrent_creation_with_other_channels_is_refused_once(
    jetstream_server: NatsServer,
) -> None:
    cluster, blind = options(jetstream_server.url), [True]

    def hook(subject: str) -> JetStreamError | None:
        if blind and subject.startswith("CONSUMER.INFO"):
            blind.clear()
            return JetStreamError(10014, "consumer not found")
        return None

    async with (
        two_servers(cluster) as (_, second_server, first_bus, second_bus),
        first_bus.subscribe(1, "eu.#", durable="d"),
    ):
        with (
            failing_requests(cluster_of(second_server).link, hook),
            pytest.raises(RefusedError, match="subscription_mismatch"),
        ):
            async with second_bus.subscribe(1, "us.#", durable="d"):
                raise AssertionError
        assert not blind


@pytest.mark.parametrize("metadata", ["", "{", "[]", '{"ack":-1}', '{"ack":1,"deliveries":1e9}'])
async def test_ignores_invalid_policy_metadata(jetstream_server: NatsServer, metadata: str) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as server,
        simplebus.connect(address(server)) as bus,
        bus.subscribe(1, durable="d", **FIRST),
    ):
        [position] = cluster_of(server).feeds
        DurableCheck(cluster_of(server)._broker).apply_policy(position, metadata)
        assert terms_at(server) == (7, 3, (1, 2))
