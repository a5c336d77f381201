"""Latency of a bystander while one client keeps the server busy with legal requests.

    python load/run.py attacks [--rounds N]

The bystander sends itself a message through the NATS port every other millisecond. Each round
starts a server, measures the bystander while the server is calm, and then from the first request of
an attack until the attacker's connections have ended. A short attack is repeated, because the p99
of few messages is random. Attackers run at low priority, and the server's event loop on a separate
core, because a real attacker has a machine of its own. The bystander runs at real-time priority if
the system permits it, so that latencies do not contain its own wait for a core. Figures are
relative to the calm of the same round, because machines are shared. In rounds of `control` the
attacker only sleeps, so the ratio shows the noise.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

from load.brokers import HOST, REPOSITORY, START_S, running
from load.connection_attack import listener_ports
from load.measure import RunOptions
from load.processes import LoadError, Process, real_time_priority, separate_core
from load.report import Row
from simplebus.core.limits import BINDINGS_MAX
from simplebus.core.protocol import frames

PACE_S = 0.002
CALM_S = 4.0
ATTACK_S = 3.0
"""Time after which an attack is not repeated any more."""
AFTER_S = 0.5
"""Time for the effects of an attack that has ended."""
PATIENCE_S = 60.0
P99_MAX = 5.0
PATTERNS = BINDINGS_MAX
SUBSCRIPTIONS = 61_440 // PATTERNS
NATS_SUBSCRIPTIONS = 200_000
CONNECTIONS = 5_000
SPARE_DESCRIPTORS = 200

SERVER = (
    *("--hello-timeout", "2", "--log-level", "error", "--max-memory", "8GiB"),
    *("--max-connections", str(2 * CONNECTIONS)),
)


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario."""
    rows = []
    for kind in ATTACKS:
        found = []
        for _ in range(run_options.rounds):
            args = (*run_options.server_args, *SERVER)
            with (
                running("simplebus-all", server_args=args) as broker,
                separate_core(broker.process.pid),
                real_time_priority() as has_real_time,
            ):
                found.append(_measure(kind, listener_ports(broker.process.output())))
        calm, attacked, worst = map(list, zip(*found, strict=True))
        missing = "" if has_real_time else "; no real-time priority"
        note = (
            f"calm {median(calm) * 1e3:.2f} ms, under attack {median(attacked) * 1e3:.1f} ms, "
            f"at most {median(worst) * 1e3:.0f} ms{missing}"
        )
        relative = [after / before for before, after in zip(calm, attacked, strict=True)]
        title = f"p99 under attack against calm: {kind}"
        limit = None if kind == "control" else P99_MAX
        rows.append(Row("attacks", title, relative, "x", limit, less_is_better=True, note=note))
    return rows


def _measure(kind: str, ports: str) -> tuple[float, float, float]:
    """Return the p99 when calm, and the p99 and the maximum during one attack, in seconds."""
    bystander = Bystander(int(ports.split(",")[1]))
    calm_end = time.monotonic() + CALM_S
    calm = bystander.measure(lambda: time.monotonic() > calm_end)
    command = [sys.executable, "-m", "load.attacks", kind, ports]
    with Process(f"the attacker {kind}", command, directory=REPOSITORY) as attacker:
        os.sched_setaffinity(attacker.pid, os.sched_getaffinity(0))
        attacker.wait_for_line("ready", timeout_s=START_S)
        deadline, ended = time.monotonic() + PATIENCE_S, 0.0

        def is_over() -> bool:
            nonlocal ended
            now = time.monotonic()
            if now > deadline:
                raise LoadError(f"the attack {kind} did not end within {PATIENCE_S:g} s")
            if not ended and not attacker.is_running():
                ended = now
            return bool(ended) and now > ended + AFTER_S

        attacked = bystander.measure(is_over)
        attacker.finish(timeout_s=PATIENCE_S)
    bystander.close()
    return quantiles(calm, n=100)[98], quantiles(attacked, n=100)[98], max(attacked)


