"""Iterators over a subscription for `async for`, under trio and asyncio.

The fast path of `__anext__` returns a prepared message without suspending. Only a refill waits or
is a checkpoint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from simplebus.client.aio.cancellation import is_being_cancelled
from simplebus.client.codecs import DecodeError
from simplebus.client.core.messages import Batch, Message
from simplebus.client.subscription_target import with_message

if TYPE_CHECKING:
    from simplebus.client.core.inbox import Inbox

T = TypeVar("T")


class IterableSubscription(Protocol):
    """Parts of a subscription that its iterators use."""

    @property
    def inbox(self) -> Inbox: ...

    async def refill(self, loop: object | None = None) -> None: ...

    def prepare_messages(self, *, values: bool = False) -> None: ...

    def next_batch(self, most: int | None = None) -> Batch: ...


class AsyncIterable(Generic[T]):
    """View of a subscription as messages or batches. Every `async for` gets its own iterator."""

    def __init__(
        self, new_iterator: Callable[[], AsyncIterator[T]], get: Callable[[], Awaitable[T]]
    ) -> None:
        self._new_iterator = new_iterator
        self._get = get

    def __aiter__(self) -> AsyncIterator[T]:
        return self._new_iterator()

    async def __anext__(self) -> T:
        """Return the next item. Acknowledges the one before."""
        return await self._get()


class _SubscriptionIterator:
    """Base of all iterators. Reports the end of its loop to the inbox."""

    __slots__ = ("_inbox", "_loop_key", "_subscription")

    def __init__(self, subscription: IterableSubscription) -> None:
        self._inbox = subscription.inbox
        self._subscription = subscription
        self._loop_key = object()
        """Identifies the loop to the inbox without keeping this iterator alive."""

    def __aiter__(self) -> Self:
        return self

    def __del__(self) -> None:
        # A loop's iterator is dropped when the loop is left: by break, return or an exception.
        inbox = getattr(self, "_inbox", None)
        if inbox is not None and inbox.auto_ack:
            inbox.end_loop(self._loop_key, is_cancelled=is_being_cancelled())


class MessageIterator(_SubscriptionIterator, Generic[T]):
    """Iterator over messages."""

    __slots__ = ("_ready",)

    def __init__(self, subscription: IterableSubscription) -> None:
        super().__init__(subscription)
        self._ready: Iterator[Message[T]] = iter(())

    async def __anext__(self) -> Message[T]:
        for message in self._ready:
            return message
        subscription = self._subscription
        await subscription.refill(self._loop_key)
        subscription.prepare_messages()
        self._ready = self._inbox.prepared_messages
        return next(self._ready)


class ValueIterator(_SubscriptionIterator, Generic[T]):
    """Iterator over decoded values. Makes a `Message` only of a payload that cannot be decoded."""

    __slots__ = ("_ready",)

    def __init__(self, subscription: IterableSubscription) -> None:
        super().__init__(subscription)
        self._ready: Iterator[T] = iter(())

    async def __anext__(self) -> T:
        """Return the next value.

        Raises:
            DecodeError: The payload is not a value of the type. Its `message` is redelivered after
                a backoff. The next call returns the message after it.
        """
        try:
            for value in self._ready:
                return value
            subscription = self._subscription
            await subscription.refill(self._loop_key)
            subscription.prepare_messages(values=True)
            assert self._inbox.decode is not None
            self._ready = map(self._inbox.decode, self._inbox.prepared_payloads)
            return next(self._ready)
        except DecodeError as error:
            message = self._inbox.get_last_message()
            self._inbox.nack_last()
            raise with_message(error, message) from None


class BatchIterator(_SubscriptionIterator):
    """Iterator over batches."""

    __slots__ = ()

    async def __anext__(self) -> Batch:
        await self._subscription.refill(self._loop_key)
        return self._subscription.next_batch()
