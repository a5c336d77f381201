"""The programs that client_loops.py times: a loop that publishes, and one that receives.

    python -m load.client_worker publish|receive PORT COUNT BLOCK

Rule 1: a loop per message, as a user writes it; nothing is batched by hand.
Rule 2: the receiver compares every payload with the one that must come, as the generator does.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import trio

import simplebus

SIZE_BYTES = 16
CLASS = 1
HOST = "127.0.0.1"


async def publish(port: int, payloads: Iterator[bytes]) -> dict[str, float]:
    async with simplebus.connect(f"simplebus://{HOST}:{port}") as bus:
        started = time.monotonic()
        for payload in payloads:
            await bus.publish(payload, class_id=CLASS)
        await bus.flush()
    return {"started": started}


async def receive(port: int, payloads: Iterator[bytes]) -> dict[str, float]:
    async with simplebus.connect(f"simplebus://{HOST}:{port}") as bus:
        async with bus.subscribe(CLASS) as messages:
            print("ready", flush=True)
            expected = next(payloads)
            async for message in messages:
                if message.payload != expected:
                    sys.exit(f"{message!r} came, expected the payload {expected!r}")
                expected = next(payloads, b"")
                if not expected:
                    break
        await bus.drain()  # The last acknowledgement is applied.
        settled = time.monotonic()
    return {"settled": settled}


def main() -> None:
    role, port, count, block = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    data = Path(block).read_bytes()
    frames = [data[at : at + SIZE_BYTES] for at in range(0, len(data), SIZE_BYTES)]
    payloads = itertools.islice(itertools.cycle(frames), count)
    found = trio.run(publish if role == "publish" else receive, port, payloads)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
