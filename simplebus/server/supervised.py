"""What systemd is told of a server that is up: that it is alive, and how it is doing.

Rule 1: the event loop itself says that it is alive. A loop that hangs says nothing, and systemd
starts the server again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import trio

from simplebus.server.notify import is_listening, notify

STATUS_SECONDS = 10.0


def watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """How often systemd wants to hear from this process at least; None for never."""
    asked, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not asked.isdigit() or not int(asked) or (pid and pid != str(os.getpid())):
        return None
    return int(asked) / 1e6


async def tell(
    status: Callable[[], str],
    *,
    watchdog: float | None,
    say: Callable[..., object] = notify,
) -> None:
    """Say that the loop is alive, twice as often as is asked for, and now and then the status,
    until cancelled. Ends at once where nobody listens."""
    if not is_listening():
        return
    pause = min(STATUS_SECONDS, watchdog / 2 if watchdog else STATUS_SECONDS)
    told = trio.current_time()
    while True:
        await trio.sleep(pause)
        words = ["WATCHDOG=1"] if watchdog else []
        if trio.current_time() - told >= STATUS_SECONDS:
            told = trio.current_time()
            words.append(f"STATUS={status()}")
        if words:
            say(*words)
