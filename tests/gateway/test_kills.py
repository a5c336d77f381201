"""A gateway that reads a file and sends to another bus, while either of them is killed.

Messages that an uplink has stored are neither lost nor duplicated, and stay in order.
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
from tests.support.programs import PATIENCE_SECONDS, Program, run_server, running_program

MODULES = """
[modules.up]
module = "uplink"
hears = ["lines"]
settings = {{ to = "{to}", class = "lines", data_dir = "{folder}/kept"{more} }}

[modules.lines]
module = "tail"
settings = {{ path = "{folder}/app.log", start = "begin", remember = "{folder}/place" }}
"""


class GrowingLog:
    """Growing file, and the configuration of a gateway that reads it."""

    def __init__(self, folder: Path, to: str, extra_config: str = "") -> None:
        self.count = 0
        self._log = folder / "app.log"
        self.file = folder / "gateway.toml"
        self.file.write_text(MODULES.format(to=to, folder=folder, more=extra_config))

    def write(self, count: int) -> None:
        with self._log.open("a") as log:
            log.writelines(f"{number}\n" for number in range(self.count, self.count + count))
        self.count += count


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def metric_value(gateway: str, name: str) -> int:
    """Return a health value of the gateway's uplink, or -1 if the metrics do not contain it."""
    with urllib.request.urlopen(f"http://{gateway}/metrics", timeout=60) as answer:
        found = re.search(rf'what="{name}"\}} (\d+)', answer.read().decode())
    return int(found[1]) if found else -1


def wait_started(gateway: Program) -> str:
    """Wait until the gateway is ready. Returns its HTTP address."""
    return gateway.read_line().partition(" http=")[2]


def run_outages(
    lines: GrowingLog,
    kill: Callable[[], object],
    start: Callable[[], object],
    read: Callable[[], list[int]],
) -> None:
    """Write lines while everything runs, while the other bus is stopped, while the gateway is
    stopped, and after that.
    """
    command = ("gateway", str(lines.file), "--http", "0")
    with running_program(*command) as gateway:
        http_address = wait_started(gateway)
        lines.write(500)
        wait_until(lambda: metric_value(http_address, "copied") > 0)
        kill()
        lines.write(500)
        wait_until(lambda: metric_value(http_address, "kept") == 1000)
    lines.write(100)  # The gateway is killed.
    with running_program(*command) as gateway:
        http_address = wait_started(gateway)
        wait_until(lambda: metric_value(http_address, "kept") == 100)
        start()
        lines.write(200)
        assert read() == list(range(lines.count))


@pytest.mark.long
@pytest.mark.parametrize("is_stateless_server", [False, True])
def test_kills_of_bus_and_gateway_lose_nothing(tmp_path: Path, is_stateless_server: bool) -> None:
    """The target is a bus with a journal, or a stateless server of a JetStream cluster."""
    port = free_port()
    flags = ("--port", str(port), "--data-dir", str(tmp_path / "bus"))
    url = f"simplebus://127.0.0.1:{port}"
    lines = GrowingLog(tmp_path, url)
    with ExitStack() as all_along, ExitStack() as first, ExitStack() as second:
        if is_stateless_server:
            nats = all_along.enter_context(nats_server(tmp_path))
            flags = ("--port", str(port), "--engine", nats.url)
        first.enter_context(run_server(*flags))

        def read() -> list[int]:
            received: list[int] = []
            with simplebus.connect_blocking(url) as client, client.subscribe("lines") as messages:
                for message in messages:
                    received.append(int(message.payload))
                    if received[-1] == lines.count - 1:
                        break
            return received

        run_outages(lines, first.close, lambda: second.enter_context(run_server(*flags)), read)


def test_kills_of_nats_and_gateway_lose_nothing(tmp_path: Path) -> None:
    nats = NatsServer(tmp_path, "one", free_port())
    nats.start()
    try:
        asyncio.run(read_stream(nats.url, 0))
        lines = GrowingLog(tmp_path, nats.url, ', channel = "app.lines", stream = "LINES"')
        run_outages(
            lines, nats.kill, nats.start, lambda: asyncio.run(read_stream(nats.url, lines.count))
        )
    finally:
        nats.kill()


async def read_stream(url: str, count: int) -> list[int]:
    """Return the numbers in the stream once it has `count` messages. Creates the stream for 0."""
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
