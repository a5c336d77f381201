"""How much a lane has before it: messages of the near end that are not confirmed by the far one.

Rule 1: a lane that copies sees it. One that does not come to that, as the far end is slow, full or
away, has the near end asked: on its own connection, or for that alone, once a second at most.
Rule 2: what is not known is not told. While the near end is away, what was known last is.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import trio

from simplebus.bridge.interfaces import Far, Near
from simplebus.core.errors import BusError

log = logging.getLogger("simplebus.bridge")

LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0

Alone = Callable[[], AbstractAsyncContextManager[tuple[Near, int]]]
"""What opens the near end without the far one, and says where the lane is as far as that knows."""


class Behind:
    """Of one lane."""

    def __init__(self, alone: Alone | None) -> None:
        """`alone`: None for a near end that keeps nothing for who is away."""
        self._alone = alone
        self.far: Far | None = None
        self.at_hand = 0
        """Messages that were found, are to be copied, and are not settled."""
        self.waits = False
        """Whether the near end has nothing more, and says when it has."""
        self.since: float | None = None
        """When the first of them was accepted, by the monotonic clock; None for nothing."""
        self._beyond: int | None = None
        """How many messages the near end has beside; None where nothing is known."""
        self._near: Near | None = None
        self._cursor = 0
        """Where these begin."""
        self._found = 0
        """How often the lane has looked."""
        self._looked_at = -math.inf
        """When the near end was opened alone."""

    @property
    def count(self) -> int | None:
        """None where it is not known."""
        if self._beyond is None:
            return None
        confirmed = self.far.confirmed if self.far is not None else 0
        return max(0, self.at_hand - confirmed) + self._beyond

    @property
    def seconds(self) -> float:
        """How long ago the first of them was accepted; 0 for nothing."""
        return 0.0 if self.since is None else max(0.0, time.monotonic() - self.since)

    def begin(self, near: Near, at: int) -> None:
        """The near end is there, and has what is to be copied from this sequence on."""
        self._near, self._cursor = near, at

    def found(self, next: int, head: int) -> None:
        """The lane has looked, and goes on here; there the near end ends."""
        self._found += 1
        self._cursor, self._beyond = next, max(0, head - next)

    def end(self) -> None:
        """An end is lost: what was at hand is not any more."""
        self._beyond = self.count
        if self._alone is None:
            self._beyond, self.since = 0, None
        self.far, self._near, self.at_hand, self.waits = None, None, 0, False

    def forget(self) -> None:
        """Nobody looks any more."""
        self._beyond = self.since = None

    async def watch(self) -> None:
        """Ask the near end while there is one, and the lane does not."""
        while True:
            found = self._found
            await trio.sleep(LOOK_SECONDS)
            near, cursor = self._near, self._cursor
            if near is None or self.waits or found != self._found:
                continue
            try:
                count, age = await near.measure_backlog(cursor)
            except (BusError, OSError):
                continue  # The lane learns of it itself.
            except Exception:  # As in `Lane.run`; what is known ages.
                log.exception("how much waits for a lane cannot be found out")
                return
            if near is self._near and found == self._found and not self.waits:
                self._learn(count, age)

    async def look(self, memory: str, at: int) -> None:
        """There are not both ends: see what the near one has, if that is there. In this memory the
        lane was here."""
        if self._alone is None or trio.current_time() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = trio.current_time()
        with trio.move_on_after(_PATIENCE_SECONDS):
            try:
                async with self._alone() as (near, kept):
                    is_same = near.storage_id == memory and kept <= at <= near.head
                    self._learn(*await near.measure_backlog(at if is_same else kept))
            except (BusError, OSError):
                return
            except Exception:  # As in `watch`.
                log.exception("how much waits for a lane cannot be found out")

    def _learn(self, count: int, age: float) -> None:
        self._beyond = count
        if not (self.at_hand or count):
            self.since = None
        elif self.since is None:
            self.since = time.monotonic() - age
