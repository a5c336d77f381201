"""Servers and bridges as real processes, which are killed and restarted under load."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from subprocess import DEVNULL

import pytest
import trio
from typer.testing import CliRunner

import simplebus
from load.ports import HOST, free_ports
from simplebus import Bus
from simplebus.bridge.runner import create_copiers, run_copiers, serve_with_bridges
from simplebus.bridge.settings import BridgeSettings, CopiedClass
from simplebus.cli import app
from simplebus.core.limits import Limits
from simplebus.core.settings import FullPolicy, Settings
from simplebus.server.run import ServeOptions, serve
from simplebus.testing.server import bus_server
from tests.support.programs import running_program, start_program

COUNT = 2000
PATIENCE_SECONDS = 120.0


class RestartableProgram:
    """Program that can be killed and started again with the same arguments."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        self._words = arguments
        self.restart()

    def restart(self) -> None:
        with self._log.open("a") as log:
            self._process = start_program(*self._words, stdin=DEVNULL, stdout=DEVNULL, stderr=log)

    def describe(self) -> str:
        """Return the end of its log, and if it is running."""
        is_running = self._process.poll() is None
        return f"{self._words[0]} ({is_running=}):\n{self._log.read_text()[-2000:]}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


async def wait_listening(address: str) -> None:
    """Wait until a server listens at the address."""
    host, _, port = address.partition(":")
    while True:
        try:
            await (await trio.open_tcp_stream(host, int(port))).aclose()
        except OSError:
            await trio.sleep(0.05)
        else:
            return


async def publish(address: str, is_published: trio.Event) -> None:
    """Publish all messages with confirms, reconnecting when the bus is lost."""
    await wait_listening(address)
    async with simplebus.connect(address, name="till", reconnect=PATIENCE_SECONDS) as bus:
        for first in range(0, COUNT, 20):
            await bus.publish_many([b"%d" % n for n in range(first, first + 20)], class_id="a")
            await trio.sleep(0.01)
    is_published.set()


async def collect_messages(bus: Bus, received: list[int]) -> None:
    """Append received numbers to `received` until there are COUNT."""
    async with bus.subscribe("a", durable="test", start="earliest") as messages:
        while len(received) < COUNT:
            received += [int(each.payload) for each in await messages.take(1000)]


@pytest.mark.long
async def test_kills_keep_messages_once_in_order(tmp_path: Path) -> None:
    ports = free_ports(2)
    source, target = (f"{HOST}:{port}" for port in ports)
    logs = [tmp_path / "near.log", tmp_path / "far.log", tmp_path / "bridge.log"]
    stateless_servers = ("--host", HOST, "--no-nats", "--no-http")
    programs = [
        RestartableProgram(
            log,
            "serve",
            *stateless_servers,
            "--port",
            str(port),
            "--data-dir",
            str(tmp_path / str(port)),
        )
        for log, port in zip(logs, ports, strict=False)
    ]
    programs.append(
        RestartableProgram(logs[2], "bridge", "--from", source, "--to", target, "--name", "b", "a")
    )
    is_published = trio.Event()
    received: list[int] = []
    try:
        with trio.move_on_after(PATIENCE_SECONDS):  # The assertion below shows what is missing.
            async with trio.open_nursery() as nursery:
                nursery.start_soon(publish, source, is_published)
                for victim in (2, 1, 0):
                    await wait_listening(source)
                    await wait_listening(target)
                    await trio.sleep(0.5)
                    programs[victim].kill()
                    await trio.sleep(0.1)
                    programs[victim].restart()
                await is_published.wait()
            await wait_listening(target)
            async with simplebus.connect(target) as bus:
                await collect_messages(bus, received)
        assert received == list(range(COUNT)), "\n".join(program.describe() for program in programs)
    finally:
        for program in programs:
            program.kill()


async def test_command_ends_cleanly_and_logs_counts() -> None:
    with bus_server() as source, bus_server() as target, trio.fail_after(PATIENCE_SECONDS):
        async with (
            simplebus.connect(source.address) as source_bus,
            simplebus.connect(target.address) as target_bus,
        ):
            await source_bus.publish(b"hello", class_id=1)
            with running_program(
                "bridge", "--from", source.address, "--to", target.address, "1"
            ) as bridge:
                async with target_bus.subscribe(1) as messages:
                    assert (await messages.get()).payload == b"hello"
                bridge.signal(signal.SIGTERM)
                status, _, log = await trio.to_thread.run_sync(bridge.wait)
    assert status == 0
    assert "bridge bridge there 1: copying from sequence 0" in log


