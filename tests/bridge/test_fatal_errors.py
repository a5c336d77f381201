"""A copier that can never work logs what to change, and ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

import simplebus
from simplebus.bridge.runner import create_copiers, run_copiers
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.core.errors import Reason, RemoteProtocolError
from tests.support.programs import running_program
from tests.support.running_server import serving

PATIENCE_SECONDS = 120.0
WHAT_TO_DO = "copy to the NATS servers of its cluster"


@asynccontextmanager
async def server_without_last_values(
    monkeypatch: pytest.MonkeyPatch, identity: str
) -> AsyncIterator[str]:
    """Yield the address of a server that keeps no last values."""

    def refuse(class_id: int) -> None:
        raise RemoteProtocolError(Reason.BAD_REQUEST, "no last values")

    async with serving() as server:
        broker = server.server.broker
        monkeypatch.setattr(broker.subscription_manager, "identity", identity)
        monkeypatch.setattr(broker.store.class_registry, "enable_last_values", refuse)
        yield f"simplebus://{server.addresses[0]}"


async def test_old_stateless_server_is_fatal_for_its_copier_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            server_without_last_values(monkeypatch, "cluster old") as stateless_server,
            serving() as server,
        ):
            own_url = f"simplebus://{server.addresses[0]}"
            copiers = create_copiers(
                [
                    BridgeSettings("bad", own_url, stateless_server, (CopiedClass("a"),)),
                    BridgeSettings("good", own_url, own_url, (CopiedClass("a", target_class="b"),)),
                ]
            )
            ended = trio.Event()
            async with trio.open_nursery() as nursery, simplebus.connect(own_url) as bus:
                nursery.start_soon(
                    partial(run_copiers, copiers, on_failed=lambda copier: ended.set())
                )
                await ended.wait()
                await bus.publish(b"hello", class_id="a")
                async with bus.subscribe("b") as messages:
                    assert (await messages.get()).payload == b"hello"
                nursery.cancel_scope.cancel()
    assert not copiers[0].statistics().is_up
    assert WHAT_TO_DO in copiers[0].statistics().problem
    records = [record for record in caplog.records if WHAT_TO_DO in record.getMessage()]
    assert [record.levelno for record in records] == [logging.ERROR]


async def test_logs_copying_to_itself_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with serving() as server:
            own_url = f"simplebus://{server.addresses[0]}"
            other_url = own_url.replace("127.0.0.1", "localhost")
            (copier,) = create_copiers(
                [BridgeSettings("b", own_url, other_url, (CopiedClass("a"),))]
            )
            await copier.run()
    assert copier.statistics().losses == 1
    assert caplog.text.count("class 'a' cannot be copied to itself; use another bus") == 1


async def test_other_bad_request_is_retried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            server_without_last_values(monkeypatch, "a bus") as other_server,
            serving() as server,
        ):
            (copier,) = create_copiers(
                [
                    BridgeSettings(
                        "b", f"simplebus://{server.addresses[0]}", other_server, (CopiedClass("a"),)
                    )
                ]
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(copier.run)
                while copier.statistics().losses < 2:  # noqa: ASYNC110 - there is no event.
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
    assert "no last values; retrying" in caplog.text


async def test_command_exits_with_config_status_on_fatal_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            server_without_last_values(monkeypatch, "cluster old") as stateless_server,
            serving() as server,
        ):
            with running_program(
                "bridge", "--from", str(server.addresses[0]), "--to", stateless_server, "a"
            ) as bridge:
                status, _, stderr = await trio.to_thread.run_sync(bridge.wait)
    assert status == 78
    assert WHAT_TO_DO in stderr.splitlines()[-1]
