"""Queue of one module.

The bus's lock guards everything here, except the delivery counters, which only the worker changes.
A worker takes the whole queue at once, so it can hold as many messages as the queue. A module that
was removed inside a callback and added again receives nothing before that callback has ended.

    publish ──► queue ──► wait_batch: the whole queue ──► receive, one message after the other
                  full: block, drop_oldest or drop_newest
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from simplebus.gateway.blocking import CallbackWaiter, TaskGate, ThreadGate
from simplebus.gateway.messages import ModuleMessage

Gate = TypeVar("Gate", ThreadGate, TaskGate)

QUEUE_UNITS = 1024
"""Default size of a module's queue. A message uses one unit per QUEUE_UNIT_BYTES."""


class FullQueuePolicy(enum.StrEnum):
    """Treatment of a message for a module whose queue is full."""

    BLOCK = "block"
    """The publisher waits."""
    DROP_OLDEST = "drop_oldest"
    """The oldest message in the queue is dropped."""
    DROP_NEWEST = "drop_newest"
    """The new message is dropped."""


@dataclass(frozen=True, slots=True)
class ModuleStatistics:
    """Statistics of one module on a bus."""

    waiting: int
    """Messages in the queue."""
    waiting_bytes: int
    delivered: int
    """Messages that the module received, including those on which it failed."""
    failed: int
    """Messages on which `receive` raised."""
    dropped: int
    """Messages that were dropped because the queue was full."""


NAME_CHARACTERS_MAX = 200


def describe_module(module: object) -> str:
    """Return the `repr` of a module, shortened.

    This runs code of the module, so it must not be called under a lock.
    """
    try:
        name = repr(module)
    except Exception:
        return object.__repr__(module)
    return name if len(name) <= NAME_CHARACTERS_MAX else name[:NAME_CHARACTERS_MAX] + "…"


class TaskStarter(Protocol):
    """Event loop of a bus, in which workers run as tasks."""

    def start(self, mailbox: Mailbox, body: Callable[..., Awaitable[Any]]) -> None: ...


class MailboxRouter(Protocol):
    """Parts of a `Router` that its mailboxes use."""

    lock: threading.Lock

    def note_idle(self, mailbox: Mailbox) -> None: ...

    def worker_ended(self, mailbox: Mailbox, lost: int) -> None: ...

    def deliver_blocked(self, mailbox: Mailbox) -> None: ...


