"""Subscriptions of the blocking client: iteration over values, messages and batches, and `get`."""

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
from simplebus.client.subscription_target import (
    SubscriptionState,
    SubscriptionTarget,
    no_message_error,
    with_message,
)
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

    from simplebus.client.blocking.publisher import BlockingPublisher

T = TypeVar("T")


class BlockingBaseSubscription(SubscriptionState[T]):
    """Messages of one class for one consumer. Made by `BlockingBus.subscribe`; it begins with its
    block.

    A message is acknowledged when you ask for the next one, or when the `with` block is left
    without an exception. If the block raises, the last message is redelivered after a backoff. With
    `auto_ack=False` you acknowledge by `ack` or `ack_batch`.

    See `simplebus.Bus.subscribe` for the details.
    """

    def __init__(
        self,
        bus: BlockingPublisher,
        target: SubscriptionTarget,
        request: SubscribeRequest,
        *,
        auto_ack: bool,
        idle_seconds: float | None = None,
    ) -> None:
        super().__init__(
            bus.connection.core, target, request, auto_ack=auto_ack, tracing=bus.tracing
        )
        self._bus = bus
        self._connection = bus.connection
        self._idle_seconds = math.inf if idle_seconds is None else idle_seconds
        self._acks_due_at = 0.0
        """Time at which acks are written, however few they are."""

    def __enter__(self) -> Self:
        self.check_not_entered()
        class_id = self._bus.resolve_class_id(self.target.class_reference)
        self._connection.check_open()
        inbox = self.open_inbox(class_id)
        try:
            self._connection.wait_answered(inbox.subscribe_request)
        except BaseException:
            self.close_inbox(is_processed=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        request = self.close_inbox(is_processed=kind is None)
        with suppress(BusConnectionError):  # The next call on the bus raises it.
            if kind is None:
                self._connection.wait_answered_briefly(request, monotonic() + CLOSE_SECONDS)
            else:
                self._connection.write_all(monotonic() + CLOSE_SECONDS_FAILED)

    def messages(self) -> BlockingIterable[Message[T]]:
        """Iterate over messages instead of values: `for message in shops.messages()`."""
        return BlockingIterable(self._iterate_messages, self._next_message)

    def batches(self) -> BlockingIterable[Batch]:
        """Iterate over batches, which cost about as much as one message: `for batch in
        shops.batches()`.
        """
        return BlockingIterable(self._iterate_batches, self._next_batch)

    def get(self, timeout: float | None = None) -> Message[T]:
        """Return the next message. Acknowledges what `get`, `take` or `next` returned before.

        Args:
            timeout: Seconds to wait for a message. None waits forever.

        Raises:
            TimeoutError: No message arrived in time.
            RefusedError: The bus has ended the subscription.
            BusConnectionError: The connection is lost for good.
        """
        inbox = self.inbox
        if inbox.active_loop is None:
            for message in inbox.prepared_messages:
                if monotonic() >= self._acks_due_at:
                    self._push_acks(handing_out=True)
                return message
        seconds = arguments.timeout_or_infinity("timeout", timeout)
        if not self._refill(seconds):
            raise no_message_error(self.target, seconds)
        inbox.prepare_messages(MESSAGES_PER_TURN)
        return next(inbox.prepared_messages)

    def ack_sync(self, *messages: Message[T]) -> None:
        """Acknowledge messages, and wait until the server has stored the acknowledgements.

        Afterwards these messages are not redelivered, however the server ends; with the durability
        `disk`, not even after a power cut. Earlier acknowledgements of the subscription are stored,
        too, if the connection was not lost since. One call for several messages costs less than a
        call for each.

        Args:
            messages: Messages of this subscription; none to wait for earlier acknowledgements.

        Raises:
            LocalProtocolError: A message belongs to another subscription or was fetched.
            BusConnectionError: The connection was lost; the messages may be redelivered.
            RefusedError: The server keeps acknowledgements in a JetStream cluster (`--engine`).
        """
        for message in messages:
            self.ack(message)
        self._connection.sync_acks(self.inbox)

    def take(self, most: int, timeout: float | None = None) -> list[Message[T]]:
        """Return messages that have arrived together. Acknowledges those returned before.

        Args:
            most: Maximum number of messages, at least 1.
            timeout: Seconds to wait if none has arrived. None waits forever.

        Returns:
            Up to `most` messages that one read of the connection has received; an empty list if
            none arrived in time.

        Raises:
            ValueError: `most` is less than 1.
            RefusedError: The bus has ended the subscription.
            BusConnectionError: The connection is lost for good.
        """
        if most < 1:
            raise ValueError(f"take expects 1 message or more, got {most}")
        if not self._refill(arguments.timeout_or_infinity("timeout", timeout)):
            return []
        return list(self.inbox.pop_batch(most) or ())

    @contextmanager
    def _loop(self) -> Iterator[object]:
        """Yield the key of a loop, and report the end of the loop to the inbox."""
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
        """Wait until there are messages for a consumer. Returns False at the timeout.

        Before it waits, the earlier messages of the consumer are acknowledged. `loop` identifies
        the consumer; None for `get` and `take`.
        """
        inbox, connection = self.inbox, self._connection
        with connection.thread_guard:
            inbox.settle_previous(loop)
            if not inbox.is_empty:
                connection.check_open()
                if connection.core.has_due_acks or monotonic() >= self._acks_due_at:
                    self._write_acks()
                return True
            inbox.has_waiting_consumer = True
            try:
                return connection.wait_until(lambda: not inbox.is_empty, monotonic() + seconds)
            finally:
                inbox.has_waiting_consumer = False

    def _push_acks(self, *, handing_out: bool = False) -> None:
        """Write acks, because the last ones were written a while ago."""
        self.inbox.settle(include_last=not handing_out)
        self._write_acks()

    def _write_acks(self) -> None:
        self._acks_due_at = monotonic() + ACK_SECONDS
        # Reading now drops redelivered copies of messages that still wait here.
        if self.inbox.buffered_bytes < PREFETCH_BYTES:
            self._connection.read_and_write()
        else:
            self._connection.write_now()


class BlockingSubscription(BlockingBaseSubscription[T]):
    """Values of one type: `with bus.subscribe(ShopCreated) as shops`, then iterate.

    A message is acknowledged when you ask for the next one, or when the `with` block is left
    without an exception. If the block raises, the last message is redelivered after a backoff.

    Use `messages()`, `get` and `take` for the messages with their metadata.
    """

    def __iter__(self) -> Iterator[T]:
        """Iterate over values.

        Raises:
            DecodeError: The payload is not a value of the type. Its `message` is redelivered
                after a backoff. A new loop continues with the next message.
        """
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
            raise with_message(error, message) from None

    def __next__(self) -> T:
        """Return the next value. Acknowledges the one before. Raises DecodeError as a loop does."""
        message = self._next_message()
        try:
            return message.value
        except DecodeError as error:
            self.inbox.nack_last()
            raise with_message(error, message) from None


class BlockingRawSubscription(BlockingBaseSubscription[bytes]):
    """Messages of one class: `with bus.subscribe(1) as messages`, then iterate.

    A message is acknowledged when you ask for the next one, or when the `with` block is left
    without an exception. If the block raises, the last message is redelivered after a backoff.
    """

    def __iter__(self) -> Iterator[Message[bytes]]:
        return self._iterate_messages()

    def __next__(self) -> Message[bytes]:
        """Return the next message. Acknowledges the one before."""
        return self._next_message()
