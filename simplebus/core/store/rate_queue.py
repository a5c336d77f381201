"""Sessions whose messages wait because they, or others of the same user or address, publish faster
than they may.

Rule 1: who waits longest is let in first, and then waits behind all others.
"""

from __future__ import annotations

from collections.abc import Callable

from simplebus.core.clock import BrokerClock
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.session.session import Session
from simplebus.core.subscription.position import NEVER
from simplebus.core.users import rate_limit
from simplebus.core.users.rate_limit import RateLimiter


class RateQueue:
    """Of one broker. Wakes by its alarms, see `alarms.Waiter`."""

    def __init__(self, clock: BrokerClock, retry_session: Callable[[Session], None]) -> None:
        self.scanned_count = 0
        """Nothing: what it does at once is bounded by the rates."""
        self.schedule_wakeup: Callable[[float, RateQueue], None] = lambda due, waiter: None
        """Called with when it is to be woken next."""
        self.waiting_sessions: dict[Session, None] = {}
        self._clock = clock
        self._retry_session = retry_session
        """Has what a session has parked stored, as far as it may be."""

    def count_allowed(self, session: Session, batch: FrameBatch) -> int:
        """How many messages of a session are let in now."""
        return rate_limit.count_allowed(session.token_buckets, batch.bounds[1:], self._clock.now)

    def add(self, session: Session) -> None:
        """It has parked messages that are to be let in later."""
        self.waiting_sessions[session] = None
        for meter in session.token_buckets:
            meter.waiting_session_count += 1
        self.schedule_wakeup(self.next_wakeup, self)

    def remove(self, session: Session) -> None:
        del self.waiting_sessions[session]
        for meter in session.token_buckets:
            meter.waiting_session_count -= 1

    @property
    def next_wakeup(self) -> float:
        """When `wake_due` is to be called."""
        if not self.waiting_sessions:
            return NEVER
        now = self._clock.now
        return min(
            rate_limit.next_available(each, now)
            for each in {s.token_buckets for s in self.waiting_sessions}
        )

    def handle_wakeup(self) -> bool:
        """Let in what may be let in by now."""
        now, spent = self._clock.now, set()
        for session in list(self.waiting_sessions):
            if session not in self.waiting_sessions or session.token_buckets in spent:
                continue
            if rate_limit.next_available(session.token_buckets, now) <= now:
                self._retry_session(session)
            if session in self.waiting_sessions:
                spent.add(session.token_buckets)
        return False

    def set_token_buckets(self, session: Session, token_buckets: tuple[RateLimiter, ...]) -> None:
        """From now on it is measured by these."""
        if session.token_buckets == token_buckets:
            return
        is_waiting = session in self.waiting_sessions
        if is_waiting:
            self.remove(session)
        session.token_buckets = token_buckets
        if is_waiting:
            self.add(session)
