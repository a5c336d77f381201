"""The Python client, message by message: what a plain loop in a program gets.

Rule 1: the other side is the load generator, so that one Python client is measured, not two; every
message is verified by whoever receives it.
Rule 2: a rate counts from the publisher's first message until the last acknowledgement is applied.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from load.brokers import REPOSITORY, Broker, running
from load.client_worker import CLASS, SIZE_BYTES
from load.generators import Generator, program
from load.measure import ECHO_CLASS, Manner, probe_nothing_in_flight
from load.processes import Process
from load.report import Row

COUNT, QUICK_COUNT, WARM_UP_COUNT = 1_500_000, 300_000, 100_000
TIMEOUT_S = 60
AT_LEAST, REACH = 0.5e6, 1e6
OPTIONS: dict[str, Any] = {"timeout_s": TIMEOUT_S, "size": SIZE_BYTES, "classes": CLASS}


def run(manner: Manner) -> list[Row]:
    """Rows: messages a second of a loop that publishes, and of one that receives."""
    count = QUICK_COUNT if manner.quick else COUNT
    published, received = [], []
    with (
        tempfile.NamedTemporaryFile() as file,
        running("simplebus", server_args=manner.server_args) as broker,
    ):
        block = Path(file.name)
        _write_block(block)
        _publish_rate(broker, block, WARM_UP_COUNT)
        _receive_rate(broker, block, WARM_UP_COUNT)
        for _ in range(manner.rounds):
            published.append(_publish_rate(broker, block, count))
            received.append(_receive_rate(broker, block, count))
    return [
        Row("client", "a loop that publishes", published, "msgs/s", AT_LEAST, REACH),
        Row("client", "a loop that receives, acked", received, "msgs/s", AT_LEAST, REACH),
    ]


def _write_block(path: Path) -> None:
    """The generator's payloads: both sides need the same."""
    command = [str(program()), "block", "simplebus", "--size", str(SIZE_BYTES)]
    path.write_bytes(subprocess.run(command, capture_output=True, check=True, timeout=10).stdout)


class _Worker(Process):
    """One Python client program."""

    def __init__(self, role: str, broker: Broker, count: int, block: Path) -> None:
        arguments = [role, str(broker.port), str(count), str(block)]
        command = [sys.executable, "-m", "load.client_worker", *arguments]
        super().__init__(f"the Python client ({role})", command, directory=REPOSITORY)

    def result(self) -> dict[str, float]:
        found: dict[str, float] = json.loads(self.finish(timeout_s=TIMEOUT_S).splitlines()[-1])
        return found


def _publish_rate(broker: Broker, block: Path, count: int) -> float:
    options = {**OPTIONS, "count": count, "echo_class": ECHO_CLASS}
    with Generator("subscribe", "simplebus", broker.port, **options) as subscriber:
        subscriber.wait_ready()
        with _Worker("publish", broker, count, block) as publisher:
            sent, heard = publisher.result(), subscriber.result()
    return float(count / (heard["settled"] - sent["started"]))


def _receive_rate(broker: Broker, block: Path, count: int) -> float:
    with _Worker("receive", broker, count, block) as subscriber:
        subscriber.wait_for_line("ready", timeout_s=TIMEOUT_S)
        with Generator("publish", "simplebus", broker.port, **OPTIONS, count=count) as publisher:
            sent, heard = publisher.result(), subscriber.result()
    probe_nothing_in_flight(broker, (CLASS,))
    return float(count / (heard["settled"] - sent["started"]))
