"""The life of one module in a gateway: made, started, given its messages, ended, and made again
when it has failed.

Rule 1: everything that is the module's is called from here, one call at a time, beside `run` and
`health` alone.
Rule 2: a failure is one module's: it is reported, the module is ended and made again after a pause
that grows, or once it has another plan. Its messages wait meanwhile; only the one on which it
failed is gone.
Rule 3: a call that does not return is waited for, and given up after the grace alone; one that is
awaited, soon after `run` has raised: its message is given again, whatever becomes of the call. What
was given up publishes nothing.
Rule 4: Ctrl-C is not raised in what is called from here: it comes to the program, which ends the
gateway in order. Whoever raises what it raises has failed, as with anything else, whatever it is:
only that a call is cancelled is not the module's own doing.

    CREATING ──► STARTING ──► RUNNING ──► ENDED
        ▲                        │ raised, in whichever state
        └────── FAILED ◄─────────┘
"""

from __future__ import annotations

import enum
import inspect
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import trio

from simplebus.gateway.blocking import inside
from simplebus.gateway.bus import ModuleBus
from simplebus.gateway.config import ModulePlan, find
from simplebus.gateway.errors import ModuleBusError, described, is_cancelled, parted
from simplebus.gateway.health import OfItself, Plain, plain_text
from simplebus.gateway.mailbox import Mailbox
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import AsyncPort, BlockingPort
from simplebus.gateway.workers import TURN_MESSAGES, OwnThread

log = logging.getLogger("simplebus.gateway")

PAUSE_S = 1.0
"""How long a module that has failed is left alone at first; then twice as long each time,"""
PAUSE_MAX_S = 60.0
"""up to this; and as at first again once it has run that long."""
GRACE_S = 10.0
"""How long a call that does not return is waited for when a module is to end,"""
AWAITED_GRACE_S = 1.0
"""and one that is awaited when its `run` has raised, on which it may wait."""


