"""NATS clients at the doors that `engine_kills` kills, in a thread with an event loop of their own.

Rule 1: they are nats-py's, as a program has them, and go on at another door by themselves.
Rule 2: what they are sent they acknowledge one by one; so each has all that was confirmed to
anybody. What they publish nobody confirms: of that some may be lost with a door.
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

from load.accounts import Seen, Sent
from load.processes import LoadError

SUBJECT = "nats.all"
PUBLISHER = "nat"
MEMBERS = 2
BURST = 5
PAUSE_S = 0.02
PATIENCE_S = 60.0


class NatsClients:
    """A publisher of `class_id`, to which SUBJECT leads, and of each of `crews` a queue group that
    shares a durable. Enter it to have them at work."""

    def __init__(self, urls: list[str], sent: Sent, class_id: int, crews: list[Seen]) -> None:
        self._urls = urls
        self._sent = sent
        self._class_id = class_id
        self._crews = crews
        self.is_over = False
        """Set it for them to publish no more."""
        self._is_done = False
        self._failed = ""
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="NATS clients", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._begun.wait(PATIENCE_S) or self._failed:
            raise LoadError(f"NATS clients did not begin: {self._failed or 'no door lets them in'}")
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = self._is_done = True
        self._thread.join(PATIENCE_S)

    def check(self) -> None:
        """Raise LoadError if they have failed."""
        if self._failed:
            raise LoadError(f"NATS clients: {self._failed}")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._failed = repr(error)
            self._begun.set()

    async def _serve(self) -> None:
        clients = [await self._connect() for _ in range(MEMBERS)]
        for client in clients:
            for crew in self._crews:
                await client.subscribe(
                    f"$SB.SUB.{crew.class_id}.nats.start=earliest.in_flight=200",
                    queue="nats",
                    cb=partial(self._take, crew),
                )
            await client.flush()
        self._begun.set()
        while not self._is_done:
            if not self.is_over:
                for payload in self._sent.more(self._class_id, PUBLISHER, BURST):
                    await clients[0].publish(SUBJECT, payload)
            await asyncio.sleep(PAUSE_S)
        for client in clients:
            await client.close()

    async def _connect(self) -> Any:
        async def pass_over(error: Exception) -> None:
            """That a door is gone is what this is about."""

        return await nats.connect(
            self._urls,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            error_cb=pass_over,
        )

    async def _take(self, crew: Seen, message: Any) -> None:
        crew.take(message.data, 0, time.monotonic())
        with contextlib.suppress(nats.errors.Error):  # Then it comes again.
            await message.ack()
