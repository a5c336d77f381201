"""Garbage collection without long pauses.

A full collection of Python examines all objects: half a second with 200,000 subscriptions, while no
client is served. The server's objects leave no reference cycles when they are dropped, so there is
hardly any garbage to be found among old objects. Old objects are excluded from collections 20 times
a second, and after every 128 steps of trio tasks. Time alone is not enough: Python starts a
collection when many more objects were created than freed. If thousands of clients become active at
once, 50,000 young objects replace as many old ones, and the next collection would examine all of
them. A full collection occurs only if eight times as much memory is in use as after the last one,
which a leak of cycles would cause, and at most once an hour.

Young objects are collected more often than by default, so that each collection examines about 1,000
objects instead of 8,000. All of them together take the same time. But each one also examines the
elements of young containers, such as a list of 5,000 sessions: 1.4 ms. So a collection that took
long is followed by one of the middle generation, after which these containers are old.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time

import trio

_EXCLUDE_SECONDS = 0.05
_EXCLUDE_TASK_STEPS = 128
_FULL_COLLECTION_SECONDS = 3600.0
_FULL_COLLECTION_GROWTH = 8
_YOUNG_THRESHOLD = 250
_MIDDLE_THRESHOLD = 3
_NEVER = 1_000_000_000
_LONG_COLLECTION_SECONDS = 0.0003
"""Ten times the usual duration of a young collection."""


async def run(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Exclude old objects from collections until cancelled. For a process that runs only the
    server.

    The first full collection is complete when the task has started.
    """
    thresholds, age_objects = gc.get_threshold(), _AgingAfterLongCollections()
    exclusion = _ExclusionInstrument()
    gc.set_threshold(_YOUNG_THRESHOLD, _MIDDLE_THRESHOLD, _NEVER)
    gc.callbacks.append(age_objects)
    try:
        block_count = _collect_all()
        trio.lowlevel.add_instrument(exclusion)
        task_status.started()
        while True:
            end = trio.current_time() + _FULL_COLLECTION_SECONDS
            while trio.current_time() < end:
                await trio.sleep(_EXCLUDE_SECONDS)
                _exclude_young()
            if sys.getallocatedblocks() > _FULL_COLLECTION_GROWTH * block_count:
                block_count = _collect_all()
    finally:
        with contextlib.suppress(KeyError):  # Not added yet.
            trio.lowlevel.remove_instrument(exclusion)
        gc.callbacks.remove(age_objects)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _exclude_young() -> None:
    """Collect young objects, and exclude the remaining ones."""
    gc.collect(1)  # Garbage would otherwise stay until the next full collection.
    gc.freeze()


class _ExclusionInstrument(trio.abc.Instrument):
    """Instrument of trio that excludes objects after many steps of tasks."""

    def __init__(self) -> None:
        self._step_count = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._step_count += 1
        if self._step_count == _EXCLUDE_TASK_STEPS:
            self._step_count = 0
            _exclude_young()


class _AgingAfterLongCollections:
    """Callback of the collector. After a young collection that took long, the next one is of the
    middle generation: the remaining objects are old then, and are not examined again.
    """

    def __init__(self) -> None:
        self._started_at = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started_at = time.perf_counter()
        elif info["generation"] > 0:
            gc.set_threshold(_YOUNG_THRESHOLD, _MIDDLE_THRESHOLD, _NEVER)
        elif time.perf_counter() - self._started_at > _LONG_COLLECTION_SECONDS:
            gc.set_threshold(_YOUNG_THRESHOLD, 0, _NEVER)


def _collect_all() -> int:
    """Run a full collection, and exclude the remaining objects. Returns the number of allocated
    memory blocks, which is known without examining the objects.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return sys.getallocatedblocks()
