"""Loops over a subscription under trio or asyncio: one `async for` each.

Rule 1: the fast path of `__anext__` hands out what is prepared, and does not suspend; each refill
is a checkpoint, or waits.
Rule 2: a loop over values makes values, and a message only of what cannot be decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from simplebus.client.cancelling import is_being_cancelled
from simplebus.client.codecs import DecodeError
from simplebus.client.target import undecodable
from simplebus.core.messages import Batch, Message

if TYPE_CHECKING:
    from simplebus.client.subscription import BaseSubscription

T = TypeVar("T")


class _Loop:
    """What all loops share: a beginning, and what becomes of the last message at the end."""

    __slots__ = ("_inbox", "_subscription")

    def __init__(self, subscription: BaseSubscription[Any]) -> None:
        self._inbox = subscription.inbox
        self._subscription = subscription
        self._inbox.give_up()

    def __aiter__(self) -> Self:
        return self

    def __del__(self) -> None:
        inbox = getattr(self, "_inbox", None)
        if inbox is not None and inbox.auto_ack and inbox.pending and is_being_cancelled():
            inbox.put_back()


class MessageLoop(_Loop, Generic[T]):
    """Messages, one by one."""

    __slots__ = ("_ready",)

    def __init__(self, subscription: BaseSubscription[T]) -> None:
        super().__init__(subscription)
        self._ready: Iterator[Message[T]] = self._inbox.ready

    async def __anext__(self) -> Message[T]:
        for message in self._ready:
            return message
        subscription = self._subscription
        await subscription.refill()
        subscription.prepare()
        self._ready = self._inbox.ready
        return next(self._ready)


class ValueLoop(_Loop, Generic[T]):
    """Values, one by one."""

    __slots__ = ("_ready",)

    def __init__(self, subscription: BaseSubscription[T]) -> None:
        super().__init__(subscription)
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
            await subscription.refill()
            subscription.prepare()
            assert self._inbox.decode is not None
            self._ready = map(self._inbox.decode, self._inbox.payloads)
            return next(self._ready)
        except DecodeError as error:
            message = self._inbox.current()
            self._inbox.give_up()
            raise undecodable(error, message) from None


class BatchLoop(_Loop):
    """Batches, one by one."""

    __slots__ = ()

    async def __anext__(self) -> Batch:
        await self._subscription.refill()
        return self._subscription.take_batch()
