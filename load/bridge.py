"""How fast a bridge copies: between two buses, and from a bus to a NATS server.

Rule 1: the rate is of verified messages from a publisher at the near end to a subscriber at the far
end, from the first one sent to the last one acknowledged there.
Rule 2: what NATS takes is measured in the same round with a publisher of its own: the same
messages, the same subscriber.
"""

from __future__ import annotations

import sys
from typing import Any

from load.brokers import HOST, REPOSITORY, START_S, Broker, is_available, running
from load.generators import Generator
from load.measure import TIMEOUT_S, Manner, probe_nothing_in_flight
from load.processes import Process
from load.report import Row
from simplebus.bridge.origin import PATH
from simplebus.client.blocking import connect_blocking

COUNT = 2_000_000
QUICK_PART = 10
SIZE_BYTES = 128
CLASS = 1


def run(manner: Manner) -> list[Row]:
    """The rows of the bridge scenario."""
    count = COUNT // (QUICK_PART if manner.quick else 1)
    between, to_nats, raw = list[float](), list[float](), list[float]()
    for _ in range(manner.rounds):
        between.append(_between_buses(manner, count))
        if is_available("nats"):
            with running("nats") as nats:
                to_nats.append(_to_nats(manner, nats, count))
                raw.append(_flow(nats, "nats", nats, "nats", count))
    rows = [_row("128 B from bus to bus, acked end to end", between, "M/s", 0.7)]
    rows[0].values[:] = [value / 1e6 for value in between]
    if raw:
        ratios = [a / b for a, b in zip(to_nats, raw, strict=True)]
        rows.append(_row("128 B to NATS core against a publisher of its own", ratios, "x", 0.8))
    return rows


def _row(title: str, values: list[float], unit: str, wish: float) -> Row:
    return Row("bridge", title, list(values), unit, wish, None)


def _between_buses(manner: Manner, count: int) -> float:
    args = manner.server_args
    with (
        running("simplebus", server_args=args) as near,
        running("simplebus", server_args=args) as far,
        _bridge(near, f"{HOST}:{far.port}"),
    ):
        path = f"{PATH}={_bus_id(near)}"
        rate = _flow(near, "simplebus-2", far, "simplebus-2", count, header=path)
        probe_nothing_in_flight(far, (CLASS,))
    return rate


def _to_nats(manner: Manner, nats: Broker, count: int) -> float:
    more = ("--rewrite", f"#=load.{CLASS}")
    with (
        running("simplebus", server_args=manner.server_args) as near,
        _bridge(near, f"nats://{HOST}:{nats.port}", *more),
    ):
        return _flow(near, "simplebus-2", nats, "nats", count)


def _bridge(near: Broker, far: str, *more: str) -> Process:
    """A running bridge that has both ends."""
    command = [sys.executable, "-m", "simplebus", "bridge", "--from", f"{HOST}:{near.port}"]
    process = Process(
        "the bridge", [*command, "--to", far, *more, str(CLASS)], directory=REPOSITORY
    )
    process.wait_for_line("goes on at", timeout_s=START_S)
    return process


def _bus_id(broker: Broker) -> str:
    """What it calls itself: the path of what comes from there."""
    with connect_blocking(f"{HOST}:{broker.port}") as bus:
        return bus.wire.core.bus_id


def _flow(near: Broker, says: str, far: Broker, hears: str, count: int, **more: str) -> float:
    common: dict[str, Any] = {
        "timeout_s": TIMEOUT_S,
        "count": count,
        "size": SIZE_BYTES,
        "classes": CLASS,
    }
    with Generator("subscribe", hears, far.port, **common, **more) as subscriber:
        subscriber.wait_ready()
        with Generator("publish", says, near.port, **common) as publisher:
            heard, sent = subscriber.result(), publisher.result()
    seconds = max(heard["settled"], sent["confirmed"]) - sent["started"]
    rate: float = count / seconds
    return rate
