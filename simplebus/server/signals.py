"""Signals that the server hears.

Rule 1: none of them kills it without its own doing; what it has no use for is said in the log.
Rule 2: what nobody has taken when the server has ended asked for nothing else, and has no effect.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator

import trio

log = logging.getLogger("simplebus.server")

STOPPING = (signal.SIGTERM, signal.SIGINT)
_HEARD = (*STOPPING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_USELESS = {
    signal.SIGHUP: "nothing is read again while the server runs; start it again for new settings",
    signal.SIGUSR1: "there is no log file to open again: the log goes to standard error",
    signal.SIGUSR2: "there is no NATS door to close, or it is closed already",
}


@contextlib.asynccontextmanager
async def listen(*, for_good: bool = False) -> AsyncIterator[AsyncIterator[int]]:
    """The signals that come. Behind the block they mean again what they did before; or nothing,
    `for_good`, in a process that ends then: while files are closed and the interpreter ends."""
    if threading.current_thread() is not threading.main_thread():  # That one alone hears signals.
        yield _no_signals()
        return
    # None is lost between their being ignored and their being heard.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _HEARD}
    try:
        # Those that are left over trio raises again, and then they are ignored.
        with trio.open_signal_receiver(*_HEARD) as signals:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            yield signals
        for _ in range(2):  # One may be on its way through the event loop.
            await trio.lowlevel.cancel_shielded_checkpoint()
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if for_good else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


async def _no_signals() -> AsyncIterator[int]:
    await trio.sleep_forever()
    yield 0


def say_ignored(number: int) -> None:
    """Say that a signal has no effect, and why."""
    log.warning("%s: %s", signal.Signals(number).name, _USELESS[signal.Signals(number)])
