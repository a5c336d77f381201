"""A thread for one module's calls, that a task awaits.

Rule 1: calls are made one after the other, all in this thread.
Rule 2: who is cancelled while it waits gives the thread up: it ends with its call, and makes no
more.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TypeVar, TypeVarTuple

from simplebus.gateway.errors import parted
from simplebus.gateway.waiting import TaskGate, Waiter, inside

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class OwnThread:
    """Of one module."""

    def __init__(self, name: str, waiter: Waiter) -> None:
        self._waiter = waiter
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.is_given_up = False
        """Whether it is in a call that nobody waits for any more."""
        work = partial(copy_context().run, self._work)  # It is inside of what its maker is.
        threading.Thread(target=work, name=f"simplebus {name}", daemon=True).start()

    def _work(self) -> None:
        inside.set(self._waiter)
        while not self.is_given_up and (call := self._calls.get()) is not None:
            call()

    async def run(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """What the call returns, or raises: RuntimeError for what is no Exception, and
        once the thread is given up."""
        if self.is_given_up:
            raise RuntimeError("its thread was given up, in a call that did not return")
        gate = TaskGate()
        returned: list[T] = []
        raised: list[Exception] = []
        lock = threading.Lock()
        is_over = False

        def make() -> None:
            nonlocal is_over
            try:
                returned.append(call(*args))
            except BaseException as error:
                failure, _ = parted(error, in_thread=True)
                assert failure is not None
                raised.append(failure)
            with lock:
                is_over = True
                if not self.is_given_up:
                    gate.open()

        def give_up() -> bool:
            with lock:
                if is_over:
                    return False
                self.is_given_up = True
            return True

        self._calls.put(make)
        await gate.wait(give_up)
        if raised:
            raise raised[0]
        return returned[0]

    def end(self) -> None:
        """The thread ends."""
        self._calls.put(None)
