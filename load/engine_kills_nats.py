"""NATS clients of the stateless servers that `engine_kills` kills, in a thread with asyncio.

The clients are nats-py's and reconnect to the other server by themselves. They ack messages one by
one. Their publications are not confirmed, so some may be lost with a killed server.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from functools import partial
from typing import Any, Self

import nats
import nats.errors

from load.message_accounting import DeliveryRecord, PublishedMessages
from load.processes import LoadError

SUBJECT = "nats.all"
PUBLISHER = "nat"
MEMBERS = 2
BURST = 5
PAUSE_S = 0.02
START_TIMEOUT_S = 60.0


class NatsClientCrew:
    """Context manager of a publisher, and a durable queue group for each record of `groups`."""

    def __init__(
        self, urls: list[str], sent: PublishedMessages, class_id: int, groups: list[DeliveryRecord]
    ) -> None:
        self._urls = urls
        self._sent = sent
        self._class_id = class_id
        self._crews = groups
        self.is_stopping = False
        """Set to True to stop publishing."""
        self._is_done = False
        self._failed = ""
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="NATS clients", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S) or self._failed:
            raise LoadError(
                f"NATS clients did not begin: {self._failed or 'no server accepts them'}"
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.is_stopping = self._is_done = True
        self._thread.join(START_TIMEOUT_S)

    def check(self) -> None:
        """Raise LoadError if a client failed."""
        if self._failed:
            raise LoadError(f"NATS clients: {self._failed}")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._failed = repr(error)
            self._started.set()

    async def _serve(self) -> None:
        clients = [await self._connect() for _ in range(MEMBERS)]
        for client in clients:
            for group in self._crews:
                await client.subscribe(
                    f"$SB.SUB.{group.class_id}.nats.start=earliest.in_flight=200",
                    queue="nats",
                    cb=partial(self._on_message, group),
                )
            await client.flush()
        self._started.set()
        while not self._is_done:
            if not self.is_stopping:
                for payload in self._sent.next_payloads(self._class_id, PUBLISHER, BURST):
                    await clients[0].publish(SUBJECT, payload)
            await asyncio.sleep(PAUSE_S)
        for client in clients:
            await client.close()

    async def _connect(self) -> Any:
        async def ignore_disconnect(error: Exception) -> None:
            """Ignore the error, because the run kills servers on purpose."""

        return await nats.connect(
            self._urls,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            error_cb=ignore_disconnect,
        )

    async def _on_message(self, group: DeliveryRecord, message: Any) -> None:
        group.record_delivery(message.data, 0, time.monotonic())
        with contextlib.suppress(nats.errors.Error):  # A message without an ack is delivered again.
            await message.ack()
