"""A NATS server returns with fewer messages, after a power failure or from an old copy."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

import simplebus
from simplebus.jetstream.consume import acked_sequences
from tests.jetstream.nats_servers import nats_server
from tests.jetstream.stateless_servers import (
    PATIENCE_SECONDS,
    address,
    cluster_of,
    options,
    stateless_server,
    until,
)


async def test_delivers_messages_confirmed_after_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences of lost messages are reused by other messages."""
    monkeypatch.setattr(acked_sequences, "CLOCK_SKEW_SECONDS", 0.0)  # The server restarts at once.
    store, copy = tmp_path / "alone", tmp_path / "copy"
    received: dict[str, list[bytes]] = {"plain": [], "durable": [], "group": []}

    async def collect(messages: AsyncIterator[simplebus.Message], kind: str) -> None:
        async for message in messages:
            received[kind].append(message.payload)

    with nats_server(tmp_path) as server:
        # Ack wait after which a message sent to a disconnected subscriber is redelivered.
        cluster = replace(options(server.url, ack_wait_seconds=2.0), storage="file")
        async with (
            stateless_server(cluster) as stateless,
            simplebus.connect(address(stateless)) as bus,
            bus.subscribe(1) as plain,
            bus.subscribe(1, durable="d") as durable,
            bus.subscribe(1, group="g") as group,
            trio.open_nursery() as nursery,
        ):
            for kind, messages in {"plain": plain, "durable": durable, "group": group}.items():
                nursery.start_soon(partial(collect, messages, kind))

            async def publish(*payloads: bytes) -> None:
                await bus.publish_many(payloads, class_id=1)
                await until(lambda: all(payloads[-1] in each for each in received.values()))

            with trio.fail_after(PATIENCE_SECONDS):
                await publish(b"kept")
                server.stop()
                shutil.copytree(store, copy)
                server.start()
                await publish(*(b"lost %d" % number for number in range(5)))
                await until(lambda: cluster_of(stateless).publisher.is_empty)
                server.kill()
                shutil.rmtree(store)
                copy.rename(store)
                server.start()
                later = [b"later %d" % number for number in range(10)]
                await publish(*later[:2])
                await publish(*later[2:])
            for each in received.values():
                assert [payload for payload in each if payload in later] == later
            nursery.cancel_scope.cancel()
    assert "lost messages" in caplog.text
