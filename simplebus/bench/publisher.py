"""Publisher process of the benchmark: publishes at full speed.

    python -m simplebus.bench.publisher URL CLASS RUN COUNT SIZE

Prints the monotonic time of its start, and ends by itself.
"""

from __future__ import annotations

import sys
import time

import trio

import simplebus
from simplebus.bench.traffic import payloads
from simplebus.console.workers import cancel_at_stdin_end

_BATCH_BYTES = 128 * 1024


async def main() -> None:
    url = sys.argv[1]
    class_id, run, count, size = map(int, sys.argv[2:])
    batch_count = max(1, _BATCH_BYTES // size)
    async with simplebus.connect(url, reconnect=None) as bus, trio.open_nursery() as nursery:
        nursery.start_soon(cancel_at_stdin_end, nursery.cancel_scope)
        print(time.monotonic(), flush=True)
        for first in range(0, count, batch_count):
            batch = payloads(run=run, first=first, count=min(batch_count, count - first), size=size)
            await bus.publish_many(batch, class_id=class_id, confirm=False)
        await bus.flush()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
