"""No message is too long for a cluster that its door has accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

import simplebus
from simplebus.core.limits import FRAME_BYTES_MIN, NAME_CHARACTERS_MAX
from simplebus.core.settings import Settings
from simplebus.engine.fitting import EngineError, fitted

from .doors import PATIENCE_SECONDS, address, door, options
from .nats_servers import nats_server

LONGEST_NAME = "\U0001f680" * NAME_CHARACTERS_MAX


async def test_the_longest_frame_under_the_longest_name_is_stored(tmp_path: Path) -> None:
    with nats_server(tmp_path, "max_payload: 65536") as server:
        async with (
            door(options(server.url)) as up,
            simplebus.connect(address(up), name=LONGEST_NAME) as bus,
        ):
            longest = bus.wire.core.frame_bytes - FRAME_BYTES_MIN
            assert 60_000 - 13 < longest < 65_536
            with trio.fail_after(PATIENCE_SECONDS):
                async with bus.subscribe(1) as messages:
                    await bus.publish(b"x" * longest, class_id=1)
                    assert len((await messages.get()).payload) == longest
                with pytest.raises(simplebus.BusError, match=r"\d+"):
                    await bus.publish(b"x" * (longest + 1), class_id=1)
                await bus.publish(b"", class_id=1)


async def test_who_takes_next_to_nothing_is_no_cluster(tmp_path: Path) -> None:
    with (
        nats_server(tmp_path, "max_payload: 4096") as server,
        pytest.raises(EngineError, match=r"4096 bytes .* at least"),
    ):
        await fitted(Settings(), options(server.url))
