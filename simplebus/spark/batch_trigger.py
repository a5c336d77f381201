"""When the next batch is due: what waits, against for how long.

Rule 1: nothing of Spark, no I/O and no clock here: a reading of one is an argument, in seconds.
"""

from __future__ import annotations


class Pace:
    """Of one query, since it runs: its first batch is due at once."""

    def __init__(self, *, least: int | None, max_delay: float) -> None:
        self._least, self._max_delay = least, max_delay
        self._last: float | None = None
        """When a batch was due last; None before the first one."""

    def is_due(self, waiting: int, now: float) -> bool:
        """Whether so many messages are a batch, or were waited for long enough. A batch that is
        due is taken to be made."""
        if (
            self._least is not None
            and waiting < self._least
            and self._last is not None
            and now < self._last + self._max_delay
        ):
            return False
        self._last = now
        return True
