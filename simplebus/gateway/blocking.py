"""Who waits for whom, and how a thread and a task wait.

Rule 1: nobody inside a module's callback begins to wait for somebody who waits, over whatever
others, for that callback to end. So there is always one who goes on.
Rule 2: in the thread of an event loop nothing waits but by `await`.

    module A, in its callback ── publishes, no room ──► module B, in its callback ── removes ──► A
                                                                                     refused here
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import trio

# One lock for all buses: a callback of one may publish on another. It is only taken to wait.
_graph = threading.Lock()


class Waiter:
    """Somebody who may wait: a module's worker while it is in the callback."""

    __slots__ = ("_awaited",)

    def __init__(self) -> None:
        self._awaited: list[tuple[Waiter, ...]] = []
        """Whom it waits for; several at once when a callback publishes from several tasks."""

    def await_always(self, other: Waiter) -> None:
        """It waits for another one, wherever it is, until `await_no_more`."""
        with _graph:
            self._awaited.append((other,))

    def await_no_more(self, other: Waiter) -> None:
        """That is over."""
        with _graph:
            self._awaited.remove((other,))

    def _leads_to(self, target: Waiter) -> bool:
        seen: set[Waiter] = set()
        ahead = [self]
        while ahead:
            waiter = ahead.pop()
            if waiter is target:
                return True
            if waiter not in seen:
                seen.add(waiter)
                ahead.extend(next_one for group in waiter._awaited for next_one in group)
        return False


inside: ContextVar[Waiter | None] = ContextVar("inside", default=None)
"""The module in whose callback this thread or task is."""


@contextmanager
def waiting_for(others: Iterable[Waiter]) -> Iterator[bool]:
    """A block that waits for them. Gives False if that would never end: then it must not."""
    me, group = inside.get(), tuple(others)
    if me is None:
        yield True
        return
    with _graph:
        ends = not any(other._leads_to(me) for other in group)
        if ends:
            me._awaited.append(group)
    try:
        yield ends
    finally:
        if ends:
            with _graph:
                me._awaited.remove(group)


def in_event_loop() -> bool:
    """Whether this thread runs trio or asyncio, which must not be blocked."""
    return trio.lowlevel.in_trio_run() or asyncio._get_running_loop() is not None


class ThreadGate:
    """Where one thread waits until somebody opens."""

    __slots__ = ("_lock", "open")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.open: Callable[[], None] = self._lock.release
        """To be called once."""

    def wait(self) -> None:
        """Return when it is open."""
        self._lock.acquire()


class End:
    """Something that ends once; who waits in a thread meanwhile is told. For any thread."""

    __slots__ = ("_lock", "_told", "is_there")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: list[Callable[[], object]] = []
        self.is_there = False

    def come(self) -> None:
        """It ends. More often than once changes nothing."""
        with self._lock:
            self.is_there, told, self._told = True, self._told, []
        for tell in told:
            tell()

    @contextmanager
    def told(self, tell: Callable[[], object]) -> Iterator[None]:
        """A block in which `tell` is called when it ends, at once if it has."""
        with self._lock:
            is_there = self.is_there
            if not is_there:
                self._told.append(tell)
        if is_there:
            tell()
        try:
            yield
        finally:
            with self._lock:
                if tell in self._told:
                    self._told.remove(tell)


class TaskGate:
    """Where one task of trio waits until somebody opens, from whatever thread."""

    __slots__ = ("_task", "_thread", "_token")

    def __init__(self) -> None:
        self._task = trio.lowlevel.current_task()
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()

    def open(self) -> None:
        """To be called once, unless the task has given up."""
        if threading.get_ident() == self._thread:
            trio.lowlevel.reschedule(self._task)
        else:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(trio.lowlevel.reschedule, self._task)

    async def wait(self, give_up: Callable[[], bool]) -> None:
        """Return when it is open. When cancelled, `give_up` says whether nobody will open it."""

        def abort(_: object) -> trio.lowlevel.Abort:
            return trio.lowlevel.Abort.SUCCEEDED if give_up() else trio.lowlevel.Abort.FAILED

        await trio.lowlevel.wait_task_rescheduled(abort)
