"""`BlockingBus`, the bus of programs without an event loop.

There is no thread, event loop or timer: data is sent and a lost connection is replaced only while
the program calls a method. Only one thread at a time may use a bus: a call raises while another
thread is in a call. Only the process that connected the bus may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from time import monotonic
from typing import Any, TypeVar, Unpack, overload

from simplebus.client import request_reply
from simplebus.client.blocking.connection import BlockingClientConnection
from simplebus.client.blocking.handlers import BlockingHandlerRunner
from simplebus.client.blocking.publisher import BlockingPublisher
from simplebus.client.blocking.subscription import BlockingRawSubscription, BlockingSubscription
from simplebus.client.core import arguments
from simplebus.client.core.messages import Message
from simplebus.client.core.publish_buffer import as_bytes
from simplebus.client.handler_errors import HandlerErrors
from simplebus.client.inspect import (
    FetchOperation,
    build_inquire_request,
    check_range,
    get_inquire_reply,
    get_purged_count,
)
from simplebus.client.message_builder import PublishOptions
from simplebus.client.message_types import Registry
from simplebus.client.request_reply import (
    EMPTY_REPLIES_UNTIL_IDLE,
    Handler,
    PendingReplies,
    PendingReply,
    ReceivedRequests,
    check_handler,
)
from simplebus.client.subscribe_options import (
    SlowPolicy,
    StartPosition,
    SubscribeOptions,
    subscribe_request,
)
from simplebus.client.subscription_target import SubscriptionTarget
from simplebus.core.limits import (
    FETCH_MESSAGES_MAX,
    MESSAGES_PER_TURN,
)
from simplebus.core.protocol.inquiry import (
    BusInfo,
    ChannelInfo,
    ClassInfo,
    InquireReply,
    SessionInfo,
)

T = TypeVar("T")


class BlockingBus(BlockingPublisher):
    """Connection of a program to a bus, without an event loop. Made by `connect_blocking`.

        with simplebus.connect_blocking("simplebus://127.0.0.1:8888") as bus:
            bus.handle(ShopCreated, send_welcome)
            bus.publish(ShopCreated("Ada's Books"))
            bus.drain()

    It has the methods of `simplebus.Bus`, and `run` to call handlers.
    """

    def __init__(self, connection: BlockingClientConnection, registry: Registry) -> None:
        super().__init__(connection, registry)
        self.failures = HandlerErrors()
        """Errors that handlers raised. Internal."""
        self._handler_runners: list[BlockingHandlerRunner] = []
        self._received_requests = ReceivedRequests()
        """Reply addresses of received requests."""
        self._replies: tuple[PendingReplies, BlockingRawSubscription] | None = None
        """None before the first request."""

    # Subscribing ---------------------------------------------------------------------------------

    @overload
    def subscribe(
        self,
        class_or_type: type[T],
        *channels: str,
        auto_ack: bool = True,
        idle_seconds: float | None = None,
        **options: Unpack[SubscribeOptions],
    ) -> BlockingSubscription[T]: ...

    @overload
    def subscribe(
        self,
        class_or_type: int | str,
        *channels: str,
        auto_ack: bool = True,
        idle_seconds: float | None = None,
        **options: Unpack[SubscribeOptions],
    ) -> BlockingRawSubscription: ...

    def subscribe(
        self,
        class_or_type: type[Any] | int | str,
        *channels: str,
        auto_ack: bool = True,
        idle_seconds: float | None = None,
        durable: str | None = None,
        durable_seconds: float | None = None,
        group: str | None = None,
        start: StartPosition = "waiting",
        max_in_flight: int | None = None,
        slow: SlowPolicy = "block",
        max_pending: int | None = None,
        ack_seconds: float | None = None,
        max_deliveries: int | None = None,
        backoff: Iterable[float] | None = None,
        by_key: bool = False,
    ) -> BlockingSubscription[Any] | BlockingRawSubscription:
        """Subscribe to the messages of a class. The subscription begins with its block.

            with bus.subscribe(ShopCreated, "shops.*", idle_seconds=5) as shops:
                for shop in shops:
                    print(shop)

        A message is acknowledged when you ask for the next one, or when the `with` block is left
        without an exception. If the block raises, its last message is redelivered after a backoff.
        See `simplebus.Bus.subscribe` for the details.

        Args:
            class_or_type: Bound type, or id or name of a class. The subscription returns the values
                of the type, or the messages of the class.
            channels: Patterns of channels, such as "orders.*" or "orders.#". Default: all messages.
            auto_ack: Acknowledge messages as described above. If False, call `message.ack()` or
                `subscription.ack_batch(batch)` yourself.
            idle_seconds: A loop ends if no message has arrived for this many seconds. None never
                ends a loop.
            durable: Name under which the bus keeps the position without a connection. The next
                subscription with the name continues there.
            durable_seconds: Seconds that the bus keeps a durable without a connected subscription.
                None keeps the current setting, by default forever.
            group: Name of a group. Its members, on any connections, share one position: each
                message goes to one member.
            start: Start position of a new subscription. A durable or a group that exists
                continues at its own position. "waiting": messages that no subscription has
                received yet if this is the first one of the class, otherwise new messages. "new":
                new messages. "earliest" or "last": the earliest or the last stored message.
                "last_values": the last message of each channel. An int: that sequence. A datetime:
                the first message accepted at or after that time.
            max_in_flight: Maximum number of unacknowledged messages at this client. None is the
                default of the bus.
            slow: Policy for messages above `max_pending`. "block": they wait in the class, and when
                that is full its publishers wait. "drop_oldest" or "drop_newest": this subscription
                loses the oldest or the newest message. "disconnect": the subscription ends.
            max_pending: Number of messages stored for this subscription above which `slow`
                applies. Required with every policy except "block", which does not allow it.
            ack_seconds: Seconds that a message may be unacknowledged before it is redelivered. None
                is the setting of the bus.
            max_deliveries: Deliveries of a message before it becomes a dead letter. 0 is no limit,
                None the setting of the bus.
            backoff: Seconds to wait before the second delivery of a rejected message, the third and
                so on; the last value also applies to all later ones. None is the setting of the
                bus. An unacknowledged message is not redelivered before `ack_seconds`.
            by_key: Make the group key-ordered: messages with equal keys go to one member, one after
                the other. The next message of a key is delivered when the one before is
                acknowledged or has become a dead letter. Requires `group`.

        Returns:
            A `BlockingSubscription` for a type, a `BlockingRawSubscription` for a class id or name.
            Its block raises RefusedError if the bus refuses the subscription.

        Raises:
            UnboundTypeError: The type is bound to no class.
            ValueError: An option has a value that no bus accepts.
            TypeError: An option has a value of the wrong type.
        """
        target = SubscriptionTarget.from_argument(class_or_type, self._registry)
        request = subscribe_request(
            channels,
            durable=durable,
            durable_seconds=durable_seconds,
            group=group,
            start=start,
            max_in_flight=max_in_flight,
            slow=slow,
            max_pending=max_pending,
            ack_seconds=ack_seconds,
            max_deliveries=max_deliveries,
            backoff=backoff,
            by_key=by_key,
        )
        kind = BlockingRawSubscription if target.decode is None else BlockingSubscription[Any]
        return kind(self, target, request, auto_ack=auto_ack, idle_seconds=idle_seconds)

    @overload
    def handle(
        self,
        class_or_type: type[T],
        handler: Callable[[T], object],
        *channels: str,
        **options: Unpack[SubscribeOptions],
    ) -> None: ...

    @overload
    def handle(
        self,
        class_or_type: int | str,
        handler: Callable[[Message[bytes]], object],
        *channels: str,
        **options: Unpack[SubscribeOptions],
    ) -> None: ...

    def handle(
        self,
        class_or_type: type[Any] | int | str,
        handler: Handler,
        *channels: str,
        durable: str | None = None,
        durable_seconds: float | None = None,
        group: str | None = None,
        start: StartPosition = "waiting",
        max_in_flight: int | None = None,
        slow: SlowPolicy = "block",
        max_pending: int | None = None,
        ack_seconds: float | None = None,
        max_deliveries: int | None = None,
        backoff: Iterable[float] | None = None,
        by_key: bool = False,
    ) -> None:
        """Call a function for every message of a class, while the program is in `run` or `drain`.

            bus.handle(ShopCreated, send_welcome, durable="welcome")
            bus.run()

        Acknowledgement, redelivery and errors are those of `simplebus.Bus.handle`.

        Args:
            class_or_type: Bound type, or id or name of a class. The argument of the handler is a
                value of the type, or a message of the class.
            handler: Function of one argument, not async. If the message is a request, the value
                that it returns is the reply.
            channels: Patterns of channels, such as "orders.*" or "orders.#". Default: all messages.
            durable: Name under which the bus keeps the position without a connection. The next
                subscription with the name continues there.
            durable_seconds: Seconds that the bus keeps a durable without a connected subscription.
                None keeps the current setting, by default forever.
            group: Name of a group. Its members, on any connections, share one position: each
                message goes to one member.
            start: Start position of a new subscription. A durable or a group that exists
                continues at its own position. "waiting": messages that no subscription has
                received yet if this is the first one of the class, otherwise new messages. "new":
                new messages. "earliest" or "last": the earliest or the last stored message.
                "last_values": the last message of each channel. An int: that sequence. A datetime:
                the first message accepted at or after that time.
            max_in_flight: Maximum number of unacknowledged messages at this client. None is the
                default of the bus.
            slow: Policy for messages above `max_pending`. "block": they wait in the class, and when
                that is full its publishers wait. "drop_oldest" or "drop_newest": this subscription
                loses the oldest or the newest message. "disconnect": the subscription ends.
            max_pending: Number of messages stored for this subscription above which `slow`
                applies. Required with every policy except "block", which does not allow it.
            ack_seconds: Seconds that a message may be unacknowledged before it is redelivered. None
                is the setting of the bus.
            max_deliveries: Deliveries of a message before it becomes a dead letter. 0 is no limit,
                None the setting of the bus.
            backoff: Seconds to wait before the second delivery of a rejected message, the third and
                so on; the last value also applies to all later ones. None is the setting of the
                bus. An unacknowledged message is not redelivered before `ack_seconds`.
            by_key: Make the group key-ordered: messages with equal keys go to one member, one after
                the other. The next message of a key is delivered when the one before is
                acknowledged or has become a dead letter. Requires `group`.

        Raises:
            UnboundTypeError: The type is bound to no class.
            ValueError: An option has a value that no bus accepts.
            TypeError: An option has a value of the wrong type, or `handler` cannot be called.
            RefusedError: The bus refuses the subscription.
            BusConnectionError: The connection is lost for good.
        """
        check_handler(handler, is_async_allowed=False)
        subscription = self.subscribe(
            class_or_type,
            *channels,
            auto_ack=False,
            durable=durable,
            durable_seconds=durable_seconds,
            group=group,
            start=start,
            max_in_flight=max_in_flight,
            slow=slow,
            max_pending=max_pending,
            ack_seconds=ack_seconds,
            max_deliveries=max_deliveries,
            backoff=backoff,
            by_key=by_key,
        )
        subscription.__enter__()  # Until the bus is left.
        self._handler_runners.append(
            BlockingHandlerRunner(self, subscription, handler, self.failures)
        )

    def run(self, seconds: float | None = None) -> None:
        """Call handlers for the messages that arrive.

        Args:
            seconds: Time after which no further handler is called, and the call returns. None
                never returns.

        Raises:
            BusConnectionError: The connection is lost for good.
            RefusedError: The bus has ended the subscription of a handler.
        """
        deadline = monotonic() + arguments.timeout_or_infinity("seconds", seconds)
        while self.connection.wait_until(self._has_work, deadline):
            self._handle_available()
            if monotonic() >= deadline:
                return

    def drain(self) -> None:
        """Call handlers until they have processed all messages that the bus can deliver now.

        Messages and replies that the handlers publish are included. Messages that wait for a
        backoff or a delay are not included. See `simplebus.Bus.drain`.

        Raises:
            ExceptionGroup: Contains the refusals that no call has raised yet.
            BusConnectionError: The connection is lost for good.
        """
        empty_reply_count = 0
        while empty_reply_count < (EMPTY_REPLIES_UNTIL_IDLE if self._handler_runners else 1):
            started_before = self._started_count
            while self._has_work():
                self._handle_available()
            self.flush()
            self.connection.request(self._core.sync)
            has_received_none = started_before == self._started_count and not self._has_work()
            empty_reply_count = empty_reply_count + 1 if has_received_none else 0

    @property
    def _started_count(self) -> int:
        """Messages passed to handlers so far."""
        return sum(runner.started_count for runner in self._handler_runners)

    def _has_work(self) -> bool:
        return any(runner.has_work for runner in self._handler_runners)

    def _handle_available(self) -> None:
        """Handle one message with each handler that has one."""
        for runner in self._handler_runners:
            if runner.has_work:
                runner.handle_next()
        if self._core.has_due_acks or not self._has_work():
            self.connection.write_now()

    # Requests and inspection ----------------------------------------------------------------------

    @overload
    def request(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        timeout: float = 5.0,
        as_: type[T],
        **about: Unpack[PublishOptions],
    ) -> T: ...

    @overload
    def request(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        timeout: float = 5.0,
        as_: None = None,
        **about: Unpack[PublishOptions],
    ) -> Message[bytes]: ...

    def request(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        timeout: float = 5.0,
        as_: Any = None,
        **about: Unpack[PublishOptions],
    ) -> Any:
        """Publish a message and return the first reply to it.

        The message expires after the timeout.

            total = bus.request(GetTotal(month=5), as_=Total)

        Args:
            message: Value of a type that is bound to a class, or bytes if `class_id` is given.
            class_id: Id or name of the class, for bytes.
            timeout: Seconds to wait for the reply.
            as_: Type of the reply's value. None returns the message.
            about: Metadata of the message, as for `publish`.

        Returns:
            The value of the reply, or the reply as a message.

        Raises:
            TimeoutError: No reply arrived in time.
            Exception: The errors of `publish`.
        """
        decode = None if as_ is None else self._registry.bindings[as_].decode
        deadline = monotonic() + arguments.timeout_or_infinity("timeout", timeout)
        pending_replies, replies = self._open_replies()
        envelope = pending_replies.get_envelope(about, timeout, self._outbound.build_envelope)
        payload, id_, _ = self._prepare(message, class_id, {})
        payload = as_bytes(payload)
        pending_reply = pending_replies.add_request(lambda: None)
        try:
            with self.connection.thread_guard:
                self.connection.check_open()
                replies.inbox.settle_previous()  # Its ack leaves together with the request.
                position = self._core.publish_buffer.publish_encoded(
                    envelope.encode(pending_reply.request_id, payload), id_, len(payload)
                )
                self._wait_for_reply(pending_replies, pending_reply, replies, position, deadline)
        finally:
            pending_replies.discard(pending_reply)
        if pending_reply.reply is None:
            raise request_reply.no_reply_error(message, class_id, timeout)
        return request_reply.decode_reply(pending_reply.reply, decode)

    def _wait_for_reply(
        self,
        pending_replies: PendingReplies,
        pending_reply: PendingReply,
        replies: BlockingRawSubscription,
        position: int,
        deadline: float,
    ) -> None:
        """Wait until the deadline for the reply to the request at `position`.

        Raises RefusedError if the bus refuses the request.
        """
        connection, inbox = self.connection, replies.inbox
        waiter = connection.confirms.add_waiter(position, position, lambda: None)
        try:
            while pending_reply.reply is None and connection.wait_until(
                lambda: bool(waiter.refusals) or not inbox.is_empty, deadline
            ):
                if waiter.refusals:
                    raise waiter.refusals[0]
                for reply in replies.take(MESSAGES_PER_TURN):
                    pending_replies.accept_reply(reply)
        finally:
            if not waiter.is_done:
                connection.confirms.cancel(waiter)

    def reply(self, message: Message[Any], value: object) -> None:
        """Reply to a request, and wait until the bus has confirmed the reply.

        Args:
            message: The request; `message.is_request` is true.
            value: Value of a bound type, or bytes.

        Raises:
            LocalProtocolError: The message is not a request, or it asks for a reply in a class
                that is not the class of replies.
            Exception: The errors of `publish`.
        """
        address, request_id = self._received_requests.get_reply_address(message)
        address.check_is_for_replies(self.resolve_class_id(request_reply.REPLY_CLASS_NAME))
        payload = self._outbound.encode_payload(value)
        with self.connection.thread_guard:
            self.connection.check_open()
            position = self._core.publish_buffer.publish_encoded(
                address.envelope.encode(request_id, payload), address.class_id, len(payload)
            )
            if refused := self.connection.wait_confirmed(position, position):
                raise refused[0]

    def _open_replies(self) -> tuple[PendingReplies, BlockingRawSubscription]:
        """Return the replies to this bus. The first request subscribes to them."""
        if self._replies is None:
            class_id = self.resolve_class_id(request_reply.REPLY_CLASS_NAME)
            pending_replies = PendingReplies(class_id, self._core.reply_channel_prefix)
            subscription = self.subscribe(
                pending_replies.class_id, pending_replies.channel, start="new"
            )
            subscription.__enter__()  # Until the bus is left.
            self._replies = pending_replies, subscription
        return self._replies

    def acknowledge_replies(self) -> None:
        """Acknowledge the reply to the last request, before the bus is left."""
        if self._replies is not None:
            _, replies = self._replies
            replies.inbox.settle_previous()

    @overload
    def fetch(
        self,
        class_or_type: type[T],
        first: int = 0,
        count: int = ...,
        *,
        time: datetime | None = None,
    ) -> list[Message[T]]: ...

    @overload
    def fetch(
        self,
        class_or_type: int | str,
        first: int = 0,
        count: int = ...,
        *,
        time: datetime | None = None,
    ) -> list[Message[bytes]]: ...

    def fetch(
        self,
        class_or_type: Any,
        first: int = 0,
        count: int = FETCH_MESSAGES_MAX,
        *,
        time: datetime | None = None,
    ) -> list[Message[Any]]:
        """Return stored messages of a class, without a subscription. No position changes.

        Args:
            class_or_type: Bound type, or id or name of a class.
            first: Sequence of the first message.
            count: Maximum number of messages.
            time: Begin with the first message that the bus accepted at or after this time, if that
                is later than `first`.

        Returns:
            The messages in order. They cannot be acknowledged.

        Raises:
            RefusedError: The user may not fetch from the class.
            BusConnectionError: The connection is lost for good.
        """
        target = SubscriptionTarget.from_argument(class_or_type, self._registry)
        fetching = FetchOperation(
            self.resolve_class_id(target.class_reference), target, first, count, time
        )
        while not fetching.is_done:
            fetching.accept_reply(
                self.connection.request(partial(fetching.send_request, self._core))
            )
        return fetching.messages

    @overload
    def explain(self) -> BusInfo: ...

    @overload
    def explain(self, class_or_type: type | int | str) -> ClassInfo: ...

    @overload
    def explain(
        self, class_or_type: type | int | str | None = None, *, channel: str
    ) -> ChannelInfo: ...

    @overload
    def explain(self, *, session: int) -> SessionInfo: ...

    def explain(
        self,
        class_or_type: type | int | str | None = None,
        *,
        channel: str | None = None,
        session: int | None = None,
    ) -> InquireReply:
        """Return which messages wait for which subscription, and why.

        Args:
            class_or_type: Bound type, or id or name of a class. None describes the whole bus.
            channel: Describe the subscriptions that match this channel, in all classes or in
                `class_or_type`.
            session: Describe the session with this number.

        Returns:
            A structure of `simplebus.core.protocol.inquiry`.

        Raises:
            RefusedError: The class or session does not exist.
            BusConnectionError: The connection is lost for good.
        """
        inquiry = build_inquire_request(class_or_type, channel, session, self._registry)
        return get_inquire_reply(self.connection.request(partial(self._core.inquire, inquiry)))

    def keep_last_values(self, class_or_type: type | int | str) -> None:
        """Make a class keep the last message of each channel from now on.

        A subscription with `start="last_values"` begins with these. A message with an empty payload
        removes the value of its channel. The class settings of the server take precedence.

        Args:
            class_or_type: Bound type, or id or name of a class.

        Raises:
            RefusedError: The bus refuses the request.
            BusConnectionError: The connection is lost for good.
        """
        target = SubscriptionTarget.from_argument(class_or_type, self._registry)
        self.connection.request(
            partial(self._core.keep_last_values, self.resolve_class_id(target.class_reference))
        )

    def purge(
        self, class_or_type: type | int | str, first: int = 0, last: int | None = None
    ) -> int:
        """Discard the stored messages first..last-1 of a class for every subscription.

        Args:
            class_or_type: Bound type, or id or name of a class.
            first: Sequence of the first message.
            last: Sequence after the last message. None for the head of the class.

        Returns:
            The number of discarded messages.

        Raises:
            RefusedError: The user may not purge the class.
            BusConnectionError: The connection is lost for good.
        """
        target = SubscriptionTarget.from_argument(class_or_type, self._registry)
        return get_purged_count(
            self.connection.request(
                partial(
                    self._core.purge,
                    self.resolve_class_id(target.class_reference),
                    *check_range(first, last),
                )
            )
        )
