"""Real nats-servers with JetStream on loopback: one, or a cluster.

Each server keeps its directory and ports when it is restarted.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from load.ports import HOST, free_port, free_ports
from tests.support.requirements import nats_server_program

PATIENCE_SECONDS = 240.0


class NatsServer:
    """A nats-server process."""

    def __init__(self, folder: Path, name: str, port: int, extra_config: str = "") -> None:
        self.name, self.port = name, port
        self.url = f"nats://{HOST}:{port}"
        self._config = folder / f"{name}.conf"
        self._log = folder / f"{name}.log"
        self._config.write_text(
            f'server_name: {name}\nlisten: "{HOST}:{port}"\n'
            f'jetstream {{ store_dir: "{folder / name}" }}\n{extra_config}\n'
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it listens."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [nats_server_program(), "-c", str(self._config)], stdout=log, stderr=log
            )
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                socket.create_connection((HOST, self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < end, self._log.read_text()
                assert self._process.poll() is None, self._log.read_text()
                time.sleep(0.02)

    def kill(self) -> None:
        """Kill the server process with SIGKILL."""
        self.stop(signal.SIGKILL)

    def stop(self, signal_number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(signal_number)
            self._process.wait(PATIENCE_SECONDS)
            self._process = None


@contextmanager
def nats_server(folder: Path, extra_config: str = "") -> Iterator[NatsServer]:
    """Run a single server."""
    server = NatsServer(folder, "alone", free_port(), extra_config)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def cluster(folder: Path, size: int = 3) -> Iterator[Sequence[NatsServer]]:
    """Run several servers that form a cluster."""
    ports, routes = free_ports(size), free_ports(size)
    urls = ", ".join(f'"nats://{HOST}:{port}"' for port in routes)
    servers = [
        NatsServer(
            folder,
            f"n{number}",
            ports[number],
            f'cluster {{ name: c, listen: "{HOST}:{routes[number]}", routes: [{urls}] }}',
        )
        for number in range(size)
    ]
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.kill()
