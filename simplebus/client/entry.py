"""What a subscription is in both clients, before anybody waits for anything.

Rule 1: a subscription is entered once. It has an inbox from then on, and for ever: what is asked of
one that was left is refused there.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from simplebus.client.target import Target
from simplebus.core.client.asking import Request
from simplebus.core.client.core import ClientCore
from simplebus.core.client.inbox import Inbox
from simplebus.core.client.messages import Batch, Message
from simplebus.core.errors import LocalProtocolError
from simplebus.core.requests import SubscribeRequest

T = TypeVar("T")


class Entry(Generic[T]):
    """A subscription to one class, whose messages' values are of one type."""

    block = "with"
    """What a block of it begins with."""

    def __init__(
        self, core: ClientCore, target: Target, request: SubscribeRequest, *, auto_ack: bool
    ) -> None:
        self.target = target
        """The class."""
        self._core = core
        self._request = request
        self._auto_ack = auto_ack
        self._entered: Inbox | None = None
        self._forget = False

    def ack(self, message: Message[Any]) -> None:
        """Acknowledge a message by hand, in any order; the bus is told within moments."""
        message.ack(self.inbox)

    def ack_batch(self, batch: Batch) -> None:
        """Acknowledge a batch by hand."""
        batch.ack(self.inbox)

    def forget(self) -> None:
        """When the block is left, the bus is to forget the position of a durable subscription."""
        self._forget = True

    @property
    def inbox(self) -> Inbox:
        """For this package."""
        if self._entered is None:
            raise LocalProtocolError(
                f"a subscription begins with its block: {self.block} bus.subscribe(…) as messages"
            )
        return self._entered

    @property
    def is_through(self) -> bool:
        """Whether everything that came was handed out, or nothing will be."""
        inbox = self.inbox
        return inbox.leaving is not None or inbox.error is not None or inbox.is_empty

    def check_fresh(self) -> None:
        """Raise LocalProtocolError unless it can be entered."""
        if self._entered is not None:
            raise LocalProtocolError("a subscription can be entered once; subscribe again")

    def enter(self, class_id: int) -> Inbox:
        """Subscribe, without waiting until the bus knows."""
        inbox = self._core.subscribe(class_id, self._request, auto_ack=self._auto_ack)
        inbox.decode = self.target.decode
        self._entered = inbox
        return inbox

    def leave(self, *, processed: bool) -> Request:
        """Unsubscribe. `processed` says what became of the last message. Returns what the bus is to
        answer."""
        return self._core.unsubscribe(self.inbox, processed=processed, forget=self._forget)
