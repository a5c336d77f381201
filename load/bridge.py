"""Copy rates of bridges: between two buses, and from a bus to a NATS server.

    python load/run.py bridge

The rate counts verified messages from a publisher at the source to a subscriber at the target, from
the first one sent to the last one acked. A publisher of the same messages, with and without the
bridge-path header, measures NATS itself in the same round. Stored messages are copied against a
publisher that also has its messages ready, and without a publisher at the source, which would take
CPU time. Everything is run once before it is measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from load.brokers import HOST, REPOSITORY, START_S, RunningBroker, is_available, running
from load.generators import Generator
from load.measure import TIMEOUT_S, RunOptions, probe_nothing_in_flight
from load.processes import Process
from load.report import Row
from simplebus.bridge.loop_header import PATH_HEADER
from simplebus.bridge.settings import is_nats_address
from simplebus.client.blocking.connect import connect_blocking

COUNT = 4_000_000
QUICK_PART = 4
STORED = 3_000_000
SIZE_BYTES = 128
CLASS = 1
APART, WITHIN = "the bridge alone", "part of a server"


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario."""
    count = COUNT // (QUICK_PART if run_options.quick else 1)
    rows: dict[str, Row] = {}

    def found(title: str, value: float, unit: str, wish: float | None) -> None:
        rows.setdefault(title, Row("bridge", title, [], unit, wish)).values.append(value)

    for _ in range(run_options.rounds):
        for way in WITHIN, APART:
            rate = _between_buses(run_options, count, way)
            found(f"from bus to bus, acked end to end, {way}", rate / 1e6, "M/s", 0.7)
        if not is_available("nats"):
            continue
        with running("nats") as nats:
            for way in WITHIN, APART:
                marked, same = _to_nats(run_options, nats, count, way, has_path=True)
                bare, plain = _to_nats(run_options, nats, count, way, has_path=False)
                found(f"to NATS, against a publisher of the same, {way}", marked / same, "x", 0.8)
                found(f"to NATS without the path, {way}", bare / plain, "x", 0.8)
                found(f"with it, against a publisher without, {way}", marked / plain, "x", 0.8)
                found("that publisher with it, against without", same / plain, "x", None)
            marked, same = _stored_to_nats(run_options, nats, has_path=True)
            bare, plain = _stored_to_nats(run_options, nats, has_path=False)
            found(f"what was stored, to NATS, against the same, {APART}", marked / same, "x", 0.8)
            found(f"what was stored, without the path, {APART}", bare / plain, "x", 0.8)
    return list(rows.values())


def _between_buses(run_options: RunOptions, count: int, way: str) -> float:
    with running("simplebus", server_args=run_options.server_args) as far:
        with _bridged(run_options, f"{HOST}:{far.port}", way) as near:
            header = {"header": f"{PATH_HEADER}={_bus_id(near)}"}
            _flow(near, "simplebus-2", far, "simplebus-2", count, hears_more=header)
            rate = _flow(near, "simplebus-2", far, "simplebus-2", count, hears_more=header)
        probe_nothing_in_flight(far, (CLASS,))
    return rate


def _to_nats(
    run_options: RunOptions, nats: RunningBroker, count: int, way: str, *, has_path: bool
) -> tuple[float, float]:
    """Return the rate through a bridge, and of a publisher of the same messages."""
    with _bridged(run_options, f"nats://{HOST}:{nats.port}", way, has_path=has_path) as near:
        header = {"header": f"{PATH_HEADER}={_bus_id(near)}"} if has_path else {}
        _flow(near, "simplebus-2", nats, "nats", count, hears_more=header)
        rate = _flow(near, "simplebus-2", nats, "nats", count, hears_more=header)
    return rate, _flow(nats, "nats", nats, "nats", count, hears_more=header, says_more=header)


