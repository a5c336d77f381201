"""Latency of an authenticated client while attackers without a secret attack every listener.

    python load/run.py attack [--quick]

The attackers use the protocols and their own source addresses. They run at idle priority, as
they would have their own machine. The client publishes at a fixed pace, with confirms, and receives
every message; a missing or repeated one fails the run.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import trio

import simplebus
from load.brokers import HOST, REPOSITORY, START_S, running
from load.certificates import make_certificate
from load.measure import RunOptions
from load.processes import LoadError, Process
from load.report import Row
from simplebus.core.protocol import frames

PACE_S = 0.002
BASELINE_S, ATTACK_S = 5.0, 10.0
CLASS = "orders"
SECRET = "a password that no attacker has"
HELD_CONNECTIONS = 100
"""Connections held open by one attacker."""
P99_MAX = 5.0

SERVER = (
    *("--max-connection-rate", "20", "--max-connections-per-address", "200"),
    *("--hello-timeout", "2", "--tls-timeout", "2", "--tick", "0.5", "--log-level", "error"),
)


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario."""
    with tempfile.TemporaryDirectory(prefix="simplebus-load-") as folder, ExitStack() as stack:
        certificate = make_certificate(Path(folder))
        users = Path(folder) / "users.toml"
        users.touch(mode=0o600)
        users.write_text(_user())
        args = (
            "--tls-cert",
            certificate.cert,
            "--tls-key",
            certificate.key,
            "--users",
            users,
            *SERVER,
        )
        args += ("--nats-tls-cert", certificate.cert, "--nats-tls-key", certificate.key)
        broker = stack.enter_context(
            running("simplebus-all", server_args=(*run_options.server_args, *map(str, args)))
        )
        client_args = (listener_ports(broker.process.output()), str(certificate.cert))
        duration_factor = 0.4 if run_options.quick else 1.0
        before = _client(*client_args, BASELINE_S * duration_factor)
        open_before, memory_before = broker.process.descriptors(), broker.process.memory_bytes()
        attackers = [
            stack.enter_context(_process(kind, *client_args, f"127.0.0.{2 + n}"))
            for n, kind in enumerate(ATTACKS)
        ]
        for attacker in attackers:
            attacker.wait_for_line("attacking", timeout_s=START_S)
        during = _client(*client_args, ATTACK_S * duration_factor)
        attempts = {}
        for kind, attacker in zip(ATTACKS, attackers, strict=True):
            attempts[kind] = int(attacker.output().splitlines()[-1].rpartition(" ")[2])
            attacker.stop()
        after = _client(*client_args, BASELINE_S * duration_factor)
        growth_mb = (broker.process.memory_bytes() - memory_before) / 1e6
        leaked = broker.process.descriptors() - open_before
    if leaked > 0:
        raise LoadError(f"{leaked} descriptors of the server are still open after the attack")
    content = ", ".join(f"{count:,} of {kind}" for kind, count in attempts.items())
    return [
        _latency(
            "p99 under attack against before", during["p99"] / before["p99"], P99_MAX, content
        ),
        _latency("p50 under attack against before", during["p50"] / before["p50"], None, ""),
        _latency("p99 after the attack against before", after["p99"] / before["p99"], None, ""),
        Row(
            "attack",
            "messages confirmed, and received once each",
            [float(during["count"])],
            "messages",
            note=_format_times(during) + "; before: " + _format_times(before),
        ),
        Row(
            "attack", "growth of the server's memory", [growth_mb], "MB", 64.0, less_is_better=True
        ),
    ]


def listener_ports(content: str) -> str:
    """Return the ports of the binary, NATS and HTTP listeners, comma-separated."""
    return ",".join(re.findall(rf"(?:tcp|nats|http)={re.escape(HOST)}:(\d+)", content)[:3])


def _format_times(found: dict[str, float]) -> str:
    """Return the latencies in milliseconds."""
    times = [found[name] * 1e3 for name in ("p50", "p99", "max")]
    return "p50 {:.1f}, p99 {:.1f}, at most {:.0f} ms".format(*times)


def _latency(title: str, value: float, at_most: float | None, note: str) -> Row:
    return Row("attack", title, [value], "x", at_most, less_is_better=True, note=note)


def _user() -> str:
    from argon2 import PasswordHasher

    password_hash = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1).hash(SECRET)
    return f'[[users]]\nname = "ada"\npassword = "{password_hash}"\n'


