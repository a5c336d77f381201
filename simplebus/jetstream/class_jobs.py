"""Queues of JetStream requests: one job at a time per class.

The jobs of a class run in order; classes are independent of each other. An unexpected error ends
only its own job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, KeysView, Mapping

import trio

from simplebus.core.errors import BusError
from simplebus.core.message_class.message_class import MessageClass, class_label
from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.engine")

Job = Callable[[], Awaitable[None]]


class ClassJobs:
    """Jobs of all classes of one server."""

    def __init__(self, classes: Mapping[int, MessageClass], on_idle: Callable[[], None]) -> None:
        """Create empty queues.

        Args:
            classes: Classes of the broker, for their names.
            on_idle: Called whenever the queue of a class becomes empty.
        """
        self._classes = classes
        self._on_idle = on_idle
        self._queues: dict[int, deque[tuple[Job, object]]] = {}
        """Job and owner by class id; the first job of each queue is running."""
        self._nursery: trio.Nursery | None = None
        self._delayed_count = 0

    def start(self, nursery: trio.Nursery) -> None:
        """Run jobs in `nursery` from now on."""
        self._nursery = nursery

    @property
    def is_empty(self) -> bool:
        """True if no job is queued, running or delayed."""
        return not (self._queues or self._delayed_count)

    @property
    def busy_classes(self) -> KeysView[int]:
        """Ids of the classes with queued jobs."""
        return self._queues.keys()

    def enqueue(self, class_id: int, job: Job, owner: object = None) -> None:
        """Run `job` after all earlier jobs of the class."""
        jobs = self._queues.setdefault(class_id, deque())
        jobs.append((job, owner))
        if len(jobs) == 1 and self._nursery is not None:
            self._nursery.start_soon(self._run_queue, class_id, jobs)

    def cancel_queued(self, class_id: int, owner: object) -> bool:
        """Remove the jobs of `owner` that are not running. Returns True if there were any."""
        jobs = self._queues.get(class_id, deque())
        remaining_jobs = [each for at, each in enumerate(jobs) if at == 0 or each[1] is not owner]
        is_dropped = len(remaining_jobs) < len(jobs)
        if is_dropped:
            jobs.clear()
            jobs.extend(remaining_jobs)
        return is_dropped

    def enqueue_later(self, class_id: int, job: Job, seconds: float) -> None:
        """Enqueue `job` after `seconds`."""
        assert self._nursery is not None, "jobs are retried only after start()"
        self._delayed_count += 1
        self._nursery.start_soon(self._enqueue_after, class_id, job, seconds)

    async def _enqueue_after(self, class_id: int, job: Job, seconds: float) -> None:
        await trio.sleep(seconds)
        self._delayed_count -= 1
        self.enqueue(class_id, job)

    def run_concurrently(self, class_id: int, job: Job) -> None:
        """Run `job` now, independently of the class's queue."""
        assert self._nursery is not None, "jobs run only after start()"
        self._nursery.start_soon(self._run_job, class_id, job)

    async def _run_queue(self, class_id: int, jobs: deque[tuple[Job, object]]) -> None:
        while jobs:
            await self._run_job(class_id, jobs[0][0])
            jobs.popleft()
        del self._queues[class_id]
        self._on_idle()

    async def _run_job(self, class_id: int, job: Job) -> None:
        try:
            await job()
        except Exception:
            log.exception(
                "stream_job.failed",
                "class {class_name}: unexpected error in a request to its stream",
                class_name=class_label(self._classes, class_id),
            )


def log_retry(class_name: str, error: Exception, tries: int) -> None:
    """Log that a subscription could not get its consumer, at exponentially growing intervals of
    tries.
    """
    if tries & (tries - 1) == 0:
        is_fault = not isinstance(error, BusError)
        log.warning(
            "consumer.retried",
            "cannot get a consumer for a subscription to class {class_name}: {error}; retrying",
            class_name=class_name,
            error=error,
            attempt=tries,
            exc_info=is_fault,
        )
