"""Tests of the C# client of version 1: its frames, and its behaviour against servers.

The client runs in separate processes, and its bytes are built and read with `oracles` only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from load.ports import free_port
from tests.dotnet.sdk import DotnetSdk
from tests.support.oracles import (
    DELIMITER,
    build_frame,
    group_ids,
    parse_ack,
    parse_connect,
    parse_frame,
)
from tests.support.oracles import split_frames as split
from tests.support.programs import PATIENCE_SECONDS, Program, run_server, running_process
from tests.support.requirements import require_program
from tests.support.strategies import ACK, CONNECT, HEARTBEAT, MESSAGE, SUBSCRIBE

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "protocol" / "dotnet" / "Version1"
VECTORS = ROOT / "protocol" / "vectors"

# Without the group, each worker compiles the programs.
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("dotnet")]

README_PROGRAM = """
using System;
using SimpleBus.Version1;
using SimpleBus.Version1.Example;

public static class Readme
{
    public static void Main(string[] arguments)
    {
        %s
    }
}
"""

Dotnet = Callable[..., contextlib.AbstractContextManager[Program]]


def code_of_the_readme() -> str:
    """The client's README example, with the port from the command line."""
    [code] = re.findall(r"```csharp\n(.*?)```", (CLIENT / "README.md").read_text(), re.DOTALL)
    assert "8888" in code
    return str(code).replace("8888", "int.Parse(arguments[0])")


PROJECT = """
<Project Sdk="Microsoft.NET.Sdk">
  <PropertyGroup>
    <OutputType>Exe</OutputType>
    <TargetFramework>netcoreapp3.1</TargetFramework>
    <LangVersion>7.3</LangVersion>
  </PropertyGroup>
  <ItemGroup>
    %s
  </ItemGroup>
</Project>
"""


