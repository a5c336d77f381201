"""Whether a task is being cancelled, and by whom; under trio and asyncio.

Rule 1: a cancellation that a scope asked for goes through. One that a task of asyncio asked for
itself is an error of that task.
"""

from __future__ import annotations

import asyncio
import math

import anyio


def is_cancelled_by_scope() -> bool:
    """Whether a scope around the current task is cancelled."""
    try:
        return anyio.current_effective_deadline() == -math.inf
    except Exception:  # No event loop: whoever asks has outlived it.
        return False


def is_being_cancelled() -> bool:
    """Whether the current task is unwinding from a cancellation, of whichever kind."""
    if is_cancelled_by_scope():
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # Not under asyncio.
        return False
    return task is not None and task.cancelling() > 0


def forgive() -> None:
    """The current task of asyncio goes on although somebody has cancelled it."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
