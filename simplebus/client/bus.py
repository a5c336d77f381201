"""The client under trio and asyncio: what a program calls.

Rule 1: when a call that publishes raises, nothing of it was published; when it is cancelled, too.
Rule 2: what goes wrong in a handler is the handler's: the bus goes on, and tells when it is left.
"""

from __future__ import annotations

import inspect
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import anyio.lowlevel

from simplebus.client import dial
from simplebus.client.dial import Address
from simplebus.client.subscription import Subscription
from simplebus.client.wire import Wire
from simplebus.core.client import ClientCore, ClientStatistics
from simplebus.core.errors import BusConnectionError
from simplebus.core.limits import CLOSE_SECONDS, CLOSE_SECONDS_FAILED, Limits
from simplebus.core.messages import Message

log = logging.getLogger("simplebus.client")

Handler = Callable[[Message], Awaitable[object] | object]

# Errors of handlers kept for the end; the log has all of them.
_ERRORS_MAX = 100


@asynccontextmanager
async def connect(
    address: str, *, timeout: float = 5.0, frame_bytes: int = Limits().frame_bytes
) -> AsyncIterator[Bus]:
    """Connect to a bus: `async with simplebus.connect("simplebus://127.0.0.1:8888") as bus`.

    Args: the address as `simplebus://host:port` or `host:port`; the seconds that connecting may
    take; the longest frame to send and to accept.
    Resource handling: leaving the block ends handlers, writes what is queued, and closes.
    Error handling: raises ValueError for what is no address, and BusConnectionError when no bus
    answers, or when leaving finds bytes that could not be written. What handlers raised comes as
    an ExceptionGroup, unless the block itself raises.
    """
    where = Address.parse(address)
    deadline = anyio.current_time() + timeout
    failure: BaseException | None = None
    failed = True
    with await _dial(where, timeout) as sock:
        wire = Wire(ClientCore(frame_bytes_max=frame_bytes), sock, where)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wire.run)
                try:
                    async with anyio.create_task_group() as handlers:
                        bus = Bus(wire, handlers)
                        try:
                            with anyio.move_on_after(deadline - anyio.current_time()) as patience:
                                await wire.sync()
                            if patience.cancelled_caught:
                                raise dial.unanswered(where, timeout, connected=True)
                            yield bus
                            failed = False
                        except (Exception, KeyboardInterrupt, SystemExit) as error:
                            failure = error  # Kept out of the task groups, which would wrap it.
                        handlers.cancel_scope.cancel()
                finally:
                    seconds = CLOSE_SECONDS_FAILED if failed else CLOSE_SECONDS
                    await wire.close(seconds=seconds, shield=failed)
        finally:
            if failure is not None:
                raise failure
    problem = bus.failure() or wire.unwritten()
    if problem is not None:
        raise problem


async def _dial(where: Address, timeout: float) -> socket.socket:
    """A connected socket. Raises BusConnectionError."""
    problem: OSError | None = None
    with anyio.move_on_after(timeout):
        try:
            infos = dial.numeric(where) or await anyio.getaddrinfo(
                where.host, where.port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise dial.refused(where, error) from error
        for info in infos:
            try:
                sock = dial.start(info)
            except OSError as error:
                problem = error
                continue
            try:
                await anyio.wait_writable(sock)
                dial.finish(sock)
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError):
                    raise
                problem = error
            else:
                return sock
        raise dial.refused(where, problem) from problem
    raise dial.unanswered(where, timeout, connected=False)


class Bus:
    """A connection to a bus; made by `connect`."""

    def __init__(self, wire: Wire, handlers: anyio.abc.TaskGroup) -> None:
        self._wire = wire
        self._core = wire.core
        self._outgoing = wire.core.outgoing
        self._handlers = handlers
        self._handled: list[Subscription] = []
        self._errors: list[Exception] = []
        self._error_count = 0

    async def publish(self, payload: bytes, *, class_id: int) -> None:
        """Hand a message over for sending. Waits while the bus takes bytes slower than they come.

        Raises LocalProtocolError for a payload that the protocol cannot carry, ValueError for what
        is no class id, TypeError for what is not bytes, BusConnectionError when the bus is gone.
        """
        if self._outgoing.queued_bytes >= self._wire.write_at:
            await self._wire.make_room()
        self._core.publish(payload, class_id)

    async def publish_many(self, payloads: Iterable[bytes], *, class_id: int) -> None:
        """Hand many messages over at once: all, or, when it raises what `publish` does, none."""
        await anyio.lowlevel.checkpoint()
        await self._wire.make_room()
        self._core.publish_many(payloads, class_id)
        self._wire.push()

    async def flush(self) -> None:
        """Wait until everything published and acknowledged so far is written to the socket."""
        await self._wire.flush()

    async def drain(self) -> None:
        """Wait until handlers have processed what came, and the bus has applied what was sent.

        What subscriptions hold that are no handlers' is their consumers' to process. Not to be
        called by a handler: it would wait for itself.
        """
        while not all(subscription.is_idle for subscription in self._handled):
            self._wire.check()
            await self._wire.changed.wait()
        await self._wire.flush()
        await self._wire.sync()

    def subscribe(self, class_id: int, *, auto_ack: bool = True) -> Subscription:
        """Messages of a class: `async with bus.subscribe(1) as messages`, then iterate.

        Several subscriptions to one class see every message each; it is acknowledged to the bus
        when all of them have. With `auto_ack=False` acknowledge by `messages.ack(message)`.
        """
        return Subscription(self._wire, class_id, auto_ack=auto_ack)

    def handle(self, class_id: int, handler: Handler) -> None:
        """Call `handler(message)` for every message of a class, one at a time, until the end.

        A class may have several handlers; a message is acknowledged when all have returned. When
        one raises, the message is not acknowledged and comes again; the error is logged, and raised
        when the bus is left.
        """
        subscription = Subscription(self._wire, class_id, auto_ack=True)
        subscription.open()
        self._handled.append(subscription)
        self._handlers.start_soon(self._run_handler, subscription, handler)

    def statistics(self) -> ClientStatistics:
        """A snapshot of this connection."""
        return self._core.statistics()

    async def _run_handler(self, subscription: Subscription, handler: Handler) -> None:
        try:
            async for message in subscription:
                try:
                    outcome = handler(message)
                    if outcome is not None and inspect.isawaitable(outcome):
                        await outcome
                except Exception as error:
                    subscription.inbox.give_up()
                    self._failed(handler, message, error)
        except BusConnectionError as error:
            log.debug("handler %r ends: %s", handler, error)

    def _failed(self, handler: Handler, message: Message, error: Exception) -> None:
        log.error("handler %r failed on %r; it will come again", handler, message, exc_info=error)
        self._error_count += 1
        if len(self._errors) < _ERRORS_MAX:
            self._errors.append(error)

    def failure(self) -> ExceptionGroup[Exception] | None:
        """What handlers raised, if any did."""
        if not self._errors:
            return None
        return ExceptionGroup(f"handlers failed {self._error_count} times", self._errors)
