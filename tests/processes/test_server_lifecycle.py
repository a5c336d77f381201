"""Tests of restarts, reloads and fatal errors of a server process."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

import simplebus
from load.ports import free_ports
from tests.support.programs import (
    PATIENCE_SECONDS,
    ROOT,
    Program,
    environment,
    run_server,
    running_program,
)
from tests.support.requirements import require_program

BINARY_ONLY = ("--no-nats", "--no-http")


# systemd -----------------------------------------------------------------------------------------


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    """Socket on which systemd would receive notifications."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(PATIENCE_SECONDS)
        yield sock


def read_notification(systemd: socket.socket, first: str) -> list[str]:
    """Return the lines of the next notification that starts with `first`."""
    while True:
        lines = systemd.recv(4096).decode().splitlines()
        if lines[0].startswith(first):
            return lines


def test_notifies_systemd_from_start_to_stop(systemd: socket.socket, tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text("[serve]\nmax-connections = 10\n")
    variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
    with run_server(*BINARY_ONLY, "--config", str(file), **variables) as (program, _):
        assert read_notification(systemd, "READY=1")[1].startswith("STATUS=listening on 127.0.0.1:")
        assert read_notification(systemd, "WATCHDOG=1") == ["WATCHDOG=1"]
        classes = "".join(f"[classes.c{n}]\nkeep-seconds = 9\n" for n in range(30))
        file.write_text(f"[serve]\nmax-connections = 20\nport = 7\n{classes}")
        program.signal(signal.SIGHUP)
        reloading = read_notification(systemd, "RELOADING=1")
        assert int(reloading[1].removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
        assert read_notification(systemd, "READY=1") == ["READY=1"]
        file.write_text("[serv]\n")
        program.signal(signal.SIGHUP)
        read_notification(systemd, "RELOADING=1")
        assert read_notification(systemd, "READY=1") == ["READY=1"]
        file.write_text("[serve]\nlog-level = 'error'\n")
        program.signal(signal.SIGHUP)
        read_notification(systemd, "RELOADING=1")
        assert read_notification(systemd, "READY=1") == ["READY=1"]
        program.signal(signal.SIGTERM)
        assert read_notification(systemd, "STOPPING=1") == ["STOPPING=1", "STATUS=draining"]
        status, _, stderr = program.wait()
    assert status == 0
    assert "serve.max-connections = 20, was 10\n" in stderr
    assert "classes.c29 was added\n" in stderr
    assert 'INFO configuration: serve.log-level = "error", was "info"\n' in stderr
    assert "reloaded the configuration: 31 changes applied\n" in stderr
    assert f"settings not reloaded: {file}:1: 'serv' is unknown; did you mean 'serve'?" in stderr


def test_hanging_loop_sends_no_watchdog_messages(systemd: socket.socket, tmp_path: Path) -> None:
    variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
    with run_server(*BINARY_ONLY, **variables) as (program, _):
        read_notification(systemd, "WATCHDOG=1")
        program.signal(signal.SIGSTOP)
        systemd.settimeout(1)
        with suppress(TimeoutError):  # Notifications sent before.
            while True:
                systemd.recv(4096)
        with pytest.raises(TimeoutError):
            systemd.recv(4096)
        program.signal(signal.SIGCONT)
        systemd.settimeout(PATIENCE_SECONDS)
        read_notification(systemd, "WATCHDOG=1")


def test_systemd_socket_activate_passes_two_listeners() -> None:
    require_program("systemd-socket-activate")
    with ExitStack() as stack:
        ports = free_ports(2)
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
        with simplebus.connect_blocking(f"simplebus://127.0.0.1:{ports[0]}", timeout=60) as bus:
            bus.publish(b"x", class_id=1)
            bus.flush()
        program = Program(activator)
        assert (
            program.read_line()
            == f"simplebus ready tcp=127.0.0.1:{ports[0]} nats=127.0.0.1:{ports[1]}"
        )
        program.signal(signal.SIGTERM)
        assert program.wait()[0] == 0


def wait_for(port: int) -> None:
    """Wait until the port accepts connections. Connecting also starts the activated program."""
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
    """Start a server that inherits this listening socket, as under systemd."""
    command = [sys.executable, "-m", "simplebus", "serve", *arguments]
    with subprocess.Popen(
        ["sh", "-c", 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"', "sh", *command],
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


@pytest.mark.long
def test_upgrade_under_load_refuses_no_client_and_loses_no_message(tmp_path: Path) -> None:
    """Restart the server three times while a client publishes. The client does not retry refused
    connections.
    """
    data = ("--data-dir", str(tmp_path / "data"), "--durability", "os")
    failures: list[BaseException] = []
    sent = 0
    stopping = threading.Event()
    with ExitStack() as stack:
        sock = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"simplebus://127.0.0.1:{sock.getsockname()[1]}"

        def publish() -> None:
            nonlocal sent
            try:
                with simplebus.connect_blocking(url, name="till", timeout=60) as bus:
                    while not stopping.is_set():
                        bus.publish(b"%d" % sent, class_id=7)
                        sent += 1
            except BaseException as error:
                failures.append(error)

        def refused() -> None:
            """Connect repeatedly: the port must always be open."""
            try:
                while not stopping.is_set():
                    socket.create_connection(sock.getsockname(), timeout=60).close()
                    time.sleep(0.005)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=each) for each in (publish, refused)]
        for turn in range(4):
            with activated(sock, *BINARY_ONLY, *data) as program:
                assert program.read_line().startswith("simplebus ready tcp=")
                if not turn:
                    for thread in threads:
                        thread.start()
                sent_before = sent
                deadline = time.monotonic() + PATIENCE_SECONDS
                while sent < sent_before + 200 and not failures:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                if turn == 3:
                    stopping.set()
                    for thread in threads:
                        thread.join(PATIENCE_SECONDS)
                    with (
                        simplebus.connect_blocking(url, timeout=60) as bus,
                        bus.subscribe(7) as messages,
                    ):
                        received = [
                            int(messages.get(PATIENCE_SECONDS).payload) for _ in range(sent)
                        ]
                        assert received == list(range(sent))
                program.signal(signal.SIGTERM)
                assert program.wait()[0] == 0
    assert not failures


# End of the process ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["serve", "gateway", "bridge"])
def test_late_signals_do_not_kill_the_process(command: str, tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('[modules.log]\nmodule = "logger"\n')
    source, target = (f"127.0.0.1:{port}" for port in free_ports(2))
    arguments = {
        "serve": ("--port", "0", *BINARY_ONLY, "--data-dir", str(tmp_path / "data")),
        "gateway": (str(file),),
        "bridge": ("--from", source, "--to", target, "--http", "127.0.0.1:0", "1"),
    }[command]
    with running_program(command, *arguments) as program:
        assert (
            f"simplebus {'ready' if command == 'serve' else command + ' ready'}"
            in program.read_line()
        )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while program.process.poll() is None:
            assert time.monotonic() < deadline
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                program.signal(number)
            time.sleep(0.001)
        status, _, stderr = program.wait()
    assert (status, "Traceback" in stderr) == (0, False), stderr


# Fatal errors ------------------------------------------------------------------------------------


def run_failing_server(*arguments: str) -> tuple[int, str]:
    """Run a server that must fail. Returns its exit status and standard error."""
    with running_program("serve", "--port", "0", *BINARY_ONLY, *arguments) as program:
        status, stdout, stderr = program.wait()
    assert stdout == ""
    assert "Traceback" not in stderr
    return status, stderr


def test_unusable_data_directory_is_reported(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with run_server(*BINARY_ONLY, "--data-dir", str(data)) as (program, _):
        assert run_failing_server("--data-dir", str(data)) == (
            75,
            f"simplebus: {data} is used by another server, process {program.process.pid}\n",
        )
    (tmp_path / "thesis.txt").touch()
    status, stderr = run_failing_server("--data-dir", str(tmp_path))
    assert status == 74
    assert stderr.startswith(f"simplebus: {tmp_path} is not a journal: it contains ")
    status, stderr = run_failing_server("--data-dir", "/proc/nowhere")
    assert (status, stderr) == (
        74,
        "simplebus: cannot use /proc/nowhere as a journal: No such file or directory\n",
    )


def test_each_error_in_a_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text("[serve]\nprt = 1\n[nat]\n")
    status, stderr = run_failing_server("--config", str(file))
    assert status == 78
    assert sorted(stderr.splitlines()) == [
        f"simplebus: {file}:2: serve: 'prt' is unknown; did you mean 'port'?",
        f"simplebus: {file}:3: 'nat' is unknown; did you mean 'nats'?",
    ]


def wait_for_health(address: str) -> None:
    """Wait until a health request succeeds; others may be evicted for new connections."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/healthz", timeout=60) as health:
                assert health.status == 200
                return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_without_descriptors_new_clients_wait() -> None:
    with ExitStack() as stack:
        program, url = stack.enter_context(run_server("--no-nats"))
        host, _, port = url.removeprefix("simplebus://").rpartition(":")
        bus = stack.enter_context(simplebus.connect_blocking(url, timeout=60))
        resource.prlimit(program.process.pid, resource.RLIMIT_NOFILE, (64, 64))
        connections = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            for _ in range(80)
        ]
        bus.publish(b"all is well", class_id=1)
        bus.flush()
        wait_for_health(program.http_address)
        program.wait_for_stderr("cannot accept connections: too many open files")
        started_at = time.monotonic()
        for connection in connections:
            connection.close()
        with (
            simplebus.connect_blocking(url, timeout=60) as late_client,
            late_client.subscribe(1) as messages,
        ):
            assert messages.get(PATIENCE_SECONDS).payload == b"all is well"
        passed = time.monotonic() - started_at
        program.signal(signal.SIGTERM)
        status, _, stderr = program.wait()
    assert status == 0
    # Logged once per occurrence, with a pause after each.
    logged_count = stderr.count("cannot accept connections: too many open files")
    assert 1 <= logged_count <= 4 + passed / 0.5
    assert stderr.count("accepting connections again") == logged_count


def test_without_memory_a_class_is_full_and_others_work() -> None:
    count, payload = 100_000, b"x" * 1000
    with run_server(*BINARY_ONLY) as (program, url):
        with simplebus.connect_blocking(url, timeout=60) as bus:
            bus.publish(b"first", class_id=1)
            bus.flush()
        pages = int(Path(f"/proc/{program.process.pid}/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + (60 << 20)
        resource.prlimit(program.process.pid, resource.RLIMIT_AS, (limit, limit))

        def fill() -> None:
            with simplebus.connect_blocking(url, timeout=60) as bus:
                bus.publish_many([payload] * count, class_id=1)
                bus.flush()

        filling = threading.Thread(target=fill)
        filling.start()
        with simplebus.connect_blocking(url, timeout=60) as bus:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not bus.explain(1).publishers:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert bus.explain(1).stored < count
            bus.publish(b"y", class_id=2)
            bus.flush()
            with bus.subscribe(1) as messages:
                received_count = 0
                while received_count <= count:
                    received_count += len(messages.take(10_000, timeout=PATIENCE_SECONDS))
        filling.join(PATIENCE_SECONDS)
        program.signal(signal.SIGTERM)
        status, _, stderr = program.wait()
    assert (status, filling.is_alive(), received_count) == (0, False, count + 1)
    assert "Traceback" not in stderr
