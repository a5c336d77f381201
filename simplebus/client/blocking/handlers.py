"""Handlers without an event loop: functions that are called, one at a time, for what comes.

Rule 1: they are called while the program is in `run` or `drain`, and at no other time.
Rule 2: a message is acknowledged when its handler has returned, and its reply, if it asked for one
and got one, is confirmed. What goes wrong in a handler is the handler's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simplebus.client.blocking.subscription import BlockingBaseSubscription
from simplebus.client.core.messages import Message
from simplebus.client.handler_errors import HandlerErrors
from simplebus.client.request_reply import Handler, check_handler_result

if TYPE_CHECKING:
    from simplebus.client.blocking.bus import BlockingBus


class BlockingHandlerRunner:
    """One handler and its subscription, which is entered."""

    def __init__(
        self,
        bus: BlockingBus,
        subscription: BlockingBaseSubscription[Any],
        handler: Handler,
        failures: HandlerErrors,
    ) -> None:
        self._bus = bus
        self._subscription = subscription
        self._handler = handler
        self._failures = failures
        self.started_count = 0
        """Messages that were handed to it."""

    @property
    def has_work(self) -> bool:
        """Whether something has come for it. Raises RefusedError once the bus has ended it."""
        return not self._subscription.inbox.is_empty

    def handle_next(self) -> None:
        """Handle a message."""
        message = self._subscription.get()
        self.started_count += 1
        at_work, sequence = self._subscription.inbox.in_handler_sequences, message.sequence
        at_work.add(sequence)
        try:
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
            message.nack(error=error)
            self._failures.add(self._handler, message, error)
        else:
            message.ack()
