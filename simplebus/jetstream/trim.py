"""Deferred bulk removal of acknowledged messages from streams.

Each server trims the classes in which it acknowledged messages, and retries after failures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial

from simplebus.core.errors import BusConnectionError
from simplebus.core.message_class.message_class import MessageClass, class_label
from simplebus.jetstream.class_jobs import ClassJobs
from simplebus.jetstream.consume.consumers import ConsumerManager
from simplebus.jetstream.consume.inboxes import ConsumerInboxes
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = EventLogger("simplebus.engine")

_TRIM_SECONDS = 2.0
"""Interval between two rounds."""


class StreamTrimmer:
    """Trims the streams of one server's classes."""

    def __init__(
        self,
        link: NatsConnection,
        classes: Mapping[int, MessageClass],
        consumers: ConsumerManager,
        jobs: ClassJobs,
        inboxes: ConsumerInboxes,
    ) -> None:
        self._link = link
        self._classes = classes
        self._consumers = consumers
        self._jobs = jobs
        self._inboxes = inboxes
        self.classes_to_trim: set[int] = set()
        """Classes with new acks, or with positions that were opened, moved or closed."""
        self._trimmed_at = 0.0
        self._failed_classes: set[int] = set()
        """Classes whose last trim failed, so that the failure is logged once."""

    def trim_if_due(self, now: float) -> None:
        """Enqueue trim jobs if the interval has passed. `now` is in seconds of a monotonic
        clock.
        """
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
                log.info(
                    "trim.postponed",
                    "cannot remove acknowledged messages of class {class_name} yet: {error}",
                    class_name=class_label(self._classes, class_id),
                    error=error,
                )
            self._failed_classes.add(class_id)
            self.classes_to_trim.add(class_id)

    async def trim_now(self, class_id: int) -> None:
        """Trim a class after the cluster has processed all acks that were sent so far."""
        last_acks = [feed.pop_last_ack() for _, feed in self._inboxes.feeds_of_class(class_id)]
        with contextlib.suppress(BusConnectionError):  # Trim without the check.
            for subject in filter(None, last_acks):  # The answer follows all earlier acks.
                await self._link.request(subject.decode("latin-1"), jetstream_codec.ACK)
        if class_id in self.classes_to_trim or any(last_acks):
            await self._trim(class_id)