def compile_with_mono(sources: list[Path], target: Path) -> list[str | Path]:
    # Language version 7 without warnings, so that old and new compilers accept it.
    flags = ["-langversion:7", "-warn:4", "-warnaserror", "-optimize"]
    process = subprocess.run(
        ["mcs", *flags, f"-out:{target}.exe", *sources],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return ["mono", f"{target}.exe"]


def compile_with_sdk(sdk: DotnetSdk, sources: list[Path], target: Path) -> list[str | Path]:
    project = target / f"{target.name}.csproj"
    target.mkdir()
    project.write_text(PROJECT % "".join(f'<Compile Include="{source}" />' for source in sources))
    return sdk.command(sdk.build(project, TreatWarningsAsErrors="true"))


@pytest.fixture(scope="module", params=["mono", "dotnet"])
def dotnet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dotnet:
    """Function that runs `Shops`, `Checks` or `Readme` and kills it at the end of the block."""
    folder = tmp_path_factory.mktemp("dotnet")
    if request.param == "mono":
        require_program("mcs")
        require_program("mono")
        compile_program = compile_with_mono
    else:
        compile_program = partial(compile_with_sdk, request.getfixturevalue("dotnet_sdk"))
    readme = folder / "Readme.cs"
    readme.write_text(README_PROGRAM % code_of_the_readme())
    shared = [*sorted(CLIENT.glob("*.cs")), CLIENT / "Example" / "ShopCreated.cs"]
    commands = {
        name: compile_program([*shared, main], folder / name)
        for name, main in {
            "Shops": CLIENT / "Example" / "Shops.cs",
            "Checks": Path(__file__).parent / "Checks.cs",
            "Readme": readme,
        }.items()
    }
    return lambda name, *arguments: running_process([*commands[name], *arguments])


def test_builds_the_project_of_the_example(dotnet_sdk: DotnetSdk) -> None:
    shops = dotnet_sdk.build(CLIENT / "Example" / "Shops.csproj", TreatWarningsAsErrors="true")
    with running_process(dotnet_sdk.command(shops)) as program:
        assert program.wait()[::2] == (2, "usage: Shops publish|subscribe|count HOST:PORT [N]\n")


def host_and_port(url: str) -> str:
    return url.removeprefix("simplebus://")


def send_line(program: Program, line: str) -> None:
    assert program.process.stdin is not None
    program.process.stdin.write(line.encode() + b"\n")
    program.process.stdin.flush()


def close_program(program: Program) -> list[str]:
    """Close the program's input and return the remaining lines of its output."""
    status, stdout, stderr = program.wait()
    assert (status, stderr) == (0, ""), stdout
    return stdout.splitlines()


def run_checks(dotnet: Dotnet, *questions: str) -> list[str]:
    """Return the answers of `Checks bytes` to these questions."""
    with dotnet("Checks", "bytes") as checks:
        status, stdout, stderr = checks.wait("".join(f"{q}\n" for q in questions).encode())
    assert status == 0, stderr
    return stdout.splitlines()


# Bytes -------------------------------------------------------------------------------------------


def vectors(file: str, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((VECTORS / f"{file}.json").read_text())[name]
    return found


def bytes_of(vector: dict[str, Any], prefix: str = "") -> bytes:
    if f"{prefix}hex" in vector:
        return bytes.fromhex(vector[f"{prefix}hex"])
    return b"".join(bytes.fromhex(piece) * count for piece, count in vector[f"{prefix}parts"])


def fields_of(vector: dict[str, Any]) -> str:
    names = ("type", "class_id", "message_id", "timer_index")
    return " ".join([*(str(vector[name]) for name in names), bytes_of(vector, "content_").hex()])


def test_encodes_the_frames_of_the_vectors(dotnet: Dotnet) -> None:
    frames = vectors("frames", "frames")
    written = run_checks(dotnet, *(f"frame {fields_of(vector)}" for vector in frames))
    assert dict(zip([v["name"] for v in frames], written, strict=True)) == {
        vector["name"]: bytes_of(vector).hex() for vector in frames
    }


def test_decodes_the_streams_of_the_vectors_in_any_fragmentation(
    dotnet: Dotnet, tmp_path: Path
) -> None:
    streams = vectors("streams", "streams") + [
        {"name": v["name"], "hex": v["hex"], "frames": [v], "leftover": 0}
        for v in vectors("frames", "frames")
    ]
    questions, expected = [], []
    for number, vector in enumerate(streams):
        path = tmp_path / f"{number}"
        path.write_bytes(bytes_of(vector))
        frames = [fields_of(frame) for frame in vector["frames"]]
        for chunk in (1, 2, 3, 5, 11, 1 << 30) if path.stat().st_size < 2000 else (99_991, 1 << 30):
            questions.append(f"stream {path} {chunk}")
            expected.append(";".join([*frames, str(vector["leftover"])]))
    for question, answer, right in zip(
        questions, run_checks(dotnet, *questions), expected, strict=True
    ):
        assert answer == right, question


def test_groups_acks_as_in_the_vectors(dotnet: Dotnet) -> None:
    grouping = vectors("acks", "grouping")
    questions = [" ".join(["group", *(f"1:3:{i}" for i in v["ids"])]) for v in grouping]
    for vector, answer in zip(grouping, run_checks(dotnet, *questions), strict=True):
        frames = [parse_frame(frame) for frame in split(bytes.fromhex(answer))[0]]
        assert [content.decode() for *_, content in frames] == vector["contents"], vector["name"]
        assert {fields[:4] for fields in frames} <= {(ACK, 1, 0, 3)}


def test_acks_of_different_classes_and_timer_indexes_are_separate(dotnet: Dotnet) -> None:
    [answer] = run_checks(dotnet, "group 1:5:7 1:5:8 2:5:9 1:0:9 1:5:9 2:5:10 1:0:10")
    frames = [parse_frame(frame) for frame in split(bytes.fromhex(answer))[0]]
    assert [(class_id, timer, content) for _, class_id, _, timer, content in frames] == [
        (1, 5, b"7-10"),
        (2, 5, b"9-11"),
        (1, 0, b"9-11"),
    ]


def test_messages_are_encoded_as_protobuf(dotnet: Dotnet) -> None:
    # Written by hand from the description of the encoding: tag, value, tag, length, bytes.
    encoded_by_message = {
        (0, ""): "",
        (1, ""): "0801",
        (150, "testing"): "0896011207" + b"testing".hex(),
        (-1, "Ω\r\n"): "08" + "ff" * 9 + "01" + "1204" + "Ω\r\n".encode().hex(),
        ((1 << 63) - 1, "x" * 200): "08" + "ff" * 8 + "7f" + "12c801" + "78" * 200,
    }
    encoded = run_checks(
        dotnet, *(f"encode {n} {name.encode().hex()}" for n, name in encoded_by_message)
    )
    assert encoded == list(encoded_by_message.values())
    decoded = run_checks(dotnet, *(f"decode {message}" for message in encoded_by_message.values()))
    assert decoded == [f"{n} {name.encode().hex()}" for n, name in encoded_by_message]


def test_skips_unknown_fields_and_rejects_invalid_ones(dotnet: Dotnet) -> None:
    unknown_fields = "18ff01" + "21" + "00" * 8 + "2a03616263" + "35" + "00" * 4
    assert run_checks(dotnet, f"decode {unknown_fields}0805{unknown_fields}") == ["5 "]
    for broken in ("08", "12ff", "120261", "0a00", "1500000000", "00", "0b", "08" + "ff" * 10):
        [answer] = run_checks(dotnet, f"decode {broken}")
        assert answer.startswith("invalid: "), broken


def test_refuses_payloads_that_violate_the_protocol(dotnet: Dotnet) -> None:
    # The client repeats unsent messages after a reconnect, so an invalid one would repeat forever.
    long = 100 - 13  # The limit that Checks sets.
    good = [b"", b"<\r\n", b"\r\n>", b"<\r\n<", b"x" * long]
    assert run_checks(dotnet, *(f"publish 1 {payload.hex()}" for payload in good)) == [
        "queued"
    ] * len(good)
    for bad in (DELIMITER, b"a" + DELIMITER, b"<<\r\n>b", b"x" * (long + 1)):
        [answer] = run_checks(dotnet, f"publish 1 {bad.hex()}")
        assert answer.startswith("refused: "), bad
    assert run_checks(dotnet, "publish 2 00") == [
        "refused: class 2 is not bound; call Bind before Publish"
    ]


# Against a fake server ---------------------------------------------------------------------------


class ServerSide:
    """The server's end of one connection of the client."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._received = b""

    def read_frame(self) -> tuple[int, int, int, int, bytes]:
        """Return the next frame from the client."""
        while DELIMITER not in self._received[9:]:
            more = self.sock.recv(65536)
            assert more, "the client hung up"
            self._received += more
        [frame, *_], _ = split(self._received)
        self._received = self._received[len(frame) :]
        return parse_frame(frame)

    def send_frame(self, frame_type: int, **fields: Any) -> None:
        self.sock.sendall(build_frame(frame_type, **fields))

    def accept_connect(self, session_id: int = 0) -> set[int] | None:
        """Read the Connect and reply. Returns the classes that it names."""
        frame_type, class_id, message_id, timer_index, content = self.read_frame()
        assert (frame_type, class_id, message_id, timer_index) == (CONNECT, 0, 0, 0)
        self.send_frame(CONNECT, content=session_id.to_bytes(4, "little"))
        return parse_connect(content)

    def read_acks(self, count: int) -> list[tuple[int, int, int, int]]:
        """Return the acks of the next `count` messages as (class, timer index, first, last)."""
        found = []
        while count > 0:
            frame_type, class_id, _, timer_index, content = self.read_frame()
            assert frame_type == ACK
            ids = parse_ack(content)
            assert ids
            found.append((class_id, timer_index, *ids))
            count -= ids[1] - ids[0]
        return found


@contextlib.contextmanager
def watched_client(
    dotnet: Dotnet, name: str, *arguments: str
) -> Iterator[tuple[Program, Callable[[], contextlib.AbstractContextManager[ServerSide]]]]:
    """Start a program. Yields it and a function that accepts its next connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_SECONDS)

        @contextlib.contextmanager
        def accept_connection() -> Iterator[ServerSide]:
            with listener.accept()[0] as sock:
                sock.settimeout(PATIENCE_SECONDS)
                yield ServerSide(sock)

        port = listener.getsockname()[1]
        with dotnet(name, *arguments, f"127.0.0.1:{port}") as program:
            yield program, accept_connection


def test_connects_then_subscribes_once_per_class(dotnet: Dotnet) -> None:
    with (
        watched_client(dotnet, "Checks", "two") as (checks, accept_connection),
        accept_connection() as peer,
    ):
        assert peer.accept_connect(session_id=0x04030201) == {1, 2}
        assert [peer.read_frame() for _ in range(2)] == [(SUBSCRIBE, n, 0, 0, b"") for n in (1, 2)]
        assert checks.read_line() == f"session {0x04030201}"
        peer.send_frame(HEARTBEAT)
        peer.send_frame(MESSAGE, class_id=2, message_id=7, timer_index=4, content=b"<\r\n")
        assert [checks.read_line() for _ in range(2)] == ["first 2 7 3c0d0a", "second 2 7 3c0d0a"]
        assert peer.read_frame() == (ACK, 2, 0, 4, b"7-8")


def test_ack_ranges_have_one_class_and_timer_index(dotnet: Dotnet) -> None:
    with (
        watched_client(dotnet, "Checks", "two") as (_, accept_connection),
        accept_connection() as peer,
    ):
        peer.accept_connect()
        [peer.read_frame() for _ in range(2)]
        sent = [(1, 0, 5), (1, 0, 6), (2, 0, 0), (1, 1, 7), (2, 0, 1), (1, 1, 3), (1, 1, 4)]
        peer.sock.sendall(  # In one call: a message that arrives later gets an ack of its own.
            b"".join(
                build_frame(MESSAGE, class_id=class_id, message_id=id_, timer_index=timer_index)
                for class_id, timer_index, id_ in sent
            )
        )
        assert peer.read_acks(len(sent)) == [
            (1, 0, 5, 7),
            (2, 0, 0, 2),
            (1, 1, 7, 8),
            (1, 1, 3, 5),
        ]


def test_many_acks_are_sent_before_the_ack_interval(dotnet: Dotnet) -> None:
    with (
        watched_client(dotnet, "Checks", "patient") as (_, accept_connection),
        accept_connection() as peer,
    ):
        peer.accept_connect()
        peer.read_frame()
        peer.sock.sendall(
            b"".join(build_frame(MESSAGE, class_id=1, message_id=i) for i in range(5000))
        )
        [(class_id, timer_index, first, last)] = peer.read_acks(4096)
        assert (class_id, timer_index, first) == (1, 0, 0)
        assert 4096 <= last <= 5000


def test_pending_acks_are_dropped_with_the_connection(dotnet: Dotnet) -> None:
    # After a server restart, the same ids belong to other messages.
    with watched_client(dotnet, "Checks", "two") as (checks, accept_connection):
        with accept_connection() as peer:
            peer.accept_connect()
            [peer.read_frame() for _ in range(2)]
            assert checks.read_line() == "session 0"
            peer.send_frame(MESSAGE, class_id=1, message_id=3)
            assert [checks.read_line() for _ in range(2)] == ["first 1 3 ", "second 1 3 "]
        with accept_connection() as peer:
            assert peer.accept_connect() == {1, 2}
            assert [peer.read_frame() for _ in range(2)] == [
                (SUBSCRIBE, n, 0, 0, b"") for n in (1, 2)
            ]
            peer.send_frame(MESSAGE, class_id=1, message_id=9)
            assert peer.read_frame() == (ACK, 1, 0, 0, b"9-10")


def test_closing_sends_pending_acks_first(dotnet: Dotnet) -> None:
    with (
        watched_client(dotnet, "Checks", "patient") as (checks, accept_connection),
        accept_connection() as peer,
    ):
        peer.accept_connect()
        peer.read_frame()
        assert checks.read_line() == "session 0"
        peer.send_frame(MESSAGE, class_id=1)
        assert checks.read_line() == "0"
        assert checks.process.stdin is not None
        checks.process.stdin.close()
        assert peer.read_frame() == (ACK, 1, 0, 0, b"0-1")
        assert peer.sock.recv(100) == b""
        peer.send_frame(MESSAGE, class_id=1, message_id=1)  # It is not processed any more.
        peer.sock.close()
        assert checks.read_line() == "closed"


def test_idle_client_sends_heartbeats(dotnet: Dotnet) -> None:
    with (
        watched_client(dotnet, "Checks", "quiet") as (_, accept_connection),
        accept_connection() as peer,
    ):
        peer.accept_connect()
        assert [peer.read_frame() for _ in range(2)] == [(HEARTBEAT, 0, 0, 0, b"")] * 2


# Against the real server -------------------------------------------------------------------------


def test_dotnet_readme_example_runs(dotnet: Dotnet) -> None:
    with run_server() as (_, url), dotnet("Readme", url.rpartition(":")[2]) as readme:
        assert readme.read_line() == "First"
        assert close_program(readme) == []
        assert unacked_ids(url) == []


def test_200000_messages_arrive_in_order_and_are_acked(dotnet: Dotnet) -> None:
    with run_server() as (bus, url):
        with (
            dotnet("Shops", "count", host_and_port(url), "200000") as counting,
            dotnet("Shops", "publish", host_and_port(url)) as publishing,
        ):
            assert counting.read_line().startswith("session ")
            assert publishing.read_line().startswith("session ")
            send_line(publishing, "200000")
            assert publishing.read_line() == "published 200000"
            assert counting.read_line().startswith("counted 200000 in order")
            assert close_program(publishing) == close_program(counting) == []
        assert unacked_ids(url) == []
        bus.process.terminate()  # The server waits for acks and logs lost messages.
        status, _, log = bus.wait()
        assert status == 0
        assert "lost" not in log


def unacked_ids(url: str) -> list[int]:
    """Return the ids of the messages of class 1 that a new subscriber receives."""
    host, port = host_and_port(url).split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as sock:
        sock.sendall(build_frame(CONNECT, content=b"[1]") + build_frame(SUBSCRIBE, class_id=1))
        # This message arrives after all stored ones.
        sock.sendall(build_frame(MESSAGE, class_id=1, content=b"end"))
        peer = ServerSide(sock)
        ids = []
        while (frame := peer.read_frame())[4] != b"end":
            if frame[0] == MESSAGE:
                ids.append(frame[2])
        sock.sendall(build_frame(ACK, class_id=1, content=b"%d-%d" % (frame[2], frame[2] + 1)))
        return ids


class NumberReader(threading.Thread):
    """Thread that reads the numbers printed by `Shops subscribe`."""

    def __init__(self, program: Program) -> None:
        super().__init__(daemon=True)
        assert program.read_line().startswith("session ")
        self.numbers: list[int] = []
        self.process = program.process
        self._incomplete_line, program._unread = program._unread, b""
        self.start()

    def run(self) -> None:
        assert self.process.stdout is not None
        more = b""
        while True:
            # An incomplete last line means that the message was not processed.
            *lines, self._incomplete_line = (self._incomplete_line + more).split(b"\n")
            self.numbers += map(int, lines)
            more = os.read(self.process.stdout.fileno(), 65536)
            if not more:
                return

    def wait_until(self, condition: Callable[[list[int]], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition(self.numbers):
            assert time.monotonic() < deadline, f"{len(self.numbers)} received: {self.numbers[-5:]}"
            time.sleep(0.01)

    def close(self) -> int:
        """Close the program's input and return its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.join(PATIENCE_SECONDS)
        return self.process.wait(PATIENCE_SECONDS)


def in_order(numbers: list[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


def test_unacked_messages_of_a_killed_consumer_go_to_the_next(dotnet: Dotnet) -> None:
    count = 60_000
    with run_server() as (_, url), dotnet("Shops", "publish", host_and_port(url)) as publishing:
        with dotnet("Shops", "subscribe", host_and_port(url)) as killed:
            first = NumberReader(killed)
            send_line(publishing, str(count))
            first.wait_until(lambda numbers: len(numbers) > count // 3)
            killed.process.kill()
            first.join(PATIENCE_SECONDS)
        assert len(first.numbers) < count, "it was killed too late to prove anything"
        with dotnet("Shops", "subscribe", host_and_port(url)) as successor:
            second = NumberReader(successor)
            second.wait_until(lambda numbers: numbers[-1:] == [count - 1])
            assert second.close() == 0
    assert in_order(first.numbers)
    assert in_order(second.numbers)
    assert set(first.numbers) | set(second.numbers) == set(range(count))
    repeated = set(first.numbers) & set(second.numbers)
    assert len(repeated) < count // 3, "it had acknowledged something, that need not come again"
    assert len(group_ids(second.numbers)) == 1


def test_message_is_redelivered_if_its_handler_throws(dotnet: Dotnet) -> None:
    with (
        run_server("--ack-timeout", "3") as (_, url),
        dotnet("Shops", "publish", host_and_port(url)) as publishing,
        dotnet("Checks", "faulty", host_and_port(url)) as faulty,
    ):
        assert faulty.read_line().startswith("session ")
        send_line(publishing, "10")
        assert [int(faulty.read_line()) for _ in range(12)] == [*range(10), 5, 7]
        status, stdout, stderr = faulty.wait()
        assert (status, stdout) == (0, "closed\n")
        assert re.findall(r"failed on message (\d+) of class 1", stderr) == ["5", "7"]
        assert unacked_ids(url) == []


def test_handler_can_publish_to_its_own_full_class(dotnet: Dotnet) -> None:
    # Each message makes the handler publish another one on the connection that also sends acks.
    with (
        run_server("--max-class-messages", "1000") as (_, url),
        dotnet("Checks", "echo", host_and_port(url)) as echoing,
        dotnet("Shops", "publish", host_and_port(url)) as publishing,
    ):
        assert echoing.read_line().startswith("session ")
        send_line(publishing, "900")
        assert [echoing.read_line() for _ in range(900)] == ["echoed"] * 900


def test_reconnects_after_a_server_restart(dotnet: Dotnet) -> None:
    port = str(free_port())
    with contextlib.ExitStack() as clients:
        with run_server("--port", port) as (bus, url):
            subscribing = clients.enter_context(dotnet("Shops", "subscribe", host_and_port(url)))
            publishing = clients.enter_context(dotnet("Shops", "publish", host_and_port(url)))
            listener = NumberReader(subscribing)
            assert publishing.read_line().startswith("session ")
            send_line(publishing, "1000")
            assert publishing.read_line() == "published 1000"
            listener.wait_until(lambda numbers: len(numbers) == 1000)
            bus.process.kill()
        assert publishing.process.stderr is not None
        assert b"connection lost: " in publishing.process.stderr.readline()
        send_line(publishing, "1000")  # They wait for the server.
        with run_server("--port", port):
            assert publishing.read_line() == "published 2000"
            listener.wait_until(lambda numbers: len(numbers) == 2000)
            assert listener.numbers == list(range(2000))


class CuttingProxy(threading.Thread):
    """Proxy between client and server that cuts each connection after a number of bytes."""

    def __init__(self, url: str, cut_after: list[int]) -> None:
        super().__init__(daemon=True)
        host, port = host_and_port(url).split(":")
        self._server = (host, int(port))
        self._cut_after = cut_after
        self.cut_count = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> CuttingProxy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.join(PATIENCE_SECONDS)
        self._listener.close()

    def run(self) -> None:
        for budget in [*self._cut_after, 1 << 60]:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            with client, socket.create_connection(self._server) as bus:
                up = threading.Thread(target=self._copy, args=(client, bus, 1 << 60), daemon=True)
                up.start()
                self._copy(bus, client, budget)
                for sock in (client, bus):
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                up.join(PATIENCE_SECONDS)
            self.cut_count += budget < 1 << 60

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, budget: int) -> None:
        with contextlib.suppress(OSError):
            while budget and (data := source.recv(min(65536, budget))):
                target.sendall(data)
                budget -= len(data)
            target.shutdown(socket.SHUT_WR)


def test_repeated_disconnects_lose_no_message(dotnet: Dotnet) -> None:
    count = 20_000
    cuts = [5, 100_001, 17 + 30, 200_007]  # In the reply, in a message, anywhere.
    with (
        # After a second disconnect, unacked messages wait for the backoff: here seconds.
        run_server("--tick", "0.3") as (_, url),
        dotnet("Shops", "publish", host_and_port(url)) as publishing,
        CuttingProxy(url, cuts) as proxy,
        dotnet("Shops", "subscribe", proxy.address) as subscribing,
    ):
        listener = NumberReader(subscribing)
        send_line(publishing, str(count))
        listener.wait_until(lambda numbers: numbers[-1:] == [count - 1])
        assert listener.close() == 0
        assert proxy.cut_count == len(cuts)
        assert set(listener.numbers) == set(range(count))
        sessions = sum(a >= b for a, b in itertools.pairwise(listener.numbers))
        assert sessions <= len(cuts), "a session's messages were not in order"
        assert unacked_ids(url) == []
