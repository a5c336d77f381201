"""Decision when the next micro-batch is due: by waiting messages and maximum delay.

No clock and no I/O: the current time is an argument, in seconds.
"""

from __future__ import annotations


class BatchTrigger:
    """Trigger of one running query. Its first batch is due at once."""

    def __init__(self, *, min_messages: int | None, max_delay_seconds: float) -> None:
        self._min_messages, self._max_delay_seconds = min_messages, max_delay_seconds
        self._last_due: float | None = None
        """Time at which a batch was due last; None before the first one."""

    def is_due(self, waiting: int, now: float) -> bool:
        """Return True if enough messages wait, or have waited for the maximum delay.

        After a True result the delay starts again, so the caller must start the batch.
        """
        if (
            self._min_messages is not None
            and waiting < self._min_messages
            and self._last_due is not None
            and now < self._last_due + self._max_delay_seconds
        ):
            return False
        self._last_due = now
        return True
