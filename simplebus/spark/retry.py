"""Connections of tasks: tried for a while, since a bus that is away for a moment costs no task.

Who starts a query wants to know at once that a bus is not there. A task is begun in the middle of
one, and Spark gives up a whole batch with its tasks.

Rule 1: what would only happen again is not tried again.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from time import monotonic, sleep

from simplebus.client.blocking.bus import BlockingBus, connect_blocking
from simplebus.client.reconnect import RETRY_DELAY_MIN_SECONDS, is_worth_retrying
from simplebus.core.errors import BusConnectionError

# Long enough for a bus that starts, short enough for a task that waits for nothing else.
_PAUSE_SECONDS_MAX = 1.0


@contextlib.contextmanager
def patient_bus(server: str, *, timeout: float, name: str | None = None) -> Iterator[BlockingBus]:
    """A connection for a block: tried for `timeout` seconds, and replaced for as long if it is lost
    in the block. With a name, whoever comes later under the same one replaces it.

    Raises BusConnectionError.
    """
    with contextlib.ExitStack() as stack:
        yield patiently(
            lambda seconds: stack.enter_context(
                connect_blocking(
                    server, name=name, instance=name, timeout=seconds, reconnect=timeout
                )
            ),
            timeout,
        )


def patiently(connect: Callable[[float], BlockingBus], timeout: float) -> BlockingBus:
    """Call `connect` with the seconds that are left, until it raises no error that may pass."""
    deadline = monotonic() + timeout
    for turn in itertools.count():
        try:
            return connect(max(deadline - monotonic(), RETRY_DELAY_MIN_SECONDS))
        except BusConnectionError as error:
            pause = min(RETRY_DELAY_MIN_SECONDS * 2.0**turn, _PAUSE_SECONDS_MAX)
            pause *= 1 - random.random() / 2
            if not is_worth_retrying(error.__cause__) or monotonic() + pause >= deadline:
                raise
            sleep(pause)
    raise AssertionError("unreachable")
