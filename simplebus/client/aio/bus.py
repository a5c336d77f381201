"""`Bus`: subscriptions, handlers, requests and inspection under trio and asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, TypeVar, Unpack, overload

import anyio
import anyio.abc

from simplebus.client import request_reply
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.aio.handlers import HandlerRunner
from simplebus.client.aio.publisher import Publisher
from simplebus.client.aio.subscription import RawSubscription, Subscription
from simplebus.client.core import arguments
from simplebus.client.core.messages import Message
from simplebus.client.event_loop.services import Waiter
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
    ReplyAddress,
    check_handler,
)
from simplebus.client.subscribe_options import (
    SlowPolicy,
    StartPosition,
    SubscribeOptions,
    subscribe_request,
)
from simplebus.client.subscription_target import SubscriptionTarget
from simplebus.core.errors import BusConnectionError
from simplebus.core.limits import FETCH_MESSAGES_MAX
from simplebus.core.protocol.inquiry import (
    BusInfo,
    ChannelInfo,
    ClassInfo,
    InquireReply,
    SessionInfo,
)

T = TypeVar("T")

_CONCURRENCY_MAX = 100_000


class Bus(Publisher):
    """Connection of a program to a bus. Made by `connect` or by entering a `MemoryBus`.

        async with simplebus.connect("simplebus://127.0.0.1:8888") as bus:
            bus.handle(ShopCreated, send_welcome)
            await bus.publish(ShopCreated("Ada's Books"))
            await bus.drain()

    `publish`, `subscribe` and `handle` send and receive messages. `request` and `reply` exchange
    one message for another. `fetch` and `explain` read without changing a position.
    """

    def __init__(
        self, connection: ClientConnection, registry: Registry, tasks: anyio.abc.TaskGroup
    ) -> None:
        super().__init__(connection, registry)
        self.failures = HandlerErrors()
        """Errors that handlers raised. Internal."""
        self.block_error: BaseException | None = None
        """Error that ended the block of the bus, raised when it is left. Internal."""
        self._tasks = tasks
        """Task group of the handlers."""
        self._handler_runners: list[HandlerRunner] = []
        self._replies: PendingReplies | None = None
        """None before the first request."""
        self._replies_lock = anyio.Lock()
        """Held while the first request subscribes to replies."""
        self.received_requests = ReceivedRequests()
        """Reply addresses of received requests. Internal."""
        self._replies_class_id: int | None = None
        """None before the first reply to a request of another bus."""

    # Subscribing ---------------------------------------------------------------------------------

    @overload
    def subscribe(
        self,
        class_or_type: type[T],
        *channels: str,
        auto_ack: bool = True,
        **options: Unpack[SubscribeOptions],
    ) -> Subscription[T]: ...

    @overload
    def subscribe(
        self,
        class_or_type: int | str,
        *channels: str,
        auto_ack: bool = True,
        **options: Unpack[SubscribeOptions],
    ) -> RawSubscription: ...

    def subscribe(
        self,
        class_or_type: type[Any] | int | str,
        *channels: str,
        auto_ack: bool = True,
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
    ) -> Subscription[Any] | RawSubscription:
        """Subscribe to the messages of a class. The subscription begins with its block.

            async with bus.subscribe(ShopCreated, "shops.*") as shops:
                async for shop in shops:
                    print(shop)

        Every subscription receives every message that matches, unless it shares a group.

        A message is acknowledged when you ask for the next one, or when the `async with` block is
        left without an exception. If the block raises, its last message is redelivered after a
        backoff; if the block is cancelled, at once. The details:

        - A loop, `get`, `take` and `anext` all acknowledge the messages that were returned before.
          Inside the body of a loop they do not acknowledge the message of that loop.
        - Leaving a loop by `break` or `return`, or by an exception that is handled inside the
          block, acknowledges nothing by itself: the two rules above apply.
        - A loop that is cancelled inside the block returns its message: it is the next one.
        - `message.nack()` rejects a message, `message.ack()` acknowledges it early.

        Args:
            class_or_type: Bound type, or id or name of a class. The subscription returns the values
                of the type, or the messages of the class.
            channels: Patterns of channels, such as "orders.*" or "orders.#". Default: all messages.
            auto_ack: Acknowledge messages as described above. If False, call `message.ack()` or
                `subscription.ack_batch(batch)` yourself.
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
            A `Subscription` for a type, a `RawSubscription` for a class id or name. Its block
            raises RefusedError if the bus refuses the subscription.

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
        kind = RawSubscription if target.decode is None else Subscription[Any]
        return kind(self, target, request, auto_ack=auto_ack)

    @overload
    def handle(
        self,
        class_or_type: type[T],
        handler: Callable[[T], Awaitable[object] | object],
        *channels: str,
        concurrency: int = 1,
        **options: Unpack[SubscribeOptions],
    ) -> None: ...

    @overload
    def handle(
        self,
        class_or_type: int | str,
        handler: Callable[[Message[bytes]], Awaitable[object] | object],
        *channels: str,
        concurrency: int = 1,
        **options: Unpack[SubscribeOptions],
    ) -> None: ...

    def handle(
        self,
        class_or_type: type[Any] | int | str,
        handler: Handler,
        *channels: str,
        concurrency: int = 1,
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
        """Call a function for every message of a class, until the bus is left.

            bus.handle(ShopCreated, send_welcome, durable="welcome")

        A message is acknowledged when its handler has returned, unless the handler has called
        `nack`, `terminate` or `ack` of the message. If the handler raises, the message is
        redelivered after a backoff; the error is logged, and raised when the bus is left. Each of
        several handlers of a class receives every message. A function that is not async runs in the
        event loop, so it must not block.

        If the connection is lost for good, the block of the bus is cancelled and raises
        BusConnectionError. If a handler raises KeyboardInterrupt or SystemExit, the block is
        cancelled and raises the same exception.

        Args:
            class_or_type: Bound type, or id or name of a class. The argument of the handler is a
                value of the type, or a message of the class.
            handler: Function of one argument; it may be async. If the message is a request, the
                value that it returns is the reply.
            channels: Patterns of channels, such as "orders.*" or "orders.#". Default: all messages.
            concurrency: Maximum number of messages that are handled at the same time.
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
            BusConnectionError: The connection is lost for good.
        """
        arguments.check_integer("concurrency", concurrency, minimum=1, maximum=_CONCURRENCY_MAX)
        check_handler(handler, is_async_allowed=True)
        self.connection.check_open()
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
        runner = HandlerRunner(
            self, subscription, handler, failures=self.failures, concurrency=concurrency
        )
        class_id = self._outbound.find_class_id(subscription.target.class_reference)
        if class_id is not None:
            runner.open(class_id)
        self._handler_runners.append(runner)
        self._tasks.start_soon(runner.run)

    async def _wait_for_handlers(self) -> None:
        while any(runner.is_opening for runner in self._handler_runners):
            await self.connection.changed.wait()

    def end_block(self, error: BaseException) -> None:
        """Cancel the block of the bus and raise `error` when it is left. Internal."""
        if self.block_error is None:
            self.block_error = error
            self._tasks.cancel_scope.cancel()

    @property
    def is_idle(self) -> bool:
        """True if handlers have processed every received message. Internal."""
        return all(runner.is_idle for runner in self._handler_runners)

    async def drain(self) -> None:
        """Wait until handlers have processed all messages that the bus can deliver now.

        Messages and replies that the handlers publish are included. Everything is flushed, and the
        bus has applied every acknowledgement. The call does not wait for messages in a backoff or
        delay, or for messages of other subscriptions. It does not end while other programs keep
        publishing for the handlers. Do not call it from a handler: it would wait for itself.

        Raises:
            ExceptionGroup: Contains the refusals that no call has raised yet.
            BusConnectionError: The connection is lost for good.
        """
        empty_reply_count = 0
        while empty_reply_count < (EMPTY_REPLIES_UNTIL_IDLE if self._handler_runners else 1):
            started_before = self._started_count
            while not self.is_idle:
                self.connection.check_open()
                await self.connection.changed.wait()
            await self.flush()
            await self.connection.request(self._core.sync)
            has_received_none = self.is_idle and started_before == self._started_count
            empty_reply_count = empty_reply_count + 1 if has_received_none else 0

    @property
    def _started_count(self) -> int:
        """Messages passed to handlers so far."""
        return sum(runner.started_count for runner in self._handler_runners)

    # Requests and inspection ----------------------------------------------------------------------

    @overload
    async def request(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        timeout: float = 5.0,
        as_: type[T],
        **about: Unpack[PublishOptions],
    ) -> T: ...

    @overload
    async def request(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        timeout: float = 5.0,
        as_: None = None,
        **about: Unpack[PublishOptions],
    ) -> Message[bytes]: ...

    async def request(
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

            total = await bus.request(GetTotal(month=5), as_=Total)

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
        connection = self.connection
        connection.check_open()
        now = connection.event_loop.current_time()
        deadline = now + arguments.timeout_or_infinity("timeout", timeout)
        if deadline <= now or not self._can_request_now(message, class_id):
            with anyio.CancelScope(deadline=deadline) as scope:
                await self._prepare_request(message, class_id)
            if scope.cancelled_caught:
                raise request_reply.no_reply_error(message, class_id, timeout)
        pending_replies = self._replies
        assert pending_replies is not None
        reply_waiter = connection.event_loop.create_waiter()
        envelope = pending_replies.get_envelope(about, timeout, self._envelope)
        id_, payload = self._encode_now(message, class_id)
        pending_reply = pending_replies.add_request(reply_waiter.wake)
        try:
            self._publish_buffer.publish_encoded(
                envelope.encode(pending_reply.request_id, payload), id_, len(payload)
            )
            await self._wait_for_reply(pending_reply, reply_waiter, deadline)
        finally:
            pending_replies.discard(pending_reply)
        if pending_reply.reply is None:
            raise request_reply.no_reply_error(message, class_id, timeout)
        return request_reply.decode_reply(pending_reply.reply, decode)

    def _can_request_now(self, message: object, class_id: int | str | None) -> bool:
        """Return True if a request can be published without waiting."""
        return (
            self._replies is not None
            and self._writer.has_room
            and (
                type(message) in self._routes
                if class_id is None
                else self._outbound.find_class_id(class_id) is not None
            )
        )

    async def _prepare_request(self, message: object, class_id: int | str | None) -> None:
        """Wait until a request can be published."""
        await self._open_replies()
        if class_id is not None:
            await self._class_id(class_id)
        elif type(message) not in self._routes:
            await self._new_route(type(message))
        await self._writer.wait_for_room()

    async def _wait_for_reply(
        self, pending_reply: PendingReply, reply_waiter: Waiter, deadline_time: float
    ) -> None:
        """Wait until the deadline for the reply to the message that was published last.

        Raises RefusedError if the bus refuses the request.
        """
        connection, position = self.connection, self._core.published_position - 1

        def on_confirm() -> None:
            if waiter.refusals or not waiter.is_done:
                reply_waiter.wake()

        waiter = connection.confirms.add_waiter(position, position, on_confirm)
        deadline = connection.deadlines.add(deadline_time, reply_waiter.wake)
        self._writer.write_now()  # A request is not delayed to be written with later messages.
        try:
            await reply_waiter
        finally:
            connection.deadlines.remove(deadline)
            if not waiter.is_done:
                connection.confirms.cancel(waiter)
        if waiter.refusals:
            raise waiter.refusals[0]
        if pending_reply.reply is None:
            connection.check_open()

    async def reply(self, message: Message[Any], value: object, *, confirm: bool = True) -> None:
        """Reply to a request.

        Args:
            message: The request; `message.is_request` is true.
            value: Value of a bound type, or bytes.
            confirm: Wait until the bus has confirmed the reply.

        Raises:
            LocalProtocolError: The message is not a request, or it asks for a reply in a class
                that is not the class of replies.
            Exception: The errors of `publish`.
        """
        address = self.received_requests.get_reply_address(message)
        if not self.can_reply_now:
            await self.prepare_reply()
        position = self.queue_reply(*address, value)
        if not confirm:
            self._writer.write_soon()
        elif refused := await self.connection.wait_confirmed(position, position):
            raise refused[0]

    @property
    def can_reply_now(self) -> bool:
        """True if a reply can be published without waiting. Internal."""
        return self._replies_class_id is not None and self._writer.has_room

    async def prepare_reply(self) -> None:
        """Wait until a reply can be published. Internal."""
        self._replies_class_id = await self.resolve_class_id(request_reply.REPLY_CLASS_NAME)
        await self._writer.wait_for_room()

    def queue_reply(self, address: ReplyAddress, request_id: bytes, value: object) -> int:
        """Publish a reply when `can_reply_now`, and return its position. The caller writes.
        Internal.
        """
        assert self._replies_class_id is not None
        address.check_is_for_replies(self._replies_class_id)
        payload = self._outbound.encode_payload(value)
        self.connection.check_open()
        return self._publish_buffer.publish_encoded(
            address.envelope.encode(request_id, payload), address.class_id, len(payload)
        )

    async def _open_replies(self) -> None:
        """Subscribe to the replies to this bus, before the first request."""
        async with self._replies_lock:
            if self._replies is None:
                class_id = await self.resolve_class_id(request_reply.REPLY_CLASS_NAME)
                pending_replies = PendingReplies(class_id, self._core.reply_channel_prefix)
                messages = self.subscribe(
                    pending_replies.class_id, pending_replies.channel, start="new"
                )
                await self._tasks.start(self._receive_replies, pending_replies, messages)
                self._replies = pending_replies

    async def _receive_replies(
        self,
        pending_replies: PendingReplies,
        subscription: RawSubscription,
        *,
        task_status: anyio.abc.TaskStatus[None],
    ) -> None:
        """Pass received replies to their requests, until the bus is left or lost."""
        with suppress(BusConnectionError):  # Callers of `request` get the error as well.
            async with subscription:
                subscription.receive_in_reader(pending_replies.accept_reply)
                task_status.started()
                await subscription.wait_ended()

    @overload
    async def fetch(
        self,
        class_or_type: type[T],
        first: int = 0,
        count: int = ...,
        *,
        time: datetime | None = None,
    ) -> list[Message[T]]: ...

    @overload
    async def fetch(
        self,
        class_or_type: int | str,
        first: int = 0,
        count: int = ...,
        *,
        time: datetime | None = None,
    ) -> list[Message[bytes]]: ...

    async def fetch(
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
            await self.resolve_class_id(target.class_reference), target, first, count, time
        )
        while not fetching.is_done:
            fetching.accept_reply(
                await self.connection.request(partial(fetching.send_request, self._core))
            )
        return fetching.messages

    @overload
    async def explain(self) -> BusInfo: ...

    @overload
    async def explain(self, class_or_type: type | int | str) -> ClassInfo: ...

    @overload
    async def explain(
        self, class_or_type: type | int | str | None = None, *, channel: str
    ) -> ChannelInfo: ...

    @overload
    async def explain(self, *, session: int) -> SessionInfo: ...

    async def explain(
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
        return get_inquire_reply(
            await self.connection.request(partial(self._core.inquire, inquiry))
        )

    async def keep_last_values(self, class_or_type: type | int | str) -> None:
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
        class_id = await self.resolve_class_id(target.class_reference)
        await self.connection.request(partial(self._core.keep_last_values, class_id))

    async def purge(
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
            await self.connection.request(
                partial(
                    self._core.purge,
                    await self.resolve_class_id(target.class_reference),
                    *check_range(first, last),
                )
            )
        )
