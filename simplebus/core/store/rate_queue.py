"""Sessions whose messages wait because they, or others of the same user or address, publish faster
than they may.

Rule 1: who waits longest is let in first, and then waits behind all others.
"""

from __future__ import annotations

from collections.abc import Callable

from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.redelivery.delivery_policy import Clock
from simplebus.core.session.session import Session
from simplebus.core.subscription.position import NEVER
from simplebus.core.users import rate_limit
from simplebus.core.users.rate_limit import Meter


class Pacing:
    """Of one broker. Wakes by its alarms, see `alarms.Waiter`."""

    def __init__(self, clock: Clock, let_in: Callable[[Session], None]) -> None:
        self.looked = 0
        """Nothing: what it does at once is bounded by the rates."""
        self.put_off: Callable[[float, Pacing], None] = lambda due, waiter: None
        """Called with when it is to be woken next."""
        self.waiting: dict[Session, None] = {}
        self._clock = clock
        self._let_in = let_in
        """Has what a session has parked stored, as far as it may be."""

    def fits(self, session: Session, batch: FrameBatch) -> int:
        """How many messages of a session are let in now."""
        return rate_limit.fits(session.meters, batch.bounds[1:], self._clock.now)

    def wait(self, session: Session) -> None:
        """It has parked messages that are to be let in later."""
        self.waiting[session] = None
        for meter in session.meters:
            meter.waiting += 1
        self.put_off(self.due, self)

    def wait_no_more(self, session: Session) -> None:
        del self.waiting[session]
        for meter in session.meters:
            meter.waiting -= 1

    @property
    def due(self) -> float:
        """When `wake_due` is to be called."""
        if not self.waiting:
            return NEVER
        now = self._clock.now
        return min(rate_limit.due(each, now) for each in {s.meters for s in self.waiting})

    def wake_due(self) -> bool:
        """Let in what may be let in by now."""
        now, spent = self._clock.now, set()
        for session in list(self.waiting):
            if session not in self.waiting or session.meters in spent:
                continue
            if rate_limit.due(session.meters, now) <= now:
                self._let_in(session)
            if session in self.waiting:
                spent.add(session.meters)
        return False

    def adopt(self, session: Session, its: tuple[Meter, ...]) -> None:
        """From now on it is measured by these."""
        if session.meters == its:
            return
        is_waiting = session in self.waiting
        if is_waiting:
            self.wait_no_more(session)
        session.meters = its
        if is_waiting:
            self.wait(session)
