"""Detection of cancellation under trio and asyncio.

A cancellation that comes from a cancel scope is passed on. A cancellation that an asyncio task
requested by itself is treated as an error of that task.
"""

from __future__ import annotations

import asyncio
import math

import anyio


def is_cancelled_by_scope() -> bool:
    """Return True if a cancel scope around the current task is cancelled."""
    try:
        return anyio.current_effective_deadline() == -math.inf
    except Exception:  # No event loop: a finalizer runs after the loop has ended.
        return False


def is_being_cancelled() -> bool:
    """Return True if the current task is cancelled, by a cancel scope or by `Task.cancel`."""
    if is_cancelled_by_scope():
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # Not under asyncio.
        return False
    return task is not None and task.cancelling() > 0


def is_cancellation(error: BaseException | None) -> bool:
    """Return True for the cancellation exception of the event loop, or a group of only these."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_cancellation(exception) for exception in error.exceptions)
    return isinstance(error, anyio.get_cancelled_exc_class())


def ignore_cancellation() -> None:
    """Clear the cancellation requests of the current asyncio task, so that it can continue."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
