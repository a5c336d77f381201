"""A gateway's way from a file to another bus, while either of them is killed.

Rule 1: nothing that an uplink has kept is lost, nothing comes twice, and all is in order.
"""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from nats.aio.client import Client

import simplebus
from load.ports import free_port
from tests.jetstream.nats_servers import NatsServer, nats_server
from tests.support.programs import (
    PATIENCE_SECONDS,
    Program,
    program,
    run_server,
)

MODULES = """
[modules.up]
module = "uplink"
hears = ["lines"]
settings = {{ to = "{to}", class = "lines", data_dir = "{folder}/kept"{more} }}

[modules.lines]
module = "tail"
settings = {{ path = "{folder}/app.log", start = "begin", remember = "{folder}/place" }}
"""


class Lines:
    """A file that grows, and a gateway that reads it."""

    def __init__(self, folder: Path, to: str, more: str = "") -> None:
        self.count = 0
        self._log = folder / "app.log"
        self.file = folder / "gateway.toml"
        self.file.write_text(MODULES.format(to=to, folder=folder, more=more))

    def write(self, count: int) -> None:
        with self._log.open("a") as log:
            log.writelines(f"{number}\n" for number in range(self.count, self.count + count))
        self.count += count


def until(told: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not told():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def value(gateway: str, what: str) -> int:
    """What the uplink of the gateway there says of itself."""
    with urllib.request.urlopen(f"http://{gateway}/metrics", timeout=60) as answer:
        found = re.search(rf'what="{what}"\}} (\d+)', answer.read().decode())
    return int(found[1]) if found else -1


def started(gateway: Program) -> str:
    """Where its HTTP door is."""
    return gateway.read_line().partition(" http=")[2]


def play(
    lines: Lines,
    kill: Callable[[], object],
    start: Callable[[], object],
    read: Callable[[], list[int]],
) -> None:
    """Lines come while all is up, while the other bus is away, while the gateway is, and then."""
    command = ("gateway", str(lines.file), "--http", "0")
    with program(*command) as gateway:
        at = started(gateway)
        lines.write(500)
        until(lambda: value(at, "copied") > 0)
        kill()
        lines.write(500)
        until(lambda: value(at, "kept") == 1000)
    lines.write(100)  # The gateway is killed.
    with program(*command) as gateway:
        at = started(gateway)
        until(lambda: value(at, "kept") == 100)
        start()
        lines.write(200)
        assert read() == list(range(lines.count))


@pytest.mark.long
@pytest.mark.parametrize("is_door", [False, True])
def test_kills_of_bus_and_gateway_lose_nothing(tmp_path: Path, is_door: bool) -> None:
    """The bus keeps its messages itself, or is a door before a JetStream cluster."""
    port = free_port()
    flags = ("--port", str(port), "--data-dir", str(tmp_path / "bus"))
    url = f"simplebus://127.0.0.1:{port}"
    lines = Lines(tmp_path, url)
    with ExitStack() as all_along, ExitStack() as first, ExitStack() as second:
        if is_door:
            nats = all_along.enter_context(nats_server(tmp_path))
            flags = ("--port", str(port), "--engine", nats.url)
        first.enter_context(run_server(*flags))

        def read() -> list[int]:
            got: list[int] = []
            with simplebus.connect_blocking(url) as client, client.subscribe("lines") as messages:
                for message in messages:
                    got.append(int(message.payload))
                    if got[-1] == lines.count - 1:
                        break
            return got

        play(lines, first.close, lambda: second.enter_context(run_server(*flags)), read)


def test_kills_of_nats_and_gateway_lose_nothing(tmp_path: Path) -> None:
    nats = NatsServer(tmp_path, "one", free_port())
    nats.start()
    try:
        asyncio.run(in_stream(nats.url, 0))
        lines = Lines(tmp_path, nats.url, ', channel = "app.lines", stream = "LINES"')
        play(lines, nats.kill, nats.start, lambda: asyncio.run(in_stream(nats.url, lines.count)))
    finally:
        nats.kill()


async def in_stream(url: str, count: int) -> list[int]:
    """What the stream has, once it is so much. Makes it if nothing is asked for."""
    client = Client()
    await client.connect(url, connect_timeout=60)
    try:
        jetstream = client.jetstream(timeout=60)
        if not count:
            await jetstream.add_stream(name="LINES", subjects=["app.>"])
            return []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await jetstream.stream_info("LINES")).state.messages < count:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        subscription = await jetstream.subscribe("app.lines", ordered_consumer=True)
        return [int((await subscription.next_msg(PATIENCE_SECONDS)).data) for _ in range(count)]
    finally:
        await client.close()
