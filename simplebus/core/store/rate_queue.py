"""Queue of sessions that publish faster than their rate limit, or than their user's or address's.

The session that has waited longest continues first, and then waits behind all others.
"""

from __future__ import annotations

from collections.abc import Iterator

from simplebus.core.clock import BrokerClock
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.session.session import Session
from simplebus.core.subscription.delayed_wakeups import NEVER
from simplebus.core.users import rate_limit


class RateQueue:
    """Rate-limited sessions of one broker."""

    def __init__(self, clock: BrokerClock) -> None:
        self.waiting_sessions: dict[Session, None] = {}
        self._clock = clock

    def count_allowed(self, session: Session, batch: FrameBatch) -> int:
        """Return how many messages of `batch` the session may publish now."""
        return rate_limit.count_allowed(session.token_buckets, batch.bounds[1:], self._clock.now)

    def add(self, session: Session) -> None:
        """Add a session that has parked messages."""
        self.waiting_sessions[session] = None
        for meter in session.token_buckets:
            meter.waiting_session_count += 1

    def remove(self, session: Session) -> None:
        del self.waiting_sessions[session]
        for meter in session.token_buckets:
            meter.waiting_session_count -= 1

    @property
    def next_allowed_time(self) -> float:
        """Time at which a waiting session may publish again; infinite if none waits."""
        if not self.waiting_sessions:
            return NEVER
        now = self._clock.now
        return min(
            rate_limit.next_available(buckets, now)
            for buckets in {s.token_buckets for s in self.waiting_sessions}
        )

    def allowed_sessions(self) -> Iterator[Session]:
        """Yield the sessions that may publish again, the longest waiting first.

        The caller publishes messages of a session before it requests the next one, and adds the
        session again if some remain.
        """
        now, spent = self._clock.now, set()
        for session in list(self.waiting_sessions):
            if session not in self.waiting_sessions or session.token_buckets in spent:
                continue
            if rate_limit.next_available(session.token_buckets, now) <= now:
                yield session
            if session in self.waiting_sessions:
                spent.add(session.token_buckets)
