"""A bidirectional bridge does not publish messages of NATS there again."""

from __future__ import annotations

import pytest
import trio

import simplebus
from simplebus.bridge.build import _IDENTITIES_MAX, _cluster_identities
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.testing.server import BusServer
from tests.bridge.memory_buses import numbered_payloads
from tests.bridge.nats_copiers import connect, running_bridges
from tests.jetstream.nats_servers import NatsServer

PATIENCE_SECONDS = 120.0


@pytest.mark.parametrize("stream", ["", "ECHO"])
async def test_bidirectional_copies_each_message_once(
    stream: str, server: BusServer, nats: NatsServer
) -> None:
    async with (
        connect(nats) as connection,
        simplebus.connect(server.address) as bus,
    ):
        if stream:
            config = {"name": stream, "subjects": ["echo.>"]}
            await connection.nats.api_request(f"STREAM.CREATE.{stream}", config)
        subject = f"echo.{stream or 'plain'}"
        copied = CopiedClass(f"both{stream}", channels=(subject,), stream=stream, start="earliest")
        bridge = BridgeSettings(
            f"both{stream}", server.address, nats.url, (copied,), is_bidirectional=True
        )
        async with (
            bus.subscribe(copied.class_) as messages,
            running_bridges(bridge, until_connected=True) as (to_nats, from_nats),
        ):
            connection.core.subscribe(subject)
            await connection.round_trip()
            await bus.publish_many(numbered_payloads(0, 5), class_id=copied.class_, channel=subject)
            for number in range(5, 15):
                connection.core.publish(subject, b"%d" % number)
            connection.nats.flush()
            while (  # noqa: ASYNC110
                to_nats.statistics().skipped.get("looped") != 10
                or from_nats.statistics().skipped.get("looped") != 5
            ):
                await trio.sleep(0.01)
            await connection.round_trip()
            received = [(await messages.get(PATIENCE_SECONDS)).payload for _ in range(15)]
            assert sorted(received) == sorted(numbered_payloads(0, 15))
            payloads = [
                batch.payload(row) for batch in connection.messages for row in range(batch.count)
            ]
            assert sorted(payloads) == sorted(numbered_payloads(0, 15))
            if stream:
                info = await connection.nats.api_request(f"STREAM.INFO.{stream}")
                assert info["state"]["messages"] == 15


async def test_disabled_path_allows_return_on_another_subject(
    server: BusServer, nats: NatsServer
) -> None:
    """This can be intended: messages from NATS are published there again under another subject."""
    into = BridgeSettings(
        "into", nats.url, server.address, (CopiedClass("way", channels=("way.in",)),)
    )
    renamed = CopiedClass("way", rewrite=(("way.in", "way.out"),), start="earliest")
    outgoing = BridgeSettings("out", server.address, nats.url, (renamed,), has_path=False)
    async with connect(nats) as connection, running_bridges(into, outgoing, until_connected=True):
        connection.core.subscribe("way.out")
        await connection.round_trip()
        connection.core.publish("way.in", b"hello")
        connection.nats.flush()
        while not connection.messages:
            await connection.wait_event()
        assert connection.messages[0].payload(0) == b"hello"


def test_collects_identities_of_cluster() -> None:
    servers = "nats://user:secret@a.invalid,tls://b.invalid"
    to_nats = _cluster_identities(servers, "", "nats.A")
    _cluster_identities("nats://a.invalid, b.invalid", "", "nats.B")
    _cluster_identities(servers, "S", "nats.C.S")
    assert list(to_nats) == ["nats.A", "nats.B"]
    for number in range(_IDENTITIES_MAX):
        _cluster_identities(servers, "", "nats.A")
        _cluster_identities(servers, "", f"nats.{number}")
    assert len(to_nats) == _IDENTITIES_MAX
    assert "nats.A" in to_nats
