"""A subscription without an event loop: one by one, in batches, as values or as messages.

Rule 1: asking for the next message says that the one before is processed. So does leaving the
subscription's block without an exception.
Rule 2: a loop says so too when it is left by `break` or `return`, and that its last message failed
when it is left by an exception. Nobody else says anything of what a loop is at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Self, TypeVar

from simplebus.client.blocking.iterators import BlockingIterable
from simplebus.client.codecs import DecodeError
from simplebus.client.core import arguments
from simplebus.client.core.messages import Batch, Message
from simplebus.client.subscription_target import Entry, Target, nothing_came, undecodable
from simplebus.core.errors import BusConnectionError
from simplebus.core.limits import (
    ACK_SECONDS,
    CLOSE_SECONDS,
    CLOSE_SECONDS_FAILED,
    MESSAGES_PER_TURN,
    PREFETCH_BYTES,
)
from simplebus.core.protocol.requests import SubscribeRequest

if TYPE_CHECKING:
    from types import TracebackType

    from simplebus.client.blocking.bus import BlockingBus

T = TypeVar("T")


class BlockingBaseSubscription(Entry[T]):
    """The messages of one class whose values are of one type; see `simplebus.Subscription`."""

    def __init__(
        self,
        bus: BlockingBus,
        target: Target,
        request: SubscribeRequest,
        *,
        auto_ack: bool,
        idle_seconds: float | None = None,
    ) -> None:
        super().__init__(bus.connection.core, target, request, auto_ack=auto_ack)
        self._bus = bus
        self._connection = bus.connection
        self._idle_seconds = math.inf if idle_seconds is None else idle_seconds
        self._acks_due_at = 0.0
        """When acknowledgements leave, however few they are."""

    def __enter__(self) -> Self:
        self.check_fresh()
        class_id = self._bus.resolve_class_id(self.target.what)
        self._connection.check_open()
        inbox = self.enter(class_id)
        try:
            self._connection.wait_answered(inbox.subscribe_request)
        except BaseException:
            self.leave(processed=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        request = self.leave(processed=kind is None)
        with suppress(BusConnectionError):  # Who needs the connection next will hear of it.
            if kind is None:
                self._connection.wait_answered_briefly(request, monotonic() + CLOSE_SECONDS)
            else:
                self._connection.write_all(monotonic() + CLOSE_SECONDS_FAILED)

    def messages(self) -> BlockingIterable[Message[T]]:
        """Iterate over messages: what came with a value, and the value."""
        return BlockingIterable(self._iterate_messages, self._next_message)

    def batches(self) -> BlockingIterable[Batch]:
        """Iterate over batches: many messages at the price of one."""
        return BlockingIterable(self._iterate_batches, self._next_batch)

    def get(self, timeout: float | None = None) -> Message[T]:
        """The next message. Says that the one before is processed, unless a loop is at that.

        Raises TimeoutError when none came in so many seconds.
        """
        inbox = self.inbox
        if inbox.active_loop is None:
            for message in inbox.prepared_messages:
                if monotonic() >= self._acks_due_at:
                    self._push_acks(handing_out=True)
                return message
        seconds = arguments.timeout_or_infinity("timeout", timeout)
        if not self._refill(seconds):
            raise nothing_came(self.target, seconds)
        inbox.prepare_messages(MESSAGES_PER_TURN)
        return next(inbox.prepared_messages)

    def take(self, most: int, timeout: float | None = None) -> list[Message[T]]:
        """The messages that are there, up to `most`; otherwise the first that come, or, after so
        many seconds, none. Says that those before are processed."""
        if most < 1:
            raise ValueError(f"take needs a number of messages from 1 on, got {most}")
        if not self._refill(arguments.timeout_or_infinity("timeout", timeout)):
            return []
        return list(self.inbox.pop_batch(most) or ())

    @contextmanager
    def _loop(self) -> Iterator[object]:
        """Give a key for a loop, and tell the inbox when the loop has ended."""
        loop_key = object()
        try:
            yield loop_key
        finally:
            self.inbox.end_loop(loop_key)

    def _iterate_messages(self) -> Iterator[Message[T]]:
        inbox = self.inbox
        with self._loop() as loop_key:
            while self._refill(self._idle_seconds, loop_key):
                inbox.prepare_messages(MESSAGES_PER_TURN)
                for message in inbox.prepared_messages:
                    yield message
                    if monotonic() >= self._acks_due_at:
                        self._push_acks()

    def _iterate_batches(self) -> Iterator[Batch]:
        with self._loop() as loop_key:
            while self._refill(self._idle_seconds, loop_key):
                yield self._take_batch()

    def _next_message(self) -> Message[T]:
        try:
            return self.get(self._idle_seconds)
        except TimeoutError:
            raise StopIteration from None

    def _next_batch(self) -> Batch:
        if not self._refill(self._idle_seconds):
            raise StopIteration
        return self._take_batch()

    def _take_batch(self) -> Batch:
        batch = self.inbox.pop_batch()
        assert batch is not None, "refill returned, and there was nothing"
        return batch

    def _refill(self, seconds: float, loop: object | None = None) -> bool:
        """Wait until there is something to hand out, to a loop or to who asks one by one. What that
        was handed before is processed."""
        inbox, connection = self.inbox, self._connection
        with connection.thread_guard:
            inbox.settle_previous(loop)
            if not inbox.is_empty:
                connection.check()
                if connection.core.has_due_acks or monotonic() >= self._acks_due_at:
                    self._write_acks()
                return True
            inbox.has_waiting_consumer = True
            try:
                return connection.wait_until(lambda: not inbox.is_empty, monotonic() + seconds)
            finally:
                inbox.has_waiting_consumer = False

    def _push_acks(self, *, handing_out: bool = False) -> None:
        """Have acknowledgements leave: the last ones left a while ago."""
        self.inbox.settle(include_last=not handing_out)
        self._write_acks()

    def _write_acks(self) -> None:
        self._acks_due_at = monotonic() + ACK_SECONDS
        # What was sent again while it waits here is known as a copy now, and not when it is done.
        if self.inbox.buffered_bytes < PREFETCH_BYTES:
            self._connection.read_and_write()
        else:
            self._connection.write_now()


class BlockingSubscription(BlockingBaseSubscription[T]):
    """The values of one type: `with bus.subscribe(ShopCreated) as shops`, then iterate."""

    def __iter__(self) -> Iterator[T]:
        """Values, one by one. Raises DecodeError, whose `message` will come again, for what is
        none; another loop goes on behind it."""
        inbox = self.inbox
        decode = inbox.decode
        assert decode is not None
        try:
            with self._loop() as loop_key:
                while self._refill(self._idle_seconds, loop_key):
                    inbox.prepare_messages(MESSAGES_PER_TURN, as_values=True)
                    for value in map(decode, inbox.prepared_payloads):
                        yield value
                        if monotonic() >= self._acks_due_at:
                            self._push_acks()
        except DecodeError as error:
            message = inbox.get_last_message()
            inbox.nack_last()
            raise undecodable(error, message) from None

    def __next__(self) -> T:
        """The next value. Says that the one before is processed. Raises DecodeError as a loop."""
        message = self._next_message()
        try:
            return message.value
        except DecodeError as error:
            self.inbox.nack_last()
            raise undecodable(error, message) from None


class BlockingRawSubscription(BlockingBaseSubscription[bytes]):
    """The messages of one class: `with bus.subscribe(1) as messages`, then iterate."""

    def __iter__(self) -> Iterator[Message[bytes]]:
        return self._iterate_messages()

    def __next__(self) -> Message[bytes]:
        """The next message. Says that the one before is processed."""
        return self._next_message()
