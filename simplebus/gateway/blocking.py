"""Waiting of threads and tasks without deadlocks.

A callback never starts to wait for a module that waits, directly or through others, for this
callback to end. So one of them can always proceed. The thread of an event loop waits only by
`await`.

    callback of A: publish() waits for room in the queue of B
    callback of B: remove_module(A) would wait for A, so it does not wait
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import trio

# One lock for all buses, because a callback of one bus may publish on another. It is taken only
# by callers that are about to wait.
_wait_lock = threading.Lock()


class CallbackWaiter:
    """Worker of a module, as a node in the graph of callbacks that wait for each other."""

    __slots__ = ("_awaited_groups",)

    def __init__(self) -> None:
        self._awaited_groups: list[tuple[CallbackWaiter, ...]] = []
        """Waiters for which this one waits; several groups if a callback publishes from several
        tasks.
        """

    def add_awaited(self, waiter: CallbackWaiter) -> None:
        """Note that this waiter waits for `waiter` until `remove_awaited`."""
        with _wait_lock:
            self._awaited_groups.append((waiter,))

    def remove_awaited(self, waiter: CallbackWaiter) -> None:
        """Undo `add_awaited`."""
        with _wait_lock:
            self._awaited_groups.remove((waiter,))

    def _waits_for(self, target: CallbackWaiter) -> bool:
        visited: set[CallbackWaiter] = set()
        to_visit = [self]
        while to_visit:
            waiter = to_visit.pop()
            if waiter is target:
                return True
            if waiter not in visited:
                visited.add(waiter)
                to_visit.extend(
                    awaited_waiter
                    for awaited in waiter._awaited_groups
                    for awaited_waiter in awaited
                )
        return False


current_callback: ContextVar[CallbackWaiter | None] = ContextVar("current_callback", default=None)
"""Module whose callback the current thread or task runs; None outside of callbacks."""


@contextmanager
def can_wait_for(waiters: Iterable[CallbackWaiter]) -> Iterator[bool]:
    """Enter a block that waits for `waiters`.

    Yields False if waiting would not end; the block must not wait then.
    """
    current, awaited = current_callback.get(), tuple(waiters)
    if current is None:
        yield True
        return
    with _wait_lock:
        can_wait = not any(waiter._waits_for(current) for waiter in awaited)
        if can_wait:
            current._awaited_groups.append(awaited)
    try:
        yield can_wait
    finally:
        if can_wait:
            with _wait_lock:
                current._awaited_groups.remove(awaited)


def is_in_event_loop() -> bool:
    """Return True if the current thread runs trio or asyncio, and so must not block."""
    return trio.lowlevel.in_trio_run() or asyncio._get_running_loop() is not None


class ThreadGate:
    """Event for one waiting thread, which can be opened once."""

    __slots__ = ("_lock", "open")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.open: Callable[[], None] = self._lock.release
        """Open the gate."""

    def wait(self) -> None:
        """Wait until the gate is open."""
        self._lock.acquire()


class StopSignal:
    """Thread-safe flag that calls registered callbacks when it is set."""

    __slots__ = ("_callbacks", "_lock", "is_set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self.is_set = False

    def set(self) -> None:
        """Set the flag. Setting it again has no effect."""
        with self._lock:
            self.is_set, callbacks, self._callbacks = True, self._callbacks, []
        for callback in callbacks:
            callback()

    @contextmanager
    def notify(self, callback: Callable[[], object]) -> Iterator[None]:
        """Enter a block during which `callback` is called when the flag is set, at once if it is
        set.
        """
        with self._lock:
            is_set = self.is_set
            if not is_set:
                self._callbacks.append(callback)
        if is_set:
            callback()
        try:
            yield
        finally:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)


class TaskGate:
    """Event for one waiting trio task, which any thread can open once."""

    __slots__ = ("_task", "_thread", "_token")

    def __init__(self) -> None:
        self._task = trio.lowlevel.current_task()
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()

    def open(self) -> None:
        """Open the gate. Must not be called after the task has stopped waiting."""
        if threading.get_ident() == self._thread:
            trio.lowlevel.reschedule(self._task)
        else:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(trio.lowlevel.reschedule, self._task)

    async def wait(self, cancel: Callable[[], bool]) -> None:
        """Wait until the gate is open.

        If the task is cancelled, `cancel` is called. It returns True if the gate will not be opened
        any more.
        """

        def abort(_: object) -> trio.lowlevel.Abort:
            return trio.lowlevel.Abort.SUCCEEDED if cancel() else trio.lowlevel.Abort.FAILED

        await trio.lowlevel.wait_task_rescheduled(abort)
