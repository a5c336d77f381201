"""A subscription without an event loop: loops over messages, or over batches.

Rule 1: asking for the next message says that the one before is processed. So does leaving the
subscription's block without an exception.
Rule 2: a loop that is left early has not asked: when another loop begins, the last message of the
one before counts as failed, and the bus sends it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Self

from simplebus.client.blocking_wire import BlockingWire
from simplebus.core.errors import BusConnectionError, LocalProtocolError
from simplebus.core.inbox import Inbox
from simplebus.core.limits import (
    ACK_SECONDS,
    CLOSE_SECONDS,
    CLOSE_SECONDS_FAILED,
    MESSAGES_PER_TURN,
)
from simplebus.core.messages import Batch, Message


class BlockingSubscription:
    """The messages of one class. Enter it, then iterate; made by `BlockingBus.subscribe`."""

    def __init__(
        self, wire: BlockingWire, class_id: int, *, auto_ack: bool, idle_seconds: float | None
    ) -> None:
        self.class_id = class_id
        self._wire = wire
        self._auto_ack = auto_ack
        self._idle_seconds = math.inf if idle_seconds is None else idle_seconds
        self._entered: Inbox | None = None
        self._ack_at = 0.0

    def __enter__(self) -> Self:
        if self._entered is not None:
            raise LocalProtocolError("a subscription can be entered once; subscribe again")
        self._wire.check()
        self._entered = self._wire.core.subscribe(self.class_id, auto_ack=self._auto_ack)
        try:
            self._wire.sync()
        except BaseException:
            self._wire.core.unsubscribe(self._entered, processed=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._wire.core.unsubscribe(self._inbox, processed=kind is None)
        with suppress(BusConnectionError):  # Who needs the connection next will hear of it.
            self._wire.check()
            patience = CLOSE_SECONDS if kind is None else CLOSE_SECONDS_FAILED
            self._wire.write(monotonic() + patience)

    def __iter__(self) -> Iterator[Message]:
        inbox = self._inbox
        inbox.give_up()
        while self._refill():
            inbox.prepare(MESSAGES_PER_TURN)
            for message in inbox.ready:
                yield message
                if monotonic() >= self._ack_at:
                    inbox.settle(current=True)
                    self._push_if_due()

    def batches(self) -> Iterator[Batch]:
        """Iterate over batches: many messages at the price of one."""
        inbox = self._inbox
        inbox.give_up()
        while self._refill():
            batch = inbox.take_batch()
            assert batch is not None, "refill returned, and there was nothing"
            yield batch

    def ack(self, message: Message) -> None:
        """Acknowledge a message by hand, in any order."""
        message.ack(self._inbox)
        self._push_if_due()

    def ack_batch(self, batch: Batch) -> None:
        """Acknowledge a batch by hand."""
        batch.ack(self._inbox)
        self._push_if_due()

    @property
    def _inbox(self) -> Inbox:
        if self._entered is None:
            raise LocalProtocolError(
                "a subscription begins with its block: with bus.subscribe(…) as messages"
            )
        return self._entered

    def _refill(self) -> bool:
        """Wait until there is something to hand out. What was handed out before is processed."""
        inbox, wire = self._inbox, self._wire
        inbox.settle(current=True)
        if not inbox.is_empty:
            wire.check()
            self._push_if_due()
            return True
        inbox.is_awaited = True
        try:
            return wire.read_until(lambda: not inbox.is_empty, monotonic() + self._idle_seconds)
        finally:
            inbox.is_awaited = False

    def _push_if_due(self) -> None:
        """Have acknowledgements leave when they are many, or the last ones left a while ago."""
        now = monotonic()
        if now >= self._ack_at or self._wire.core.acks_are_due:
            self._ack_at = now + ACK_SECONDS
            self._wire.write()
