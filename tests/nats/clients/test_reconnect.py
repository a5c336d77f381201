"""Clients of three languages reconnect after a server restart and keep buffered messages.

Then the server enters lame duck mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import nats
import pytest

from load.ports import free_port
from tests.nats.clients.programs import compiled, javascript, read_final_output, running
from tests.nats.running_server import PATIENT, on_asyncio, start_server
from tests.support.programs import PATIENCE_SECONDS

pytestmark = pytest.mark.xdist_group("nats clients")


@on_asyncio
async def test_client_reconnects_to_a_server_that_it_learned() -> None:
    reconnected = asyncio.Event()

    async def on_reconnected() -> None:
        reconnected.set()

    async def ignore(error: Exception) -> None:
        pass

    with start_server() as second:
        address = second.url.removeprefix("nats://")
        with start_server("--nats-connect-url", address) as first:
            client = await nats.connect(
                first.url,
                **PATIENT,
                reconnected_cb=on_reconnected,
                error_cb=ignore,
                reconnect_time_wait=0.05,
            )
            await client.flush(PATIENCE_SECONDS)
            assert [server.netloc for server in client.discovered_servers] == [address]
        await asyncio.wait_for(reconnected.wait(), PATIENCE_SECONDS)
        assert client.connected_url is not None
        assert client.connected_url.netloc == address
        await client.close()


@on_asyncio
async def test_clients_reconnect_after_a_server_restart(tmp_path: Path) -> None:
    port = free_port()
    disconnected, reconnected, lame_duck_received = (
        asyncio.Event(),
        asyncio.Event(),
        asyncio.Event(),
    )

    async def on_disconnected() -> None:
        disconnected.set()

    async def on_reconnected() -> None:
        reconnected.set()

    async def on_lame_duck() -> None:
        lame_duck_received.set()

    async def ignore(error: Exception) -> None:
        pass

    with contextlib.ExitStack() as stack:
        with start_server(port=port) as first:
            programs = {
                name: stack.enter_context(running(command, "reconnect", first.url))
                for name, command in (("js", javascript()), ("c", compiled(tmp_path)))
            }
            client = await nats.connect(
                first.url,
                **PATIENT,
                disconnected_cb=on_disconnected,
                reconnected_cb=on_reconnected,
                lame_duck_mode_cb=on_lame_duck,
                error_cb=ignore,
                reconnect_time_wait=0.02,
                max_reconnect_attempts=-1,
            )
            subscription = await client.subscribe("again.*")
            await client.publish("again.before", b"1")
            assert (await subscription.next_msg(timeout=60)).data == b"1"
            assert [program.read_line() for program in programs.values()] == ["ready"] * 2
        await asyncio.wait_for(disconnected.wait(), PATIENCE_SECONDS)
        await client.publish("again.meanwhile", b"2")
        with start_server(port=port) as second:
            await asyncio.wait_for(reconnected.wait(), PATIENCE_SECONDS)
            await client.publish("again.after", b"3")
            received = [(await subscription.next_msg(timeout=60)).data for _ in range(2)]
            assert received == [b"2", b"3"]
            assert read_final_output(programs["js"]) == {
                "received": ["after reconnect"],
                "hasEvents": True,
            }
            assert read_final_output(programs["c"]) == {
                "received": ["before reconnect", "after reconnect"]
            }
            second.process.send_signal(signal.SIGUSR2)
            await asyncio.wait_for(lame_duck_received.wait(), PATIENCE_SECONDS)
            await client.close()
            assert second.process.wait(PATIENCE_SECONDS) == 0
