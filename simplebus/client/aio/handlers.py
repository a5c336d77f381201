"""Handlers under trio and asyncio: functions that are called for what comes.

Rule 1: a message is acknowledged when its handler has returned, and its reply, if it asked for one
and got one, is confirmed.
Rule 2: what goes wrong in a handler is the handler's: its message comes again after the bus's
pause, the bus goes on, and tells when it is left.
Rule 3: every handler has a subscription of its own. One that hangs holds up nobody else.
Rule 4: a program that lives by its handlers is told when nothing will come any more: its block
ends. So it does when a handler ends the program.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import anyio

from simplebus.client.aio.cancellation import ignore_cancellation, is_cancelled_by_scope
from simplebus.client.aio.subscription import BaseSubscription
from simplebus.client.core.messages import Message
from simplebus.client.handler_errors import HandlerErrors
from simplebus.client.request_reply import Handler, check_outcome
from simplebus.core.errors import BusConnectionError, BusError, RefusedError

if TYPE_CHECKING:
    from simplebus.client.aio.bus import Bus


class HandlerRunner:
    """One handler and its subscription."""

    def __init__(
        self,
        bus: Bus,
        subscription: BaseSubscription[Any],
        handler: Handler,
        *,
        failures: HandlerErrors,
        concurrency: int,
    ) -> None:
        self.is_opening = True
        """Whether its subscription is not yet on its way to the bus."""
        self._bus = bus
        self._subscription = subscription
        self._handler = handler
        self._failures = failures
        self._concurrency = concurrency
        self.started_count = 0
        """Messages that were handed to it."""
        self._busy_count = 0
        """Messages that are being handled."""

    @property
    def is_idle(self) -> bool:
        """Whether it is through with everything that came."""
        return not self.is_opening and not self._busy_count and self._subscription.is_through

    def open(self, class_id: int) -> None:
        """Subscribe now."""
        self._subscription.subscribe(class_id)
        self.is_opening = False

    async def run(self) -> None:
        """Handle messages until the bus is left or lost."""
        wire, subscription = self._bus.connection, self._subscription
        try:
            if self.is_opening:
                self.open(await self._bus.resolve_class_id(subscription.target.what))
                wire.changed.set()
            await wire.wait_answered(subscription.inbox.subscribe_request)
            async with anyio.create_task_group() as workers:
                for _ in range(self._concurrency):
                    workers.start_soon(self._process_messages, workers.cancel_scope)
        except BusConnectionError as error:
            self._bus.end_block(error)
        except BusError as error:
            self._failures.add(self._handler, subscription.target, error)
        finally:
            if not self.is_opening:
                subscription.unsubscribe(processed=False)
            self.is_opening = False
            wire.changed.set()

    async def _process_messages(self, scope: anyio.CancelScope) -> None:
        """One of its tasks, in the scope of all of them."""
        at_work = self._subscription.inbox.in_handler_sequences
        try:
            while True:
                message = await self._subscription.get()
                sequence = message.sequence
                at_work.add(sequence)
                self.started_count += 1
                self._busy_count += 1
                try:
                    await self._handle(message)
                finally:
                    self._busy_count -= 1
                    at_work.discard(sequence)
                    self._bus.connection.changed.set()
        except (BusConnectionError, KeyboardInterrupt, SystemExit) as error:
            self._bus.end_block(error)  # Raised from here, it would be wrapped, or end the loop.
        except RefusedError as error:  # The bus has ended the subscription.
            self._failures.add(self._handler, self._subscription.target, error)
            scope.cancel()

    async def _handle(self, message: Message[Any]) -> None:
        try:
            decode = self._subscription.target.decode
            outcome = self._handler(message if decode is None else decode(message.payload))
            if outcome is not None and inspect.isawaitable(outcome):
                outcome = await outcome
            check_outcome(outcome)
            is_reply = outcome is not None and message.is_request
            if is_reply:
                await self._bus.reply(message, outcome, confirm=False)
        except Exception as error:
            message.nack(error=error)
            self._failures.add(self._handler, message, error)
        except anyio.get_cancelled_exc_class() as cancelled:
            if is_cancelled_by_scope():
                raise
            ignore_cancellation()
            itself = RuntimeError("the handler cancelled itself")
            itself.__cause__ = cancelled
            message.nack(error=itself)
            self._failures.add(self._handler, message, itself)
        else:
            message.ack()
            if is_reply:  # In one piece, and before we wait for anything.
                self._bus.connection.writer.write_now()