class Mailbox(CallbackWaiter):
    """Queue and worker state of a module on a bus."""

    __slots__ = (
        "_router",
        "blocks_publisher",
        "capacity",
        "delivered",
        "dropped",
        "end_gates",
        "event_loop",
        "failed",
        "free_units",
        "full_policy",
        "has_ended",
        "hears_all",
        "is_busy",
        "is_closed",
        "is_interrupted",
        "lost_count",
        "module",
        "name",
        "previous",
        "queue",
        "sources",
        "wake_callback",
    )

    def __init__(
        self, router: MailboxRouter, module: object, capacity: int, full_policy: FullQueuePolicy
    ) -> None:
        super().__init__()
        self._router = router
        self.module = module
        self.name = describe_module(module)
        """Name of the module in messages."""
        self.capacity = capacity
        """Number of queue units."""
        self.full_policy = full_policy
        self.blocks_publisher = full_policy is FullQueuePolicy.BLOCK
        """True if publishers wait while the queue is full."""
        self.queue: deque[ModuleMessage] = deque()
        self.free_units = capacity
        """Free queue units. Negative if the last message was longer than the free space."""
        self.delivered = 0
        self.failed = 0
        self.dropped = 0
        self.lost_count = 0
        """Messages that were not delivered because the module was removed."""
        self.hears_all = True
        """True if the module receives the messages of all others."""
        self.sources: dict[int, object] = {}
        """Modules to which it is linked, by identity."""
        self.wake_callback: Callable[[], None] | None = None
        """Function that wakes the worker; None while it does not wait."""
        self.is_busy = True
        """True while the worker processes messages."""
        self.is_interrupted = False
        """True if the worker is to wake up without a message."""
        self.is_closed = False
        """True if no more messages are delivered."""
        self.has_ended = False
        """True if the worker has ended."""
        self.end_gates: list[ThreadGate | TaskGate] = []
        """Gates of callers that wait for the end of the worker."""
        self.previous: Mailbox | None = None
        """Earlier mailbox of the same module, while its worker has not ended."""
        self.event_loop: TaskStarter | None = None
        """Event loop of the bus that runs the worker; None for a worker with a thread or loop of
        its own.
        """

    def is_on(self, router: MailboxRouter) -> bool:
        """Return True if the mailbox belongs to the bus of `router`."""
        return self._router is router

    def wait_for_previous(self, previous: Mailbox) -> None:
        """Deliver nothing until the previous worker has ended. The caller holds the lock."""
        self.previous = previous
        self.add_awaited(previous)

    def make_room(self) -> bool:
        """Apply the policy for a full queue. Returns True if there is room now.

        The caller holds the lock.
        """
        if self.is_closed:
            return False
        if self.full_policy is FullQueuePolicy.DROP_NEWEST:
            self.dropped += 1
            return False
        while self.free_units <= 0:
            self.free_units += self.queue.popleft().places
            self.dropped += 1
        return True

    def wake_worker(self) -> None:
        """Wake the worker if it waits. The caller holds the lock."""
        wake_callback, self.wake_callback = self.wake_callback, None
        if wake_callback is not None:
            self.is_busy = True
            wake_callback()

    def mark_idle(self) -> None:
        """Mark the worker as idle although it does not wait for messages."""
        with self._router.lock:
            self._router.note_idle(self)

    def interrupt_wait(self) -> None:
        """Wake the worker even without a message."""
        with self._router.lock:
            self.is_interrupted = True
            self.wake_worker()

    def close(self) -> None:
        """Drop the queue, and deliver nothing more. The caller holds the lock."""
        self.is_closed = True
        self.lost_count += len(self.queue)
        self.queue.clear()
        self.free_units, self.blocks_publisher = 0, False
        self.wake_worker()

    def end(self, lost_count: int = 0) -> None:
        """Note that the worker has ended, with `lost_count` undelivered messages."""
        self._router.worker_ended(self, lost_count)

    def _take_all(self) -> deque[ModuleMessage]:
        """Take the whole queue. The caller holds the lock."""
        batch, self.queue = self.queue, deque()
        self.free_units, self.is_interrupted = self.capacity, False
        self.is_busy = True  # Also after `mark_idle`.
        self._router.deliver_blocked(self)
        return batch

    def _poll(self, gate_type: type[Gate]) -> tuple[Gate | None, deque[ModuleMessage] | None]:
        """Return the queue, or a gate that opens when there is a message."""
        with self._router.lock:
            if self.is_closed:
                return None, None
            if self.previous is not None:
                if not self.previous.has_ended:
                    gate = gate_type()
                    self.previous.end_gates.append(gate)
                    return gate, None
                self.remove_awaited(self.previous)
                self.previous = None
            if self.queue or self.is_interrupted:
                return None, self._take_all()
            gate = gate_type()
            self.wake_callback = gate.open
            self._router.note_idle(self)
            return gate, None

    def wait_batch(self) -> deque[ModuleMessage] | None:
        """Wait for messages in a thread.

        Returns:
            The whole queue; empty after `interrupt_wait`; None if the module was removed.
        """
        while True:
            gate, batch = self._poll(ThreadGate)
            if gate is None:
                return batch
            gate.wait()

    async def wait_batch_async(self) -> deque[ModuleMessage] | None:
        """Wait for messages like `wait_batch`, in a trio task."""
        while True:
            gate, batch = self._poll(TaskGate)
            if gate is None:
                return batch
            await gate.wait(partial(self._cancel_wait, gate))

    def _cancel_wait(self, gate: TaskGate) -> bool:
        with self._router.lock:
            if self.previous is not None and gate in self.previous.end_gates:
                self.previous.end_gates.remove(gate)
                return True
            waited, self.wake_callback = self.wake_callback is not None, None
        return waited

    def statistics(self) -> ModuleStatistics:
        """Return the statistics of the module."""
        waiting_bytes = sum(message.size for message in self.queue)
        return ModuleStatistics(
            len(self.queue), waiting_bytes, self.delivered, self.failed, self.dropped
        )
