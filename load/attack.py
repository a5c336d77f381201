"""An attack on a server under load: what do those notice who are let in?

Rule 1: the attackers know the protocols and no secret. They come from addresses of their own, and
leave processors to others: what they take from a machine that is not theirs is what counts.
Rule 2: the one who is let in publishes at a pace, each message confirmed, and hears them all: a
message that is missing, or comes twice, fails the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles

import trio

import simplebus
from load.brokers import HOST, REPOSITORY, START_S, running
from load.certificates import make
from load.measure import Manner
from load.processes import LoadError, Process
from load.report import Row
from simplebus.core import frames

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
        broker = stack.enter_context(
            running("simplebus", server_args=(*manner.server_args, *map(str, args)))
        )
        where = (str(broker.port), str(shown.cert))
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
    print(json.dumps(trio.run(_talk, int(port), ca, float(seconds))))


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


def _dialled(port: int, source: str) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=5, source_address=(source, 0))


def _secret(port: int, source: str, ca: str) -> ssl.SSLSocket:
    trusting = ssl.create_default_context(cafile=ca)
    return trusting.wrap_socket(_dialled(port, source), server_hostname="localhost")


def _hello() -> bytes:
    """What a TLS client says first."""
    goes = ssl.MemoryBIO()
    made = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), goes, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        made.do_handshake()
    return goes.read()


def half_tls(port: int, source: str, ca: str) -> None:
    """Hold many connections, each in the middle of a handshake."""
    held: list[socket.socket] = []
    half = _hello()
    half = half[: len(half) // 2]
    for _ in range(HELD):
        sock = _dialled(port, source)
        with contextlib.suppress(OSError):
            sock.sendall(half)
        held.append(sock)
        yield_()
    time.sleep(0.5)
    for sock in held:
        sock.close()


def slow(port: int, source: str, ca: str) -> None:
    """Behind the handshake, say a Connect byte by byte."""
    held: list[ssl.SSLSocket] = []
    said = frames.encode(frames.CONNECT, content=b'{"version":2,"client":"' + b"x" * 100 + b'"}')
    try:
        for _ in range(20):
            with contextlib.suppress(OSError):
                held.append(_secret(port, source, ca))
            yield_()
        for at in range(40):
            for sock in held:
                with contextlib.suppress(OSError):
                    sock.send(said[at : at + 1])
            time.sleep(0.05)
    finally:
        for sock in held:
            sock.close()


def flood(port: int, source: str, ca: str) -> None:
    """Connect and go, as fast as that goes."""
    for _ in range(500):
        _dialled(port, source).close()
        yield_()


def oversize(port: int, source: str, ca: str) -> None:
    """Say more than anybody may before it is known who he is: Heartbeats, deep JSON, no end."""
    for said in (
        frames.encode(frames.HEARTBEAT) * 20_000,
        frames.encode(frames.CONNECT, content=b'{"x":' + b"[" * 60_000),
        b"4" + bytes(8) + b"{" + b" " * 300_000,
        os.urandom(100_000),
    ):
        with contextlib.suppress(OSError), _secret(port, source, ca) as sock:
            sock.sendall(said)
            sock.recv(100)
        yield_()


def guess(port: int, source: str, ca: str) -> None:
    """Try passwords."""
    auth = b'{"version":2,"auth":{"user":"ada","password":"%d"}}' % time.monotonic_ns()
    with contextlib.suppress(OSError), _secret(port, source, ca) as sock:
        sock.sendall(frames.encode(frames.CONNECT, content=auth))
        sock.recv(1000)
    yield_()


ATTACKS: dict[str, Callable[[int, str, str], None]] = {
    "half_tls": half_tls,
    "slow": slow,
    "flood": flood,
    "oversize": oversize,
    "guess": guess,
}

_tried = 0


def yield_() -> None:
    """Count an attempt, and say so now and then."""
    global _tried
    _tried += 1
    if _tried == 1 or _tried % 10 == 0:
        print(f"attacking {_tried}", flush=True)


def attack(kind: str, port: str, ca: str, source: str) -> None:
    """Attack without end."""
    os.nice(19)
    while True:
        with contextlib.suppress(OSError):
            ATTACKS[kind](int(port), source, ca)


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client(*sys.argv[2:])
    else:
        attack(*sys.argv[1:])
