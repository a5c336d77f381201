"""Messages that everybody has acknowledged are removed from streams: some seconds later, many at
once (trio).

Rule 1: what was acknowledged at this door is looked after by this door. What cannot be removed now
is tried again.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial

from simplebus.core.errors import BusConnectionError
from simplebus.jetstream.class_jobs import ClassJobs
from simplebus.jetstream.consume.consumers import Positions
from simplebus.jetstream.consume.inboxes import Listening
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

_TRIM_SECONDS = 2.0
"""How often that is done."""


class Trimming:
    """Of one door."""

    def __init__(
        self, link: NatsConnection, positions: Positions, jobs: ClassJobs, listening: Listening
    ) -> None:
        self._link = link
        self._positions = positions
        self._jobs = jobs
        self._listening = listening
        self.acked: set[int] = set()
        """Classes of which messages were acknowledged, or positions came, moved or went, since they
        were trimmed."""
        self._trimmed_at = 0.0
        self._stay: set[int] = set()
        """Classes of which what is done with could not be removed last: that is said once."""

    def beat(self, now: float) -> None:
        """While JetStream can be asked."""
        if now - self._trimmed_at > _TRIM_SECONDS:
            self._trimmed_at = now
            acked, self.acked = self.acked, set()
            for class_id in acked:
                self._jobs.enqueue(class_id, partial(self._trim, class_id))

    async def _trim(self, class_id: int) -> None:
        try:
            floors = await self._positions.trim(class_id)
            for name, feed in self._listening.of(class_id):
                feed.remembered.raise_floor(floors.get(name, 0))
            self._stay.discard(class_id)
        except (BusConnectionError, JetStreamError) as error:
            if class_id not in self._stay:
                log.info("what is done with of class %d stays for now: %s", class_id, error)
            self._stay.add(class_id)
            self.acked.add(class_id)

    async def trim_all(self, class_id: int) -> None:
        """Have what everybody has acknowledged removed, if that was said here up to now."""
        said = [feed.take_said() for _, feed in self._listening.of(class_id)]
        with contextlib.suppress(BusConnectionError):  # Then it stays for now.
            for subject in filter(None, said):  # What was said before is known when it is answered.
                await self._link.request(subject.decode("latin-1"), jetstream_codec.ACK)
        if class_id in self.acked or any(said):
            await self._trim(class_id)