class State(enum.StrEnum):
    """Where a module is in its life."""

    CREATING = "creating"
    STARTING = "starting"
    """Created; those before it have not all started."""
    RUNNING = "running"
    FAILED = "failed"
    """It waits to be made again."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LifeStatistics:
    """A snapshot of one module of a gateway."""

    name: str
    module: str
    state: State
    failures: int
    """How often it was ended because something of it raised."""
    error: str
    """What it raised last; empty if it never did."""
    waiting: int
    """Messages in its queue."""
    delivered: int
    """Messages that it was given."""
    dropped: int
    """Messages that it did not hear because its queue was full."""
    published: int
    own: Mapping[str, Plain] = field(default_factory=dict)
    """What it says of itself, if it has a method `health`."""


class _Again(Exception):  # noqa: N818 - it is no error.
    """The module is to be made again, by another plan."""


class Life:
    """A module of a gateway. On the bus, this is the module."""

    within: ContextVar[Life | None] = ContextVar("within", default=None)
    """The one whose task, or thread, this is."""

    def __init__(self, bus: ModuleBus, plan: ModulePlan) -> None:
        self.plan = plan
        self.state = State.CREATING
        self.failures = 0
        self.error = ""
        self.created = trio.Event()
        """Set once it was tried to create it,"""
        self.may_start = trio.Event()
        """set by the gateway once all others were,"""
        self.started = trio.Event()
        """and set once it was tried to start it."""
        self.is_unwanted = False
        """Whether nobody waits for it to get ready any more."""
        self._bus = bus
        self._box: Mailbox | None = None
        self._of_itself: OfItself | None = None
        """What was made says that, while it is there."""
        self._port: AsyncPort | BlockingPort | None = None
        self._published = 0
        """Messages of ports that are no more."""
        self._batch: deque[ModuleMessage] = deque()
        """Messages in its hands."""
        self._failure: Exception | None = None
        """What `run` has raised, or how else it is to be interrupted."""
        self._names: tuple[str, ...] | None = None
        """Modules that there are now, if it was not told yet."""
        self._ending = trio.Event()
        self._ended = trio.Event()
        self._scope = trio.CancelScope()
        self._pause = trio.CancelScope()
        """Around the pause after a failure."""
        self._run_scope = trio.CancelScope()
        self._deliveries = trio.CancelScope()
        """Around its calls; what is given up of them has this deadline."""
        self._keeps_running = False

    def __repr__(self) -> str:
        return repr(self.plan.name)

    # From outside ---------------------------------------------------------------------------------

    def join(self) -> None:
        """Come onto the bus, hearing nobody yet. Raises ModuleBusError."""
        plan = self.plan
        self._box = self._bus.add_worker(
            self, self._live, hears_all=False, places=plan.places, full=plan.full
        )

    def stop_running(self) -> None:
        """End its `run`, unless that is needed for what it hears."""
        if not self._keeps_running:
            self._stop_running()

    def _stop_running(self) -> None:
        if self._port is not None:
            self._port.stop()
        if not self._keeps_running:
            self._run_scope.cancel()

    async def leave(self, grace: float) -> None:
        """End, and leave the bus."""
        self._ending.set()
        self.may_start.set()  # It does not start, if it has not.
        self.stop_running()
        with trio.move_on_after(grace):
            with suppress(ModuleBusError):  # Who left before has given up waiting.
                await self._bus.remove_module_async(self)
            await self._ended.wait()
        if not self._ended.is_set():
            log.warning("module %r does not end: given up after %g s", self.plan.name, grace)
            self._scope.cancel()
            with trio.move_on_after(AWAITED_GRACE_S) as scope:
                await self._ended.wait()
            if scope.cancelled_caught:
                if self._port is not None:
                    self._port.end()
                log.error(
                    "module %r shields itself from being given up: it goes on, and the gateway "
                    "cannot end before it does", self.plan.name,
                )  # fmt: skip

    async def wait_ended(self) -> None:
        """Return when it has."""
        await self._ended.wait()

    @property
    def is_leaving(self) -> bool:
        """Whether it ends, or has."""
        return self._ending.is_set()

    def become(self, plan: ModulePlan) -> None:
        """Be made again, by another plan, between two messages; at once if it has failed."""
        self.plan = plan
        self._pause.cancel()
        self._interrupt(_Again())

    def tell(self, names: tuple[str, ...]) -> None:
        """Modules have come or gone."""
        self._names = names
        if self._box is not None:
            self._box.poke()

    def _interrupt(self, why: Exception) -> None:
        self._failure = why
        self._bound_calls()
        if self._box is not None:
            self._box.poke()

    def _bound_calls(self) -> None:
        """Something is to interrupt it: say how long the call that it is in may take."""
        is_awaited = not isinstance(self._port, BlockingPort)
        has_failed = not isinstance(self._failure, _Again)
        grace = AWAITED_GRACE_S if is_awaited and has_failed else GRACE_S
        self._deliveries.deadline = min(self._deliveries.deadline, trio.current_time() + grace)

    def statistics(self) -> LifeStatistics:
        """A snapshot."""
        box = self._box
        return LifeStatistics(
            self.plan.name,
            self.plan.module,
            self.state,
            self.failures,
            self.error,
            0 if box is None else len(box.queue) + len(self._batch),
            0 if box is None else box.delivered,
            0 if box is None else box.dropped,
            self._published + (0 if self._port is None else self._port.published),
            {} if self._of_itself is None else self._of_itself.told(),
        )

    # Inside ---------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def _live(self, box: Mailbox) -> None:
        self.within.set(self)
        pause, since = PAUSE_S, trio.current_time()
        try:
            with self._scope:
                while not self._ending.is_set():
                    plan = self.plan
                    try:
                        await self._live_once(box)
                    except _Again:
                        log.info("module %r is made again, by another plan", self.plan.name)
                        continue
                    except Exception as error:
                        if trio.current_time() - since > PAUSE_MAX_S:
                            pause = PAUSE_S
                        await self._fail(box, error, pause if self.plan is plan else 0.0)
                        pause, since = min(2 * pause, PAUSE_MAX_S), trio.current_time()
                        if self.plan is not plan:  # It may be mended.
                            pause = PAUSE_S
        finally:
            box.lost += len(self._batch)
            self._batch.clear()
            self.state = State.ENDED
            self.created.set()
            self.started.set()
            self._ended.set()

    async def _fail(self, box: Mailbox, error: Exception, pause: float) -> None:
        self.state = State.FAILED
        self.failures += 1
        self.error = plain_text(described(error))
        log.error(
            "module %r failed and is made again in %g s", self.plan.name, pause, exc_info=error
        )
        self.created.set()
        self.started.set()
        if not self._batch:  # What it has in its hands is still to be heard.
            box.rest()
        with trio.move_on_after(pause) as self._pause:
            await self._ending.wait()

    async def _live_once(self, box: Mailbox) -> None:
        """From create to destroy. Raises what the module raises, and _Again."""
        self.state, self._failure = State.CREATING, None
        factory = self.plan.factory or find(self.plan.module)
        is_blocking = _is_blocking(factory)
        kind = BlockingPort if is_blocking else AsyncPort
        port = self._port = kind(self._bus, self, self.plan.name)
        thread = OwnThread(self.plan.name, box) if is_blocking else None
        calls = _Calls(thread)
        module = None
        try:
            module = await calls.call(factory, port, self.plan.settings)
            _check_kind(module, is_blocking)
            of_itself = self._of_itself = OfItself(module, name=port.name, is_blocking=is_blocking)
            self.state = State.STARTING
            self.created.set()
            await self.may_start.wait()
            if self._ending.is_set():
                return
            await calls.call(getattr(module, "start", _nothing))
            self.state = State.RUNNING
            self.started.set()
            await self._work(box, module, calls, of_itself)
        finally:
            if self._of_itself is not None:
                self._of_itself.end()
                self._of_itself = None
            port.stop()
            self._published += port.published
            self._port = None
            if module is not None:
                await self._destroy(module, calls)
            port.end()
            if thread is not None:
                thread.end()

    async def _destroy(self, module: Any, calls: _Calls) -> None:
        if calls.thread is not None and calls.thread.is_given_up:
            return
        try:
            with trio.move_on_after(GRACE_S) as scope:
                await calls.call(getattr(module, "destroy", _nothing))
            if scope.cancelled_caught:
                log.warning("module %r does not end its destroy: given up", self.plan.name)
        except Exception:
            log.exception("module %r failed in destroy", self.plan.name)

    async def _work(self, box: Mailbox, module: Any, calls: _Calls, of_itself: OfItself) -> None:
        """Give it its messages, and let it run beside."""
        name = self.plan.name
        self._run_scope = trio.CancelScope()
        if self._ending.is_set():
            return
        self._keeps_running = getattr(module, "keeps_running", False)
        run = getattr(module, "run", None)
        raised: Exception | None = None
        self._deliveries = trio.CancelScope()
        if self._failure is not None:
            self._bound_calls()
        async with trio.open_nursery() as nursery:
            if run is not None:
                nursery.start_soon(self._run, run)
            nursery.start_soon(of_itself.run)
            try:
                with self._deliveries:
                    await self._deliver(box, module, calls)
                if self._deliveries.cancelled_caught:
                    log.warning("module %r: a call of it that did not return is given up", name)
                    self._check_failure()
            except Exception as error:  # Not to be wrapped.
                raised = error
            self._stop_running()
            of_itself.end()
            nursery.cancel_scope.deadline = trio.current_time() + GRACE_S
        if raised is not None:
            raise raised

    @trio.lowlevel.enable_ki_protection
    async def _run(self, run: Callable[[], Any]) -> None:
        inside.set(None)  # No callback: it may wait for whomever it likes.
        try:
            if inspect.iscoroutinefunction(run):
                with self._run_scope:
                    await run()
            else:  # Its port tells it to end.
                await self._run_beside(run)
        except BaseException as error:
            failure, rest = _parted(error)
            if failure is not None:
                self._interrupt(failure)
            if rest is not None:
                raise rest from None

    async def _run_beside(self, run: Callable[[], Any]) -> None:
        """In a thread."""
        port = self._port
        assert port is not None
        try:
            await trio.to_thread.run_sync(
                _run_in_thread, run, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
            )
        except trio.Cancelled:  # It goes on, and nobody waits for it any more.
            port.end()
            log.warning("module %r: its run does not end, and is given up", port.name)
            raise

    async def _deliver(self, box: Mailbox, module: Any, calls: _Calls) -> None:
        while True:
            await self._tell(module, calls)
            while self._batch:
                if calls.thread is not None:
                    await calls.thread.run(self._deliver_batch, box, module.receive, calls.thread)
                else:
                    await self._deliver_turn(box, module.receive)
                if box.is_closed:
                    return
                self._check_failure()
                await self._tell(module, calls)
            batch = await box.take_async()
            if batch is None:
                return
            self._batch = batch
            self._check_failure()

    def _deliver_batch(
        self, box: Mailbox, receive: Callable[[ModuleMessage], Any], thread: OwnThread
    ) -> None:
        """In the module's thread."""
        batch = self._batch
        while batch and not (box.is_closed or thread.is_given_up) and self._failure is None:
            box.delivered += 1
            receive(batch.popleft())

    async def _deliver_turn(self, box: Mailbox, receive: Callable[[ModuleMessage], Any]) -> None:
        batch = self._batch
        try:
            for _ in range(TURN_MESSAGES):
                if not batch or box.is_closed or self._failure is not None:
                    break
                box.delivered += 1
                message = batch.popleft()
                await receive(message)
                if (self._failure is not None or self._ending.is_set()) and is_cancelled():
                    self._take_back(box, message)  # It makes nothing of that.
                    break
        except BaseException as error:
            if is_cancelled():  # What it makes of that is its own business.
                self._take_back(box, message)
            _raise_own(error)
            raise
        await trio.lowlevel.checkpoint()

    def _take_back(self, box: Mailbox, message: ModuleMessage) -> None:
        """It is to be given again, and does not count."""
        self._batch.appendleft(message)
        box.delivered -= 1

    async def _tell(self, module: Any, calls: _Calls) -> None:
        if self._names is not None:
            names, self._names = self._names, None
            tell = getattr(module, "modules_changed", None)
            if tell is not None:
                await calls.call(tell, names)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _Calls:
    """How a module's methods are called."""

    def __init__(self, thread: OwnThread | None) -> None:
        self.thread = thread

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """In its thread, or here and awaited."""
        if self.thread is not None:
            return await self.thread.run(method, *args)
        try:
            answer = method(*args)
            return await answer if inspect.isawaitable(answer) else answer
        except BaseException as error:
            _raise_own(error)
            raise


