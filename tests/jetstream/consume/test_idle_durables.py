"""Unused durables expire in the cluster after their idle time."""

from __future__ import annotations

import pytest
import trio

import simplebus
from simplebus.jetstream import api
from simplebus.jetstream.backend import JetStreamBackend
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from tests.jetstream.nats_servers import NatsServer
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    address,
    cluster_of,
    options,
    stateless_server,
)

IDLE_SECONDS = 1.5
"""Longer than a busy machine delays the requests of a stateless server."""


async def kept_for(cluster: JetStreamBackend) -> float | None:
    """Return the idle time of the durable of class 7; None if it is deleted, 0.0 for no limit."""
    try:
        info = await cluster.link.api_request(
            f"CONSUMER.INFO.{cluster.options.names.stream_name(7)}.d-d"
        )
    except JetStreamError as error:
        if error.code not in jetstream_codec.NOT_FOUND:
            raise
        return None
    return api.idle_seconds_of(info) or 0.0


async def test_subscriber_sets_idle_time_of_durable(jetstream_server: NatsServer) -> None:
    async with (
        stateless_server(options(jetstream_server.url)) as server,
        simplebus.connect(address(server)) as bus,
    ):
        found: list[float | None] = []
        for seconds in (None, 3600.0, 7200.0, None, 0.5):
            async with bus.subscribe(7, durable="d", durable_seconds=seconds):
                found.append(await kept_for(cluster_of(server)))
        assert found == [0.0, 3600.0, 7200.0, 7200.0, api.DURABLE_IDLE_MIN_SECONDS]


async def test_unused_durable_expires_and_used_one_stays(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "DURABLE_IDLE_MIN_SECONDS", IDLE_SECONDS)
    async with (
        stateless_server(options(jetstream_server.url)) as server,
        simplebus.connect(address(server)) as bus,
    ):
        with trio.fail_after(PATIENCE_SECONDS):
            async with bus.subscribe(7, durable="d", durable_seconds=IDLE_SECONDS) as messages:
                for number in range(5):
                    await bus.publish(b"%d" % number, class_id=7)
                    message = await messages.get()
                    await trio.sleep(IDLE_SECONDS / 3)
                    message.ack()
                    assert await kept_for(cluster_of(server)) == IDLE_SECONDS
            while await kept_for(cluster_of(server)) is not None:  # noqa: ASYNC110 - no event.
                await trio.sleep(0.05)
