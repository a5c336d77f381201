"""Supervisor of one module: creates and starts it, delivers messages, stops and restarts it.

The methods of the module are called from here, one at a time, beside `run` and `health`. After a
failure the module is destroyed and created again, after a growing delay or when it gets another
plan. Its messages wait meanwhile; only the message on which it failed is
lost.

A call that does not return is abandoned GRACE_S after the module is to end, or AWAITED_GRACE_S
after `run` has raised if the call is awaited. Its message is delivered again. Abandoned code cannot
publish. Ctrl-C is not raised in these calls; the program ends the gateway in order. Every other
exception, of any type, is a failure of the module, except the cancellation of the call.

    CREATING ──► STARTING ──► RUNNING ──► ENDED
        ▲                        │ raised, in any state
        └────── FAILED ◄─────────┘
"""

from __future__ import annotations

import enum
import inspect
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import trio

from simplebus.gateway.blocking import current_callback
from simplebus.gateway.bus import ModuleBus
from simplebus.gateway.config import ModulePlan, find_entry_point
from simplebus.gateway.errors import ModuleBusError, describe_error, is_cancelled, split_failure
from simplebus.gateway.health import HealthProbe, HealthValue, plain_text
from simplebus.gateway.mailbox import Mailbox
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import AsyncPort, BlockingPort
from simplebus.gateway.workers import MESSAGES_PER_TURN, ModuleThread
from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.gateway")

RESTART_DELAY_S = 1.0
"""Delay before the first restart. It doubles with each failure."""
RESTART_DELAY_MAX_S = 60.0
"""Longest delay. A module that ran for this long starts with the first delay again."""
GRACE_S = 10.0
"""Time for a call to return when the module is to end."""
AWAITED_GRACE_S = 1.0
"""Time for an awaited call to return after `run` has raised, because it may wait for `run`."""


class State(enum.StrEnum):
    """State of a module in a gateway."""

    CREATING = "creating"
    STARTING = "starting"
    """Created, but earlier modules have not started yet."""
    RUNNING = "running"
    FAILED = "failed"
    """Waiting for the next restart."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LifeStatistics:
    """Statistics of one module of a gateway."""

    name: str
    module: str
    state: State
    failures: int
    """Number of failures."""
    error: str
    """Last failure; empty if the module has not failed."""
    waiting: int
    """Messages in the queue."""
    delivered: int
    """Messages that the module received."""
    dropped: int
    """Messages that were dropped because the queue was full."""
    published: int
    own: Mapping[str, HealthValue] = field(default_factory=dict)
    """Values that the module's `health` returned."""


class _Restart(Exception):  # noqa: N818 - not an error.
    """The module is to be restarted with another plan."""


