"""Modules for tests: they write down what they hear, and can be held in their callback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from simplebus.gateway import ModuleBus, ModuleMessage
from simplebus.gateway.mailbox import Mailbox

SOON = 60
"""Seconds that nothing here takes, and after which a test has failed."""


def said(text: str) -> ModuleMessage:
    return ModuleMessage(text.encode())


class Listener:
    """A module with a thread."""

    def __init__(self, then: Callable[[ModuleMessage], None] = lambda message: None) -> None:
        self.heard: list[str] = []
        self.threads: set[int] = set()
        self.then = then
        """Called with each message, once it is written down."""
        self._changed = threading.Condition()

    def receive(self, message: ModuleMessage) -> None:
        with self._changed:
            self.heard.append(message.content.decode())
            self.threads.add(threading.get_ident())
            self._changed.notify_all()
        self.then(message)

    def wait(self, count: int) -> list[str]:
        """What was heard, once it is so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.heard) >= count, SOON), self.heard
        return self.heard


class Held(Listener):
    """One that stays in its callback until it is let go."""

    def __init__(self) -> None:
        super().__init__(self._hold)
        self.entered = threading.Semaphore(0)
        self._go = threading.Event()

    def _hold(self, message: ModuleMessage) -> None:
        self.entered.release()
        assert self._go.wait(SOON)

    def wait_held(self) -> None:
        """Return when it is in a callback."""
        assert self.entered.acquire(timeout=SOON)

    def let_go(self) -> None:
        self._go.set()


class in_thread:  # noqa: N801 - it is called like a function.
    """Call it in a thread."""

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
    def is_there(self) -> bool:
        """Whether it has not returned."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for it, and raise what it raised."""
        self._thread.join(SOON)
        assert not self.is_there, "it still waits"
        if self._raised:
            raise self._raised[0]


_OTHERS = {"simplebus server", "simplebus awake"}  # Of fixtures that other tests share.


def assert_no_threads_left() -> None:
    """That all threads of modules end, which takes them a moment after their last callback."""
    for thread in threading.enumerate():
        if thread.name.startswith("simplebus ") and thread.name not in _OTHERS:
            thread.join(SOON)
            assert not thread.is_alive(), thread


class _Lock:
    """Knows who holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.holder: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self.holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.holder = None
        self._lock.release()


_UNDER_LOCK = ("attach", "find", "detach", "link", "unlink", "route", "takes", "let_in")


@contextmanager
def guarded_bus() -> Iterator[ModuleBus]:
    """A bus that finds out who touches its modules and their queues without its lock: between two
    steps of such a one another thread's could come, though that is rare."""
    lock, unguarded = _Lock(), []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            if lock.holder != threading.get_ident():
                unguarded.append(call.__qualname__)
            return call(*args)

        return checked

    bus = ModuleBus()
    router = bus._router
    router.lock = lock  # type: ignore[assignment]
    for name in _UNDER_LOCK:
        setattr(router, name, watched(getattr(router, name)))
    with patch.object(Mailbox, "_take_all", watched(Mailbox._take_all)), bus:
        yield bus
    assert unguarded == []
