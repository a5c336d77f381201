"""What a subscription is to: a type, a class's id, or its name.

Rule 1: a type stands for the class of its binding, and its messages' values are of that type. A
class by id or name has messages, whose payloads are what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from simplebus.client.codecs import DecodeError
from simplebus.client.core.client import ClientCore, check_class_id
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.messages import Batch, Message
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.message_types import Binding, Registry
from simplebus.core.errors import LocalProtocolError
from simplebus.core.protocol.requests import SubscribeRequest


@dataclass(frozen=True, slots=True)
class SubscriptionTarget:
    """One class, and how its payloads are read."""

    class_reference: Binding[Any] | int | str
    decode: Callable[[bytes], Any] | None
    """None where payloads are what is wanted."""

    @classmethod
    def from_argument(cls, what: object, registry: Registry) -> SubscriptionTarget:
        """Raises UnboundTypeError for a type without a class, ValueError for no class id."""
        if isinstance(what, int) and not isinstance(what, bool):
            check_class_id(what)
            return cls(what, None)
        if isinstance(what, str):
            if not what:
                raise ValueError("a class's name is empty, expected a word for it")
            return cls(what, None)
        binding = registry.bindings[what]
        return cls(binding, binding.decode)

    def __str__(self) -> str:
        what = self.class_reference
        if isinstance(what, int):
            return f"class {what}"
        if isinstance(what, str):
            return f"class {what!r}"
        return f"class {what.class_id}" if what.name is None else f"class {what.name!r}"


def no_message_error(target: SubscriptionTarget, seconds: float) -> TimeoutError:
    """A `get` has waited long enough."""
    return TimeoutError(f"no message of {target} came within {seconds:g} s")


def with_message(error: DecodeError, message: Any) -> DecodeError:
    """What a loop over values raises: the error, which has the message that it is about."""
    error.message = message
    return error


T = TypeVar("T")


class SubscriptionState(Generic[T]):
    """A subscription to one class, whose messages' values are of one type."""

    block_keyword = "with"
    """What a block of it begins with."""

    def __init__(
        self, core: ClientCore, target: SubscriptionTarget, request: SubscribeRequest, *, auto_ack: bool
    ) -> None:
        self.target = target
        """The class."""
        self._core = core
        self._request = request
        self._auto_ack = auto_ack
        self._inbox: Inbox | None = None
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
        if self._inbox is None:
            raise LocalProtocolError(
                f"a subscription begins with its block: {self.block_keyword} bus.subscribe(…) as messages"
            )
        return self._inbox

    @property
    def is_exhausted(self) -> bool:
        """Whether everything that came was handed out, or nothing will be."""
        inbox = self.inbox
        return inbox.unsubscribe_request is not None or inbox.error is not None or inbox.is_empty

    def check_not_entered(self) -> None:
        """Raise LocalProtocolError unless it can be entered."""
        if self._inbox is not None:
            raise LocalProtocolError("a subscription can be entered once; subscribe again")

    def subscribe(self, class_id: int) -> Inbox:
        """Subscribe, without waiting until the bus knows."""
        inbox = self._core.subscribe(class_id, self._request, auto_ack=self._auto_ack)
        inbox.decode = self.target.decode
        self._inbox = inbox
        return inbox

    def unsubscribe(self, *, is_processed: bool) -> OpenRequest:
        """Unsubscribe. `processed` says what became of the last message. Returns what the bus is to
        answer."""
        return self._core.unsubscribe(self.inbox, is_processed=is_processed, forget=self._forget)
