"""Who waits for the bus to confirm what it published, and what the bus refused.

Rule 1: positions are waited for in the order in which they were given out. So a confirm, which is
cumulative, looks at those whom it wakes and at nobody else.
Rule 2: a refusal goes to whoever waits for its position. What nobody waits for is kept for the next
`flush`, or for the end of the bus: the first of them, and how many there were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from simplebus.core.errors import RefusedError

# Refusals that are kept for a flush; further ones are counted.
_KEPT_MAX = 100


@dataclass(slots=True, eq=False)
class ConfirmWaiter:
    """Somebody who waits for the positions first..last."""

    first: int
    last: int
    on_done: Callable[[], None]
    is_done: bool = False
    """Whether all of them are confirmed or refused."""
    is_cancelled: bool = False
    """Whether it does not wait any more: what is refused is no concern of its."""
    refusals: list[RefusedError] = field(default_factory=list)
    refused_positions: list[int] = field(default_factory=list)
    """Those of what was refused."""


class PendingConfirms:
    """The waiters of one bus, and the refusals that are nobody's."""

    def __init__(self) -> None:
        self._waiters: deque[ConfirmWaiter] = deque()
        self._refusal_by_position: dict[int, RefusedError] = {}
        """By position: those that a waiter may claim."""
        self._unclaimed: list[RefusedError] = []
        self._unclaimed_count = 0

    @property
    def has_waiters(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiters)

    def add_waiter(self, first: int, last: int, on_done: Callable[[], None]) -> ConfirmWaiter:
        """Have `wake` called when positions first..last are through. No position may be below
        one that is waited for already; `first` above `last` claims no refusals."""
        waiter = ConfirmWaiter(first, last, on_done)
        self._waiters.append(waiter)
        return waiter

    def update(self, confirmed: int, refused: dict[int, RefusedError]) -> None:
        """Everything below `confirmed` is through; of that and of what follows, this is refused."""
        if refused:
            self._refusal_by_position.update(refused)
        waiters = self._waiters
        while waiters and waiters[0].last < confirmed:
            waiter = waiters.popleft()
            if self._refusal_by_position:
                self._claim(waiter)
            waiter.is_done = True
            waiter.on_done()
        if self._refusal_by_position:
            awaited = next((w.first for w in waiters if not w.is_cancelled), confirmed)
            self._set_aside(min(awaited, confirmed))

    def cancel(self, waiter: ConfirmWaiter) -> None:
        """It does not wait any longer. What was refused of its positions is nobody's."""
        waiter.is_cancelled = True
        for error in waiter.refusals:
            self._keep(error)

    def wake_all(self) -> None:
        """The bus is gone for good: nobody is to wait any longer."""
        while self._waiters:
            self._waiters.popleft().on_done()

    def pop_unclaimed(self) -> ExceptionGroup[RefusedError] | None:
        """What was refused and was nobody's, if anything was."""
        self._set_aside(None)
        if not self._unclaimed:
            return None
        kept, count = self._unclaimed, self._unclaimed_count
        self._unclaimed, self._unclaimed_count = [], 0
        return group_refusals(kept, count)

    def _claim(self, waiter: ConfirmWaiter) -> None:
        if waiter.is_cancelled:
            return
        if waiter.first == waiter.last:
            found = self._refusal_by_position.pop(waiter.first, None)
            if found is not None:
                waiter.refusals.append(found)
                waiter.refused_positions.append(waiter.first)
        elif waiter.first < waiter.last:
            for position, error in self._taken(waiter.first, waiter.last + 1):
                waiter.refusals.append(error)
                waiter.refused_positions.append(position)

    def _set_aside(self, end: int | None) -> None:
        """Nobody will claim what was refused below `end`; None for all."""
        for _, error in self._taken(0, end):
            self._keep(error)

    def _keep(self, error: RefusedError) -> None:
        self._unclaimed_count += 1
        if len(self._unclaimed) < _KEPT_MAX:
            self._unclaimed.append(error)

    def _taken(self, begin: int, end: int | None) -> Iterator[tuple[int, RefusedError]]:
        for position in sorted(self._refusal_by_position):
            if position >= begin and (end is None or position < end):
                yield position, self._refusal_by_position.pop(position)


def group_refusals(refused: list[RefusedError], count: int | None = None) -> ExceptionGroup[RefusedError]:
    """Several refusals as one exception."""
    count = len(refused) if count is None else count
    return ExceptionGroup(f"the bus refused {count} message{'' if count == 1 else 's'}", refused)
