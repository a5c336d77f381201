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
from simplebus.jetstream.consume.consumers import ConsumerManager
from simplebus.jetstream.consume.inboxes import ConsumerInboxes
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

_TRIM_SECONDS = 2.0
"""How often that is done."""


class StreamTrimmer:
    """Of one door."""

    def __init__(
        self,
        link: NatsConnection,
        consumers: ConsumerManager,
        jobs: ClassJobs,
        inboxes: ConsumerInboxes,
    ) -> None:
        self._link = link
        self._consumers = consumers
        self._jobs = jobs
        self._inboxes = inboxes
        self.classes_to_trim: set[int] = set()
        """Classes of which messages were acknowledged, or positions came, moved or went, since they
        were trimmed."""
        self._trimmed_at = 0.0
        self._failed_classes: set[int] = set()
        """Classes of which what is done with could not be removed last: that is last_acks once."""

    def trim_if_due(self, now: float) -> None:
        """While JetStream can be asked."""
        if now - self._trimmed_at > _TRIM_SECONDS:
            self._trimmed_at = now
            classes, self.classes_to_trim = self.classes_to_trim, set()
            for class_id in classes:
                self._jobs.enqueue(class_id, partial(self._trim, class_id))

    async def _trim(self, class_id: int) -> None:
        try:
            floors = await self._consumers.trim(class_id)
            for name, feed in self._inboxes.feeds_of_class(class_id):
                feed.acked_sequences.raise_floor(floors.get(name, 0))
            self._failed_classes.discard(class_id)
        except (BusConnectionError, JetStreamError) as error:
            if class_id not in self._failed_classes:
                log.info("what is done with of class %d stays for now: %s", class_id, error)
            self._failed_classes.add(class_id)
            self.classes_to_trim.add(class_id)

    async def trim_now(self, class_id: int) -> None:
        """Have what everybody has acknowledged removed, if that was last_acks here up to now."""
        last_acks = [feed.pop_last_ack() for _, feed in self._inboxes.feeds_of_class(class_id)]
        with contextlib.suppress(BusConnectionError):  # Then it stays for now.
            for subject in filter(
                None, last_acks
            ):  # What was last_acks before is known when it is answered.
                await self._link.request(subject.decode("latin-1"), jetstream_codec.ACK)
        if class_id in self.classes_to_trim or any(last_acks):
            await self._trim(class_id)
