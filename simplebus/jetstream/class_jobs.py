"""What has to be asked of JetStream: of each class one thing after the other (trio).

Rule 1: what is to be asked about a class is asked in the order in which it came up, each thing when
all before it is answered.
Rule 2: classes wait for nothing of each other.
Rule 3: what goes wrong with one, which is a fault of the door's own, ends nothing else.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, KeysView

import trio

from simplebus.core.errors import BusError

log = logging.getLogger("simplebus.engine")

Job = Callable[[], Awaitable[None]]


class ClassJobs:
    """Of one door."""

    def __init__(self, on_idle: Callable[[], None]) -> None:
        """`tell` is called whenever nothing is left to be asked about a class."""
        self._on_idle = on_idle
        self._queues: dict[int, deque[tuple[Job, object]]] = {}
        """Of each class, and for whom; the first one is under way."""
        self._nursery: trio.Nursery | None = None
        self._delayed_count = 0

    def start(self, nursery: trio.Nursery) -> None:
        """From now on they are done; what was to be done before is not."""
        self._nursery = nursery

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be asked, now or later."""
        return not (self._queues or self._delayed_count)

    @property
    def busy_classes(self) -> KeysView[int]:
        """Those about which something is asked."""
        return self._queues.keys()

    def enqueue(self, class_id: int, job: Job, owner: object = None) -> None:
        """Have something asked about a class, when all that came up before is done."""
        jobs = self._queues.setdefault(class_id, deque())
        jobs.append((job, owner))
        if len(jobs) == 1 and self._nursery is not None:
            self._nursery.start_soon(self._run_queue, class_id, jobs)

    def cancel_queued(self, class_id: int, owner: object) -> bool:
        """Somebody is gone: what is not under way is not asked for him. Returns whether anything
        was to be."""
        jobs = self._queues.get(class_id, deque())
        kept = [each for at, each in enumerate(jobs) if at == 0 or each[1] is not owner]
        is_dropped = len(kept) < len(jobs)
        if is_dropped:
            jobs.clear()
            jobs.extend(kept)
        return is_dropped

    def enqueue_later(self, class_id: int, job: Job, seconds: float) -> None:
        """Have something asked about a class when so much time has passed."""
        assert self._nursery is not None, "only what was begun can fail"
        self._delayed_count += 1
        self._nursery.start_soon(self._enqueue_after, class_id, job, seconds)

    async def _enqueue_after(self, class_id: int, job: Job, seconds: float) -> None:
        await trio.sleep(seconds)
        self._delayed_count -= 1
        self.enqueue(class_id, job)

    def run_concurrently(self, class_id: int, job: Job) -> None:
        """Have something asked about a class that waits for nothing else, and for which nothing
        waits."""
        assert self._nursery is not None, "nobody asks before the door is open"
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
            log.exception("class %d: what was asked of its stream went wrong", class_id)


def log_retry(class_id: int, error: Exception, tries: int) -> None:
    """A subscription has not what it needs, after so many tries more: said in the log, and more
    rarely each time."""
    if tries & (tries - 1) == 0:
        is_fault = not isinstance(error, BusError)
        what = "a subscription to class %d: %s; trying on"
        log.warning(what, class_id, error, exc_info=is_fault)