def _process(kind: str, *words: str) -> Process:
    command = [sys.executable, "-m", "load.connection_attack", kind, *words]
    return Process(f"the attacker {kind!r}", command, directory=REPOSITORY)


def _client(port: str, ca: str, seconds: float) -> dict[str, float]:
    with _process("client", port, ca, str(seconds)) as process:
        found: dict[str, float] = json.loads(process.finish(timeout_s=seconds + 60))
    return found


# The authenticated client ------------------------------------------------------------------------


def client(port: str, ca: str, seconds: str) -> None:
    """Publish at a fixed pace, receive every message, and print the latencies."""
    print(
        json.dumps(trio.run(_publish_and_receive, int(port.partition(",")[0]), ca, float(seconds)))
    )


async def _publish_and_receive(port: int, ca: str, seconds: float) -> dict[str, float]:
    latencies: list[float] = []
    total = int(seconds / PACE_S)
    access = simplebus.Access(user="ada", password=SECRET, ca=ca)
    async with (
        simplebus.connect(f"simplebuss://{HOST}:{port}", access=access) as bus,
        bus.subscribe(CLASS) as messages,
        trio.open_nursery() as nursery,
    ):

        async def publish() -> None:
            begin = trio.current_time()
            for number in range(total):
                due = begin + number * PACE_S
                await trio.sleep_until(due)
                await bus.publish(json.dumps([number, due]).encode(), class_id=CLASS)

        nursery.start_soon(publish)
        while len(latencies) < total:
            message = await messages.get(timeout=30)
            number, due = json.loads(message.payload)
            if number != len(latencies):
                raise LoadError(f"received message {number}, expected {len(latencies)}")
            latencies.append(trio.current_time() - due)
    cuts = quantiles(latencies, n=100)
    return {"count": len(latencies), "p50": cuts[49], "p99": cuts[98], "max": max(latencies)}


# The attackers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttackTarget:
    """Ports of the listeners, and the source address of the attacker."""

    tcp: int
    nats: int
    http: int
    source: str
    ca: str
    """File of the CA certificate."""

    def connect_tls(self, port: int) -> ssl.SSLSocket:
        """Connect over TLS."""
        tls_context = ssl.create_default_context(cafile=self.ca)
        return tls_context.wrap_socket(_connect(port, self.source), server_hostname="localhost")

    def connect_nats_tls(self) -> ssl.SSLSocket:
        """Connect to the NATS listener over TLS, after its INFO."""
        tls_context = ssl.create_default_context(cafile=self.ca)
        plain = _connect(self.nats, self.source)
        plain.recv(4096)
        return tls_context.wrap_socket(plain, server_hostname="localhost")


def _connect(port: int, source: str) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=5, source_address=(source, 0))


def _tls_client_hello() -> bytes:
    """Return a TLS ClientHello."""
    outgoing = ssl.MemoryBIO()
    handshake = ssl.create_default_context().wrap_bio(
        ssl.MemoryBIO(), outgoing, server_hostname="localhost"
    )
    with contextlib.suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    return outgoing.read()