class ModuleSupervisor:
    """Supervisor of a module. The bus delivers messages to the supervisor, not to the module."""

    current: ContextVar[ModuleSupervisor | None] = ContextVar("within", default=None)
    """Supervisor whose task or thread is running."""

    def __init__(self, bus: ModuleBus, plan: ModulePlan) -> None:
        self.plan = plan
        self.state = State.CREATING
        self.failures = 0
        self.error = ""
        self.created = trio.Event()
        """Set after the first attempt to create the module."""
        self.may_start = trio.Event()
        """Set by the gateway when the module may start."""
        self.started = trio.Event()
        """Set after the first attempt to start the module."""
        self.is_abandoned = False
        """True if the gateway no longer waits for the module to start."""
        self._bus = bus
        self._mailbox: Mailbox | None = None
        self._health_probe: HealthProbe | None = None
        """Probe of the created module."""
        self._port: AsyncPort | BlockingPort | None = None
        self._published_before = 0
        """Messages published through earlier ports."""
        self._batch: deque[ModuleMessage] = deque()
        """Messages taken from the mailbox."""
        self._failure: Exception | None = None
        """Exception of `run`, or another reason to interrupt the module."""
        self._pending_names: tuple[str, ...] | None = None
        """Names of the modules, if the module has not been notified yet."""
        self._stopping = trio.Event()
        self._ended = trio.Event()
        self._scope = trio.CancelScope()
        self._restart_delay = trio.CancelScope()
        """Scope around the delay before a restart."""
        self._run_scope = trio.CancelScope()
        self._deliveries = trio.CancelScope()
        """Scope around the calls. Its deadline limits calls that do not return."""
        self._keeps_running = False

    def __repr__(self) -> str:
        return repr(self.plan.name)

    # From outside ---------------------------------------------------------------------------------

    def attach(self) -> None:
        """Add the module to the bus, without links. Raises ModuleBusError."""
        plan = self.plan
        self._mailbox = self._bus.add_worker(
            self, self._run_until_stopped, hears_all=False, places=plan.places, full=plan.full
        )

    def stop_run(self) -> None:
        """End `run`, unless it is needed to process messages."""
        if not self._keeps_running:
            self._stop_run()

    def _stop_run(self) -> None:
        if self._port is not None:
            self._port.stop()
        if not self._keeps_running:
            self._run_scope.cancel()

    async def stop(self, grace: float) -> None:
        """End the module and remove it from the bus.

        Args:
            grace: Seconds to wait for it.
        """
        self._stopping.set()
        self.may_start.set()  # A module that has not started does not start.
        self.stop_run()
        with trio.move_on_after(grace):
            with suppress(ModuleBusError):  # An earlier call removed it, and has given up waiting.
                await self._bus.remove_module_async(self)
            await self._ended.wait()
        if not self._ended.is_set():
            log.warning(
                "module.abandoned",
                "module {module_name!r} did not stop within {seconds:g} s and was abandoned",
                module_name=self.plan.name,
                seconds=grace,
            )
            self._scope.cancel()
            with trio.move_on_after(AWAITED_GRACE_S) as scope:
                await self._ended.wait()
            if scope.cancelled_caught:
                if self._port is not None:
                    self._port.end()
                log.error(
                    "module.shielded",
                    "module {module_name!r} shields itself from cancellation; the gateway "
                    "cannot end before the module does",
                    module_name=self.plan.name,
                )

    async def wait_ended(self) -> None:
        """Wait until the module has ended."""
        await self._ended.wait()

    @property
    def is_stopping(self) -> bool:
        """True if the module is ending or has ended."""
        return self._stopping.is_set()

    def restart_with(self, plan: ModulePlan) -> None:
        """Restart the module with another plan, between two messages; at once if it has failed."""
        self.plan = plan
        self._restart_delay.cancel()
        self._interrupt(_Restart())

    def notify_modules_changed(self, names: tuple[str, ...]) -> None:
        """Notify the module about added or removed modules."""
        self._pending_names = names
        if self._mailbox is not None:
            self._mailbox.interrupt_wait()

    def _interrupt(self, failure: Exception) -> None:
        self._failure = failure
        self._limit_calls()
        if self._mailbox is not None:
            self._mailbox.interrupt_wait()

    def _limit_calls(self) -> None:
        """Limit the time of the current call, because the module is to be interrupted."""
        is_awaited = not isinstance(self._port, BlockingPort)
        has_failed = not isinstance(self._failure, _Restart)
        grace = AWAITED_GRACE_S if is_awaited and has_failed else GRACE_S
        self._deliveries.deadline = min(self._deliveries.deadline, trio.current_time() + grace)

    def statistics(self) -> LifeStatistics:
        """Return the statistics of the module."""
        mailbox = self._mailbox
        return LifeStatistics(
            self.plan.name,
            self.plan.module,
            self.state,
            self.failures,
            self.error,
            0 if mailbox is None else len(mailbox.queue) + len(self._batch),
            0 if mailbox is None else mailbox.delivered,
            0 if mailbox is None else mailbox.dropped,
            self._published_before + (0 if self._port is None else self._port.published),
            {} if self._health_probe is None else self._health_probe.latest(),
        )

    # Inside ---------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def _run_until_stopped(self, mailbox: Mailbox) -> None:
        self.current.set(self)
        delay, failed_at = RESTART_DELAY_S, trio.current_time()
        try:
            with self._scope:
                while not self._stopping.is_set():
                    plan = self.plan
                    try:
                        await self._run_once(mailbox)
                    except _Restart:
                        log.info(
                            "module.restarted",
                            "module {module_name!r} restarts with another plan",
                            module_name=self.plan.name,
                        )
                        continue
                    except Exception as error:
                        if trio.current_time() - failed_at > RESTART_DELAY_MAX_S:
                            delay = RESTART_DELAY_S
                        await self._handle_failure(
                            mailbox, error, delay if self.plan is plan else 0.0
                        )
                        delay, failed_at = min(2 * delay, RESTART_DELAY_MAX_S), trio.current_time()
                        if self.plan is not plan:  # The new plan may have fixed it.
                            delay = RESTART_DELAY_S
        finally:
            mailbox.lost_count += len(self._batch)
            self._batch.clear()
            self.state = State.ENDED
            self.created.set()
            self.started.set()
            self._ended.set()

    async def _handle_failure(self, mailbox: Mailbox, error: Exception, delay: float) -> None:
        self.state = State.FAILED
        self.failures += 1
        self.error = plain_text(describe_error(error))
        log.error(
            "module.failed",
            "module {module_name!r} failed; restarting in {seconds:g} s",
            module_name=self.plan.name,
            seconds=delay,
            error=self.error,
            exc_info=error,
        )
        self.created.set()
        self.started.set()
        if not self._batch:  # Messages that were taken are still to be delivered.
            mailbox.mark_idle()
        with trio.move_on_after(delay) as self._restart_delay:
            await self._stopping.wait()

    async def _run_once(self, mailbox: Mailbox) -> None:
        """Run the module from create to destroy. Raises its failure, or _Restart."""
        self.state, self._failure = State.CREATING, None
        factory = self.plan.factory or find_entry_point(self.plan.module)
        is_blocking = _is_blocking(factory)
        port_type = BlockingPort if is_blocking else AsyncPort
        port = self._port = port_type(self._bus, self, self.plan.name)
        thread = ModuleThread(self.plan.name, mailbox) if is_blocking else None
        calls = _Calls(thread)
        module = None
        try:
            module = await calls.call(factory, port, self.plan.settings)
            _check_kind(module, is_blocking)
            health_probe = self._health_probe = HealthProbe(
                module, name=port.name, is_blocking=is_blocking
            )
            self.state = State.STARTING
            self.created.set()
            await self.may_start.wait()
            if self._stopping.is_set():
                return
            await calls.call(getattr(module, "start", _no_operation))
            self.state = State.RUNNING
            self.started.set()
            await self._deliver_and_run(mailbox, module, calls, health_probe)
        finally:
            if self._health_probe is not None:
                self._health_probe.end()
                self._health_probe = None
            port.stop()
            self._published_before += port.published
            self._port = None
            if module is not None:
                await self._destroy(module, calls)
            port.end()
            if thread is not None:
                thread.end()

    async def _destroy(self, module: Any, calls: _Calls) -> None:
        if calls.thread is not None and calls.thread.is_abandoned:
            return
        try:
            with trio.move_on_after(GRACE_S) as scope:
                await calls.call(getattr(module, "destroy", _no_operation))
            if scope.cancelled_caught:
                log.warning(
                    "module_destroy.abandoned",
                    "module {module_name!r} did not return from destroy and was abandoned",
                    module_name=self.plan.name,
                )
        except Exception:
            log.exception(
                "module_destroy.failed",
                "module {module_name!r} failed in destroy",
                module_name=self.plan.name,
            )

    async def _deliver_and_run(
        self, mailbox: Mailbox, module: Any, calls: _Calls, health_probe: HealthProbe
    ) -> None:
        """Deliver messages, beside `run`."""
        name = self.plan.name
        self._run_scope = trio.CancelScope()
        if self._stopping.is_set():
            return
        self._keeps_running = getattr(module, "keeps_running", False)
        run = getattr(module, "run", None)
        raised: Exception | None = None
        self._deliveries = trio.CancelScope()
        if self._failure is not None:
            self._limit_calls()
        async with trio.open_nursery() as nursery:
            if run is not None:
                nursery.start_soon(self._run, run)
            nursery.start_soon(health_probe.run)
            try:
                with self._deliveries:
                    await self._deliver(mailbox, module, calls)
                if self._deliveries.cancelled_caught:
                    log.warning(
                        "module_call.abandoned",
                        "module {module_name!r}: abandoned a call that did not return",
                        module_name=name,
                    )
                    self._check_failure()
            except Exception as error:  # Raised outside the nursery, which would wrap it.
                raised = error
            self._stop_run()
            health_probe.end()
            nursery.cancel_scope.deadline = trio.current_time() + GRACE_S
        if raised is not None:
            raise raised

    @trio.lowlevel.enable_ki_protection
    async def _run(self, run: Callable[[], Any]) -> None:
        current_callback.set(None)  # `run` is not a callback, so it may wait for any module.
        try:
            if inspect.iscoroutinefunction(run):
                with self._run_scope:
                    await run()
            else:  # It cannot be cancelled; it watches `stopping` of its port.
                await self._run_blocking(run)
        except BaseException as error:
            failure, remaining_error = _split_failure(error)
            if failure is not None:
                self._interrupt(failure)
            if remaining_error is not None:
                raise remaining_error from None

    async def _run_blocking(self, run: Callable[[], Any]) -> None:
        """Call `run` in a thread."""
        port = self._port
        assert port is not None
        try:
            await trio.to_thread.run_sync(
                _run_in_thread, run, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
            )
        except trio.Cancelled:  # The thread continues, but nothing waits for it.
            port.end()
            log.warning(
                "module_run.abandoned",
                "module {module_name!r}: abandoned run, which did not end",
                module_name=port.name,
            )
            raise

    async def _deliver(self, mailbox: Mailbox, module: Any, calls: _Calls) -> None:
        while True:
            await self._notify_modules_changed(module, calls)
            while self._batch:
                if calls.thread is not None:
                    await calls.thread.run(
                        self._deliver_batch, mailbox, module.receive, calls.thread
                    )
                else:
                    await self._deliver_turn(mailbox, module.receive)
                if mailbox.is_closed:
                    return
                self._check_failure()
                await self._notify_modules_changed(module, calls)
            batch = await mailbox.wait_batch_async()
            if batch is None:
                return
            self._batch = batch
            self._check_failure()

    def _deliver_batch(
        self, mailbox: Mailbox, receive: Callable[[ModuleMessage], Any], thread: ModuleThread
    ) -> None:
        """Deliver messages in the thread of the module."""
        batch = self._batch
        while batch and not (mailbox.is_closed or thread.is_abandoned) and self._failure is None:
            mailbox.delivered += 1
            receive(batch.popleft())

    async def _deliver_turn(
        self, mailbox: Mailbox, receive: Callable[[ModuleMessage], Any]
    ) -> None:
        batch = self._batch
        try:
            for _ in range(MESSAGES_PER_TURN):
                if not batch or mailbox.is_closed or self._failure is not None:
                    break
                mailbox.delivered += 1
                message = batch.popleft()
                await receive(message)
                if (self._failure is not None or self._stopping.is_set()) and is_cancelled():
                    self._requeue(mailbox, message)  # The module suppressed the cancellation.
                    break
        except BaseException as error:
            if is_cancelled():  # An error after the cancellation is no failure on the message.
                self._requeue(mailbox, message)
            _raise_failure(error)
            raise
        await trio.lowlevel.checkpoint()

    def _requeue(self, mailbox: Mailbox, message: ModuleMessage) -> None:
        """Put a message back, to be delivered again."""
        self._batch.appendleft(message)
        mailbox.delivered -= 1

    async def _notify_modules_changed(self, module: Any, calls: _Calls) -> None:
        if self._pending_names is not None:
            names, self._pending_names = self._pending_names, None
            notify = getattr(module, "modules_changed", None)
            if notify is not None:
                await calls.call(notify, names)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _Calls:
    """Calls methods of a module."""

    def __init__(self, thread: ModuleThread | None) -> None:
        self.thread = thread

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method in the module's thread, or here and await it."""
        if self.thread is not None:
            return await self.thread.run(method, *args)
        try:
            result = method(*args)
            return await result if inspect.isawaitable(result) else result
        except BaseException as error:
            _raise_failure(error)
            raise


