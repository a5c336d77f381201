"""A process of the demo: writes down every message that comes, then acknowledges it.

    python -m simplebus.demo.subscriber URL NOTES CLASS...

At the word `withhold` it stops acknowledging, until something that it left is sent again. When its
standard input ends, so does it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

import simplebus
from simplebus.client.aio.bus import Bus
from simplebus.console.stdin_lines import read_stdin_lines
from simplebus.core.limits import MESSAGE_ID_MASK
from simplebus.demo.records import Notebook, number_in


class Subscriber:
    """Follows classes on one connection."""

    def __init__(self, bus: Bus, notebook: Notebook) -> None:
        self._bus = bus
        self._notebook = notebook
        self._withholds = False

    async def follow(self, class_id: int) -> None:
        """Take the messages of a class, for ever."""
        async with self._bus.subscribe(class_id, auto_ack=False) as messages:
            async for batch in messages.batches():
                again = batch.attempt > 1
                self._notebook.write(
                    (class_id, again, number_in(class_id, content), sequence & MESSAGE_ID_MASK)
                    for content, sequence in zip(batch.payloads, batch.sequences, strict=True)
                )
                if again:
                    self._withholds = False
                if not self._withholds:
                    messages.ack_batch(batch)

    async def obey(self) -> None:
        """Do as told, until nothing more can come."""
        async for word in read_stdin_lines():
            if word == "withhold":
                self._withholds = True


async def main() -> None:
    url, notes, *class_ids = sys.argv[1:]
    notebook = Notebook(Path(notes))
    async with simplebus.connect(url, reconnect=None) as bus, trio.open_nursery() as nursery:
        subscriber = Subscriber(bus, notebook)
        for class_id in class_ids:
            nursery.start_soon(subscriber.follow, int(class_id))
        await subscriber.obey()
        nursery.cancel_scope.cancel()
    notebook.close()


if __name__ == "__main__":
    trio.run(main)
