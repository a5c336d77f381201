"""A bus between the modules of one process.

Rule 1: any call, from any thread, at any time; from inside a callback too. No module's code runs
under the lock.
Rule 2: a message is taken for all who hear it at once, or for none. So all modules hear all
messages in one order, and whoever gets an error may publish again.
Rule 3: what waits for each module is bounded. Who publishes beyond that waits, unless the module is
added with another policy.
Rule 4: waiting always ends. A callback that would wait for somebody who waits for it is told so
instead, and in an event loop only what is awaited waits.

    publish(source) ── lock: route, room? ──► mailbox ──► worker ──► module.receive
                              └── no room: wait, and be let in by the worker that makes some
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import trio

from simplebus.gateway.blocking import End, TaskGate, ThreadGate, in_event_loop, inside, waiting_for
from simplebus.gateway.errors import MalformedError, ModuleBusError, invalid
from simplebus.gateway.mailbox import QUEUE_PLACES, Full, Mailbox, ModuleStatistics
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.routing import Switchboard
from simplebus.gateway.workers import (
    TURN_MESSAGES,
    Body,
    Home,
    deliver_async,
    is_async,
    receiver,
    start_loop,
    start_thread,
)

log = logging.getLogger("simplebus.gateway")

_numbers = itertools.count(1)

_ENDLESS = "waiting for it would never end: it waits for the callback that publishes"
_ENDLESS_QUIET = "waiting for that would never end: a module there waits for this callback"


@dataclass(frozen=True, slots=True)
class ModuleBusStatistics:
    """A snapshot of a module bus."""

    references: int
    """How many hold it; at 0 it is freed."""
    modules: tuple[tuple[object, ModuleStatistics], ...]
    """Those on the bus, in the order in which they came."""
    published: int
    """Messages that were taken."""
    malformed: int
    """Byte forms that were none, and skipped."""
    waiting: int
    """Publishers that wait for room."""
    lost: int
    """Messages that modules were not given any more as they were removed, over all of them."""


class ModuleBus:
    """Modules hear what others publish, each in its own thread or task, one message at a time.

        with ModuleBus() as bus:
            bus.add_module(thermometer)
            bus.add_module(display)
            bus.publish(ModuleMessage(b"21.5"), source=thermometer)

    A module is an object with a method `receive(message)`, or a function. An `async def` is called
    in a task of the event loop where the bus was entered by `async with`, or in one of its own if
    it was not; any other in a thread of its own, which it may block; with `quick=True` it never
    blocks, and shares the loop.

    Who has the bus holds a reference: the first is that of whoever made it. At zero references
    its modules are removed, and what is called afterwards raises ModuleBusError. Leaving a `with`
    gives one back; `async with` also removes the modules that have their task in its loop.

    Every call raises ModuleBusError, whose `result` is ERROR, or INVALIDARG for arguments that make
    no sense. `publish`, `remove_module`, `dec_ref` and `destroy` may wait: in an event loop await
    `publish_async` and `remove_module_async`.
    """

    def __init__(self) -> None:
        self.id = f"{next(_numbers)}-{secrets.token_hex(8)}"
        """Unlike that of any other bus."""
        self.url = f"inproc://{self.id}"
        """How it is called in texts."""
        try:
            self._board = Switchboard(self.url)
        except (OSError, RuntimeError, MemoryError) as error:
            raise ModuleBusError(f"the bus cannot be made: {error}") from error
        self._home: Home | None = None
        """Where its tasks are, while it is entered."""
        self._entered: AbstractAsyncContextManager[None] | None = None
        self._turn = 0
        """Messages that tasks have published, by which others get a turn."""

    def __repr__(self) -> str:
        return f"<ModuleBus {self.url}, {len(self._board.boxes)} modules>"

    # References ----------------------------------------------------------------------------------

    def inc_ref(self) -> None:
        """Hold one reference more."""
        with self._board.lock:
            self._board.check()
            self._board.references += 1

    def dec_ref(self) -> None:
        """Give a reference back. The last one removes all modules, and waits for their callbacks
        as `remove_module` does."""
        board, gone = self._board, []
        with board.lock:
            board.check()
            board.references -= 1
            if board.references == 0:
                gone = self._detached()
        self._wait_ended(gone)

    def destroy(self) -> None:
        """As `dec_ref`."""
        self.dec_ref()

    @property
    def is_freed(self) -> bool:
        """Whether nobody holds it any more."""
        return self._board.references == 0

    def _detached(self, home: Home | None = None) -> list[Mailbox]:
        """Take all modules off, or those with a task there. Returns whom to wait for. The lock is
        held."""
        boxes = self._board.boxes.values()
        gone = [box for box in boxes if home is None or box.home is home]
        for box in gone:
            self._board.detach(box)
        self._board.reroute()  # Of a bus that is freed, none may be found.
        return gone

    def __enter__(self) -> Self:
        with self._board.lock:
            self._board.check()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_freed:
            self.dec_ref()

    async def __aenter__(self) -> Self:
        with self._board.lock:
            self._board.check()
        if self._entered is not None:
            raise ModuleBusError(f"{self.url} is in an event loop already")
        self._entered = entered = self._in_loop()
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
    async def _in_loop(self) -> AsyncIterator[None]:
        """A block in whose event loop tasks can be."""
        raised: Exception | None = None
        async with trio.open_nursery() as nursery:
            self._home = home = Home(nursery)
            try:
                yield
            except Exception as error:  # Not to be wrapped: no task of ours ever raises.
                raised = error
                nursery.cancel_scope.cancel()
            finally:
                gone = self._leave(home)
            await self._wait_ended_async(gone)
        if raised is not None:
            raise raised

    def _leave(self, home: Home) -> list[Mailbox]:
        """The event loop is left. Returns whom to wait for."""
        board = self._board
        with board.lock:
            self._home = None
            board.references -= bool(board.references)
            return self._detached(home if board.references else None)

    # Modules -------------------------------------------------------------------------------------

    def add_module(
        self,
        module: object,
        *,
        quick: bool = False,
        hears_all: bool = True,
        places: int = QUEUE_PLACES,
        full: Full = Full.BLOCK,
    ) -> None:
        """Have the module hear what others publish from now on.

        Args: whether its `receive`, without being async, never blocks; whether it hears everyone
        else, or only those that it is linked to; how many messages may wait for it; what happens
        to one for which there is no room.
        Raises ModuleBusError: INVALIDARG for what is no module or on the bus already, ERROR when
        it can have no worker.
        """
        receive = receiver(module)
        awaits = is_async(receive)
        body = None
        if awaits or quick:

            async def body(box: Mailbox) -> None:
                await deliver_async(box, receive, awaits)

        box = self._attach(module, hears_all, places, full, is_task=body is not None)
        try:
            if body is None:
                start_thread(box, receive)
            else:
                self._start_task(box, body)
        except RuntimeError as error:
            box.end()
            raise ModuleBusError(f"module {box.name} can have no worker: {error}") from error

    def add_worker(
        self,
        module: object,
        body: Body,
        *,
        hears_all: bool = True,
        places: int = QUEUE_PLACES,
        full: Full = Full.BLOCK,
    ) -> Mailbox:
        """As `add_module`, for something that takes its messages itself: `body` is a task that
        takes them from the mailbox, until that gives None. Returns the mailbox."""
        box = self._attach(module, hears_all, places, full, is_task=True)
        try:
            self._start_task(box, body)
        except RuntimeError as error:
            box.end()
            raise ModuleBusError(f"module {box.name} can have no worker: {error}") from error
        return box

    def _attach(
        self, module: object, hears_all: bool, places: int, full: Full, *, is_task: bool
    ) -> Mailbox:
        if module is None:
            raise invalid("a module must be something, got None")
        if not isinstance(places, int) or places < 1:
            raise invalid(f"places must be 1 or more, got {places!r}")
        if full not in list(Full):
            raise invalid(f"full must be one of {', '.join(Full)}, got {full!r}")
        box = Mailbox(self._board, module, places, Full(full))
        box.hears_all = hears_all
        with self._board.lock:
            self._board.attach(box)
            box.home = self._home if is_task else None
        return box

    def _start_task(self, box: Mailbox, body: Body) -> None:
        if box.home is None:
            start_loop(box, body)
        else:
            box.home.start(box, body)

    def remove_module(self, module: object) -> None:
        """Have the module hear no more. None of its callbacks begins after this; what waited for
        it is given up, and counted as lost.

        Waits for the callback that it is in; but not inside that callback, nor inside one that it
        waits for, nor in an event loop.
        Raises ModuleBusError: ERROR for a module that is not on the bus.
        """
        self._wait_ended([self._removed(module)])

    async def remove_module_async(self, module: object) -> None:
        """As `remove_module`; it waits in trio's event loop too."""
        await self._wait_ended_async([self._removed(module)])

    def _removed(self, module: object) -> Mailbox:
        if module is None:
            raise invalid("a module must be something, got None")
        board = self._board
        with board.lock:
            box = board.find(module)
            board.detach(box)
        return box

    def _wait_ended(self, boxes: Iterable[Mailbox]) -> None:
        if in_event_loop():
            return
        for box in boxes:
            with waiting_for([box]) as ends:
                if ends and (gate := self._board.gate_of_end(box, ThreadGate)) is not None:
                    gate.wait()

    async def _wait_ended_async(self, boxes: Iterable[Mailbox]) -> None:
        board = self._board
        for box in boxes:
            with waiting_for([box]) as ends:
                if ends and (gate := board.gate_of_end(box, TaskGate)) is not None:
                    await gate.wait(partial(board.withdraw, box.ends, gate))

    def link(self, source: object | None, sink: object) -> None:
        """Have one module hear another, or with None everyone else. Raises ModuleBusError:
        INVALIDARG if it does already, ERROR if one of them is not on the bus."""
        with self._board.lock:
            self._board.link(source, sink)

    def unlink(self, source: object | None, sink: object) -> None:
        """Undo a `link`. Raises ModuleBusError with ERROR if there is none."""
        with self._board.lock:
            self._board.unlink(source, sink)

    # Messages ------------------------------------------------------------------------------------

    def publish(self, message: ModuleMessage | bytes, *, source: object | None = None) -> None:
        """Give a message to all who hear its source; without one, to all who hear everyone.

        A source does not hear itself, unless it is linked to itself. Bytes are the byte form of a
        message; malformed ones are skipped and counted.
        Waits for room. Raises ModuleBusFullError where there is none inside a callback that one of
        the hearers waits for, or that is one of them, and in an event loop; ModuleBusError with
        INVALIDARG for what is no message.
        """
        if type(message) is not ModuleMessage:
            if (meant := self._meant(message)) is None:
                return
            message = meant
        if not self._board.give(message, source):
            self._publish_waiting(message, source, None)

    def publish_until(
        self, message: ModuleMessage, end: End, *, source: object | None = None
    ) -> bool:
        """As `publish`, but not beyond an end. Returns whether it has published."""
        if end.is_there:
            return False
        return self._board.give(message, source) or self._publish_waiting(message, source, end)

    def _publish_waiting(
        self, message: ModuleMessage, source: object | None, end: End | None
    ) -> bool:
        board = self._board
        with board.lock:
            boxes = board.route(source)
            if board.takes(message, boxes):
                return True
            if in_event_loop():
                raise board.full_error(boxes, "in an event loop, await publish_async")
            gate = ThreadGate()
            outside = board.wait_outside(message, boxes, gate)
        is_over = False

        def give_up() -> None:
            nonlocal is_over
            if board.go_away(outside):
                is_over = True
                gate.open()

        with waiting_for(outside.awaited) as ends:
            try:
                if ends:
                    with end.told(give_up) if end is not None else nullcontext():
                        gate.wait()
            finally:
                is_refused = board.go_away(outside)
        if is_refused:
            raise board.full_error(boxes, _ENDLESS)
        return not is_over

    async def publish_async(
        self, message: ModuleMessage | bytes, *, source: object | None = None
    ) -> None:
        """As `publish`, in a task of trio. Others get a turn when it waits, and now and then.
        Cancelled, it has not published."""
        if type(message) is not ModuleMessage:
            if (meant := self._meant(message)) is None:
                return
            message = meant
        board = self._board
        self._turn = turn = self._turn + 1
        if turn % TURN_MESSAGES == 0:
            await trio.lowlevel.checkpoint()
        if not board.give(message, source):
            await self._publish_waiting_async(message, source)

    async def _publish_waiting_async(self, message: ModuleMessage, source: object | None) -> None:
        board = self._board
        with board.lock:
            boxes = board.route(source)
            if board.takes(message, boxes):
                return
            gate = TaskGate()
            outside = board.wait_outside(message, boxes, gate)
        with waiting_for(outside.awaited) as ends:
            if not ends and board.go_away(outside):
                raise board.full_error(boxes, _ENDLESS)
            await gate.wait(partial(board.go_away, outside))

    def publish_nowait(
        self, message: ModuleMessage | bytes, *, source: object | None = None
    ) -> None:
        """As `publish`, from anywhere. Raises ModuleBusFullError if there is no room."""
        if type(message) is not ModuleMessage:
            if (meant := self._meant(message)) is None:
                return
            message = meant
        board = self._board
        if not board.give(message, source):
            with board.lock:
                raise board.full_error(board.route(source), "publish would wait for it")

    def _meant(self, message: object) -> ModuleMessage | None:
        """The message; None for bytes that are none."""
        if isinstance(message, ModuleMessage):
            return message
        if not isinstance(message, bytes):
            raise invalid(f"a message must be a ModuleMessage or its bytes, got {message!r}")
        board = self._board
        try:
            return ModuleMessage.from_bytes(message)
        except MalformedError as error:
            with board.lock:
                board.check()
                board.malformed += 1
            log.warning("%s skipped bytes that are no message: %s", self.url, error)
            return None

    def wait_quiet(self) -> None:
        """Wait until no module has anything to do: nothing waits, and none is in a callback.
        Raises ModuleBusError in a callback, where that would never end, and in an event loop."""
        if in_event_loop():
            raise ModuleBusError("in an event loop, await wait_quiet_async")
        self._check_outside()
        board = self._board
        waited = board.gate_of_quiet(ThreadGate)
        if waited is not None:
            gate, gates = waited
            with waiting_for(board.all_boxes()) as ends:
                if ends:
                    gate.wait()
                elif board.withdraw(gates, gate):
                    raise ModuleBusError(f"it is not quiet, and {_ENDLESS_QUIET}")

    async def wait_quiet_async(self) -> None:
        """As `wait_quiet`, in a task of trio."""
        self._check_outside()
        board = self._board
        waited = board.gate_of_quiet(TaskGate)
        if waited is not None:
            gate, gates = waited
            with waiting_for(board.all_boxes()) as ends:
                if not ends and board.withdraw(gates, gate):
                    raise ModuleBusError(f"it is not quiet, and {_ENDLESS_QUIET}")
                await gate.wait(partial(board.withdraw, gates, gate))

    def _check_outside(self) -> None:
        if isinstance(box := inside.get(), Mailbox) and box.is_on(self._board):
            raise ModuleBusError(f"module {box.name} is in its callback: it is not quiet")

    def statistics(self) -> ModuleBusStatistics:
        """A snapshot. A freed bus has one too."""
        board = self._board
        with board.lock:
            modules = [(box.module, box.statistics()) for box in board.boxes.values()]
            return ModuleBusStatistics(
                board.references,
                tuple(modules),
                board.published,
                board.malformed,
                board.waiting,
                board.lost,
            )
