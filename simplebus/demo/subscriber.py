"""Subscriber process of the demo: records every message, then acks it.

    python -m simplebus.demo.subscriber URL RECEIPTS CLASS...

At the line `withhold` it stops acking until a message is redelivered. Ends with its standard input.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

import simplebus
from simplebus.client.aio.bus import Bus
from simplebus.console.stdin_lines import read_stdin_lines
from simplebus.core.limits import MESSAGE_ID_MASK
from simplebus.demo.records import ReceiptLog, message_number


class RecordingSubscriber:
    """Subscriber to several classes on one connection."""

    def __init__(self, bus: Bus, receipt_log: ReceiptLog) -> None:
        self._bus = bus
        self._receipt_log = receipt_log
        self._is_withholding = False

    async def receive_messages(self, class_id: int) -> None:
        """Receive and record the messages of a class, until cancelled."""
        async with self._bus.subscribe(class_id, auto_ack=False) as messages:
            async for batch in messages.batches():
                is_redelivered = batch.attempt > 1
                self._receipt_log.write(
                    (
                        class_id,
                        is_redelivered,
                        message_number(class_id, content),
                        sequence & MESSAGE_ID_MASK,
                    )
                    for content, sequence in zip(batch.payloads, batch.sequences, strict=True)
                )
                if is_redelivered:
                    self._is_withholding = False
                if not self._is_withholding:
                    messages.ack_batch(batch)

    async def read_commands(self) -> None:
        """Execute commands from standard input until it ends."""
        async for word in read_stdin_lines():
            if word == "withhold":
                self._is_withholding = True


async def main() -> None:
    url, receipts_path, *class_ids = sys.argv[1:]
    receipt_log = ReceiptLog(Path(receipts_path))
    async with simplebus.connect(url, reconnect=None) as bus, trio.open_nursery() as nursery:
        subscriber = RecordingSubscriber(bus, receipt_log)
        for class_id in class_ids:
            nursery.start_soon(subscriber.receive_messages, int(class_id))
        await subscriber.read_commands()
        nursery.cancel_scope.cancel()
    receipt_log.close()


if __name__ == "__main__":
    trio.run(main)