def _stored_to_nats(
    run_options: RunOptions, nats: RunningBroker, *, has_path: bool
) -> tuple[float, float]:
    """Return the rate of a bridge with a full backlog, and of a publisher of the same messages."""
    with running("simplebus", server_args=run_options.server_args) as near:
        header = {"header": f"{PATH_HEADER}={_bus_id(near)}"} if has_path else {}
        shape = {"timeout_s": TIMEOUT_S, "count": STORED, "size": SIZE_BYTES, "classes": CLASS}
        with Generator("publish", "simplebus-2", near.port, **shape) as publisher:
            publisher.result()
        with Generator("subscribe", "nats", nats.port, **shape, **header) as subscriber:
            subscriber.wait_ready()
            to = f"nats://{HOST}:{nats.port}"
            with _configured(to, has_path=has_path) as file, _alone(file, near):
                rate = _heard(subscriber)
    with Generator("subscribe", "nats", nats.port, **shape, **header) as subscriber:
        subscriber.wait_ready()
        with Generator("publish", "nats", nats.port, **shape, **header) as publisher:
            publisher.result()
            return rate, _heard(subscriber)


def _heard(subscriber: Generator) -> float:
    """Return the rate at the target after its last message."""
    heard = subscriber.result()
    rate: float = heard["messages"] / heard["seconds"]
    return rate


@contextmanager
def _bridged(
    run_options: RunOptions, to: str, way: str, *, has_path: bool = True
) -> Iterator[RunningBroker]:
    """Run a source server and a bridge that has both ends connected."""
    with _configured(to, has_path=has_path) as file:
        more = ["--config", str(file)] if way == WITHIN else []
        with running("simplebus", server_args=[*run_options.server_args, *more]) as near:
            if way == WITHIN:
                near.process.wait_for_line("copying from sequence", timeout_s=START_S)
                yield near
                return
            with _alone(file, near):
                yield near


@contextmanager
def _configured(to: str, *, has_path: bool) -> Iterator[Path]:
    """Write the configuration of a bridge."""
    rewrite = [["#", f"load.{CLASS}"]] if is_nats_address(to) else []
    lines = [
        "[[bridges]]",
        'name = "load"',
        f'to = "{to}"',
        "" if has_path else "path = false",
        "[[bridges.copy]]",
        f"class = {CLASS}",
        f"rewrite = {json.dumps(rewrite)}",
    ]
    with tempfile.TemporaryDirectory(prefix="simplebus-load-") as directory:
        file = Path(directory) / "bridges.toml"
        file.write_text("\n".join(lines) + "\n")
        yield file


@contextmanager
def _alone(file: Path, near: RunningBroker) -> Iterator[None]:
    """Run the bridge as its own process."""
    lines = file.read_text()
    file.write_text(lines.replace("to =", f'from = "{HOST}:{near.port}"\nto =', 1))
    command = [sys.executable, "-m", "simplebus", "bridge", str(file)]
    with Process("the bridge", command, directory=REPOSITORY) as bridge:
        bridge.wait_for_line("copying from sequence", timeout_s=START_S)
        yield


def _bus_id(broker: RunningBroker) -> str:
    """Return the bus id, which is the bridge path of its messages."""
    with connect_blocking(f"{HOST}:{broker.port}") as bus:
        return bus.connection.core.bus_id


def _flow(
    near: RunningBroker,
    says: str,
    far: RunningBroker,
    hears: str,
    count: int,
    *,
    hears_more: dict[str, Any],
    says_more: dict[str, Any] | None = None,
) -> float:
    common: dict[str, Any] = {
        "timeout_s": TIMEOUT_S,
        "count": count,
        "size": SIZE_BYTES,
        "classes": CLASS,
    }
    with Generator("subscribe", hears, far.port, **common, **hears_more) as subscriber:
        subscriber.wait_ready()
        with Generator("publish", says, near.port, **common, **(says_more or {})) as publisher:
            heard, sent = subscriber.result(), publisher.result()
    seconds = max(heard["settled"], sent["confirmed"]) - sent["started"]
    rate: float = count / seconds
    return rate