def _run_in_thread(run: Callable[[], Any]) -> None:
    try:
        run()
    except Exception:
        raise
    except BaseException as error:
        failure, _ = parted(error, in_thread=True)
        assert failure is not None
        raise failure from error


def _raise_own(error: BaseException) -> None:
    """Raise what a module has failed with as an Exception, if it is its own doing."""
    failure, rest = _parted(error)
    if failure is None or failure is error:
        return
    raise failure if rest is None else BaseExceptionGroup(str(error), [failure, rest])


def _parted(error: BaseException) -> tuple[Exception | None, BaseException | None]:
    """The same in the task of a module. Ctrl-C is raised in tasks that it has begun itself: what
    was in there has failed, and the program is told."""
    if isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt):
        is_raised = getattr(signal.getsignal(signal.SIGINT), "__module__", "") == _RAISES
        if is_raised and threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
    return parted(error, hears_ctrl_c=False)


_RAISES = "trio._core._ki"
"""Where that is which raises KeyboardInterrupt for Ctrl-C; or else signals are heard otherwise."""


def _nothing() -> None:
    """In place of a method that a module does not have."""


_METHODS = ("receive", "run", "start", "destroy", "modules_changed")


def _is_blocking(factory: Callable[..., Any]) -> bool:
    """Whether a module's methods may block: unless one of them is async, or what makes it is."""
    methods = [factory, *(getattr(factory, name, None) for name in _METHODS)]
    return not any(map(inspect.iscoroutinefunction, methods))


def _check_kind(module: Any, is_blocking: bool) -> None:
    """Raise TypeError for a module with async methods that nobody would await, and for none."""
    if not callable(getattr(module, "receive", None)):
        raise TypeError(f"a module has a method `receive`; got {module!r}")
    if is_blocking and not _is_blocking(module):
        raise TypeError("it has async methods: its entry point must be its class, or async too")