class Bystander:
    """Client that sends itself a message every PACE_S, whether or not earlier ones have arrived."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port), timeout=PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(b'CONNECT {"verbose":false}\r\nSUB bystander 1\r\nPING\r\n')
        received = b""
        while not received.endswith(b"PONG\r\n"):
            received += self._socket.recv(65536)

    def measure(self, is_over: Callable[[], bool]) -> list[float]:
        """Return the latencies of the messages until `is_over`. Raises LoadError if one is lost."""
        latencies: list[float] = []
        begin = due = time.monotonic()
        sent = 0
        while not is_over():
            now = time.monotonic()
            if now >= due:
                self._socket.sendall(b"PUB bystander 1\r\nx\r\n")
                sent += 1
                due += PACE_S
                continue
            self._receive(due - now, begin, latencies)
        while len(latencies) < sent:
            if time.monotonic() > due + PATIENCE_S:
                raise LoadError(f"{sent - len(latencies)} messages of the bystander are missing")
            self._receive(PACE_S, begin, latencies)
        return latencies

    def _receive(self, seconds: float, begin: float, latencies: list[float]) -> None:
        """Wait for messages, and append the time since each was due."""
        if select.select([self._socket], [], [], seconds)[0]:
            count, now = self._socket.recv(65536).count(b"x\r\n"), time.monotonic()
            first = len(latencies)
            latencies += [now - begin - (first + n) * PACE_S for n in range(count)]

    def close(self) -> None:
        self._socket.close()


# Attackers ---------------------------------------------------------------------------------------


def subscribe_patterns(tcp: int, nats: int) -> None:
    """Subscribe to a class with many patterns on many subscriptions, and disconnect."""
    subscribes = b"".join(
        frames.encode(
            frames.SUBSCRIBE,
            class_id=1,
            message_id=number,
            content=b'{"channels":[%b]}' % _patterns(number),
            timer_index=number,
        )
        for number in range(1, SUBSCRIPTIONS + 1)
    )
    sock = _connect(tcp)
    sock.sendall(frames.encode(frames.CONNECT, content=b'{"version":2,"classes":[1]}') + subscribes)
    received, replies = b"", 0
    while replies < SUBSCRIPTIONS:
        received += sock.recv(65536)
        replies = received.count(frames.DELIMITER + b"2")
    sock.close()


def _patterns(number: int) -> bytes:
    return b",".join(b'"site.*.meter.%d.%d.*"' % (number, n) for n in range(PATTERNS))


def subscribe_wildcards(tcp: int, nats: int) -> None:
    """Subscribe to many wildcard subjects on the NATS port, and disconnect."""
    sock = _connect(nats)
    sock.sendall(b'CONNECT {"verbose":false}\r\n')
    for first in range(0, NATS_SUBSCRIPTIONS, 1000):
        lines = b"".join(b"SUB site.%d.*.> %d\r\n" % (n, n) for n in range(first, first + 1000))
        sock.sendall(lines)
    sock.sendall(b"PING\r\n")
    received = b""
    while b"PONG\r\n" not in received:
        received += sock.recv(65536)
        received = received[-2000:]
    sock.close()


def open_connections(tcp: int, nats: int) -> None:
    """Open many connections to both ports, send nothing, and wait until the server closes them."""
    sockets = [_connect(tcp if number % 2 else nats) for number in range(CONNECTIONS)]
    for number, sock in enumerate(sockets):
        if number % 2:  # The NATS port waits for a silent client if it needs no authentication.
            while sock.recv(65536):
                pass
        sock.close()


def send_nothing(tcp: int, nats: int) -> None:
    """Send nothing for a while, as a control."""
    time.sleep(CALM_S)


def _connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=PATIENCE_S)


ATTACKS: dict[str, Callable[[int, int], None]] = {
    "patterns": subscribe_patterns,
    "wildcards": subscribe_wildcards,
    "connections": open_connections,
    "control": send_nothing,
}


def attack(kind: str, ports: str) -> None:
    """Attack, repeatedly for ATTACK_S."""
    # At idle priority, the kernel would stop the attacker while it holds locks of the server's
    # sockets.
    os.nice(19)
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    tcp, nats, _ = map(int, ports.split(","))
    print("ready", flush=True)
    end = time.monotonic() + ATTACK_S
    while time.monotonic() < end:
        ATTACKS[kind](tcp, nats)


if __name__ == "__main__":
    attack(*sys.argv[1:])
