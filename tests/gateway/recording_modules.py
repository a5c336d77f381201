"""Test modules that record received messages and can be held in their callback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from simplebus.gateway import ModuleBus, ModuleMessage
from simplebus.gateway.mailbox import Mailbox

TIMEOUT_SECONDS = 60
"""Time after which a wait fails the test."""


def text_message(text: str) -> ModuleMessage:
    return ModuleMessage(text.encode())


class Listener:
    """Module with a thread, which records received messages."""

    def __init__(self, on_message: Callable[[ModuleMessage], None] = lambda message: None) -> None:
        self.received: list[str] = []
        self.threads: set[int] = set()
        self.on_message = on_message
        """Called with each message after it is recorded."""
        self._changed = threading.Condition()

    def receive(self, message: ModuleMessage) -> None:
        with self._changed:
            self.received.append(message.content.decode())
            self.threads.add(threading.get_ident())
            self._changed.notify_all()
        self.on_message(message)

    def wait(self, count: int) -> list[str]:
        """Wait for `count` messages. Returns their contents."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.received) >= count, TIMEOUT_SECONDS), (
                self.received
            )
        return self.received


class HeldListener(Listener):
    """Listener that stays in its callback until it is released."""

    def __init__(self) -> None:
        super().__init__(self._hold)
        self.entered = threading.Semaphore(0)
        self._released = threading.Event()

    def _hold(self, message: ModuleMessage) -> None:
        self.entered.release()
        assert self._released.wait(TIMEOUT_SECONDS)

    def wait_entered(self) -> None:
        """Wait until the module is in a callback."""
        assert self.entered.acquire(timeout=TIMEOUT_SECONDS)

    def release(self) -> None:
        self._released.set()


class run_in_thread:  # noqa: N801 - it is called like a function.
    """Run a function in a thread."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._raised: list[BaseException] = []
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._raised.append(error)

    @property
    def is_running(self) -> bool:
        """True until the function has returned."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the function, and raise its exception if it failed."""
        self._thread.join(TIMEOUT_SECONDS)
        assert not self.is_running, "the function has not returned"
        if self._raised:
            raise self._raised[0]


# Threads of fixtures that several tests share.
_SHARED_THREADS = {
    "simplebus server",
    "simplebus awake",
}


def assert_no_threads_left() -> None:
    """Check that all module threads end, which takes them a moment after their last callback."""
    for thread in threading.enumerate():
        if thread.name.startswith("simplebus ") and thread.name not in _SHARED_THREADS:
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive(), thread


class _OwnedLock:
    """Lock that records the thread that holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.holder: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self.holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.holder = None
        self._lock.release()


_UNDER_LOCK = (
    "attach",
    "find",
    "detach",
    "link",
    "unlink",
    "find_route",
    "try_deliver",
    "deliver_blocked",
)


@contextmanager
def lock_checking_bus() -> Iterator[ModuleBus]:
    """Yield a bus that detects access to its modules and queues without its lock.

    Such access rarely fails: another thread must run between two of its steps.
    """
    lock, unguarded = _OwnedLock(), []

    def checked_under_lock(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            if lock.holder != threading.get_ident():
                unguarded.append(call.__qualname__)
            return call(*args)

        return checked

    bus = ModuleBus()
    router = bus._router
    router.lock = lock  # type: ignore[assignment]
    for name in _UNDER_LOCK:
        setattr(router, name, checked_under_lock(getattr(router, name)))
    with patch.object(Mailbox, "_take_all", checked_under_lock(Mailbox._take_all)), bus:
        yield bus
    assert unguarded == []
