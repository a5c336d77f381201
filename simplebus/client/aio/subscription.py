"""A subscription under trio or asyncio: one by one, in batches, as values or as messages.

Rule 1: a loop says that a message is processed by coming round for the next one, and by being left
with `break` or `return`. What its body was at when it raised comes again after the bus's pause;
what it was at when it was cancelled is put back, and is the next. When it cannot be known how a
loop was left, it counts as raised.
Rule 2: who asks one by one, with `get`, `take` or `anext`, says by asking that what it was handed
before is processed, and nothing of what a loop is at. So does leaving the subscription's block
without an exception.
Rule 3: a message is handed out behind the last point at which a task can be cancelled: cancelling
loses nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeVar

import anyio
import anyio.lowlevel

from simplebus.client.aio.cancellation import is_cancellation
from simplebus.client.aio.iterators import (
    AsyncIterable,
    BatchIterator,
    MessageIterator,
    ValueIterator,
)
from simplebus.client.aio.wakeup_event import WakeupEvent
from simplebus.client.codecs import DecodeError
from simplebus.client.core import arguments
from simplebus.client.core.messages import Batch, Message
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.subscription_target import Entry, Target, nothing_came, undecodable
from simplebus.core.errors import LocalProtocolError
from simplebus.core.limits import MESSAGES_PER_TURN
from simplebus.core.protocol.requests import SubscribeRequest

if TYPE_CHECKING:
    from types import TracebackType

    from simplebus.client.aio.bus import Bus

T = TypeVar("T")


class BaseSubscription(Entry[T]):
    """The messages of one class whose values are of one type.

    A message is acknowledged when its loop comes round for the next one, or is left by `break` or
    `return`. It is not when the body raises, wherever that is caught: then it comes again after a
    pause. Nor when the body is cancelled: then it is the next message. A loop that runs in a
    generator of yours, or over an iterator that you keep, does not see how its body was left:
    unless it comes round, its last message comes again.

    What `get`, `take` and `anext` have returned is acknowledged when any of them, or a loop, asks
    for more, and when the block is left without an exception.
    """

    block = "async with"

    def __init__(
        self, bus: Bus, target: Target, request: SubscribeRequest, *, auto_ack: bool
    ) -> None:
        super().__init__(bus.connection.core, target, request, auto_ack=auto_ack)
        self._bus = bus
        self._connection = bus.connection
        self._messages_arrived = WakeupEvent()
        self._returned_since_checkpoint = 0
        """Messages handed out since other tasks had their turn."""

    async def __aenter__(self) -> Self:
        self.check_fresh()
        self.subscribe(await self._bus.resolve_class_id(self.target.what))
        try:
            await self._connection.wait_answered(self.inbox.subscribe_request)
        except BaseException:
            self.unsubscribe(processed=False)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if is_cancellation(error):
            self.inbox.put_back_unprocessed()
        request = self.unsubscribe(processed=kind is None)
        if kind is None:  # A later subscription then no longer meets this one at the bus.
            await self._connection.wait_answered_briefly(request)

    def messages(self) -> AsyncIterable[Message[T]]:
        """Iterate over messages: what came with a value, and the value."""
        return AsyncIterable(lambda: MessageIterator(self), self.get)

    def batches(self) -> AsyncIterable[Batch]:
        """Iterate over batches: many messages at the price of one."""
        return AsyncIterable(lambda: BatchIterator(self), self._wait_for_batch)

    async def get(self, timeout: float | None = None) -> Message[T]:
        """The next message. Says that the one before is processed, unless a loop is at that.

        Raises TimeoutError when none came in so many seconds. With `auto_ack=False` several tasks
        may get messages of one subscription.
        """
        inbox = self.inbox
        while True:
            if inbox.active_loop is None:
                for message in inbox.prepared_messages:
                    return message
            with anyio.move_on_after(arguments.check_timeout("timeout", timeout)):
                await self.refill()
            if inbox.is_empty:
                assert timeout is not None, "refill returned, and there was nothing"
                raise nothing_came(self.target, timeout)
            for message in inbox.prepared_messages:  # Another task has prepared some.
                return message
            self.prepare_messages()

    async def take(self, most: int, timeout: float | None = None) -> list[Message[T]]:
        """The messages that are there, up to `most`; otherwise the first that come, or, after so
        many seconds, none. Says that those before are processed."""
        if most < 1:
            raise ValueError(f"take needs a number of messages from 1 on, got {most}")
        with anyio.move_on_after(arguments.check_timeout("timeout", timeout)):
            await self.refill()
        return [] if self.inbox.is_empty else list(self.next_batch(most))

    # For the loops and the bus -------------------------------------------------------------------

    def subscribe(self, class_id: int) -> None:
        """Begin, without waiting until the bus knows."""
        self._connection.check_open()
        self._connection.opened(self.enter(class_id), self._messages_arrived)

    def unsubscribe(self, *, processed: bool) -> OpenRequest:
        """End. `processed` says what became of the last message. Returns what the bus is to
        answer."""
        request = self.leave(processed=processed)
        self._connection.closed(self.inbox)
        return request

    async def refill(self, loop: object | None = None) -> None:
        """Return once there is something to hand out, to a loop or to who asks one by one. What
        that was handed before is processed."""
        inbox, wire = self.inbox, self._connection
        wire.check_thread()
        inbox.settle_previous(loop)
        if not inbox.is_empty:
            wire.check_open()
            wire.writer.write_due_acks()
            if self._returned_since_checkpoint >= MESSAGES_PER_TURN:
                self._returned_since_checkpoint = 0
                await anyio.lowlevel.checkpoint()
            return
        if inbox.has_waiting_consumer and self._auto_ack:
            raise LocalProtocolError("another task already waits for this subscription's messages")
        self._returned_since_checkpoint = 0
        inbox.has_waiting_consumer = True
        try:
            wire.writer.write_now()  # Acknowledgements leave before we wait.
            wire.changed.set()
            while inbox.is_empty:
                wire.check_open()
                await self._messages_arrived.wait()
        finally:
            inbox.has_waiting_consumer = False
        inbox.settle_previous(loop)  # Other tasks may have taken some meanwhile.

    def prepare_messages(self, *, values: bool = False) -> None:
        """Have the messages of the next turn ready."""
        self._returned_since_checkpoint += self.inbox.prepare_messages(MESSAGES_PER_TURN, as_values=values)
        self._connection.handed_out()

    async def _wait_for_batch(self) -> Batch:
        await self.refill()
        return self.next_batch()

    def next_batch(self, most: int | None = None) -> Batch:
        batch = self.inbox.pop_batch(most)
        assert batch is not None, "refill returned, and there was nothing"
        self._returned_since_checkpoint += len(batch)
        self._connection.handed_out()
        return batch


class Subscription(BaseSubscription[T]):
    """The values of one type: `async with bus.subscribe(ShopCreated) as shops`, then iterate."""

    def __aiter__(self) -> ValueIterator[T]:
        return ValueIterator(self)

    async def __anext__(self) -> T:
        """The next value. Says that the one before is processed. Raises DecodeError, whose
        `message` will come again, for what is none."""
        message = await self.get()
        try:
            return message.value
        except DecodeError as error:
            self.inbox.nack_last()
            raise undecodable(error, message) from None


class RawSubscription(BaseSubscription[bytes]):
    """The messages of one class: `async with bus.subscribe(1) as messages`, then iterate."""

    def __aiter__(self) -> MessageIterator[bytes]:
        return MessageIterator(self)

    async def __anext__(self) -> Message[bytes]:
        """The next message. Says that the one before is processed."""
        return await self.get()
