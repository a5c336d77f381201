"""Count of the steps of tasks, to show that work is divided between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import trio


class StepCounter(trio.abc.Instrument):
    """Counts the steps of all tasks."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


@contextlib.contextmanager
def counting_steps() -> Iterator[StepCounter]:
    """Count the steps until the block ends."""
    counter = StepCounter()
    trio.lowlevel.add_instrument(counter)
    try:
        yield counter
    finally:
        trio.lowlevel.remove_instrument(counter)
