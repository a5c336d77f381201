"""Loops over a subscription under trio and asyncio: one `async for` each.

Rule 1: the fast path of `__anext__` hands out what is prepared, and does not suspend; each refill
is a checkpoint, or waits.
Rule 2: a loop over values makes values, and a message only of what cannot be decoded.
Rule 3: a loop settles what it was handed: when it comes round, and when it ends, by how it ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from simplebus.client import leaving
from simplebus.client.codecs import DecodeError
from simplebus.client.core.messages import Batch, Message
from simplebus.client.subscription_target import undecodable

if TYPE_CHECKING:
    from simplebus.client.aio.subscription import BaseSubscription

T = TypeVar("T")


class Looped(Generic[T]):
    """What a subscription is iterated as. Every `async for` over it is a loop of its own."""

    def __init__(
        self,
        begin: Callable[[CodeType | None], AsyncIterator[T]],
        one: Callable[[], Awaitable[T]],
    ) -> None:
        self._begin = begin
        self._one = one

    def __aiter__(self) -> AsyncIterator[T]:
        return self._begin(leaving.statement())

    async def __anext__(self) -> T:
        """The next one. Says that the one before is processed."""
        return await self._one()


class _Loop:
    """What all loops share: a beginning, and what becomes of the last message at the end."""

    __slots__ = ("_inbox", "_key", "_stands", "_subscription")

    def __init__(self, subscription: BaseSubscription[Any], stands: CodeType | None) -> None:
        self._inbox = subscription.inbox
        self._subscription = subscription
        self._key = object()
        """What the inbox knows it by, which does not keep it alive."""
        self._stands = stands

    def __aiter__(self) -> Self:
        self._inbox.start_loop(self._key)
        self._stands = leaving.statement()
        return self

    def __del__(self) -> None:
        inbox = getattr(self, "_inbox", None)
        if inbox is not None and inbox.auto_ack:
            inbox.end_loop(self._key, leaving.verdict(self._stands))


class MessageLoop(_Loop, Generic[T]):
    """Messages, one by one."""

    __slots__ = ("_ready",)

    def __init__(self, subscription: BaseSubscription[T], stands: CodeType | None) -> None:
        super().__init__(subscription, stands)
        self._ready: Iterator[Message[T]] = iter(())

    async def __anext__(self) -> Message[T]:
        for message in self._ready:
            return message
        subscription = self._subscription
        await subscription.refill(self._key)
        subscription.prepare()
        self._ready = self._inbox.prepared_messages
        return next(self._ready)


class ValueLoop(_Loop, Generic[T]):
    """Values, one by one."""

    __slots__ = ("_ready",)

    def __init__(self, subscription: BaseSubscription[T], stands: CodeType | None) -> None:
        super().__init__(subscription, stands)
        self._ready: Iterator[T] = iter(())

    async def __anext__(self) -> T:
        """The next value.

        Raises DecodeError, whose `message` will come again, for what is none; the next call goes on
        behind it.
        """
        try:
            for value in self._ready:
                return value
            subscription = self._subscription
            await subscription.refill(self._key)
            subscription.prepare(values=True)
            assert self._inbox.decode is not None
            self._ready = map(self._inbox.decode, self._inbox.prepared_payloads)
            return next(self._ready)
        except DecodeError as error:
            message = self._inbox.get_last_message()
            self._inbox.nack_last()
            raise undecodable(error, message) from None


class BatchLoop(_Loop):
    """Batches, one by one."""

    __slots__ = ()

    async def __anext__(self) -> Batch:
        await self._subscription.refill(self._key)
        return self._subscription.take_batch()
