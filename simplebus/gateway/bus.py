"""Module bus: messages between the modules of one process.

Every method can be called from any thread, at any time, also inside a callback. No module's code
runs under the lock. A message is delivered to all modules of its route at once, or to none, so all
modules receive all messages in the same order, and a failed publish can be repeated. Queues are
bounded; a publisher waits for room unless the module has another policy. A callback that would wait
for a module that waits for it gets an error, so waiting always ends.

    publish(source) ── lock: route, room? ──► mailbox ──► worker ──► module.receive
                              └── full: wait until the worker makes room
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import trio

from simplebus.gateway.blocking import (
    StopSignal,
    TaskGate,
    ThreadGate,
    can_wait_for,
    current_callback,
    is_in_event_loop,
)
from simplebus.gateway.errors import MalformedError, ModuleBusError, invalid_argument
from simplebus.gateway.mailbox import QUEUE_UNITS, FullQueuePolicy, Mailbox, ModuleStatistics
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.routing import Router
from simplebus.gateway.workers import (
    MESSAGES_PER_TURN,
    ModuleEventLoop,
    TaskBody,
    deliver_async,
    is_async,
    receive_function,
    start_loop,
    start_thread,
)
from simplebus.logs.event_logger import EventLogger
from simplebus.logs.sampling import is_logged

log = EventLogger("simplebus.gateway")

_numbers = itertools.count(1)

_DEADLOCK = "waiting would not end: that module waits for the publishing callback"
_DEADLOCK_IDLE = "waiting would not end: a module of the bus waits for this callback"


@dataclass(frozen=True, slots=True)
class ModuleBusStatistics:
    """Statistics of a module bus."""

    references: int
    """Number of references. The bus is freed at 0."""
    modules: tuple[tuple[object, ModuleStatistics], ...]
    """Modules on the bus with their statistics, in the order of `add_module`."""
    published: int
    """Messages that were published."""
    malformed: int
    """Malformed byte forms, which were skipped."""
    waiting: int
    """Publishers that wait for room."""
    lost: int
    """Messages that were not delivered because their module was removed."""


class ModuleBus:
    """Bus between modules of one process. Each module receives one message at a time.

        with ModuleBus() as bus:
            bus.add_module(thermometer)
            bus.add_module(display)
            bus.publish(ModuleMessage(b"21.5"), source=thermometer)

    A module is an object with a method `receive(message)`, or a function. An `async def` runs in a
    task of the event loop in which the bus was entered with `async with`, or otherwise in a
    separate loop. Any other function runs in its own thread and may block; with `quick=True` it
    shares the event loop.

    The bus counts references, and its creator holds the first one. At zero references its modules
    are removed, and later calls raise ModuleBusError. Leaving a `with` block releases one
    reference; leaving `async with` also removes the modules whose tasks run in its loop.

    `publish`, `remove_module`, `dec_ref` and `destroy` may block. In an event loop, await
    `publish_async` and `remove_module_async` instead.

    Raises:
        ModuleBusError: From every method. `result` is ERROR, or INVALIDARG for invalid arguments.
    """

    def __init__(self) -> None:
        self.id = f"{next(_numbers)}-{secrets.token_hex(8)}"
        """Unique id."""
        self.url = f"inproc://{self.id}"
        """Name of the bus in messages."""
        try:
            self._router = Router(self.url)
        except (OSError, RuntimeError, MemoryError) as error:
            raise ModuleBusError(f"cannot create the bus: {error}") from error
        self._event_loop: ModuleEventLoop | None = None
        """Event loop for tasks, while the bus is entered."""
        self._entered: AbstractAsyncContextManager[None] | None = None
        self._publish_count = 0
        """Messages published by tasks. Other tasks get a turn after each MESSAGES_PER_TURN."""

    def __repr__(self) -> str:
        return f"<ModuleBus {self.url}, {len(self._router.mailboxes)} modules>"

    # References ----------------------------------------------------------------------------------

    def inc_ref(self) -> None:
        """Add a reference.

        Raises:
            ModuleBusError: The bus is freed.
        """
        with self._router.lock:
            self._router.check_open()
            self._router.references += 1

    def dec_ref(self) -> None:
        """Release a reference. The last one removes all modules and waits like `remove_module`.

        Raises:
            ModuleBusError: The bus is freed.
        """
        router, removed = self._router, []
        with router.lock:
            router.check_open()
            router.references -= 1
            if router.references == 0:
                removed = self._detach_all()
        self._wait_ended(removed)

    def destroy(self) -> None:
        """Same as `dec_ref`."""
        self.dec_ref()

    @property
    def is_freed(self) -> bool:
        """True if there is no reference any more."""
        return self._router.references == 0

    def _detach_all(self, event_loop: ModuleEventLoop | None = None) -> list[Mailbox]:
        """Remove all modules, or those in `event_loop`. Returns the mailboxes to wait for.

        The caller holds the lock.
        """
        mailboxes = self._router.mailboxes.values()
        removed = [
            mailbox
            for mailbox in mailboxes
            if event_loop is None or mailbox.event_loop is event_loop
        ]
        for mailbox in removed:
            self._router.detach(mailbox)
        self._router.clear_routes()  # A freed bus has no routes.
        return removed

    def __enter__(self) -> Self:
        with self._router.lock:
            self._router.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_freed:
            self.dec_ref()

    async def __aenter__(self) -> Self:
        with self._router.lock:
            self._router.check_open()
        if self._entered is not None:
            raise ModuleBusError(f"{self.url} is already entered in an event loop")
        self._entered = entered = self._open_event_loop()
        await entered.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        entered, self._entered = self._entered, None
        assert entered is not None, "left without being entered"
        return await entered.__aexit__(kind, error, traceback)

    @asynccontextmanager
    async def _open_event_loop(self) -> AsyncIterator[None]:
        """Enter a block in whose event loop tasks can run."""
        raised: Exception | None = None
        async with trio.open_nursery() as nursery:
            self._event_loop = event_loop = ModuleEventLoop(nursery)
            try:
                yield
            except Exception as error:  # Raised outside the nursery, which would wrap it.
                raised = error
                nursery.cancel_scope.cancel()
            finally:
                removed = self._leave_event_loop(event_loop)
            await self._wait_ended_async(removed)
        if raised is not None:
            raise raised

    def _leave_event_loop(self, event_loop: ModuleEventLoop) -> list[Mailbox]:
        """Leave the event loop. Returns the mailboxes to wait for."""
        router = self._router
        with router.lock:
            self._event_loop = None
            router.references -= bool(router.references)
            return self._detach_all(event_loop if router.references else None)

    # Modules -------------------------------------------------------------------------------------

    def add_module(
        self,
        module: object,
        *,
        quick: bool = False,
        hears_all: bool = True,
        places: int = QUEUE_UNITS,
        full: FullQueuePolicy = FullQueuePolicy.BLOCK,
    ) -> None:
        """Add a module, which receives the messages published from now on.

        Args:
            module: Object with a method `receive(message)`, or a function.
            quick: True if `receive` is not async and never blocks.
            hears_all: True to receive the messages of all other modules; False for linked ones
                only.
            places: Size of its queue in queue units of 64 KiB.
            full: Policy for a message when the queue is full.

        Raises:
            ModuleBusError: With INVALIDARG for an invalid argument or a module that is on the
                bus; with ERROR if its thread or task cannot be started.
        """
        receive = receive_function(module)
        is_awaited = is_async(receive)
        body = None
        if is_awaited or quick:

            async def body(mailbox: Mailbox) -> None:
                await deliver_async(mailbox, receive, is_awaited)

        mailbox = self._attach(module, hears_all, places, full, is_task=body is not None)
        try:
            if body is None:
                start_thread(mailbox, receive)
            else:
                self._start_task(mailbox, body)
        except RuntimeError as error:
            mailbox.end()
            raise ModuleBusError(
                f"module {mailbox.name} cannot start its worker: {error}"
            ) from error

    def add_worker(
        self,
        module: object,
        body: TaskBody,
        *,
        hears_all: bool = True,
        places: int = QUEUE_UNITS,
        full: FullQueuePolicy = FullQueuePolicy.BLOCK,
    ) -> Mailbox:
        """Add a module that takes its messages from its mailbox.

        Args:
            module: Any object that is not on the bus.
            body: Async function that takes messages from the mailbox until it returns None.
            hears_all: As in `add_module`.
            places: As in `add_module`.
            full: As in `add_module`.

        Returns:
            The mailbox.

        Raises:
            ModuleBusError: As in `add_module`.
        """
        mailbox = self._attach(module, hears_all, places, full, is_task=True)
        try:
            self._start_task(mailbox, body)
        except RuntimeError as error:
            mailbox.end()
            raise ModuleBusError(
                f"module {mailbox.name} cannot start its worker: {error}"
            ) from error
        return mailbox

    def _attach(
        self, module: object, hears_all: bool, places: int, full: FullQueuePolicy, *, is_task: bool
    ) -> Mailbox:
        if module is None:
            raise invalid_argument("expected a module, got None")
        if not isinstance(places, int) or places < 1:
            raise invalid_argument(f"places must be 1 or more, got {places!r}")
        if full not in list(FullQueuePolicy):
            raise invalid_argument(
                f"full must be one of {', '.join(FullQueuePolicy)}, got {full!r}"
            )
        mailbox = Mailbox(self._router, module, places, FullQueuePolicy(full))
        mailbox.hears_all = hears_all
        with self._router.lock:
            self._router.attach(mailbox)
            mailbox.event_loop = self._event_loop if is_task else None
        return mailbox

    def _start_task(self, mailbox: Mailbox, body: TaskBody) -> None:
        if mailbox.event_loop is None:
            start_loop(mailbox, body)
        else:
            mailbox.event_loop.start(mailbox, body)

    def remove_module(self, module: object) -> None:
        """Remove a module. None of its callbacks begins after this; queued messages count as lost.

        Waits for the current callback of the module, except in an event loop, inside that callback,
        and inside another callback that it waits for.

        Args:
            module: Module on the bus.

        Raises:
            ModuleBusError: With ERROR if the module is not on the bus.
        """
        self._wait_ended([self._detach(module)])

    async def remove_module_async(self, module: object) -> None:
        """Remove a module like `remove_module`, and wait in trio's event loop, too."""
        await self._wait_ended_async([self._detach(module)])

    def _detach(self, module: object) -> Mailbox:
        if module is None:
            raise invalid_argument("expected a module, got None")
        router = self._router
        with router.lock:
            mailbox = router.find(module)
            router.detach(mailbox)
        return mailbox

    def _wait_ended(self, mailboxes: Iterable[Mailbox]) -> None:
        if is_in_event_loop():
            return
        for mailbox in mailboxes:
            with can_wait_for([mailbox]) as can_wait:
                if (
                    can_wait
                    and (gate := self._router.create_end_gate(mailbox, ThreadGate)) is not None
                ):
                    gate.wait()

    async def _wait_ended_async(self, mailboxes: Iterable[Mailbox]) -> None:
        router = self._router
        for mailbox in mailboxes:
            with can_wait_for([mailbox]) as can_wait:
                if can_wait and (gate := router.create_end_gate(mailbox, TaskGate)) is not None:
                    await gate.wait(partial(router.remove_gate, mailbox.end_gates, gate))

    def link(self, source: object | None, sink: object) -> None:
        """Let one module receive the messages of another one.

        Args:
            source: Module on the bus; None for all modules.
            sink: Module on the bus.

        Raises:
            ModuleBusError: With INVALIDARG if the link exists, ERROR if a module is not on the bus.
        """
        with self._router.lock:
            self._router.link(source, sink)

    def unlink(self, source: object | None, sink: object) -> None:
        """Remove a link.

        Raises:
            ModuleBusError: With ERROR if there is no such link.
        """
        with self._router.lock:
            self._router.unlink(source, sink)

    # Messages ------------------------------------------------------------------------------------

    def publish(self, message: ModuleMessage | bytes, *, source: object | None = None) -> None:
        """Publish a message to the modules that receive messages of `source`.

        A source does not receive its own messages, unless it is linked to itself. Waits while a
        queue is full.

        Args:
            message: Message, or its byte form. A malformed byte form is skipped and counted.
            source: Publishing module. Without one, or for a source that is not on the bus, the
                modules that receive all messages get it.

        Raises:
            ModuleBusFullError: A queue is full, and waiting would not end because that module
                waits for this callback, or would block an event loop.
            ModuleBusError: With INVALIDARG if `message` is not a message.
        """
        if type(message) is not ModuleMessage:
            if (parsed := self._parse_message(message)) is None:
                return
            message = parsed
        if not self._router.publish(message, source):
            self._publish_waiting(message, source, None)

    def publish_until(
        self, message: ModuleMessage, end: StopSignal, *, source: object | None = None
    ) -> bool:
        """Publish like `publish`, but stop waiting when `end` is set. Returns True if it was
        published.
        """
        if end.is_set:
            return False
        return self._router.publish(message, source) or self._publish_waiting(message, source, end)

    def _publish_waiting(
        self, message: ModuleMessage, source: object | None, end: StopSignal | None
    ) -> bool:
        router = self._router
        with router.lock:
            mailboxes = router.find_route(source)
            if router.try_deliver(message, mailboxes):
                return True
            if is_in_event_loop():
                raise router.full_error(mailboxes, "in an event loop, await publish_async")
            gate = ThreadGate()
            blocked = router.block_publish(message, mailboxes, gate)
        is_ended = False

        def give_up() -> None:
            nonlocal is_ended
            if router.cancel_blocked(blocked):
                is_ended = True
                gate.open()

        with can_wait_for(blocked.full_mailboxes) as can_wait:
            try:
                if can_wait:
                    with end.notify(give_up) if end is not None else nullcontext():
                        gate.wait()
            finally:
                is_refused = router.cancel_blocked(blocked)
        if is_refused:
            raise router.full_error(mailboxes, _DEADLOCK)
        return not is_ended

    async def publish_async(
        self, message: ModuleMessage | bytes, *, source: object | None = None
    ) -> None:
        """Publish like `publish`, in a trio task. A cancelled call has published nothing."""
        if type(message) is not ModuleMessage:
            if (parsed := self._parse_message(message)) is None:
                return
            message = parsed
        router = self._router
        self._publish_count = publish_count = self._publish_count + 1
        if publish_count % MESSAGES_PER_TURN == 0:
            await trio.lowlevel.checkpoint()
        if not router.publish(message, source):
            await self._publish_waiting_async(message, source)

    async def _publish_waiting_async(self, message: ModuleMessage, source: object | None) -> None:
        router = self._router
        with router.lock:
            mailboxes = router.find_route(source)
            if router.try_deliver(message, mailboxes):
                return
            gate = TaskGate()
            blocked = router.block_publish(message, mailboxes, gate)
        with can_wait_for(blocked.full_mailboxes) as can_wait:
            if not can_wait and router.cancel_blocked(blocked):
                raise router.full_error(mailboxes, _DEADLOCK)
            await gate.wait(partial(router.cancel_blocked, blocked))

    def publish_nowait(
        self, message: ModuleMessage | bytes, *, source: object | None = None
    ) -> None:
        """Publish like `publish`, without waiting.

        Raises:
            ModuleBusFullError: A queue is full.
        """
        if type(message) is not ModuleMessage:
            if (parsed := self._parse_message(message)) is None:
                return
            message = parsed
        router = self._router
        if not router.publish(message, source):
            with router.lock:
                raise router.full_error(router.find_route(source), "publish would wait for it")

    def _parse_message(self, message: object) -> ModuleMessage | None:
        """Return the message, or None for a malformed byte form."""
        if isinstance(message, ModuleMessage):
            return message
        if not isinstance(message, bytes):
            raise invalid_argument(
                f"a message must be a ModuleMessage or its bytes, got {message!r}"
            )
        router = self._router
        try:
            return ModuleMessage.from_bytes(message)
        except MalformedError as error:
            with router.lock:
                router.check_open()
                router.malformed += 1
                count = router.malformed
            if is_logged(count):
                log.warning(
                    "module_message.malformed",
                    "{url} skipped a malformed message: {error}",
                    url=self.url,
                    error=error,
                )
            return None

    def wait_quiet(self) -> None:
        """Wait until no queue has messages and no module is in a callback.

        Raises:
            ModuleBusError: In an event loop, and in a callback where waiting would not end.
        """
        if is_in_event_loop():
            raise ModuleBusError("in an event loop, await wait_quiet_async")
        self._check_not_in_callback()
        router = self._router
        waited = router.create_idle_gate(ThreadGate)
        if waited is not None:
            gate, gates = waited
            with can_wait_for(router.all_mailboxes()) as can_wait:
                if can_wait:
                    gate.wait()
                elif router.remove_gate(gates, gate):
                    raise ModuleBusError(f"modules are busy, and {_DEADLOCK_IDLE}")

    async def wait_quiet_async(self) -> None:
        """Wait like `wait_quiet`, in a trio task."""
        self._check_not_in_callback()
        router = self._router
        waited = router.create_idle_gate(TaskGate)
        if waited is not None:
            gate, gates = waited
            with can_wait_for(router.all_mailboxes()) as can_wait:
                if not can_wait and router.remove_gate(gates, gate):
                    raise ModuleBusError(f"modules are busy, and {_DEADLOCK_IDLE}")
                await gate.wait(partial(router.remove_gate, gates, gate))

    def _check_not_in_callback(self) -> None:
        if isinstance(mailbox := current_callback.get(), Mailbox) and mailbox.is_on(self._router):
            raise ModuleBusError(f"module {mailbox.name} is in its callback, so modules are busy")

    def statistics(self) -> ModuleBusStatistics:
        """Return the current statistics. A freed bus has some, too."""
        router = self._router
        with router.lock:
            modules = [
                (mailbox.module, mailbox.statistics()) for mailbox in router.mailboxes.values()
            ]
            return ModuleBusStatistics(
                router.references,
                tuple(modules),
                router.published,
                router.malformed,
                router.blocked_count,
                router.lost,
            )
