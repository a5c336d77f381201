"""Signals that the server hears.

Rule 1: none of them kills it without its own doing; what it has no use for is said in the log.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator, Iterator

import trio

log = logging.getLogger("simplebus.server")

STOPPING = (signal.SIGTERM, signal.SIGINT)
_HEARD = (*STOPPING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_USELESS = {
    signal.SIGHUP: "nothing is read again while the server runs; start it again for new settings",
    signal.SIGUSR1: "there is no log file to open again: the log goes to standard error",
    signal.SIGUSR2: "there is no NATS door to close, or it is closed already",
}


@contextlib.contextmanager
def listen() -> Iterator[AsyncIterator[int]]:
    """The signals that come. Behind the block they mean again what they did before."""
    if threading.current_thread() is threading.main_thread():
        with trio.open_signal_receiver(*_HEARD) as signals:
            yield signals
    else:  # Only the main thread hears signals.
        yield _no_signals()


async def _no_signals() -> AsyncIterator[int]:
    await trio.sleep_forever()
    yield 0


def say_ignored(number: int) -> None:
    """Say that a signal has no effect, and why."""
    log.warning("%s: %s", signal.Signals(number).name, _USELESS[signal.Signals(number)])
