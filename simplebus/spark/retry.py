"""Connections of tasks, with retries: a short outage of the bus must not fail a task.

The driver connects without retries, so that a user sees at once that the bus is down. A failed
task, however, makes Spark abort the whole batch. Permanent errors are not retried.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from time import monotonic, sleep

from simplebus.client.blocking.bus import BlockingBus
from simplebus.client.blocking.connect import connect_blocking
from simplebus.client.reconnect import RETRY_DELAY_MIN_SECONDS, is_worth_retrying
from simplebus.core.errors import BusConnectionError

# Long enough for a bus to start, short enough to delay a task little.
_RETRY_DELAY_MAX_SECONDS = 1.0


@contextlib.contextmanager
def connect_with_retry(
    server: str, *, timeout: float, name: str | None = None
) -> Iterator[BlockingBus]:
    """Connect for the duration of a block, with retries for `timeout` seconds.

    A connection lost within the block is replaced, also for up to `timeout` seconds. With a name, a
    later connection under the same name replaces this one. Raises BusConnectionError.
    """
    with contextlib.ExitStack() as stack:
        yield retry_connect(
            lambda seconds: stack.enter_context(
                connect_blocking(
                    server, name=name, instance=name, timeout=seconds, reconnect=timeout
                )
            ),
            timeout,
        )


def retry_connect(connect: Callable[[float], BlockingBus], timeout: float) -> BlockingBus:
    """Call `connect` with the remaining seconds until it succeeds or its error is permanent."""
    deadline = monotonic() + timeout
    for turn in itertools.count():
        try:
            return connect(max(deadline - monotonic(), RETRY_DELAY_MIN_SECONDS))
        except BusConnectionError as error:
            delay = min(RETRY_DELAY_MIN_SECONDS * 2.0**turn, _RETRY_DELAY_MAX_SECONDS)
            delay *= 1 - random.random() / 2
            if not is_worth_retrying(error.__cause__) or monotonic() + delay >= deadline:
                raise
            sleep(delay)
    raise AssertionError("unreachable")
