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
SEPARATE, IN_SERVER = "the bridge alone", "part of a server"


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario."""
    count = COUNT // (QUICK_PART if run_options.quick else 1)
    rows: dict[str, Row] = {}

    def add_value(title: str, value: float, unit: str, target: float | None) -> None:
        rows.setdefault(title, Row("bridge", title, [], unit, target)).values.append(value)

    for _ in range(run_options.rounds):
        for way in IN_SERVER, SEPARATE:
            rate = _between_buses(run_options, count, way)
            add_value(f"from bus to bus, acked end to end, {way}", rate / 1e6, "M/s", 0.7)
        if not is_available("nats"):
            continue
        with running("nats") as nats:
            for way in IN_SERVER, SEPARATE:
                marked, same = _to_nats(run_options, nats, count, way, has_path=True)
                bare, plain = _to_nats(run_options, nats, count, way, has_path=False)
                add_value(
                    f"to NATS, against a publisher of the same, {way}", marked / same, "x", 0.8
                )
                add_value(f"to NATS without the path, {way}", bare / plain, "x", 0.8)
                add_value(f"with it, against a publisher without, {way}", marked / plain, "x", 0.8)
                add_value("that publisher with it, against without", same / plain, "x", None)
            marked, same = _stored_to_nats(run_options, nats, has_path=True)
            bare, plain = _stored_to_nats(run_options, nats, has_path=False)
            add_value(
                f"stored messages, to NATS, against the same, {SEPARATE}", marked / same, "x", 0.8
            )
            add_value(f"stored messages, without the path, {SEPARATE}", bare / plain, "x", 0.8)
    return list(rows.values())


def _between_buses(run_options: RunOptions, count: int, way: str) -> float:
    with running("simplebus", server_args=run_options.server_args) as target_server:
        with _bridged(run_options, f"{HOST}:{target_server.port}", way) as source:
            header = {"header": f"{PATH_HEADER}={_bus_id(source)}"}
            _flow(
                source,
                "simplebus-2",
                target_server,
                "simplebus-2",
                count,
                subscriber_options=header,
            )
            rate = _flow(
                source,
                "simplebus-2",
                target_server,
                "simplebus-2",
                count,
                subscriber_options=header,
            )
        probe_nothing_in_flight(target_server, (CLASS,))
    return rate


def _to_nats(
    run_options: RunOptions, nats: RunningBroker, count: int, way: str, *, has_path: bool
) -> tuple[float, float]:
    """Return the rate through a bridge, and of a publisher of the same messages."""
    with _bridged(run_options, f"nats://{HOST}:{nats.port}", way, has_path=has_path) as source:
        header = {"header": f"{PATH_HEADER}={_bus_id(source)}"} if has_path else {}
        _flow(source, "simplebus-2", nats, "nats", count, subscriber_options=header)
        rate = _flow(source, "simplebus-2", nats, "nats", count, subscriber_options=header)
    return rate, _flow(
        nats, "nats", nats, "nats", count, subscriber_options=header, publisher_options=header
    )


def _stored_to_nats(
    run_options: RunOptions, nats: RunningBroker, *, has_path: bool
) -> tuple[float, float]:
    """Return the rate of a bridge with a full backlog, and of a publisher of the same messages."""
    with running("simplebus", server_args=run_options.server_args) as source:
        header = {"header": f"{PATH_HEADER}={_bus_id(source)}"} if has_path else {}
        shape = {"timeout_s": TIMEOUT_S, "count": STORED, "size": SIZE_BYTES, "classes": CLASS}
        with Generator("publish", "simplebus-2", source.port, **shape) as publisher:
            publisher.result()
        with Generator("subscribe", "nats", nats.port, **shape, **header) as subscriber:
            subscriber.wait_ready()
            to = f"nats://{HOST}:{nats.port}"
            with _configured(to, has_path=has_path) as file, _separate_bridge(file, source):
                rate = _target_rate(subscriber)
    with Generator("subscribe", "nats", nats.port, **shape, **header) as subscriber:
        subscriber.wait_ready()
        with Generator("publish", "nats", nats.port, **shape, **header) as publisher:
            publisher.result()
            return rate, _target_rate(subscriber)


def _target_rate(subscriber: Generator) -> float:
    """Wait until the subscriber at the target has all messages, and return its rate."""
    received = subscriber.result()
    rate: float = received["messages"] / received["seconds"]
    return rate


@contextmanager
def _bridged(
    run_options: RunOptions, to: str, way: str, *, has_path: bool = True
) -> Iterator[RunningBroker]:
    """Run a source server and a bridge that has both ends connected."""
    with _configured(to, has_path=has_path) as file:
        config_args = ["--config", str(file)] if way == IN_SERVER else []
        with running("simplebus", server_args=[*run_options.server_args, *config_args]) as source:
            if way == IN_SERVER:
                source.process.wait_for_line("copying from sequence", timeout_s=START_S)
                yield source
                return
            with _separate_bridge(file, source):
                yield source


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
def _separate_bridge(file: Path, source: RunningBroker) -> Iterator[None]:
    """Run the bridge as its own process."""
    lines = file.read_text()
    file.write_text(lines.replace("to =", f'from = "{HOST}:{source.port}"\nto =', 1))
    command = [sys.executable, "-m", "simplebus", "bridge", str(file)]
    with Process("the bridge", command, directory=REPOSITORY) as bridge:
        bridge.wait_for_line("copying from sequence", timeout_s=START_S)
        yield


def _bus_id(broker: RunningBroker) -> str:
    """Return the bus id, which is the bridge path of its messages."""
    with connect_blocking(f"{HOST}:{broker.port}") as bus:
        return bus.connection.core.bus_id


def _flow(
    source: RunningBroker,
    source_protocol: str,
    target_server: RunningBroker,
    target_protocol: str,
    count: int,
    *,
    subscriber_options: dict[str, Any],
    publisher_options: dict[str, Any] | None = None,
) -> float:
    common: dict[str, Any] = {
        "timeout_s": TIMEOUT_S,
        "count": count,
        "size": SIZE_BYTES,
        "classes": CLASS,
    }
    with Generator(
        "subscribe", target_protocol, target_server.port, **common, **subscriber_options
    ) as subscriber:
        subscriber.wait_ready()
        with Generator(
            "publish", source_protocol, source.port, **common, **(publisher_options or {})
        ) as publisher:
            received, sent = subscriber.result(), publisher.result()
    seconds = max(received["settled"], sent["confirmed"]) - sent["started"]
    rate: float = count / seconds
    return rate
