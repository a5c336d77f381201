"""An attack on a server under load: what do those notice who are let in?

Rule 1: the attackers know the protocols and no secret, and try all doors. They come from addresses
of their own, and leave processors to others: what they take from a machine that is not theirs is
what counts.
Rule 2: the one who is let in publishes at a pace, each message confirmed, and hears them all: a
message that is missing, or comes twice, fails the run.
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
from load.certificates import make
from load.measure import Manner
from load.processes import LoadError, Process
from load.report import Row
from simplebus.core.protocol import frames

PACE_S = 0.002
CALM_S, STORM_S = 5.0, 10.0
CLASS = "orders"
SECRET = "a password that no attacker has"
HELD = 100
"""Connections that one attacker holds open."""
P99_MAX = 5.0

SERVER = (
    *("--max-connection-rate", "20", "--max-connections-per-address", "200"),
    *("--hello-timeout", "2", "--tls-timeout", "2", "--tick", "0.5", "--log-level", "error"),
)


def run(manner: Manner) -> list[Row]:
    """The rows of the attack scenario."""
    with tempfile.TemporaryDirectory(prefix="simplebus-load-") as folder, ExitStack() as stack:
        shown = make(Path(folder))
        users = Path(folder) / "users.toml"
        users.touch(mode=0o600)
        users.write_text(_user())
        args = ("--tls-cert", shown.cert, "--tls-key", shown.key, "--users", users, *SERVER)
        args += ("--nats-tls-cert", shown.cert, "--nats-tls-key", shown.key)
        broker = stack.enter_context(
            running("simplebus-all", server_args=(*manner.server_args, *map(str, args)))
        )
        where = (_ports(broker.process.output()), str(shown.cert))
        part = 0.4 if manner.quick else 1.0
        calm = _client(*where, CALM_S * part)
        open_before, memory_before = broker.process.descriptors(), broker.process.memory_bytes()
        attackers = [
            stack.enter_context(_process(kind, *where, f"127.0.0.{2 + n}"))
            for n, kind in enumerate(ATTACKS)
        ]
        for attacker in attackers:
            attacker.wait_for_line("attacking", timeout_s=START_S)
        storm = _client(*where, STORM_S * part)
        tried = {}
        for kind, attacker in zip(ATTACKS, attackers, strict=True):
            tried[kind] = int(attacker.output().splitlines()[-1].rpartition(" ")[2])
            attacker.stop()
        after = _client(*where, CALM_S * part)
        grown = (broker.process.memory_bytes() - memory_before) / 1e6
        left = broker.process.descriptors() - open_before
    if left > 0:
        raise LoadError(f"{left} descriptors of the server are still open after the attack")
    said = ", ".join(f"{count:,} of {kind}" for kind, count in tried.items())
    return [
        _latency("p99 under attack against before", storm["p99"] / calm["p99"], P99_MAX, said),
        _latency("p50 under attack against before", storm["p50"] / calm["p50"], None, ""),
        _latency("p99 after it against before", after["p99"] / calm["p99"], None, ""),
        Row(
            "attack",
            "messages confirmed, and heard once each",
            [float(storm["count"])],
            "messages",
            note=_shown(storm) + "; before: " + _shown(calm),
        ),
        Row("attack", "memory of the server, grown", [grown], "MB", 64.0, less_is_better=True),
    ]


def _ports(said: str) -> str:
    """Of the binary, the NATS and the HTTP door, with commas between them."""
    return ",".join(re.findall(rf"(?:tcp|nats|http)={re.escape(HOST)}:(\d+)", said)[:3])


def _shown(found: dict[str, float]) -> str:
    """Its times, in milliseconds."""
    times = [found[name] * 1e3 for name in ("p50", "p99", "max")]
    return "p50 {:.1f}, p99 {:.1f}, at most {:.0f} ms".format(*times)


def _latency(title: str, value: float, at_most: float | None, note: str) -> Row:
    return Row("attack", title, [value], "x", at_most, less_is_better=True, note=note)


def _user() -> str:
    from argon2 import PasswordHasher

    kept = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1).hash(SECRET)
    return f'[[users]]\nname = "ada"\npassword = "{kept}"\n'


def _process(kind: str, *words: str) -> Process:
    command = [sys.executable, "-m", "load.attack", kind, *words]
    return Process(f"the attacker {kind!r}", command, directory=REPOSITORY)


def _client(port: str, ca: str, seconds: float) -> dict[str, float]:
    with _process("client", port, ca, str(seconds)) as process:
        found: dict[str, float] = json.loads(process.finish(timeout_s=seconds + 60))
    return found


# The one who is let in ---------------------------------------------------------------------------


def client(port: str, ca: str, seconds: str) -> None:
    """Publish at a pace, hear everything, and print how long each message took."""
    print(json.dumps(trio.run(_talk, int(port.partition(",")[0]), ca, float(seconds))))


async def _talk(port: int, ca: str, seconds: float) -> dict[str, float]:
    took: list[float] = []
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
        while len(took) < total:
            message = await messages.get(timeout=30)
            number, due = json.loads(message.payload)
            if number != len(took):
                raise LoadError(f"message {number} came where {len(took)} was to come")
            took.append(trio.current_time() - due)
    cuts = quantiles(took, n=100)
    return {"count": len(took), "p50": cuts[49], "p99": cuts[98], "max": max(took)}


# The attackers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Where the doors are, and from where they are attacked."""

    tcp: int
    nats: int
    http: int
    source: str
    ca: str

    def secret(self, port: int) -> ssl.SSLSocket:
        """A connection over TLS."""
        trusting = ssl.create_default_context(cafile=self.ca)
        return trusting.wrap_socket(_dialled(port, self.source), server_hostname="localhost")

    def secret_nats(self) -> ssl.SSLSocket:
        """The same at the NATS door, where INFO comes first."""
        trusting = ssl.create_default_context(cafile=self.ca)
        plain = _dialled(self.nats, self.source)
        plain.recv(4096)
        return trusting.wrap_socket(plain, server_hostname="localhost")


