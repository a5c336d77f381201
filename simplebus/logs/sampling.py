"""Sampling of repeated failures, so that a failing handler does not fill the log."""

from __future__ import annotations

LOGGED_FIRST = 3
"""Failures of one handler or module that are all logged."""
TEXTS_MAX = 100


def is_logged(failure_count: int) -> bool:
    """Return True if the failure with this number is logged: the first three, then each time that
    the number has doubled.
    """
    return failure_count <= LOGGED_FIRST or failure_count & (failure_count - 1) == 0


class FailureCounts:
    """Numbers of failures by their text, of a bounded number of texts."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, text: str) -> int:
        """Count a failure. Returns the number of failures with this text so far."""
        if text not in self._counts and len(self._counts) >= TEXTS_MAX:
            self._counts.clear()
        count = self._counts[text] = self._counts.get(text, 0) + 1
        return count