async def test_record_class_does_not_spill(tmp_path: Path) -> None:
    """A class that spills keeps no last values, and bridges find their records by them."""
    spill = Settings(full_policy=FullPolicy.SPILL, limits=Limits(class_messages=100))
    with trio.fail_after(PATIENCE_SECONDS), bus_server() as source:
        async with simplebus.connect(source.address) as source_bus:
            for run_number in range(2):
                await source_bus.publish_many([b"%d" % run_number] * 200, class_id="a")
                with bus_server(spill, data_dir=tmp_path) as target:
                    copiers = create_copiers(
                        [BridgeSettings("b", source.address, target.address, (CopiedClass("a"),))]
                    )
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(run_copiers, copiers)
                        async with (
                            simplebus.connect(target.address) as target_bus,
                            target_bus.subscribe("a", durable="test") as messages,
                        ):
                            for _ in range(200):
                                assert (await messages.get()).payload == b"%d" % run_number
                        nursery.cancel_scope.cancel()


async def test_server_runs_configured_bridges() -> None:
    bridges = [BridgeSettings("out", "", "", (CopiedClass("orders", target_class="copies"),))]
    options = ServeOptions(hosts=("127.0.0.1",), port=0)
    log_lines: list[str] = []
    run = partial(serve, Settings(), options, announce=log_lines.append)
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_with_bridges, run, bridges)
            while not log_lines:  # noqa: ASYNC110 - there is no event.
                await trio.sleep(0.01)
            async with simplebus.connect(log_lines[0].split("tcp=")[1]) as bus:
                await bus.publish(b"hello", class_id="orders")
                async with bus.subscribe("copies") as messages:
                    assert (await messages.get()).payload == b"hello"
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--from", "a", "--to", "a", "1"], "source and target are the same: a"),
        (["--from", "a", "1"], "expected --from and --to"),
        (["--from", "a", "--to", "b"], "at least one class"),
        (["--from", "a", "--to", "b", "70000"], "a class id is from 0"),
        (["--from", "a", "--to", "b", "--rewrite", "x=y.*", "1"], "has 1 '*'"),
        (["--from", "a", "--to", "b", "--name", "a b", "1"], "letters, digits"),
        (["--from", "a", "--to", "b", "--no-path", "1"], "copied in a loop"),
        (["--from", "a", "--to", "nats://b", "--both", "--no-path", "1"], "copied in a loop"),
        (["--from", "a", "--to", "b", "bridges"], "it holds the records of bridges"),
    ],
)
def test_invalid_options_print_one_sentence(arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["bridge", *arguments])
    assert result.exit_code == 2
    assert problem in result.output


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('form = "a"', "'form' is unknown; did you mean 'from'?"),
        ('from = "a"', "'to' is missing"),
        ('from = "a"\nto = "b"', "copies at least one class"),
        ('from = "a/b"\nto = "b"', "bridges[0].from: 'a/b' is not a server address"),
        ('from = "a"\nto = "b"\nclasses = ["x"]\nhops = 0', "hops is from 1"),
        ('from = "a"\nto = "b"\n[[bridges.copy]]\nclass = 7\nchannels = ["a..b"]', "is empty"),
        ('from = "nats://a"\nto = "b"\nboth = true\nclasses = ["x"]', "another bridge"),
        (
            'from = "a"\nto = "b"\n[[bridges.copy]]\nclass = 7\nto = "bridges"',
            "it holds the records of bridges",
        ),
        (
            'from = "a"\nto = "nats://b"\n[[bridges.copy]]\nclass = 7\nstream = "A B"',
            "invalid stream name 'A B'",
        ),
        (
            'from = "a"\nto = "nats://b"\n[[bridges.copy]]\nclass = 7\nunder_way = 1',
            "needs a 'stream' at the target",
        ),
        (
            'from = "a"\nto = "nats://b"\n[[bridges.copy]]\nclass = 7\nstream = "A"\nunder_way = 0',
            "under_way is from 1 to 24576, got 0",
        ),
        (
            'from = "nats://b"\nto = "a"\n[[bridges.copy]]\nclass = 7\nstream = "A"\nunder_way = 1',
            "this bridge leads to a bus",
        ),
        (
            'from = "a"\nto = "nats://b"\npath = false\nclasses = ["x"]\n'
            '[[bridges]]\nname = "y"\nfrom = "nats://b"\nto = "c"\nclasses = ["x"]',
            "bridge 'x' has path = false, and bridge 'y' reads from NATS",
        ),
    ],
)
def test_names_place_of_mistake_in_file(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "bridges.toml"
    file.write_text(f'[[bridges]]\nname = "x"\n{text}\n')
    for each in file, tmp_path / "nothing.toml":
        result = CliRunner().invoke(app, ["bridge", str(each)])
        assert result.exit_code == 78
        assert (problem if each is file else "cannot be read") in result.output
        assert str(each) in result.output


def test_a_file_without_a_bridge_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bridges.toml"
    for text in "", "# later", "bridges = []":
        file.write_text(text)
        result = CliRunner().invoke(app, ["bridge", str(file)])
        assert result.exit_code == 78
        assert f"{file}: the file has no bridges" in result.output
