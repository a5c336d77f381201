"""What calls modules: a thread or a task for each, with one message after the other.

Rule 1: a module is in one callback at a time, and its messages come in the order of the bus.
Rule 2: a callback that raises costs its message, which is counted and logged, and nothing else.
Rule 3: whatever ends a worker, the bus learns that it has ended.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import trio

from simplebus.gateway.blocking import TaskGate, Waiter, inside
from simplebus.gateway.errors import invalid, parted
from simplebus.gateway.mailbox import Mailbox, named
from simplebus.gateway.messages import ModuleMessage

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


log = logging.getLogger("simplebus.gateway")

Receive = Callable[[ModuleMessage], Any]
Body = Callable[[Mailbox], Awaitable[None]]
"""What a task does for a module: takes from its mailbox until that gives None."""

Begun = queue.SimpleQueue[OSError | None]
"""Told once, by the thread of an event loop: that it has begun, or why not."""

TURN_MESSAGES = 64
"""So many messages are delivered in an event loop before others there get a turn."""


def receiver(module: object) -> Receive:
    """What is called with each message: the module's `receive`, or the module."""
    receive = getattr(module, "receive", module)
    if not callable(receive):
        raise invalid(f"a module has a method `receive`, or can be called; got {named(module)}")
    return receive


def is_async(receive: Receive) -> bool:
    """Whether calling it gives something to be awaited."""
    called = getattr(receive, "__call__", None)  # noqa: B004 - an object's own is asked for.
    return inspect.iscoroutinefunction(receive) or inspect.iscoroutinefunction(called)


def _say_failed(box: Mailbox, error: BaseException, *, in_thread: bool) -> None:
    """Raises what is not the module's doing."""
    failure, rest = parted(error, in_thread=in_thread)
    if failure is not None:
        box.failed += 1
        log.error(
            "module %s failed on a message; it goes on with the next", box.name, exc_info=failure
        )
    if rest is not None:
        raise rest


def deliver(box: Mailbox, receive: Receive) -> None:
    """The worker of a module with a thread."""
    inside.set(box)
    batch: deque[ModuleMessage] | None = None
    try:
        while (batch := box.take()) is not None:
            while batch:
                if box.is_closed:
                    return
                box.delivered += 1
                try:
                    receive(batch.popleft())
                except BaseException as error:
                    _say_failed(box, error, in_thread=True)
    finally:
        box.end(len(batch or ()))


async def deliver_async(box: Mailbox, receive: Receive, awaits: bool) -> None:
    """The worker of a module with a task: `receive` is awaited, or does not block."""
    batch: deque[ModuleMessage] | None = None
    turn = 0
    try:
        while (batch := await box.take_async()) is not None:
            while batch:
                if (turn := turn + 1) % TURN_MESSAGES == 0:
                    await trio.lowlevel.checkpoint()
                if box.is_closed:
                    return
                box.delivered += 1
                try:
                    answer = receive(batch.popleft())
                    if awaits:
                        await answer
                except BaseException as error:
                    _say_failed(box, error, in_thread=False)
    finally:
        box.lost += len(batch or ())


async def _in_task(box: Mailbox, body: Body) -> None:
    inside.set(box)
    try:
        await body(box)
    except BaseException as error:
        failure, rest = parted(error)
        if failure is not None:
            log.error(
                "the worker of module %s failed; the module is removed", box.name, exc_info=failure
            )
        if rest is not None:
            raise rest from None


async def _in_nursery(box: Mailbox, body: Body) -> None:
    try:
        await _in_task(box, body)
    finally:
        box.end()


def _in_loop(box: Mailbox, body: Body, begun: Begun) -> None:
    async def begin() -> None:
        begun.put(None)
        await _in_task(box, body)

    try:
        trio.run(begin)
    except OSError as error:  # An event loop takes files, which there may be none of.
        begun.put(error)
    finally:
        box.end()


def start_thread(box: Mailbox, receive: Receive) -> None:
    """Give the module a thread. It does not keep the process alive. Raises RuntimeError."""
    name = f"simplebus {type(box.module).__name__}"
    threading.Thread(target=deliver, args=(box, receive), name=name, daemon=True).start()


def start_loop(box: Mailbox, body: Body) -> None:
    """Give the module a task in an event loop of its own, which begins within a moment. Raises
    RuntimeError."""
    name = f"simplebus {type(box.module).__name__}"
    begun: Begun = queue.SimpleQueue()
    threading.Thread(target=_in_loop, args=(box, body, begun), name=name, daemon=True).start()
    if (error := begun.get()) is not None:
        raise RuntimeError(f"it can have no event loop: {error}") from error


class Home:
    """The event loop in which a bus's tasks are."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.thread = threading.get_ident()
        self._nursery = nursery
        self._token = trio.lowlevel.current_trio_token()

    def start(self, box: Mailbox, body: Body) -> None:
        """Give the module a task, from whatever thread. Raises RuntimeError if the loop ended."""
        if threading.get_ident() == self.thread:
            self._start(box, body)
        else:
            self._token.run_sync_soon(self._start, box, body)

    def _start(self, box: Mailbox, body: Body) -> None:
        try:
            self._nursery.start_soon(_in_nursery, box, body, name=f"module {box.name}")
        except RuntimeError:  # The loop is being left.
            box.end()
