"""Threads and tasks that call modules, with one message after the other.

A module is in one callback at a time, and receives messages in the order of the bus. A callback
that raises is counted and logged, and only its message is lost. A worker reports every end to
the bus, also one by an exception.
"""

from __future__ import annotations

import inspect
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import trio

from simplebus.gateway.blocking import CallbackWaiter, TaskGate, current_callback
from simplebus.gateway.errors import invalid_argument, split_failure
from simplebus.gateway.mailbox import Mailbox, describe_module
from simplebus.gateway.messages import ModuleMessage
from simplebus.logs.event_logger import EventLogger
from simplebus.logs.sampling import is_logged

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ModuleThread:
    """Thread that runs the calls of one module."""

    def __init__(self, name: str, waiter: CallbackWaiter) -> None:
        self._waiter = waiter
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.is_abandoned = False
        """True if no task waits for the current call of the thread any more."""
        # The thread inherits the context, and so the current callback, of its creator.
        work = partial(copy_context().run, self._work)
        threading.Thread(target=work, name=f"simplebus {name}", daemon=True).start()

    def _work(self) -> None:
        current_callback.set(self._waiter)
        while not self.is_abandoned and (call := self._calls.get()) is not None:
            call()

    async def run(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a call in the thread. Returns or raises what the call does.

        Raises RuntimeError if the call raises something that is not an Exception, and after the
        thread was abandoned.
        """
        if self.is_abandoned:
            raise RuntimeError("its thread was abandoned, in a call that did not return")
        gate = TaskGate()
        returned: list[T] = []
        raised: list[Exception] = []
        lock = threading.Lock()
        is_done = False

        def run_call() -> None:
            nonlocal is_done
            try:
                returned.append(call(*args))
            except BaseException as error:
                failure, _ = split_failure(error, in_thread=True)
                assert failure is not None
                raised.append(failure)
            with lock:
                is_done = True
                if not self.is_abandoned:
                    gate.open()

        def abandon() -> bool:
            with lock:
                if is_done:
                    return False
                self.is_abandoned = True
            return True

        self._calls.put(run_call)
        await gate.wait(abandon)
        if raised:
            raise raised[0]
        return returned[0]

    def end(self) -> None:
        """End the thread after the current call."""
        self._calls.put(None)


log = EventLogger("simplebus.gateway")

ReceiveFunction = Callable[[ModuleMessage], Any]
TaskBody = Callable[[Mailbox], Awaitable[None]]
"""Async function that takes messages from a mailbox until it returns None."""

LoopStarted = queue.SimpleQueue[OSError | None]
"""Receives one item from a thread: None when its event loop has started, or the error."""

MESSAGES_PER_TURN = 64
"""Messages that are delivered in an event loop before other tasks get a turn."""


def receive_function(module: object) -> ReceiveFunction:
    """Return the function that receives messages: the module's `receive`, or the module."""
    receive = getattr(module, "receive", module)
    if not callable(receive):
        raise invalid_argument(
            f"a module has a method `receive`, or can be called; got {describe_module(module)}"
        )
    return receive


def is_async(receive: ReceiveFunction) -> bool:
    """Return True if calling `receive` returns an awaitable."""
    called = getattr(receive, "__call__", None)  # noqa: B004 - also callable objects.
    return inspect.iscoroutinefunction(receive) or inspect.iscoroutinefunction(called)


def _handle_failure(mailbox: Mailbox, error: BaseException, *, in_thread: bool) -> None:
    """Count and log the failure of a module. Re-raises cancellation and Ctrl-C."""
    failure, remaining_error = split_failure(error, in_thread=in_thread)
    if failure is not None:
        mailbox.failed += 1
        if is_logged(mailbox.failed):
            log.error(
                "module_receive.failed",
                "module {module_name} failed on a message; continuing with the next one; "
                "failure {failure_count}",
                module_name=mailbox.name,
                failure_count=mailbox.failed,
                exc_info=failure,
            )
    if remaining_error is not None:
        raise remaining_error


def deliver(mailbox: Mailbox, receive: ReceiveFunction) -> None:
    """Deliver messages in the thread of a module."""
    current_callback.set(mailbox)
    batch: deque[ModuleMessage] | None = None
    try:
        while (batch := mailbox.wait_batch()) is not None:
            while batch:
                if mailbox.is_closed:
                    return
                mailbox.delivered += 1
                try:
                    receive(batch.popleft())
                except BaseException as error:
                    _handle_failure(mailbox, error, in_thread=True)
    finally:
        mailbox.end(len(batch or ()))


async def deliver_async(mailbox: Mailbox, receive: ReceiveFunction, awaits: bool) -> None:
    """Deliver messages in the task of a module. `awaits` is True if `receive` is async."""
    batch: deque[ModuleMessage] | None = None
    turn = 0
    try:
        while (batch := await mailbox.wait_batch_async()) is not None:
            while batch:
                if (turn := turn + 1) % MESSAGES_PER_TURN == 0:
                    await trio.lowlevel.checkpoint()
                if mailbox.is_closed:
                    return
                mailbox.delivered += 1
                try:
                    result = receive(batch.popleft())
                    if awaits:
                        await result
                except BaseException as error:
                    _handle_failure(mailbox, error, in_thread=False)
    finally:
        mailbox.lost_count += len(batch or ())


async def _in_task(mailbox: Mailbox, body: TaskBody) -> None:
    current_callback.set(mailbox)
    try:
        await body(mailbox)
    except BaseException as error:
        failure, remaining_error = split_failure(error)
        if failure is not None:
            log.error(
                "module_worker.failed",
                "the worker of module {module_name} failed; the module is removed",
                module_name=mailbox.name,
                exc_info=failure,
            )
        if remaining_error is not None:
            raise remaining_error from None


async def _in_nursery(mailbox: Mailbox, body: TaskBody) -> None:
    try:
        await _in_task(mailbox, body)
    finally:
        mailbox.end()


def _in_loop(mailbox: Mailbox, body: TaskBody, started: LoopStarted) -> None:
    async def run_body() -> None:
        started.put(None)
        await _in_task(mailbox, body)

    try:
        trio.run(run_body)
    except OSError as error:  # An event loop needs file descriptors.
        started.put(error)
    finally:
        mailbox.end()


def start_thread(mailbox: Mailbox, receive: ReceiveFunction) -> None:
    """Start a daemon thread for a module. Raises RuntimeError."""
    name = f"simplebus {type(mailbox.module).__name__}"
    threading.Thread(target=deliver, args=(mailbox, receive), name=name, daemon=True).start()


def start_loop(mailbox: Mailbox, body: TaskBody) -> None:
    """Start a daemon thread with an event loop for a module. Raises RuntimeError."""
    name = f"simplebus {type(mailbox.module).__name__}"
    started: LoopStarted = queue.SimpleQueue()
    threading.Thread(target=_in_loop, args=(mailbox, body, started), name=name, daemon=True).start()
    if (error := started.get()) is not None:
        raise RuntimeError(f"cannot create an event loop: {error}") from error


class ModuleEventLoop:
    """Event loop of a bus, in which tasks of modules run."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.thread = threading.get_ident()
        self._nursery = nursery
        self._token = trio.lowlevel.current_trio_token()

    def start(self, mailbox: Mailbox, body: TaskBody) -> None:
        """Start a task for a module, from any thread. Raises RuntimeError if the loop has ended."""
        if threading.get_ident() == self.thread:
            self._start(mailbox, body)
        else:
            self._token.run_sync_soon(self._start, mailbox, body)

    def _start(self, mailbox: Mailbox, body: TaskBody) -> None:
        try:
            self._nursery.start_soon(_in_nursery, mailbox, body, name=f"module {mailbox.name}")
        except RuntimeError:  # The loop is being left.
            mailbox.end()
