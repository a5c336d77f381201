"""Physical limit: a relay that receives up to 1 MiB and forwards it, without a protocol.

    python load/lab/relay.py

The generator verifies every payload, as elsewhere. Its rate here is the highest rate that it can
measure of any broker.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # For `python load/lab/...`.

from load.brokers import HOST
from load.generators import Generator
from load.report import spread
from simplebus.spark.jobs.report.summary import format_number

READ_BYTES = 1 << 20
BYTES_A_RUN = 1 << 30
ROUNDS = 3


def relay(listener: socket.socket) -> None:
    """Forward bytes from the second connection to the first."""
    subscriber, _ = listener.accept()
    publisher, _ = listener.accept()
    buffer = memoryview(bytearray(READ_BYTES))
    with subscriber, publisher:
        while count := publisher.recv_into(buffer):
            subscriber.sendall(buffer[:count])


def rate_of(size_bytes: int) -> float:
    """Return verified messages per second through the relay."""
    options = {"timeout_s": 30, "count": BYTES_A_RUN // size_bytes, "size": size_bytes}
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=relay, args=(listener,), daemon=True)
        thread.start()
        with Generator("subscribe", "raw", port, **options) as subscriber:
            subscriber.wait_ready()
            with Generator("publish", "raw", port, **options) as publisher:
                received, sent = subscriber.result(), publisher.result()
        thread.join()
    return float(received["messages"] / (received["settled"] - sent["started"]))


def main() -> None:
    for size_bytes in (16, 128, 1024):
        rates = [rate_of(size_bytes) for _ in range(ROUNDS)]
        print(f"{size_bytes:5} B  {format_number(median(rates))} msgs/s ({spread(rates)})")


if __name__ == "__main__":
    main()
