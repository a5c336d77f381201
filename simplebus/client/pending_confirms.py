"""Waiters for confirms, and the messages that the server refused.

Waiters wait for positions in ascending order, so a cumulative confirm only visits the waiters that
it finishes. A refusal goes to the waiter of its position; without one it is kept for the next
`flush` or the end of the bus.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from simplebus.core.errors import RefusedError

# Unclaimed refusals that are kept; further ones are only counted.
_UNCLAIMED_MAX = 100


def _do_nothing() -> None:
    """Replace a called `on_done`, so that its closure, which may refer to the waiter, is freed."""


@dataclass(slots=True, eq=False)
class ConfirmWaiter:
    """Waiter for the confirms of the positions first..last."""

    first: int
    last: int
    on_done: Callable[[], None]
    is_done: bool = False
    """True if all positions are confirmed or refused."""
    is_cancelled: bool = False
    """True if the waiter has stopped waiting. Later refusals are not reported to it."""
    refusals: list[RefusedError] = field(default_factory=list)
    refused_positions: list[int] = field(default_factory=list)
    """Positions of `refusals`."""


class PendingConfirms:
    """Waiters of one bus, and refusals without a waiter."""

    def __init__(self) -> None:
        self._waiters: deque[ConfirmWaiter] = deque()
        self._refusal_by_position: dict[int, RefusedError] = {}
        """Refusals that a waiter may still claim."""
        self._unclaimed: list[RefusedError] = []
        self._unclaimed_count = 0

    @property
    def has_waiters(self) -> bool:
        """True if a waiter is waiting."""
        return bool(self._waiters)

    def add_waiter(self, first: int, last: int, on_done: Callable[[], None]) -> ConfirmWaiter:
        """Add a waiter for the positions first..last; `on_done` is called when all are confirmed.

        `last` must not be below the `last` of earlier waiters. A waiter with `first > last` claims
        no refusals.
        """
        waiter = ConfirmWaiter(first, last, on_done)
        self._waiters.append(waiter)
        return waiter

    def update(self, confirmed_position: int, refusals: dict[int, RefusedError]) -> None:
        """Add new refusals, and finish the waiters of positions below `confirmed_position`."""
        if refusals:
            self._refusal_by_position.update(refusals)
        waiters = self._waiters
        while waiters and waiters[0].last < confirmed_position:
            waiter = waiters.popleft()
            if self._refusal_by_position:
                self._claim(waiter)
            waiter.is_done = True
            waiter.on_done()
            waiter.on_done = _do_nothing
        if self._refusal_by_position:
            active = (waiter.first for waiter in waiters if not waiter.is_cancelled)
            first_awaited = next(active, confirmed_position)
            self._keep_unclaimed_below(min(first_awaited, confirmed_position))

    def cancel(self, waiter: ConfirmWaiter) -> None:
        """Stop waiting. The waiter's refusals are kept as unclaimed."""
        waiter.is_cancelled = True
        waiter.on_done = _do_nothing
        for error in waiter.refusals:
            self._keep_unclaimed(error)

    def wake_all(self) -> None:
        """Call `on_done` of all waiters, because no further confirm will arrive."""
        while self._waiters:
            self._waiters.popleft().on_done()

    def pop_unclaimed(self) -> ExceptionGroup[RefusedError] | None:
        """Return and clear the refusals that no waiter has claimed; None if all were claimed."""
        self._keep_unclaimed_below(None)
        if not self._unclaimed:
            return None
        refusals, count = self._unclaimed, self._unclaimed_count
        self._unclaimed, self._unclaimed_count = [], 0
        return group_refusals(refusals, count)

    def _claim(self, waiter: ConfirmWaiter) -> None:
        if waiter.is_cancelled:
            return
        if waiter.first == waiter.last:
            refusal = self._refusal_by_position.pop(waiter.first, None)
            if refusal is not None:
                waiter.refusals.append(refusal)
                waiter.refused_positions.append(waiter.first)
        elif waiter.first < waiter.last:
            for position, error in self._pop_refusals(waiter.first, waiter.last + 1):
                waiter.refusals.append(error)
                waiter.refused_positions.append(position)

    def _keep_unclaimed_below(self, end: int | None) -> None:
        """Keep the refusals below `end`, or all for None, that no waiter will claim."""
        for _, error in self._pop_refusals(0, end):
            self._keep_unclaimed(error)

    def _keep_unclaimed(self, error: RefusedError) -> None:
        self._unclaimed_count += 1
        if len(self._unclaimed) < _UNCLAIMED_MAX:
            self._unclaimed.append(error)

    def _pop_refusals(self, begin: int, end: int | None) -> Iterator[tuple[int, RefusedError]]:
        for position in sorted(self._refusal_by_position):
            if position >= begin and (end is None or position < end):
                yield position, self._refusal_by_position.pop(position)


def group_refusals(
    refusals: list[RefusedError], count: int | None = None
) -> ExceptionGroup[RefusedError]:
    """Return several refusals as one exception; `count` may exceed their number."""
    count = len(refusals) if count is None else count
    messages = "1 message" if count == 1 else f"{count} messages"
    return ExceptionGroup(f"the server refused {messages}", refusals)