def _run_in_thread(run: Callable[[], Any]) -> None:
    try:
        run()
    except Exception:
        raise
    except BaseException as error:
        failure, _ = split_failure(error, in_thread=True)
        assert failure is not None
        raise failure from error


def _raise_failure(error: BaseException) -> None:
    """Raise the failure of a module as an Exception, unless it is one already."""
    failure, remainder = _split_failure(error)
    if failure is None or failure is error:
        return
    raise failure if remainder is None else BaseExceptionGroup(str(error), [failure, remainder])


def _split_failure(error: BaseException) -> tuple[Exception | None, BaseException | None]:
    """Split an exception that was raised in a module's task.

    Ctrl-C can be raised in tasks that the module has started. It is passed on to the program.
    """
    if isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt):
        is_handled_by_trio = (
            getattr(signal.getsignal(signal.SIGINT), "__module__", "") == _TRIO_SIGNAL_MODULE
        )
        if is_handled_by_trio and threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
    return split_failure(error, can_raise_ctrl_c=False)


_TRIO_SIGNAL_MODULE = "trio._core._ki"
"""Module of trio's SIGINT handler, which raises KeyboardInterrupt. Other handlers do not."""


def _no_operation() -> None:
    """Stand in for a method that a module does not have."""


_METHODS = ("receive", "run", "start", "destroy", "modules_changed")


def _is_blocking(factory: Callable[..., Any]) -> bool:
    """Return True if the methods of a module may block: if neither they nor the entry point are
    async.
    """
    methods = [factory, *(getattr(factory, name, None) for name in _METHODS)]
    return not any(map(inspect.iscoroutinefunction, methods))


def _check_kind(module: Any, is_blocking: bool) -> None:
    """Raise TypeError for an object without `receive`, or with async methods in a thread."""
    if not callable(getattr(module, "receive", None)):
        raise TypeError(f"a module has a method `receive`; got {module!r}")
    if is_blocking and not _is_blocking(module):
        raise TypeError("the module has async methods: its entry point must be its class, or async")
