"""A process of the bench: checks every message of a run, then acknowledges it.

    python -m simplebus.bench.subscriber URL CLASS RUN COUNT SIZE

It says `ready`, then how far it is, a few times a second; at last `done`, the second of the
machine's clock at which the last message was there, and how many came again and how many were left
from before. Or `failed`, and why. It ends when its standard input does.
"""

from __future__ import annotations

import sys
import time

import trio

import simplebus
from simplebus.bench.traffic import Check, TrafficError
from simplebus.console.workers import cancel_at_stdin_end
from simplebus.core.limits import MESSAGE_ID_MASK

_SAY_SECONDS = 0.2


async def follow(url: str, class_id: int, check: Check) -> None:
    """Check messages until all were there, or one is wrong."""
    async with (
        simplebus.connect(url, reconnect=None) as bus,
        bus.subscribe(class_id, auto_ack=False) as messages,
    ):
        say("ready")
        due = 0.0
        async for batch in messages.batches():
            try:
                check.take(
                    batch.data,
                    first_id=int(batch.sequences[0]) & MESSAGE_ID_MASK,
                    count=len(batch),
                    redelivered=batch.attempt > 1,
                )
            except TrafficError as error:
                say("failed", error)
                return
            messages.ack_batch(batch)
            now = time.monotonic()
            if check.is_done:
                await bus.drain()  # The bus has applied every acknowledgement.
                say("done", now, check.redelivered, check.leftovers)
                return
            if now >= due:
                due = now + _SAY_SECONDS
                say("seen", check.seen)


def say(*words: object) -> None:
    print(*words, flush=True)


async def main() -> None:
    url = sys.argv[1]
    class_id, run, count, size = map(int, sys.argv[2:])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_at_stdin_end, nursery.cancel_scope)
        await follow(url, class_id, Check(run=run, count=count, size=size))


if __name__ == "__main__":
    trio.run(main)
