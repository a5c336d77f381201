"""A server's life as its operator sees it: how it is started again, reloaded, and what it says when
it cannot go on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from needs import needed
from programs import PATIENCE_SECONDS, ROOT, Program, environment, server

import simplebus

ALONE = ("--no-nats", "--no-http")


# systemd -----------------------------------------------------------------------------------------


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    """Where it listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(PATIENCE_SECONDS)
        yield sock


def heard(systemd: socket.socket, first: str) -> list[str]:
    """What it is told that begins with this, whatever comes before."""
    while True:
        words = systemd.recv(4096).decode().splitlines()
        if words[0].startswith(first):
            return words


def test_systemd_is_told_of_a_whole_life(systemd: socket.socket, tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text("[serve]\nmax-connections = 10\n")
    variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
    with server(*ALONE, "--config", str(file), **variables) as (it, _):
        assert heard(systemd, "READY=1")[1].startswith("STATUS=listening on 127.0.0.1:")
        assert heard(systemd, "WATCHDOG=1") == ["WATCHDOG=1"]
        file.write_text("[serve]\nmax-connections = 20\nport = 7\n")
        it.signal(signal.SIGHUP)
        told = heard(systemd, "RELOADING=1")
        assert int(told[1].removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
        assert heard(systemd, "READY=1") == ["READY=1"]
        file.write_text("[serv]\n")
        it.signal(signal.SIGHUP)
        heard(systemd, "RELOADING=1")
        assert heard(systemd, "READY=1") == ["READY=1"]
        it.signal(signal.SIGTERM)
        assert heard(systemd, "STOPPING=1") == ["STOPPING=1", "STATUS=draining"]
        status, _, said = it.end()
    assert status == 0
    assert "serve.max-connections is now 20, was 10\n" in said
    assert "the configuration is read again: 1 changes" in said
    assert f"nothing is changed: {file}:1: 'serv' is unknown; did you mean 'serve'?" in said


def test_a_loop_that_hangs_is_not_said_to_be_alive(systemd: socket.socket, tmp_path: Path) -> None:
    variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
    with server(*ALONE, **variables) as (it, _):
        heard(systemd, "WATCHDOG=1")
        it.signal(signal.SIGSTOP)
        systemd.settimeout(1)
        with suppress(TimeoutError):  # What was said before.
            while True:
                systemd.recv(4096)
        with pytest.raises(TimeoutError):
            systemd.recv(4096)
        it.signal(signal.SIGCONT)
        systemd.settimeout(PATIENCE_SECONDS)
        heard(systemd, "WATCHDOG=1")


def test_systemd_s_own_activator_hands_over_two_doors() -> None:
    needed("systemd-socket-activate")
    with ExitStack() as stack:
        ports = [free_port() for _ in range(2)]
        activator = stack.enter_context(
            subprocess.Popen(
                ["systemd-socket-activate", "--fdname=tcp:nats"]
                + [f"--listen=127.0.0.1:{port}" for port in ports]
                + [sys.executable, "-m", "simplebus", "serve", "--no-http"],
                cwd=ROOT,
                env=environment(PYTHONPATH=str(ROOT)) | {"SIMPLEBUS_NATS_PORT": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        stack.callback(activator.kill)
        wait_for(ports[0])
        with simplebus.connect_blocking(f"simplebus://127.0.0.1:{ports[0]}") as bus:
            bus.publish(b"x", class_id=1)
            bus.flush()
        it = Program(activator)
        assert it.line() == f"simplebus ready tcp=127.0.0.1:{ports[0]} nats=127.0.0.1:{ports[1]}"
        it.signal(signal.SIGTERM)
        assert it.end()[0] == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def wait_for(port: int) -> None:
    """Until somebody listens there. Connecting would start what is activated, which is wanted."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@contextmanager
def activated(sock: socket.socket, *arguments: str) -> Iterator[Program]:
    """A server that is handed this socket, as systemd would."""
    words = [sys.executable, "-m", "simplebus", "serve", *arguments]
    with subprocess.Popen(
        ["sh", "-c", 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"', "sh", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env=environment(LISTEN_FDNAMES="tcp"),
        preexec_fn=lambda: os.dup2(sock.fileno(), 3),
        close_fds=False,
    ) as process:
        try:
            yield Program(process)
        finally:
            process.kill()


def test_an_upgrade_under_load_refuses_nobody_and_loses_nothing(tmp_path: Path) -> None:
    """The server is started again three times, while a client publishes that never retries a
    connection that was refused."""
    data = ("--data-dir", str(tmp_path / "data"), "--durability", "os")
    failures: list[BaseException] = []
    sent = 0
    over = threading.Event()
    with ExitStack() as stack:
        sock = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"simplebus://127.0.0.1:{sock.getsockname()[1]}"

        def publish() -> None:
            nonlocal sent
            try:
                with simplebus.connect_blocking(url, name="till") as bus:
                    while not over.is_set():
                        bus.publish(b"%d" % sent, class_id=7)
                        sent += 1
            except BaseException as error:
                failures.append(error)

        def refused() -> None:
            """Connects again and again: somebody must always listen."""
            try:
                while not over.is_set():
                    socket.create_connection(sock.getsockname(), timeout=20).close()
                    time.sleep(0.005)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=each) for each in (publish, refused)]
        for turn in range(4):
            with activated(sock, *ALONE, *data) as it:
                assert it.line().startswith("simplebus ready tcp=")
                if not turn:
                    for thread in threads:
                        thread.start()
                before = sent
                deadline = time.monotonic() + PATIENCE_SECONDS
                while sent < before + 200 and not failures:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                if turn == 3:
                    over.set()
                    for thread in threads:
                        thread.join(PATIENCE_SECONDS)
                    with simplebus.connect_blocking(url) as bus, bus.subscribe(7) as messages:
                        got = [int(messages.get(5).payload) for _ in range(sent)]
                        assert got == list(range(sent))
                it.signal(signal.SIGTERM)
                assert it.end()[0] == 0
    assert not failures
