"""Signals of the server process.

No signal ends the process directly; signals without a function are logged.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import AsyncIterator

import trio

from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.server")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HANDLED_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_IGNORED_REASONS = {
    signal.SIGHUP: "no configuration file to reload; restart the server for new settings",
    signal.SIGUSR1: "no log file to reopen; the log goes to standard error",
    signal.SIGUSR2: "no NATS listener to close, or it is closed already",
}


@contextlib.asynccontextmanager
async def open_signal_receiver(
    *, ignore_afterwards: bool = False
) -> AsyncIterator[AsyncIterator[int]]:
    """Receive signals for the length of the block.

    Afterwards the previous handlers apply again. With `ignore_afterwards`, signals are ignored
    instead: the process is about to end and closes its files.
    """
    # Only the main thread receives signals.
    if threading.current_thread() is not threading.main_thread():
        yield _no_signals()
        return
    # Signals stay pending until the receiver is open, so none is lost.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _HANDLED_SIGNALS}
    try:
        # trio raises unread signals again on exit; they are ignored then.
        with trio.open_signal_receiver(*_HANDLED_SIGNALS) as signals:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            yield signals
        for _ in range(2):  # A signal may still be queued in the event loop.
            await trio.lowlevel.cancel_shielded_checkpoint()
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ignore_afterwards else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


async def _no_signals() -> AsyncIterator[int]:
    await trio.sleep_forever()
    yield 0


def log_ignored_signal(number: int) -> None:
    """Log that a signal has no effect, and why."""
    log.warning(
        "signal.ignored",
        "{signal}: {reason}",
        signal=signal.Signals(number).name,
        reason=_IGNORED_REASONS[signal.Signals(number)],
    )
