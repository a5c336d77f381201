"""Publisher process of the demo: publishes numbered messages at a steady rate.

    python -m simplebus.demo.publisher URL RATE SECONDS CLASS...

Starts at the line `go`, prints the number of messages of each class, and ends. Ends also with its
standard input.
"""

from __future__ import annotations

import sys

import trio

import simplebus
from simplebus.console.stdin_lines import read_stdin_lines
from simplebus.console.workers import cancel_at_stdin_end
from simplebus.demo.records import payload

_BATCHES_PER_SECOND = 50


async def publish(url: str, *, rate: int, seconds: float, class_ids: list[int]) -> int:
    """Publish `rate` messages per second of each class, in small batches.

    Returns the number of messages per class.
    """
    sent = 0
    async with simplebus.connect(url, reconnect=None) as bus:
        async for word in read_stdin_lines():
            if word == "go":
                break
        else:
            return 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_at_stdin_end, nursery.cancel_scope)
            began = trio.current_time()
            for batch in range(1, round(seconds * _BATCHES_PER_SECOND) + 1):
                await trio.sleep_until(began + batch / _BATCHES_PER_SECOND)
                until = rate * batch // _BATCHES_PER_SECOND
                for class_id in class_ids:
                    await bus.publish_many(
                        [payload(class_id, number) for number in range(sent, until)],
                        class_id=class_id,
                        confirm=False,
                    )
                sent = until
            await bus.flush()
            nursery.cancel_scope.cancel()
    return sent


async def main() -> None:
    url, rate, seconds, *class_ids = sys.argv[1:]
    classes = [int(class_id) for class_id in class_ids]
    sent = await publish(url, rate=int(rate), seconds=float(seconds), class_ids=classes)
    for class_id in classes:
        print(class_id, sent)


if __name__ == "__main__":
    trio.run(main)
