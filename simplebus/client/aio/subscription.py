"""Subscriptions under trio and asyncio: iteration over values, messages and batches, and `get`.

A call takes a message only after its last checkpoint, so a cancellation loses no message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from simplebus.client.codecs import DecodeError
from simplebus.client.core import arguments
from simplebus.client.core.messages import Batch, Message
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.event_loop.wakeup_event import WakeupEvent
from simplebus.client.subscription_target import (
    SubscriptionState,
    SubscriptionTarget,
    no_message_error,
    with_message,
)
from simplebus.core.errors import LocalProtocolError
from simplebus.core.limits import MESSAGES_PER_TURN
from simplebus.core.protocol.requests import SubscribeRequest

if TYPE_CHECKING:
    from types import TracebackType

    from simplebus.client.aio.publisher import Publisher

T = TypeVar("T")

# Acks of messages that the reader passes on are sent together, up to this number.
_READER_ACKS = 64


class BaseSubscription(SubscriptionState[T]):
    """Messages of one class for one consumer. Made by `Bus.subscribe`; it begins with its block.

    A message is acknowledged when you ask for the next one, or when the `async with` block is left
    without an exception. If the block raises, the last message is redelivered after a backoff; if
    the block is cancelled, at once. With `auto_ack=False` you acknowledge by `ack` or `ack_batch`.

    See `Bus.subscribe` for the details.
    """

    block_keyword = "async with"

    def __init__(
        self,
        bus: Publisher,
        target: SubscriptionTarget,
        request: SubscribeRequest,
        *,
        auto_ack: bool,
    ) -> None:
        super().__init__(
            bus.connection.core, target, request, auto_ack=auto_ack, tracing=bus.tracing
        )
        self._bus = bus
        self._connection = bus.connection
        self._messages_arrived = WakeupEvent()
        self._returned_since_checkpoint = 0
        """Messages returned since the last checkpoint, at which other tasks run."""

    async def __aenter__(self) -> Self:
        self.check_not_entered()
        self.subscribe(await self._bus.resolve_class_id(self.target.class_reference))
        try:
            await self._connection.wait_answered(self.inbox.subscribe_request)
        except BaseException:
            self.unsubscribe(is_processed=False)
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
        request = self.unsubscribe(is_processed=kind is None)
        if kind is None:  # A later subscription must not find this one at the bus.
            await self._connection.wait_answered_briefly(request)

    def messages(self) -> AsyncIterable[Message[T]]:
        """Iterate over messages instead of values: `async for message in shops.messages()`."""
        return AsyncIterable(lambda: MessageIterator(self), self.get)

    def batches(self) -> AsyncIterable[Batch]:
        """Iterate over batches, which cost about as much as one message: `async for batch in
        s.batches()`.
        """
        return AsyncIterable(lambda: BatchIterator(self), self._wait_for_batch)

    async def get(self, timeout: float | None = None) -> Message[T]:
        """Return the next message. Acknowledges what `get`, `take` or `anext` returned before.

        With `auto_ack=False` several tasks may get messages of one subscription.

        Args:
            timeout: Seconds to wait for a message. None waits forever.

        Raises:
            TimeoutError: No message arrived in time.
            RefusedError: The bus has ended the subscription.
            BusConnectionError: The connection is lost for good.
        """
        inbox = self.inbox
        while True:
            if inbox.active_loop is None:
                for message in inbox.prepared_messages:
                    return message
            if timeout is None:
                await self.refill()
            else:
                with anyio.move_on_after(arguments.check_timeout("timeout", timeout)):
                    await self.refill()
                if inbox.is_empty:
                    raise no_message_error(self.target, timeout)
            for message in inbox.prepared_messages:  # Another task has prepared some.
                return message
            self.prepare_messages()

    async def take(self, most: int, timeout: float | None = None) -> list[Message[T]]:
        """Return messages that have arrived together. Acknowledges those returned before.

        Args:
            most: Maximum number of messages, at least 1.
            timeout: Seconds to wait if none has arrived. None waits forever.

        Returns:
            Up to `most` messages that one read of the connection has received; an empty list if
            none arrived in time.

        Raises:
            ValueError: `most` is less than 1.
            RefusedError: The bus has ended the subscription.
            BusConnectionError: The connection is lost for good.
        """
        if most < 1:
            raise ValueError(f"take expects 1 message or more, got {most}")
        with anyio.move_on_after(arguments.check_timeout("timeout", timeout)):
            await self.refill()
        return [] if self.inbox.is_empty else list(self.next_batch(most))

    async def ack_sync(self, *messages: Message[T]) -> None:
        """Acknowledge messages, and wait until the server has stored the acknowledgements.

        Afterwards these messages are not redelivered, however the server ends; with the durability
        `disk`, not even after a power cut. Earlier acknowledgements of the subscription are stored,
        too, if the connection was not lost since. One call for several messages costs less than a
        call for each.

        Args:
            messages: Messages of this subscription; none to wait for earlier acknowledgements.

        Raises:
            LocalProtocolError: A message belongs to another subscription or was fetched.
            BusConnectionError: The connection was lost; the messages may be redelivered.
            RefusedError: The server keeps acknowledgements in a JetStream cluster (`--engine`).
        """
        self._connection.check_thread()
        for message in messages:
            self.ack(message)
        await self._connection.sync_acks(self.inbox)

    # For the loops and the bus -------------------------------------------------------------------

    def subscribe(self, class_id: int) -> None:
        """Send the Subscribe, without waiting for the reply of the bus. Internal."""
        self._connection.check_open()
        self._connection.add_inbox(self.open_inbox(class_id), self._messages_arrived.set)

    def unsubscribe(self, *, is_processed: bool) -> OpenRequest:
        """Send the Unsubscribe and return it, without waiting for the reply. Internal.

        `is_processed` decides whether the last message is acknowledged or rejected.
        """
        request = self.close_inbox(is_processed=is_processed)
        self._connection.remove_inbox(self.inbox)
        return request

    async def refill(self, loop: object | None = None) -> None:
        """Wait until there are messages for a consumer. Internal.

        Before it waits, the earlier messages of the consumer are acknowledged. `loop` identifies
        the consumer; None for `get` and `take`.
        """
        inbox, connection = self.inbox, self._connection
        connection.check_thread()
        inbox.settle_previous(loop)
        if not inbox.is_empty:
            connection.check_open()
            connection.writer.write_due_acks()
            if self._returned_since_checkpoint >= MESSAGES_PER_TURN:
                self._returned_since_checkpoint = 0
                await anyio.lowlevel.checkpoint()
            return
        if inbox.has_waiting_consumer and self._auto_ack:
            raise LocalProtocolError("another task already waits for this subscription's messages")
        self._returned_since_checkpoint = 0
        inbox.has_waiting_consumer = True
        try:
            connection.writer.write_now()  # Acknowledgements leave before we wait.
            connection.changed.set()
            while True:
                connection.check_open()
                await self._messages_arrived.wait()
                if not inbox.is_empty:
                    break
        finally:
            inbox.has_waiting_consumer = False
        # Another task may have received messages while this one waited.
        if self._auto_ack or inbox.has_unsettled:
            inbox.settle_previous(loop)

    def receive_in_reader(self, on_message: Callable[[Message[T]], None]) -> None:
        """Call `on_message` in the reader of the connection, and acknowledge the message. Internal.

        The acks are collected, and written by the ack timer at the latest.
        """
        self.inbox.set_ack_batch(_READER_ACKS)
        self._connection.add_inbox(self.inbox, partial(self._pass_arrived, on_message))
        self._pass_arrived(on_message)

    def _pass_arrived(self, on_message: Callable[[Message[T]], None]) -> None:
        inbox, has_messages = self.inbox, False
        while (batch := inbox.pop_batch()) is not None:
            has_messages = True
            for message in batch:
                on_message(message)
            inbox.settle(include_last=True)
        if has_messages:
            self._connection.writer.write_due_acks()
            self._connection.start_ack_timer()
        else:  # The subscription has ended.
            self._messages_arrived.set()

    async def wait_ended(self) -> None:
        """Wait until the subscription ends, and raise the reason. Internal."""
        while self.inbox.is_empty:
            self._connection.check_open()
            await self._messages_arrived.wait()

    def prepare_messages(self, *, values: bool = False) -> None:
        """Prepare the messages of the next turn. Internal."""
        self._returned_since_checkpoint += self.inbox.prepare_messages(
            MESSAGES_PER_TURN, as_values=values
        )
        self._connection.start_ack_timer()

    async def _wait_for_batch(self) -> Batch:
        await self.refill()
        return self.next_batch()

    def next_batch(self, most: int | None = None) -> Batch:
        """Return up to `most` messages that have arrived. Internal; call `refill` before."""
        batch = self.inbox.pop_batch(most)
        assert batch is not None, "refill returned, and there was nothing"
        self._returned_since_checkpoint += len(batch)
        self._connection.start_ack_timer()
        return batch


class Subscription(BaseSubscription[T]):
    """Values of one type: `async with bus.subscribe(ShopCreated) as shops`, then iterate.

    A message is acknowledged when you ask for the next one, or when the `async with` block is left
    without an exception. If the block raises, the last message is redelivered after a backoff; if
    the block is cancelled, at once.

    Use `messages()`, `get` and `take` for the messages with their metadata.
    """

    def __aiter__(self) -> ValueIterator[T]:
        return ValueIterator(self)

    async def __anext__(self) -> T:
        """Return the next value. Acknowledges the one before.

        Raises:
            DecodeError: The payload is not a value of the type. Its `message` is redelivered
                after a backoff.
        """
        message = await self.get()
        try:
            return message.value
        except DecodeError as error:
            self.inbox.nack_last()
            raise with_message(error, message) from None


class RawSubscription(BaseSubscription[bytes]):
    """Messages of one class: `async with bus.subscribe(1) as messages`, then iterate.

    A message is acknowledged when you ask for the next one, or when the `async with` block is left
    without an exception. If the block raises, the last message is redelivered after a backoff; if
    the block is cancelled, at once.
    """

    def __aiter__(self) -> MessageIterator[bytes]:
        return MessageIterator(self)

    async def __anext__(self) -> Message[bytes]:
        """Return the next message. Acknowledges the one before."""
        return await self.get()
