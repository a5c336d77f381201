"""Handlers under trio and asyncio.

A message that its handler does not settle itself is acknowledged when the handler has returned and
the reply, if any, is confirmed. If a handler raises, its message is redelivered after a backoff,
and the error is raised when the bus is left. Every handler has its own subscription, so a handler
that hangs delays no other handler.

If no more messages can arrive, or a handler ends the program, the block of the bus is cancelled.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from simplebus.client.aio.cancellation import ignore_cancellation, is_cancelled_by_scope
from simplebus.client.aio.subscription import BaseSubscription
from simplebus.client.core.acks import ACKED, nack_outcome
from simplebus.client.core.messages import Message
from simplebus.client.handler_errors import HandlerErrors
from simplebus.client.message_types import Binding
from simplebus.client.request_reply import (
    Handler,
    ReceivedRequests,
    ReplyAddress,
    check_handler_result,
)
from simplebus.core.errors import BusConnectionError, BusError, RefusedError

if TYPE_CHECKING:
    from simplebus.client.aio.connection import ClientConnection
    from simplebus.client.tracing.interface import Tracing


class HandlerBus(Protocol):
    """Parts of a `Bus` that handlers use."""

    connection: ClientConnection

    async def resolve_class_id(self, class_reference: Binding[Any] | int | str) -> int: ...

    received_requests: ReceivedRequests

    tracing: Tracing | None

    @property
    def can_reply_now(self) -> bool: ...

    async def prepare_reply(self) -> None: ...

    def queue_reply(self, address: ReplyAddress, request_id: bytes, value: object) -> int: ...

    def end_block(self, error: BaseException) -> None: ...


class HandlerRunner:
    """Calls one handler for the messages of its subscription."""

    def __init__(
        self,
        bus: HandlerBus,
        subscription: BaseSubscription[Any],
        handler: Handler,
        *,
        failures: HandlerErrors,
        concurrency: int,
    ) -> None:
        self.is_opening = True
        """True until the Subscribe is queued."""
        self._bus = bus
        self._subscription = subscription
        self._handler = handler
        self._failures = failures
        self._concurrency = concurrency
        self.started_count = 0
        """Messages passed to the handler so far."""
        self._busy_count = 0
        """Messages that are being handled."""

    @property
    def is_idle(self) -> bool:
        """True if every received message has been handled."""
        return not self.is_opening and not self._busy_count and self._subscription.is_exhausted

    def open(self, class_id: int) -> None:
        """Subscribe without waiting for the reply of the bus."""
        self._subscription.subscribe(class_id)
        self._subscription.inbox.set_handled()
        self.is_opening = False

    async def run(self) -> None:
        """Handle messages until the bus is left or lost."""
        connection, subscription = self._bus.connection, self._subscription
        try:
            if self.is_opening:
                self.open(await self._bus.resolve_class_id(subscription.target.class_reference))
                connection.changed.set()
            await connection.wait_answered(subscription.inbox.subscribe_request)
            async with anyio.create_task_group() as workers:
                for _ in range(self._concurrency):
                    workers.start_soon(self._process_messages, workers.cancel_scope)
        except BusConnectionError as error:
            self._bus.end_block(error)
        except BusError as error:
            self._failures.add(self._handler, subscription.target, error)
        finally:
            if not self.is_opening:
                subscription.unsubscribe(is_processed=False)
            self.is_opening = False
            connection.changed.set()

    async def _process_messages(self, scope: anyio.CancelScope) -> None:
        """Handle one message after the other. `concurrency` tasks run this in one scope."""
        in_handler, tracing = self._subscription.inbox.in_handler_sequences, self._bus.tracing
        try:
            while True:
                message = await self._subscription.get()
                sequence = message.sequence
                in_handler.add(sequence)
                self.started_count += 1
                self._busy_count += 1
                try:
                    if tracing is None:
                        await self._handle(message)
                    else:
                        with tracing.process(message, self._subscription.target.class_name):
                            await self._handle(message)
                finally:
                    self._busy_count -= 1
                    in_handler.discard(sequence)
                    self._bus.connection.changed.set()
        except (BusConnectionError, KeyboardInterrupt, SystemExit) as error:
            self._bus.end_block(error)  # Raised here, the error would be wrapped, or end the loop.
        except RefusedError as error:  # The bus has ended the subscription.
            self._failures.add(self._handler, self._subscription.target, error)
            scope.cancel()

    async def _handle(self, message: Message[Any]) -> None:
        try:
            decode = self._subscription.target.decode
            outcome = self._handler(message if decode is None else decode(message.payload))
            if outcome is not None and inspect.isawaitable(outcome):
                outcome = await outcome
            check_handler_result(outcome)
            address = (
                None if outcome is None else self._bus.received_requests.find_reply_address(message)
            )
            if address is not None:
                if not self._bus.can_reply_now:
                    await self._bus.prepare_reply()
                self._bus.queue_reply(*address, outcome)
        except Exception as error:
            message.settle(nack_outcome(error=error))
            self._failures.add(self._handler, message, error)
        except anyio.get_cancelled_exc_class() as cancelled:
            if is_cancelled_by_scope():
                raise
            ignore_cancellation()
            failure = RuntimeError("the handler cancelled itself")
            failure.__cause__ = cancelled
            message.settle(nack_outcome(error=failure))
            self._failures.add(self._handler, message, failure)
        else:
            message.settle(ACKED)
            if address is not None:  # Reply and ack leave in one write, before any wait.
                self._bus.connection.writer.write_now()
