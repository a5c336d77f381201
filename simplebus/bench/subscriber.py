"""Subscriber process of the benchmark: verifies every message, then acks it.

    python -m simplebus.bench.subscriber URL CLASS RUN COUNT SIZE

Prints `ready`, then `seen COUNT` a few times a second, and at the end `done` with the monotonic
time of the last message, redelivered messages and leftovers of earlier runs; or `failed` with the
reason. Ends with its standard input.
"""

from __future__ import annotations

import sys
import time

import trio

import simplebus
from simplebus.bench.traffic import TrafficCheck, TrafficError
from simplebus.console.workers import cancel_at_stdin_end
from simplebus.core.limits import MESSAGE_ID_MASK

_REPORT_INTERVAL_SECONDS = 0.2


async def receive_and_check(url: str, class_id: int, check: TrafficCheck) -> None:
    """Verify messages until all have arrived or one is wrong."""
    async with (
        simplebus.connect(url, reconnect=None) as bus,
        bus.subscribe(class_id, auto_ack=False) as messages,
    ):
        print_line("ready")
        due = 0.0
        async for batch in messages.batches():
            try:
                check.check_frames(
                    batch.data,
                    first_id=int(batch.sequences[0]) & MESSAGE_ID_MASK,
                    count=len(batch),
                    redelivered=batch.attempt > 1,
                )
            except TrafficError as error:
                print_line("failed", error)
                return
            messages.ack_batch(batch)
            now = time.monotonic()
            if check.is_done:
                await bus.drain()  # The bus has applied every acknowledgement.
                print_line("done", now, check.redelivered_count, check.leftover_count)
                return
            if now >= due:
                due = now + _REPORT_INTERVAL_SECONDS
                print_line("seen", check.seen_count)


def print_line(*words: object) -> None:
    print(*words, flush=True)


async def main() -> None:
    url = sys.argv[1]
    class_id, run, count, size = map(int, sys.argv[2:])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_at_stdin_end, nursery.cancel_scope)
        await receive_and_check(url, class_id, TrafficCheck(run=run, count=count, size=size))


if __name__ == "__main__":
    trio.run(main)
