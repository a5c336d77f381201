"""The client under trio and asyncio: what a program calls to subscribe and to ask.

Rule 1: no decisions here. How a subscription is asked for is the business of `options`, what a
request carries that of `replies`; the wire waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, TypeVar, Unpack, overload

import anyio
import anyio.abc

from simplebus.client import request_reply
from simplebus.client.aio.connection import Wire
from simplebus.client.aio.handlers import Handling
from simplebus.client.aio.publisher import Publisher
from simplebus.client.aio.subscription import RawSubscription, Subscription
from simplebus.client.core import arguments
from simplebus.client.core.messages import Message
from simplebus.client.handler_errors import Failures
from simplebus.client.inspect import Fetching, answer, purged, question, span
from simplebus.client.message_builder import About
from simplebus.client.message_types import Registry
from simplebus.client.request_reply import QUIET_ANSWERS, Handler, Replies, check_handler
from simplebus.client.subscribe_options import Options, subscribe_request
from simplebus.client.subscription_target import Target
from simplebus.core.errors import BusConnectionError
from simplebus.core.limits import FETCH_MESSAGES_MAX
from simplebus.core.protocol.inquiry import BusSaid, ChannelSaid, ClassSaid, Explained, SessionSaid

T = TypeVar("T")

_CONCURRENCY_MAX = 100_000


class Bus(Publisher):
    """A bus that a program is connected to; made by `connect`."""

    def __init__(self, wire: Wire, registry: Registry, tasks: anyio.abc.TaskGroup) -> None:
        super().__init__(wire, registry)
        self.failures = Failures()
        """What handlers raised. For this package."""
        self.end: BaseException | None = None
        """Why the block was ended although it was not through: what leaving raises. For this
        package."""
        self._tasks = tasks
        """Where handlers run."""
        self._replies: Replies | None = None
        """None before the first request."""
        self._opening_replies = anyio.Lock()

    # Subscribing ---------------------------------------------------------------------------------

    @overload
    def subscribe(
        self, what: type[T], *channels: str, auto_ack: bool = True, **options: Unpack[Options]
    ) -> Subscription[T]: ...

    @overload
    def subscribe(
        self, what: int | str, *channels: str, auto_ack: bool = True, **options: Unpack[Options]
    ) -> RawSubscription: ...

    def subscribe(
        self, what: Any, *channels: str, auto_ack: bool = True, **options: Unpack[Options]
    ) -> Subscription[Any] | RawSubscription:
        """Messages of a class: `async with bus.subscribe(ShopCreated) as shops`, then iterate.

        Args: a type, whose values the loop gives, or a class by id or name, whose messages it
        gives; patterns of channels, none for all messages; whether asking for the next message
        acknowledges the one before, or you do; how the bus is to serve it.
        Every subscription gets every message that is for it. Raises RefusedError on entering when
        the bus refuses it, UnboundTypeError and ValueError at once.
        """
        target = Target.of(what, self._registry)
        request = subscribe_request(channels, **options)
        kind = RawSubscription if target.decode is None else Subscription[Any]
        return kind(self, target, request, auto_ack=auto_ack)

    @overload
    def handle(
        self,
        what: type[T],
        handler: Callable[[T], Awaitable[object] | object],
        *channels: str,
        concurrency: int = 1,
        **options: Unpack[Options],
    ) -> None: ...

    @overload
    def handle(
        self,
        what: int | str,
        handler: Callable[[Message[bytes]], Awaitable[object] | object],
        *channels: str,
        concurrency: int = 1,
        **options: Unpack[Options],
    ) -> None: ...

    def handle(
        self,
        what: Any,
        handler: Handler,
        *channels: str,
        concurrency: int = 1,
        **options: Unpack[Options],
    ) -> None:
        """Call `handler(value)`, or `handler(message)` for a class by id or name, for all that
        comes, `concurrency` at a time, until the bus is left. What it returns answers a request.

        A message is acknowledged when its handler has returned. When that raises, it comes again
        after a pause; the error is logged, and raised when the bus is left. Several handlers of a
        class get every message each.
        When the bus is gone for good, or the handler raises KeyboardInterrupt or SystemExit, the
        bus's block is cancelled, and leaving it raises BusConnectionError, or that.
        """
        arguments.check_integer("concurrency", concurrency, minimum=1, maximum=_CONCURRENCY_MAX)
        check_handler(handler, may_wait=True)
        self.wire.check()
        subscription = self.subscribe(what, *channels, auto_ack=False, **options)
        handling = Handling(
            self, subscription, handler, failures=self.failures, concurrency=concurrency
        )
        known = self._outbound.known_id(subscription.target.what)
        if known is not None:
            handling.open(known)
        self._handled.append(handling)
        self._tasks.start_soon(handling.run)

    def end_block(self, error: BaseException) -> None:
        """Handlers cannot go on: have the block cancelled, and leaving it raise this. For this
        package."""
        if self.end is None:
            self.end = error
            self._tasks.cancel_scope.cancel()

    @property
    def is_idle(self) -> bool:
        """Whether handlers are through with everything that came. For this package."""
        return all(handling.is_idle for handling in self._handled)

    async def drain(self) -> None:
        """Wait until handlers have processed all that the bus could send them, what comes of it
        included: what they publish, their replies. All is flushed, and the bus has applied it.

        What a handler has failed on, and what its publisher has delayed, would come only after a
        pause: that is not waited for, nor what other subscriptions hold. As long as others publish
        for the handlers without a break, there is no end. Not to be called by a handler: it would
        wait for itself.
        """
        answers = 0
        while answers < (QUIET_ANSWERS if self._handled else 1):
            begun = self._begun
            while not self.is_idle:
                self.wire.check()
                await self.wire.changed.wait()
            await self.flush()
            await self.wire.ask(self._core.sync)
            answers = answers + 1 if self.is_idle and begun == self._begun else 0

    @property
    def _begun(self) -> int:
        """Messages that were handed to handlers."""
        return sum(handling.begun for handling in self._handled)

    # Asking --------------------------------------------------------------------------------------

    @overload
    async def request(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        timeout: float = 5.0,
        as_: type[T],
        **about: Unpack[About],
    ) -> T: ...

    @overload
    async def request(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        timeout: float = 5.0,
        as_: None = None,
        **about: Unpack[About],
    ) -> Message[bytes]: ...

    async def request(
        self,
        message: object,
        *,
        class_id: int | str | None = None,
        timeout: float = 5.0,
        as_: Any = None,
        **about: Unpack[About],
    ) -> Any:
        """Publish a message and return the first reply to it: as a value of the type `as_`, or the
        message. It expires when nobody waits for its reply any longer.

        Raises TimeoutError when none came in time, and what `publish` does.
        """
        decode = None if as_ is None else self._registry.bindings[as_].decode
        self.wire.check()
        answered = anyio.Event()
        with anyio.move_on_after(arguments.check_timeout("timeout", timeout)):
            asking = await self._replies_open()
            asked = asking.ask(about, timeout=timeout, wake=answered.set)
            try:
                await self.publish(message, class_id=class_id, confirm=False, **asked.about)
                await self._reply_or_refusal(answered)
            finally:
                asking.forget(asked)
            assert asked.reply is not None
            return request_reply.value(asked.reply, decode)
        raise request_reply.unanswered(message, class_id, timeout)

    async def _reply_or_refusal(self, answered: anyio.Event) -> None:
        """Return when what was published last is answered. Raises what the bus refused it for, and
        BusConnectionError when the bus is gone for good."""
        confirms, position = self.wire.confirms, self._core.published_position - 1

        def through() -> None:
            if waiter.refused or not waiter.is_done:
                answered.set()

        waiter = confirms.wait_for(position, position, through)
        self._writer.push()  # Nobody waits for the next message to write this one with.
        try:
            await answered.wait()
        finally:
            if not waiter.is_done:
                confirms.leave(waiter)
        if waiter.refused:
            raise waiter.refused[0]
        self.wire.check()

    async def reply(self, message: Message[Any], value: object, *, confirm: bool = True) -> None:
        """Answer a request, and wait for the confirm unless told otherwise. Raises
        LocalProtocolError for a message that asks for no reply, or for one anywhere but where
        replies are, and what `publish` does."""
        class_id, envelope = request_reply.reply_to(message)
        request_reply.check_home(class_id, envelope, await self.class_of(request_reply.CLASS))
        payload = self._outbound.payload(value)
        self.wire.check()
        if not confirm:
            if self._source.published_bytes >= self._writer.write_at:
                await self._writer.make_room()
            self._core.publish(payload, class_id, envelope)
            return
        position = self._core.publish(payload, class_id, envelope)
        if refused := await self.wire.confirmed(position, position):
            raise refused[0]

    async def _replies_open(self) -> Replies:
        """The subscription that replies to this bus come to; made by the first request."""
        async with self._opening_replies:
            if self._replies is None:
                asking = Replies(await self.class_of(request_reply.CLASS))
                messages = self.subscribe(asking.class_id, asking.channel, start="new")
                await self._tasks.start(self._take_replies, asking, messages)
                self._replies = asking
            return self._replies

    async def _take_replies(
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
        fetching = Fetching(await self.class_of(target.what), target, first, count, time)
        while not fetching.is_done:
            fetching.take(await self.wire.ask(partial(fetching.ask, self._core)))
        return fetching.messages

    @overload
    async def explain(self) -> BusSaid: ...

    @overload
    async def explain(self, what: type | int | str) -> ClassSaid: ...

    @overload
    async def explain(
        self, what: type | int | str | None = None, *, channel: str
    ) -> ChannelSaid: ...

    @overload
    async def explain(self, *, session: int) -> SessionSaid: ...

    async def explain(
        self,
        what: type | int | str | None = None,
        *,
        channel: str | None = None,
        session: int | None = None,
    ) -> Explained:
        """What waits for what: of a class; of a channel, in all classes or in one; of a session; or
        of the whole bus. What is answered is described in `simplebus.core.explained`.

        Raises RefusedError for a class or a session that is not there, and none is made.
        """
        asked = question(what, channel, session, self._registry)
        return answer(await self.wire.ask(partial(self._core.inquire, asked)))

    async def keep_last_values(self, what: type | int | str) -> None:
        """Have a class keep the last message of each channel from now on, besides everything else
        that it keeps, for subscriptions that begin with these: `start="last_values"`.

        A message with an empty payload takes its channel's value away. The bus's own settings for
        the class win.
        """
        target = Target.of(what, self._registry)
        class_id = await self.class_of(target.what)
        await self.wire.ask(partial(self._core.keep_last_values, class_id))

    async def purge(self, what: type | int | str, first: int = 0, last: int | None = None) -> int:
        """Have the stored messages first..last-1 of a class be nobody's any more: no subscription
        gets them, nor does `fetch`. All of them unless told otherwise. Returns how many they were.

        What this program has published before counts, as far as it is stored.
        """
        target = Target.of(what, self._registry)
        return purged(
            await self.wire.ask(
                partial(self._core.purge, await self.class_of(target.what), *span(first, last))
            )
        )
