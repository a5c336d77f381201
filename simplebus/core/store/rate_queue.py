"""Queue of sessions that publish faster than their rate limit, or than their user's or address's.

The session that has waited longest continues first, and then waits behind all others.
"""

from __future__ import annotations

from collections.abc import Callable

from simplebus.core.clock import BrokerClock
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.session.session import Session
from simplebus.core.subscription.delayed_wakeups import NEVER
from simplebus.core.users import rate_limit
from simplebus.core.users.rate_limit import RateLimiter


class RateQueue:
    """Rate-limited sessions of one broker. A `WakeupTarget`."""

    def __init__(self, clock: BrokerClock, retry_session: Callable[[Session], None]) -> None:
        self.scanned_count = 0
        """Always 0: the work of one wakeup is bounded by the rates."""
        self.schedule_wakeup: Callable[[float, RateQueue], None] = lambda due, waiter: None
        """Called with the time of the next wakeup and this queue."""
        self.waiting_sessions: dict[Session, None] = {}
        self._clock = clock
        self._retry_session = retry_session
        """Stores the parked messages of a session as far as its rate allows."""

    def count_allowed(self, session: Session, batch: FrameBatch) -> int:
        """Return how many messages of `batch` the session may publish now."""
        return rate_limit.count_allowed(session.token_buckets, batch.bounds[1:], self._clock.now)

    def add(self, session: Session) -> None:
        """Add a session that has parked messages."""
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
        """Time of the next call of `handle_wakeup`."""
        if not self.waiting_sessions:
            return NEVER
        now = self._clock.now
        return min(
            rate_limit.next_available(each, now)
            for each in {s.token_buckets for s in self.waiting_sessions}
        )

    def handle_wakeup(self) -> bool:
        """Store messages of the sessions that may publish again."""
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
        """Replace the token buckets of a session, which may be waiting."""
        if session.token_buckets == token_buckets:
            return
        is_waiting = session in self.waiting_sessions
        if is_waiting:
            self.remove(session)
        session.set_token_buckets(token_buckets)
        if is_waiting:
            self.add(session)
