"""Target of a subscription, and the state of a subscription that all drivers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from simplebus.client.codecs import DecodeError
from simplebus.client.core.client import ClientCore, check_class_id
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.messages import Batch, Message
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.message_types import Binding, Registry
from simplebus.client.tracing.interface import Tracing
from simplebus.core.errors import LocalProtocolError
from simplebus.core.protocol.requests import SubscribeRequest


@dataclass(frozen=True, slots=True)
class SubscriptionTarget:
    """A class, and the decoder of its payloads.

    A type stands for the class of its binding, and its messages have values of that type. The
    messages of a class id or class name have their payload as value.
    """

    class_reference: Binding[Any] | int | str
    decode: Callable[[bytes], Any] | None
    """Converts a payload into a value; None returns the payload."""

    @classmethod
    def from_argument(cls, argument: object, registry: Registry) -> SubscriptionTarget:
        """Return the target for a type, class id or class name.

        Raises:
            UnboundTypeError: If the type is not bound to a class.
            ValueError: If the class id or name is invalid.
        """
        if isinstance(argument, int) and not isinstance(argument, bool):
            check_class_id(argument)
            return cls(argument, None)
        if isinstance(argument, str):
            if not argument:
                raise ValueError("got an empty class name, expected 1 character or more")
            return cls(argument, None)
        binding = registry.bindings[argument]
        return cls(binding, binding.decode)

    @property
    def class_name(self) -> str:
        """Name of the class, or its id if the name is unknown."""
        reference = self.class_reference
        if isinstance(reference, int | str):
            return str(reference)
        return str(reference.class_id) if reference.name is None else reference.name

    def __str__(self) -> str:
        reference = self.class_reference
        if isinstance(reference, int):
            return f"class {reference}"
        if isinstance(reference, str):
            return f"class {reference!r}"
        return (
            f"class {reference.class_id}" if reference.name is None else f"class {reference.name!r}"
        )


def no_message_error(target: SubscriptionTarget, seconds: float) -> TimeoutError:
    """Return the error for a `get` without a message in time."""
    return TimeoutError(f"received no message of {target} within {seconds:g} s")


def with_message(error: DecodeError, message: Any) -> DecodeError:
    """Attach the message to its DecodeError, and return the error."""
    error.message = message
    return error


T = TypeVar("T")


class SubscriptionState(Generic[T]):
    """State of a subscription, independent of the driver."""

    block_keyword = "with"
    """Statement that enters the subscription, for error messages."""

    def __init__(
        self,
        core: ClientCore,
        target: SubscriptionTarget,
        request: SubscribeRequest,
        *,
        auto_ack: bool,
        tracing: Tracing | None,
    ) -> None:
        self.target = target
        """The subscribed class."""
        self._core = core
        self._request = request
        self._auto_ack = auto_ack
        self._tracing = tracing
        self._inbox: Inbox | None = None
        self._forget = False

    def ack(self, message: Message[Any]) -> None:
        """Acknowledge a message, in any order. The ack is sent within moments.

        Args:
            message: A message of this subscription.

        Raises:
            LocalProtocolError: If the message belongs to another subscription or was fetched.
        """
        message.ack(self.inbox)

    def ack_batch(self, batch: Batch) -> None:
        """Acknowledge all messages of a batch.

        Args:
            batch: A batch of this subscription.

        Raises:
            LocalProtocolError: If the batch belongs to another subscription.
        """
        batch.ack(self.inbox)

    def forget(self) -> None:
        """Delete the position of the durable on the server when the subscription is left."""
        self._forget = True

    @property
    def inbox(self) -> Inbox:
        """The inbox, for this package only.

        Raises:
            LocalProtocolError: If the subscription was not entered.
        """
        if self._inbox is None:
            raise LocalProtocolError(
                f"the subscription was not entered; expected {self.block_keyword} "
                "bus.subscribe(…) as messages"
            )
        return self._inbox

    @property
    def is_exhausted(self) -> bool:
        """True if all received messages were handed out, or the subscription has ended."""
        inbox = self.inbox
        return inbox.unsubscribe_request is not None or inbox.error is not None or inbox.is_empty

    def check_not_entered(self) -> None:
        """Raise LocalProtocolError if the subscription was entered before."""
        if self._inbox is not None:
            raise LocalProtocolError("a subscription can be entered once; create a new one")

    def open_inbox(self, class_id: int) -> Inbox:
        """Send the Subscribe request, without waiting for its reply."""
        inbox = self._core.subscribe(class_id, self._request, auto_ack=self._auto_ack)
        inbox.decode = self.target.decode
        if self._tracing is not None:
            inbox.on_prepared = partial(self._tracing.receive, self.target.class_name)
        self._inbox = inbox
        return inbox

    def close_inbox(self, *, is_processed: bool) -> OpenRequest:
        """Send the Unsubscribe request and return it.

        Args:
            is_processed: True to acknowledge the last message, False to reject it.
        """
        return self._core.unsubscribe(self.inbox, is_processed=is_processed, forget=self._forget)
