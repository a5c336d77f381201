"""Tests of the NATS listener of a server process: port, signals and shutdown."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import IO

import pytest

from tests.support.programs import Program, run_program, run_server


class BlockingNatsClient:
    """A raw, blocking NATS client."""

    def __init__(self, program: Program) -> None:
        host, _, port = program.nats_address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.lines: IO[bytes] = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_line(self) -> bytes:
        return self.lines.readline()

    def close(self) -> None:
        self.lines.close()
        self.socket.close()

    def handshake(self, options: bytes = b'{"verbose":false}') -> None:
        assert self.read_line().startswith(b"INFO {")
        self.send(b"CONNECT " + options + b"\r\nPING\r\n")
        assert self.read_line() == b"PONG\r\n"


@pytest.fixture
def client() -> Iterator[Callable[[Program], BlockingNatsClient]]:
    """Factory of clients, which are closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda program: stack.enter_context(contextlib.closing(BlockingNatsClient(program)))


def test_nats_port_in_use_is_reported_with_its_purpose() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening_socket:
        port = listening_socket.getsockname()[1]
        status, stdout, stderr = run_program(
            "serve", "--host", "127.0.0.1", "--port", "0", "--nats-port", str(port)
        )
    assert (status, stdout) == (69, "")
    assert stderr == (
        f"simplebus: cannot listen on 127.0.0.1:{port}: Address already in use. That port is for "
        "NATS clients: select another one with --nats-port, or disable NATS with --no-nats\n"
    )


def test_sighup_and_sigusr1_are_ignored_and_sigterm_flushes(
    client: Callable[[Program], BlockingNatsClient],
) -> None:
    with run_server() as (program, _):
        reader, publisher = client(program), client(program)
        reader.handshake()
        reader.send(b"SUB a 1\r\nPING\r\n")
        assert reader.read_line() == b"PONG\r\n"
        publisher.handshake()
        count = 10_000
        publisher.send(b"PUB a 1000\r\n%b\r\n" % bytes(1000) * count)  # More than sockets hold.
        publisher.send(b"PING\r\n")
        assert publisher.read_line() == b"PONG\r\n"  # Else some of it may not have been read.
        for number in (signal.SIGHUP, signal.SIGUSR1):
            program.signal(number)
            for _ in range(3):  # The server handles a signal before the next one.
                publisher.send(b"PING\r\n")
                assert publisher.read_line() == b"PONG\r\n"
        program.signal(signal.SIGTERM)
        assert publisher.read_line() == b""
        received = reader.lines.read(count * len(b"MSG a 1 1000\r\n%b\r\n" % bytes(1000)) + 1)
        assert received == b"MSG a 1 1000\r\n%b\r\n" % bytes(1000) * count
        status, stdout, stderr = program.wait()
    assert (status, stdout) == (0, "")
    assert "SIGHUP: no configuration file to reload" in stderr
    assert "SIGUSR1: no log file" in stderr
    assert "SIGTERM: draining" in stderr


def test_lame_duck_mode_announces_closes_and_ends(
    client: Callable[[Program], BlockingNatsClient],
) -> None:
    with run_server("--nats-lame-duck-grace", "0.2", "--nats-lame-duck-time", "0.2") as (
        program,
        _,
    ):
        new_client, old_client = client(program), client(program)
        new_client.handshake(b'{"verbose":false,"protocol":1}')
        old_client.handshake()
        program.signal(signal.SIGUSR2)
        while b'"ldm":true' not in (line := new_client.read_line()):
            assert line.startswith(b"INFO {"), line
        assert old_client.read_line() == b""
        assert new_client.read_line() == b""
        status, _, stderr = program.wait()
    assert status == 0
    assert "SIGUSR2: refusing new NATS clients" in stderr
    assert "the last NATS client has disconnected: draining" in stderr


def test_disabled_nats_listener_is_not_in_the_ready_line() -> None:
    with run_server("--no-nats") as (program, _):
        assert program.nats_address == ""
        program.signal(signal.SIGUSR2)
        assert program.process.stderr is not None
        line = program.process.stderr.readline()  # Two pending signals have no order.
        program.signal(signal.SIGTERM)
        assert program.wait()[0] == 0
    assert b"SIGUSR2: no NATS listener to close" in line