def _dialled(port: int, source: str) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=5, source_address=(source, 0))


def _hello() -> bytes:
    """What a TLS client says first."""
    goes = ssl.MemoryBIO()
    made = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), goes, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        made.do_handshake()
    return goes.read()


def half_tls(at: Target) -> None:
    """Hold many connections to each door, each in the middle of a handshake."""
    held: list[socket.socket] = []
    half = _hello()
    half = half[: len(half) // 2]
    for n in range(HELD):
        sock = _dialled((at.tcp, at.nats, at.http)[n % 3], at.source)
        with contextlib.suppress(OSError):
            sock.sendall(half)
        held.append(sock)
        yield_()
    time.sleep(0.5)
    for sock in held:
        sock.close()


def _slowly(held: list[ssl.SSLSocket], said: bytes) -> None:
    """Say something on all of these byte by byte."""
    try:
        for n in range(40):
            for sock in held:
                with contextlib.suppress(OSError):
                    sock.send(said[n : n + 1])
            time.sleep(0.05)
    finally:
        for sock in held:
            sock.close()


def _many(made: Callable[[], ssl.SSLSocket]) -> list[ssl.SSLSocket]:
    held: list[ssl.SSLSocket] = []
    for _ in range(20):
        with contextlib.suppress(OSError):
            held.append(made())
        yield_()
    return held


def slow(at: Target) -> None:
    """Behind the handshake, say a Connect byte by byte."""
    said = frames.encode(frames.CONNECT, content=b'{"version":2,"client":"' + b"x" * 100 + b'"}')
    _slowly(_many(lambda: at.secret(at.tcp)), said)


def slow_nats(at: Target) -> None:
    """The same of a NATS client."""
    _slowly(_many(at.secret_nats), b'CONNECT {"user":"ada","pass":"' + b"x" * 100)


def slow_http(at: Target) -> None:
    """A head that does not end."""
    said = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 100
    _slowly(_many(lambda: at.secret(at.http)), said)


def flood(at: Target) -> None:
    """Connect and go, as fast as that goes."""
    for n in range(500):
        _dialled((at.tcp, at.nats, at.http)[n % 3], at.source).close()
        yield_()


def _say(made: Callable[[], ssl.SSLSocket], *all_: bytes) -> None:
    for said in all_:
        with contextlib.suppress(OSError), made() as sock:
            sock.sendall(said)
            sock.recv(1000)
        yield_()


def oversize(at: Target) -> None:
    """Say more than anybody may before it is known who he is: Heartbeats, deep JSON, no end."""
    _say(
        lambda: at.secret(at.tcp),
        frames.encode(frames.HEARTBEAT) * 20_000,
        frames.encode(frames.CONNECT, content=b'{"x":' + b"[" * 60_000),
        b"4" + bytes(8) + b"{" + b" " * 300_000,
        os.urandom(100_000),
    )
    _say(
        at.secret_nats,
        b"CONNECT " + b'{"x":' * 50_000,
        b'CONNECT {"x":' + b"[" * 4000 + b"\r\n",
        b"PUB a 999999999\r\n" + b"x" * 300_000,
        b"x" * 300_000,
        os.urandom(100_000),
    )
    _say(
        lambda: at.secret(at.http),
        b"GET / HTTP/1.1\r\nX-Long: " + b"x" * 300_000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 300000000\r\n\r\n" + b"x" * 300_000,
        os.urandom(100_000),
    )


def replay(at: Target) -> None:
    """Say, without a Connect, what others may have said: messages, acknowledgements, requests."""
    said = frames.encode(frames.MESSAGE, class_id=1, message_id=0, content=b"x") * 3
    said += frames.encode_ack(class_id=1, timer_index=0, first=0, last=1000)
    said += frames.encode(frames.SUBSCRIBE, class_id=1, content=b"{}")
    _say(lambda: at.secret(at.tcp), said, said * 100)
    _say(at.secret_nats, b"PUB $JS.ACK.a.1.1.1.1.1.1 4\r\n+ACK\r\n" * 100, b"SUB > 1\r\n" * 100)


def guess(at: Target) -> None:
    """Try passwords, at all doors."""
    wrong = b"%d" % time.monotonic_ns()
    auth = b'{"version":2,"auth":{"user":"ada","password":"%b"}}' % wrong
    _say(lambda: at.secret(at.tcp), frames.encode(frames.CONNECT, content=auth))
    _say(at.secret_nats, b'CONNECT {"user":"ada","pass":"%b"}\r\nPING\r\n' % wrong)
    basic = base64.b64encode(b"ada:" + wrong)
    ask = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic %b\r\n\r\n"
    _say(lambda: at.secret(at.http), ask % basic)


ATTACKS: dict[str, Callable[[Target], None]] = {
    "half_tls": half_tls,
    "slow": slow,
    "slow_nats": slow_nats,
    "slow_http": slow_http,
    "flood": flood,
    "oversize": oversize,
    "replay": replay,
    "guess": guess,
}

_tried = 0


def yield_() -> None:
    """Count an attempt, and say so now and then."""
    global _tried
    _tried += 1
    if _tried == 1 or _tried % 10 == 0:
        print(f"attacking {_tried}", flush=True)


def attack(kind: str, ports: str, ca: str, source: str) -> None:
    """Attack without end."""
    # A lower priority alone would keep a processor for milliseconds from who wakes up.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    target = Target(*map(int, ports.split(",")), source=source, ca=ca)
    while True:
        with contextlib.suppress(OSError):
            ATTACKS[kind](target)


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client(*sys.argv[2:])
    else:
        attack(*sys.argv[1:])
