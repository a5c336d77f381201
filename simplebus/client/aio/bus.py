"""The client under trio and asyncio: what a program calls to subscribe and to ask.

Rule 1: no decisions here. How a subscription is asked for is the business of `options`, what a
request carries that of `replies`; the wire waits.
"""

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
from simplebus.client.handler_errors import HandlerErrors
from simplebus.client.inspect import FetchOperation, get_inquire_reply, get_purged_count, build_inquire_request, check_range
from simplebus.client.message_builder import PublishOptions
from simplebus.client.message_types import Registry
from simplebus.client.request_reply import QUIET_ANSWERS, Handler, Replies, check_handler
from simplebus.client.subscribe_options import (
    SlowPolicy,
    StartPosition,
    SubscribeOptions,
    subscribe_request,
)
from simplebus.client.subscription_target import Target
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
    """A bus that a program is connected to; made by `connect`."""

    def __init__(self, wire: ClientConnection, registry: Registry, tasks: anyio.abc.TaskGroup) -> None:
        super().__init__(wire, registry)
        self.failures = HandlerErrors()
        """What handlers raised. For this package."""
        self.block_error: BaseException | None = None
        """Why the block was ended although it was not through: what leaving raises. For this
        package."""
        self._tasks = tasks
        """Where handlers run."""
        self._replies: Replies | None = None
        """None before the first request."""
        self._replies_lock = anyio.Lock()

    # Subscribing ---------------------------------------------------------------------------------

    @overload
    def subscribe(
        self,
        what: type[T],
        *channels: str,
        auto_ack: bool = True,
        **options: Unpack[SubscribeOptions],
    ) -> Subscription[T]: ...

    @overload
    def subscribe(
        self,
        what: int | str,
        *channels: str,
        auto_ack: bool = True,
        **options: Unpack[SubscribeOptions],
    ) -> RawSubscription: ...

    def subscribe(
        self,
        what: type[Any] | int | str,
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

        - A loop, `get`, `take` and `anext` all acknowledge what was returned before. Inside the
          body of a loop they do not acknowledge the message of that loop.
        - Leaving a loop by `break` or `return`, or by an exception that is handled inside the
          block, acknowledges nothing by itself: the two rules above apply.
        - A loop that is cancelled inside the block returns its message: it is the next one.
        - `message.nack()` rejects a message, `message.ack()` acknowledges it early.

        Args:
            what: Bound type, whose values the subscription returns, or the id or name of a class,
                whose messages it returns.
            channels: Patterns of channels, such as "orders.*" or "orders.#". None for all messages.
            auto_ack: Acknowledge messages as described above. If False, call `message.ack()` or
                `subscription.ack_batch(batch)` yourself.
            durable: Name under which the bus keeps the position when the program is gone. The next
                subscription with the name continues there.
            durable_seconds: Seconds that the bus keeps a durable without a connected subscription.
                None keeps the present setting, which is forever by default.
            group: Name of a group, whose members share one position: each message goes to one
                member, on whichever connection.
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
                applies. Required with any policy but "block", and not allowed with that.
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
        target = Target.of(what, self._registry)
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
        what: type[T],
        handler: Callable[[T], Awaitable[object] | object],
        *channels: str,
        concurrency: int = 1,
        **options: Unpack[SubscribeOptions],
    ) -> None: ...

    @overload
    def handle(
        self,
        what: int | str,
        handler: Callable[[Message[bytes]], Awaitable[object] | object],
        *channels: str,
        concurrency: int = 1,
        **options: Unpack[SubscribeOptions],
    ) -> None: ...

    def handle(
        self,
        what: type[Any] | int | str,
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

        A message is acknowledged when its handler has returned. If the handler raises, the message
        is redelivered after a backoff; the error is logged, and raised when the bus is left. Each
        of several handlers of a class receives every message.

        If the bus is gone for good, the block of the bus is cancelled and raises
        BusConnectionError. If a handler raises KeyboardInterrupt or SystemExit, the block is
        cancelled and raises that.

        Args:
            what: Bound type, whose values the handler is called with, or the id or name of a class,
                whose messages it is called with.
            handler: Function of one argument; it may be async. If the message is a request, the
                value that it returns is the reply.
            channels: Patterns of channels, such as "orders.*" or "orders.#". None for all messages.
            concurrency: Maximum number of messages that are handled at the same time.
            durable: Name under which the bus keeps the position when the program is gone. The next
                subscription with the name continues there.
            durable_seconds: Seconds that the bus keeps a durable without a connected subscription.
                None keeps the present setting, which is forever by default.
            group: Name of a group, whose members share one position: each message goes to one
                member, on whichever connection.
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
                applies. Required with any policy but "block", and not allowed with that.
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
        check_handler(handler, may_wait=True)
        self.connection.check_open()
        subscription = self.subscribe(
            what,
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
        handling = HandlerRunner(
            self, subscription, handler, failures=self.failures, concurrency=concurrency
        )
        known = self._outbound.find_class_id(subscription.target.what)
        if known is not None:
            handling.open(known)
        self._handler_runners.append(handling)
        self._tasks.start_soon(handling.run)

    def end_block(self, error: BaseException) -> None:
        """Handlers cannot go on: have the block cancelled, and leaving it raise this. For this
        package."""
        if self.block_error is None:
            self.block_error = error
            self._tasks.cancel_scope.cancel()

    @property
    def is_idle(self) -> bool:
        """Whether handlers are through with everything that came. For this package."""
        return all(handling.is_idle for handling in self._handler_runners)

    async def drain(self) -> None:
        """Wait until handlers have processed all that the bus could send them, what comes of it
        included: what they publish, their replies. All is flushed, and the bus has applied it.

        What a handler has failed on, and what its publisher has delayed, would come only after a
        pause: that is not waited for, nor what other subscriptions hold. As long as others publish
        for the handlers without a break, there is no end. Not to be called by a handler: it would
        wait for itself.
        """
        answers = 0
        while answers < (QUIET_ANSWERS if self._handler_runners else 1):
            begun = self._started_count
            while not self.is_idle:
                self.connection.check_open()
                await self.connection.changed.wait()
            await self.flush()
            await self.connection.request(self._core.sync)
            answers = answers + 1 if self.is_idle and begun == self._started_count else 0

    @property
    def _started_count(self) -> int:
        """Messages that were handed to handlers."""
        return sum(handling.started_count for handling in self._handler_runners)

    # Asking --------------------------------------------------------------------------------------

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
        """Publish a message and return the first reply to it: as a value of the type `as_`, or the
        message. It expires when nobody waits for its reply any longer.

        Raises TimeoutError when none came in time, and what `publish` does.
        """
        decode = None if as_ is None else self._registry.bindings[as_].decode
        self.connection.check_open()
        answered = anyio.Event()
        with anyio.move_on_after(arguments.check_timeout("timeout", timeout)):
            asking = await self._open_replies()
            asked = asking.ask(about, timeout=timeout, wake=answered.set)
            try:
                await self.publish(message, class_id=class_id, confirm=False, **asked.about)
                await self._wait_for_reply(answered)
            finally:
                asking.forget(asked)
            assert asked.reply is not None
            return request_reply.value(asked.reply, decode)
        raise request_reply.unanswered(message, class_id, timeout)

    async def _wait_for_reply(self, answered: anyio.Event) -> None:
        """Return when what was published last is answered. Raises what the bus refused it for, and
        BusConnectionError when the bus is gone for good."""
        confirms, position = self.connection.confirms, self._core.published_position - 1

        def through() -> None:
            if waiter.refusals or not waiter.is_done:
                answered.set()

        waiter = confirms.add_waiter(position, position, through)
        self._writer.write_now()  # Nobody waits for the next message to write this one with.
        try:
            await answered.wait()
        finally:
            if not waiter.is_done:
                confirms.cancel(waiter)
        if waiter.refusals:
            raise waiter.refusals[0]
        self.connection.check_open()

    async def reply(self, message: Message[Any], value: object, *, confirm: bool = True) -> None:
        """Answer a request, and wait for the confirm unless told otherwise. Raises
        LocalProtocolError for a message that asks for no reply, or for one anywhere but where
        replies are, and what `publish` does."""
        class_id, envelope = request_reply.reply_to(message)
        request_reply.check_home(class_id, envelope, await self.resolve_class_id(request_reply.CLASS))
        payload = self._outbound.encode_payload(value)
        self.connection.check_open()
        if not confirm:
            if self._publish_buffer.published_bytes >= self._writer.free_until_bytes:
                await self._writer.wait_for_room()
            self._core.publish(payload, class_id, envelope)
            return
        position = self._core.publish(payload, class_id, envelope)
        if refused := await self.connection.wait_confirmed(position, position):
            raise refused[0]

    async def _open_replies(self) -> Replies:
        """The subscription that replies to this bus come to; made by the first request."""
        async with self._replies_lock:
            if self._replies is None:
                asking = Replies(await self.resolve_class_id(request_reply.CLASS))
                messages = self.subscribe(asking.class_id, asking.channel, start="new")
                await self._tasks.start(self._receive_replies, asking, messages)
                self._replies = asking
            return self._replies

    async def _receive_replies(
        self,
        asking: Replies,
        subscription: RawSubscription,
        *,
        task_status: anyio.abc.TaskStatus[None],
    ) -> None:
        with suppress(BusConnectionError):  # Who waits for a reply learns it from the wire.
            async with subscription as messages:
                task_status.started()
                async for message in messages:
                    asking.take(message)

    @overload
    async def fetch(
        self, what: type[T], first: int = 0, count: int = ..., *, time: datetime | None = None
    ) -> list[Message[T]]: ...

    @overload
    async def fetch(
        self, what: int | str, first: int = 0, count: int = ..., *, time: datetime | None = None
    ) -> list[Message[bytes]]: ...

    async def fetch(
        self,
        what: Any,
        first: int = 0,
        count: int = FETCH_MESSAGES_MAX,
        *,
        time: datetime | None = None,
    ) -> list[Message[Any]]:
        """Messages of a class that the bus still holds, by sequence, `count` at most; from the
        first one on that it accepted at or after a `time`, if there is one. Nobody's position
        changes; they cannot be acknowledged."""
        target = Target.of(what, self._registry)
        fetching = FetchOperation(await self.resolve_class_id(target.what), target, first, count, time)
        while not fetching.is_done:
            fetching.accept_reply(await self.connection.request(partial(fetching.send_request, self._core)))
        return fetching.messages

    @overload
    async def explain(self) -> BusInfo: ...

    @overload
    async def explain(self, what: type | int | str) -> ClassInfo: ...

    @overload
    async def explain(
        self, what: type | int | str | None = None, *, channel: str
    ) -> ChannelInfo: ...

    @overload
    async def explain(self, *, session: int) -> SessionInfo: ...

    async def explain(
        self,
        what: type | int | str | None = None,
        *,
        channel: str | None = None,
        session: int | None = None,
    ) -> InquireReply:
        """What waits for what: of a class; of a channel, in all classes or in one; of a session; or
        of the whole bus. What is answered is described in `simplebus.core.explained`.

        Raises RefusedError for a class or a session that is not there, and none is made.
        """
        asked = build_inquire_request(what, channel, session, self._registry)
        return get_inquire_reply(await self.connection.request(partial(self._core.inquire, asked)))

    async def keep_last_values(self, what: type | int | str) -> None:
        """Have a class keep the last message of each channel from now on, besides everything else
        that it keeps, for subscriptions that begin with these: `start="last_values"`.

        A message with an empty payload takes its channel's value away. The bus's own settings for
        the class win.
        """
        target = Target.of(what, self._registry)
        class_id = await self.resolve_class_id(target.what)
        await self.connection.request(partial(self._core.keep_last_values, class_id))

    async def purge(self, what: type | int | str, first: int = 0, last: int | None = None) -> int:
        """Have the stored messages first..last-1 of a class be nobody's any more: no subscription
        gets them, nor does `fetch`. All of them unless told otherwise. Returns how many they were.

        What this program has published before counts, as far as it is stored.
        """
        target = Target.of(what, self._registry)
        return get_purged_count(
            await self.connection.request(
                partial(self._core.purge, await self.resolve_class_id(target.what), *check_range(first, last))
            )
        )