def incomplete_handshakes(target: AttackTarget) -> None:
    """Hold many connections to each listener in the middle of a TLS handshake."""
    sockets: list[socket.socket] = []
    hello = _tls_client_hello()
    half = hello[: len(hello) // 2]
    for n in range(HELD_CONNECTIONS):
        sock = _connect((target.tcp, target.nats, target.http)[n % 3], target.source)
        with contextlib.suppress(OSError):
            sock.sendall(half)
        sockets.append(sock)
        count_attempt()
    time.sleep(0.5)
    for sock in sockets:
        sock.close()


def _send_slowly(sockets: list[ssl.SSLSocket], content: bytes) -> None:
    """Send content byte by byte on all sockets."""
    try:
        for n in range(40):
            for sock in sockets:
                with contextlib.suppress(OSError):
                    sock.send(content[n : n + 1])
            time.sleep(0.05)
    finally:
        for sock in sockets:
            sock.close()


def _open_connections(connect: Callable[[], ssl.SSLSocket]) -> list[ssl.SSLSocket]:
    sockets: list[ssl.SSLSocket] = []
    for _ in range(20):
        with contextlib.suppress(OSError):
            sockets.append(connect())
        count_attempt()
    return sockets


def slow_connect(target: AttackTarget) -> None:
    """Send a Connect frame byte by byte."""
    content = frames.encode(frames.CONNECT, content=b'{"version":2,"client":"' + b"x" * 100 + b'"}')
    _send_slowly(_open_connections(lambda: target.connect_tls(target.tcp)), content)


def slow_nats_connect(target: AttackTarget) -> None:
    """Send a NATS CONNECT byte by byte."""
    _send_slowly(
        _open_connections(target.connect_nats_tls), b'CONNECT {"user":"ada","pass":"' + b"x" * 100
    )


def slow_http_request(target: AttackTarget) -> None:
    """Send an HTTP head that does not end."""
    content = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 100
    _send_slowly(_open_connections(lambda: target.connect_tls(target.http)), content)


def flood(target: AttackTarget) -> None:
    """Connect and disconnect as fast as possible."""
    for n in range(500):
        _connect((target.tcp, target.nats, target.http)[n % 3], target.source).close()
        count_attempt()


def _send_on_new_connection(connect: Callable[[], ssl.SSLSocket], *contents: bytes) -> None:
    for content in contents:
        with contextlib.suppress(OSError), connect() as sock:
            sock.sendall(content)
            sock.recv(1000)
        count_attempt()


def oversize(target: AttackTarget) -> None:
    """Send more than an unauthenticated connection may: heartbeats, deep JSON, endless frames."""
    _send_on_new_connection(
        lambda: target.connect_tls(target.tcp),
        frames.encode(frames.HEARTBEAT) * 20_000,
        frames.encode(frames.CONNECT, content=b'{"x":' + b"[" * 60_000),
        b"4" + bytes(8) + b"{" + b" " * 300_000,
        os.urandom(100_000),
    )
    _send_on_new_connection(
        target.connect_nats_tls,
        b"CONNECT " + b'{"x":' * 50_000,
        b'CONNECT {"x":' + b"[" * 4000 + b"\r\n",
        b"PUB a 999999999\r\n" + b"x" * 300_000,
        b"x" * 300_000,
        os.urandom(100_000),
    )
    _send_on_new_connection(
        lambda: target.connect_tls(target.http),
        b"GET / HTTP/1.1\r\nX-Long: " + b"x" * 300_000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 300000000\r\n\r\n" + b"x" * 300_000,
        os.urandom(100_000),
    )


def replay(target: AttackTarget) -> None:
    """Send messages, acks and requests without a Connect."""
    content = frames.encode(frames.MESSAGE, class_id=1, message_id=0, content=b"x") * 3
    content += frames.encode_ack(class_id=1, timer_index=0, first=0, last=1000)
    content += frames.encode(frames.SUBSCRIBE, class_id=1, content=b"{}")
    _send_on_new_connection(lambda: target.connect_tls(target.tcp), content, content * 100)
    _send_on_new_connection(
        target.connect_nats_tls,
        b"PUB $JS.ACK.a.1.1.1.1.1.1 4\r\n+ACK\r\n" * 100,
        b"SUB > 1\r\n" * 100,
    )


def guess(target: AttackTarget) -> None:
    """Try passwords at all listeners."""
    password = b"%d" % time.monotonic_ns()
    auth = b'{"version":2,"auth":{"user":"ada","password":"%b"}}' % password
    _send_on_new_connection(
        lambda: target.connect_tls(target.tcp), frames.encode(frames.CONNECT, content=auth)
    )
    _send_on_new_connection(
        target.connect_nats_tls, b'CONNECT {"user":"ada","pass":"%b"}\r\nPING\r\n' % password
    )
    basic = base64.b64encode(b"ada:" + password)
    request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic %b\r\n\r\n"
    _send_on_new_connection(lambda: target.connect_tls(target.http), request % basic)


ATTACKS: dict[str, Callable[[AttackTarget], None]] = {
    "half_tls": incomplete_handshakes,
    "slow": slow_connect,
    "slow_nats": slow_nats_connect,
    "slow_http": slow_http_request,
    "flood": flood,
    "oversize": oversize,
    "replay": replay,
    "guess": guess,
}

_tried = 0


def count_attempt() -> None:
    """Count an attempt, and print the number regularly."""
    global _tried
    _tried += 1
    if _tried == 1 or _tried % 10 == 0:
        print(f"attacking {_tried}", flush=True)


def attack(kind: str, ports: str, ca: str, source: str) -> None:
    """Attack until the process is stopped."""
    # With a mere nice value, an attacker would still delay the server by milliseconds.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    target = AttackTarget(*map(int, ports.split(",")), source=source, ca=ca)
    while True:
        with contextlib.suppress(OSError):
            ATTACKS[kind](target)


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client(*sys.argv[2:])
    else:
        attack(*sys.argv[1:])
