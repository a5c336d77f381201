"""Sampling of repeated failures, so that a failing handler does not fill the log."""

from __future__ import annotations

LOGGED_FIRST = 3
"""Failures of one handler or module that are all logged."""


def is_logged(failure_count: int) -> bool:
    """Return True if the failure with this number is logged: the first three, then each time that
    the number has doubled.
    """
    return failure_count <= LOGGED_FIRST or failure_count & (failure_count - 1) == 0
