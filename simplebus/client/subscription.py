"""A subscription under trio or asyncio: loops over messages, or over batches.

Rule 1: asking for the next message says that the one before is processed. So does leaving the
subscription's block without an exception.
Rule 2: a loop that is left early has not asked: when another loop begins, the last message of the
one before counts as failed, and the bus sends it again. One whose processing was cancelled is put
back at once: it is the next.
Rule 3: the fast path of `__anext__` hands out prepared messages and does not suspend; each
refill is a checkpoint, or waits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
import anyio.lowlevel

from simplebus.client.signal import Signal
from simplebus.core.errors import LocalProtocolError
from simplebus.core.inbox import Inbox
from simplebus.core.limits import MESSAGES_PER_TURN
from simplebus.core.messages import Batch, Message

if TYPE_CHECKING:
    from simplebus.client.wire import Wire


class Subscription:
    """The messages of one class. Enter it, then iterate; made by `Bus.subscribe`.

    A message is acknowledged when its loop comes round for the next one, and the last one when the
    block is left without an exception. To have a failed message again, let the exception leave the
    block, or begin another loop; an exception that is caught between loop and block, with no loop
    behind it, counts as processed. What a cancelled body was at is put back by itself.
    """

    def __init__(self, wire: Wire, class_id: int, *, auto_ack: bool) -> None:
        self.class_id = class_id
        self.arrived = Signal()
        """Set by the bus when there is something to look at."""
        self._wire = wire
        self._auto_ack = auto_ack
        self._inbox: Inbox | None = None
        self._loop: MessageLoop | None = None
        self._since_turn = 0

    async def __aenter__(self) -> Self:
        self.open()
        try:
            await self._wire.sync()
        except BaseException:
            self.close(processed=False)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(processed=kind is None)

    def __aiter__(self) -> MessageLoop:
        return MessageLoop(self)

    async def __anext__(self) -> Message:
        """The next message. Says that the one before is processed."""
        if self._loop is None:
            self._loop = MessageLoop(self)
        return await self._loop.__anext__()

    def batches(self) -> BatchLoop:
        """Iterate over batches: many messages at the price of one."""
        return BatchLoop(self)

    def ack(self, message: Message) -> None:
        """Acknowledge a message by hand, in any order; it is told to the bus within moments."""
        message.ack(self.inbox)
        self._wire.acked()

    def ack_batch(self, batch: Batch) -> None:
        """Acknowledge a batch by hand."""
        batch.ack(self.inbox)
        self._wire.acked()

    # For the loops and the bus -------------------------------------------------------------------

    @property
    def inbox(self) -> Inbox:
        if self._inbox is None:
            raise LocalProtocolError(
                "a subscription begins with its block: async with bus.subscribe(…) as messages"
            )
        return self._inbox

    @property
    def is_idle(self) -> bool:
        """Whether its consumer has processed everything that came."""
        return self.inbox.is_awaited and self.inbox.is_empty

    def open(self) -> None:
        """Begin, without waiting until the bus knows."""
        if self._inbox is not None:
            raise LocalProtocolError("a subscription can be entered once; subscribe again")
        self._inbox = self._wire.opened(self, auto_ack=self._auto_ack)

    def close(self, *, processed: bool) -> None:
        """End. `processed` says what became of the last message."""
        self._wire.closed(self.inbox, processed=processed)

    async def refill(self) -> None:
        """Return once there is something to hand out. What was handed out before is processed."""
        inbox, wire = self.inbox, self._wire
        inbox.settle(current=True)
        if not inbox.is_empty:
            wire.check()
            wire.push_due_acks()
            if self._since_turn >= MESSAGES_PER_TURN:
                self._since_turn = 0
                await anyio.lowlevel.checkpoint()
            return
        if inbox.is_awaited:
            raise LocalProtocolError("another task already waits for this subscription's messages")
        self._since_turn = 0
        inbox.is_awaited = True
        try:
            wire.push()  # Acknowledgements leave before we wait.
            wire.changed.set()
            while inbox.is_empty:
                wire.check()
                await self.arrived.wait()
        finally:
            inbox.is_awaited = False

    def prepare(self) -> Iterator[Message]:
        """The messages of the next turn."""
        self._since_turn += self.inbox.prepare(MESSAGES_PER_TURN)
        self._wire.handed_out()
        return self.inbox.ready

    def take_batch(self) -> Batch:
        batch = self.inbox.take_batch()
        assert batch is not None, "refill returned, and there was nothing"
        self._since_turn += len(batch)
        self._wire.handed_out()
        return batch

    def loop_left(self) -> None:
        """A loop is gone. Put its last message back if its processing was cancelled."""
        if self._inbox is not None and self._inbox.pending and _is_being_cancelled():
            self._inbox.put_back()


class MessageLoop:
    """One `async for` over messages."""

    __slots__ = ("_ready", "_subscription")

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        subscription.inbox.give_up()
        self._ready = subscription.inbox.ready

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        for message in self._ready:
            return message
        await self._subscription.refill()
        self._ready = self._subscription.prepare()
        return next(self._ready)

    def __del__(self) -> None:
        self._subscription.loop_left()


class BatchLoop:
    """One `async for` over batches."""

    __slots__ = ("_subscription",)

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        subscription.inbox.give_up()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        await self._subscription.refill()
        return self._subscription.take_batch()

    def __del__(self) -> None:
        self._subscription.loop_left()


def _is_being_cancelled() -> bool:
    """Whether the current task is unwinding from a cancellation, of whichever kind."""
    try:
        if anyio.current_effective_deadline() == -math.inf:
            return True
    except Exception:  # No event loop: the loop object outlived it.
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # Not under asyncio.
        return False
    return task is not None and task.cancelling() > 0
