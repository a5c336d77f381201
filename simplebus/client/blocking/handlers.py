"""Handlers of the blocking client. They are called only while the program is in `run` or `drain`.

A message that its handler does not settle itself is acknowledged when the handler has returned and
the reply, if any, is confirmed. If a handler raises, its message is redelivered after a backoff,
and the error is raised when the bus is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from simplebus.client.blocking.subscription import BlockingBaseSubscription
from simplebus.client.core.acks import ACKED, nack_outcome
from simplebus.client.core.messages import Message
from simplebus.client.handler_errors import HandlerErrors
from simplebus.client.request_reply import Handler, check_handler_result

if TYPE_CHECKING:
    from simplebus.client.tracing.interface import Tracing


class ReplyingBus(Protocol):
    """Part of a `BlockingBus` that handlers use."""

    tracing: Tracing | None

    def reply(self, message: Message[Any], value: object) -> None: ...


class BlockingHandlerRunner:
    """Calls one handler for the messages of its subscription, which has begun."""

    def __init__(
        self,
        bus: ReplyingBus,
        subscription: BlockingBaseSubscription[Any],
        handler: Handler,
        failures: HandlerErrors,
    ) -> None:
        subscription.inbox.set_handled()
        self._bus = bus
        self._subscription = subscription
        self._handler = handler
        self._failures = failures
        self.started_count = 0
        """Messages passed to the handler so far."""

    @property
    def has_work(self) -> bool:
        """True if a message has arrived. Raises RefusedError once the bus has ended the
        subscription.
        """
        return not self._subscription.inbox.is_empty

    def handle_next(self) -> None:
        """Handle one message."""
        message = self._subscription.get()
        self.started_count += 1
        at_work, sequence = self._subscription.inbox.in_handler_sequences, message.sequence
        at_work.add(sequence)
        try:
            tracing = self._bus.tracing
            if tracing is None:
                self._handle(message)
            else:
                with tracing.process(message, self._subscription.target.class_name):
                    self._handle(message)
        finally:
            at_work.discard(sequence)

    def _handle(self, message: Message[Any]) -> None:
        decode = self._subscription.target.decode
        try:
            outcome = self._handler(message if decode is None else decode(message.payload))
            check_handler_result(outcome)
            if outcome is not None and message.is_request:
                self._bus.reply(message, outcome)
        except Exception as error:
            message.settle(nack_outcome(error=error))
            self._failures.add(self._handler, message, error)
        else:
            message.settle(ACKED)
