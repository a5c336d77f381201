"""Clients that fall behind: whom they hold up, for how long, and when they are given up.

Rule 1: a publisher waits for clients that it has filled and that go on taking, and is read in
smaller pieces if that was too little: so a fast one does not drown a slower one. It does so only if
nobody else is sent the same, or was sent something else lately: a slow client never slows another.
And it does not wait long for one that takes nothing.
Rule 2: for one that is about to be given up, every publisher waits a moment, as at the reference
server: that is its last chance, and is soon over. It has another one when it has caught up.
Rule 3: a client is given up when more waits for it than may, or when it takes nothing for too long.
It is told nothing: it would not read it.
Rule 4: where too much is kept for all together, those go for whom the most is; between two beats,
too, where much comes of what is not whole yet.
Rule 5: what nobody waits for costs nothing: only who is above the mark is looked at.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from simplebus.core.broker.broker import Broker
from simplebus.core.clock import BrokerClock
from simplebus.core.errors import Reason
from simplebus.core.session.pending_limits import UncountedPendingBytes
from simplebus.core.session.rate_limits import SessionRateLimits
from simplebus.core.users import rate_limit
from simplebus.nats.errors import NatsError
from simplebus.nats.limits import (
    LAST_CHANCE_SECONDS,
    RECENT_DELIVERY_SECONDS,
    SLOW_CLIENT_PENDING_BYTES,
    STALL_SECONDS_EXCLUSIVE,
    STALL_SECONDS_MAX,
    STUCK_SECONDS,
    NatsLimits,
)
from simplebus.nats.server.session import NatsSession
from simplebus.nats.server.users import NatsUser

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class NatsRateLimits:
    """Of one front."""

    def __init__(self, broker: Broker | None) -> None:
        self._clock = broker.clock if broker is not None else BrokerClock()
        self._rate_limits = (
            broker.rate_limits if broker is not None else SessionRateLimits(self._clock)
        )

    def start_session(self, session: NatsSession) -> None:
        """A client has come, of whom nothing is known but the address."""
        session.set_token_buckets(self._rate_limits.token_buckets_for(None, session.address))

    def set_user(self, session: NatsSession, user: NatsUser | None) -> None:
        """It is known who it is."""
        shared = user.shared_user if user is not None else None
        session.set_token_buckets(self._rate_limits.token_buckets_for(shared, session.address))

    def charge(self, session: NatsSession) -> None:
        """Have what it has published since the last time count, and see how long it is to wait."""
        if session.token_buckets:
            rate_limit.consume(session.token_buckets, *session.drain_published())
            session.rate_limited_until = rate_limit.next_available(
                session.token_buckets, self._clock.now
            )

    def is_paused(self, session: NatsSession) -> bool:
        """Whether it is not read from because it has published too fast."""
        return session.rate_limited_until > self._clock.now

    def pause_seconds(self, session: NatsSession) -> float:
        """How long it is to wait; 0 for not at all. Others may have published for the same user
        meanwhile: asked again when that is over."""
        if not session.token_buckets:
            return 0.0
        session.rate_limited_until = rate_limit.next_available(
            session.token_buckets, self._clock.now
        )
        return session.rate_limited_until - self._clock.now


_SUBJECTS_LISTED_MAX = 3


class StallablePublisher(Protocol):
    """Whose messages fill others, at whichever door."""

    def reduce_read_size(self) -> None:
        """Less of it is to be read at a time."""


class PublisherStall:
    """For whom a publisher waits."""

    __slots__ = ("has_fast_receivers", "max_seconds", "initial_sent_bytes", "sessions")

    def __init__(
        self, sessions: list[NatsSession], has_fast_receivers: bool, max_seconds: float
    ) -> None:
        self.sessions = sessions
        self.has_fast_receivers = has_fast_receivers
        """Whether others, who are not behind, would wait with it."""
        self.max_seconds = max_seconds
        """How long it waits at most, before it says something more."""
        self.initial_sent_bytes = [session.outbox.sent_bytes for session in sessions]
        """What each had taken when it began."""

    def shorten(self) -> None:
        """It waits a moment, and for nobody but those who are about to be given up."""
        self.has_fast_receivers, self.max_seconds = True, STALL_SECONDS_MAX


class SlowConsumerMonitor:
    """Of one front."""

    def __init__(self, limits: NatsLimits, *, total_pending_bytes: int) -> None:
        """`total` is what may be kept for all clients together, in bytes."""
        self._limits = limits
        self._total_pending_bytes = total_pending_bytes
        self.slow_pending_bytes = min(SLOW_CLIENT_PENDING_BYTES, limits.max_pending // 4)
        """With more than this waiting for it a client is behind."""
        self._critical_pending_bytes = limits.max_pending * 3 // 4
        """With more than this it is about to be given up."""
        self.now = 0.0
        """The front sets it before it asks anything."""
        self._tracked_sessions: dict[NatsSession, None] = {}
        """For whom something was kept at the last beat, or since."""
        self._new_slow_sessions: dict[NatsSession, None] = {}
        self._partial_command_bytes = UncountedPendingBytes()

    def set_limits(self, limits: NatsLimits, *, total_pending_bytes: int) -> None:
        """Go by other limits from now on; the mark is for clients to come."""
        self._limits, self._total_pending_bytes = limits, total_pending_bytes
        self.slow_pending_bytes = min(SLOW_CLIENT_PENDING_BYTES, limits.max_pending // 4)
        self._critical_pending_bytes = limits.max_pending * 3 // 4

    def add_slow(self, session: NatsSession) -> NatsError | None:
        """More than the mark waits for a client. Returns why it is to be given up, if it is."""
        waiting, most = session.pending_bytes, self._limits.max_pending
        if waiting <= most:
            self._new_slow_sessions[session] = None
            return None
        return NatsError(
            Reason.SLOW_CONSUMER,
            f"{waiting} bytes wait for it, {most} may{_list_subjects(session)}",
            closed_reason="Slow Consumer (Pending Bytes)",
        )

    def create_stall(
        self, *, has_fast_receivers: bool, is_exclusive: bool = False
    ) -> PublisherStall | None:
        """For whom a publisher is to wait: of those that were noted since this was asked last.
        `others` says whether anybody else was sent something meanwhile, `is_alone` whether it is
        known that nobody was for some time. None for nobody."""
        if not self._new_slow_sessions:
            return None
        seconds = STALL_SECONDS_EXCLUSIVE if is_exclusive else STALL_SECONDS_MAX
        hold = PublisherStall(list(self._new_slow_sessions), has_fast_receivers, seconds)
        self._new_slow_sessions.clear()
        return hold if self.is_stall_needed(hold) else None

    def create_session_stall(
        self, publisher: NatsSession, receivers: Iterable[NatsSession], *, has_other_receivers: bool
    ) -> PublisherStall | None:
        """The same for a client, which has just sent something to these, and `elsewhere`."""
        others = self._has_fast_receivers(publisher, receivers) or has_other_receivers
        hold = self.create_stall(has_fast_receivers=others, is_exclusive=not others)
        publisher.has_stalled = publisher.has_stalled or hold is not None
        return hold

    def _has_fast_receivers(self, publisher: NatsSession, receivers: Iterable[NatsSession]) -> bool:
        """Whether anybody would wait with it: one of those that were sent something, and is not
        behind, or one that was a short time ago."""
        others = (s for s in receivers if s is not publisher and not self.is_slow(s))
        if (other := next(others, None)) is not None:
            publisher.last_fast_receiver, publisher.last_fast_receiver_at = ref(other), self.now
            return True
        fed = (
            publisher.last_fast_receiver()
            if self.now - publisher.last_fast_receiver_at <= RECENT_DELIVERY_SECONDS
            else None
        )
        return fed is not None and not (fed.is_disconnecting or self.is_slow(fed))

    def is_slow(self, session: NatsSession) -> bool:
        """Whether more than the mark waits for it."""
        return session.outbox.pending_bytes > self.slow_pending_bytes

    def is_stall_needed(self, stall: PublisherStall) -> bool:
        """Whether waiting helps anybody still."""
        return any(
            self._should_wait_for(session, stall.has_fast_receivers) for session in stall.sessions
        )

    def _should_wait_for(self, session: NatsSession, has_fast_receivers: bool) -> bool:
        if session.is_disconnecting:
            return False
        if not self.is_slow(session):
            session.last_chance_until = 0.0
            return False
        if not (has_fast_receivers or self._is_stuck(session)):
            return True
        if session.outbox.pending_bytes <= self._critical_pending_bytes:
            return False
        session.last_chance_until = session.last_chance_until or self.now + LAST_CHANCE_SECONDS
        return self.now <= session.last_chance_until

    def _is_stuck(self, session: NatsSession) -> bool:
        return (
            session.outbox.sent_bytes == session.stuck_sent_bytes
            and self.now - session.stuck_since > STUCK_SECONDS
        )

    @property
    def has_new_slow(self) -> bool:
        """Whether anybody was noted since it was asked who."""
        return bool(self._new_slow_sessions)

    def stall_timed_out(self, stall: PublisherStall, publisher: StallablePublisher) -> None:
        """A publisher has waited as long as one may."""
        for session, before in zip(stall.sessions, stall.initial_sent_bytes, strict=True):
            if session.outbox.sent_bytes == before != session.stuck_sent_bytes:
                session.stuck_sent_bytes, session.stuck_since = before, self.now
        if not stall.has_fast_receivers and not all(
            self._is_stuck(session) for session in stall.sessions
        ):
            # Otherwise the sooner they are given up, the better for all.
            publisher.reduce_read_size()

    def track(self, sessions: Mapping[NatsSession, None]) -> None:
        """Something is kept for these: they are looked at with each beat until there is nothing."""
        self._tracked_sessions.update(sessions)

    def add_partial_command(
        self, session: NatsSession, size: int
    ) -> list[tuple[NatsSession, NatsError]]:
        """So many bytes came of something that a client has not said to its end: it is looked at
        with each beat, too. Returns who is to be given up now, and why."""
        self._tracked_sessions[session] = None
        return (
            list(self._find_over_memory())
            if self._partial_command_bytes.add(size, self._total_pending_bytes)
            else []
        )

    def find_slow_consumers(self) -> list[tuple[NatsSession, NatsError]]:
        """One beat: who is to be given up, and why."""
        for session in [
            session
            for session in self._tracked_sessions
            if session.is_closed or not session.kept_bytes
        ]:
            session.sent_bytes_at_tick, session.last_chance_until = -1, 0.0
            del self._tracked_sessions[session]
        return [*self._find_write_timeouts(), *self._find_over_memory()]

    def _find_write_timeouts(self) -> Iterator[tuple[NatsSession, NatsError]]:
        """Who has taken nothing of what waits for it for too long."""
        seconds = self._limits.write_seconds
        for session in self._tracked_sessions:
            outbox = session.outbox
            if not self.is_slow(session):
                session.last_chance_until = 0.0
            if outbox.sent_bytes != session.sent_bytes_at_tick or not outbox.pending_bytes:
                session.sent_bytes_at_tick, session.progress_at = outbox.sent_bytes, self.now
            elif self.now - session.progress_at > seconds and not session.is_disconnecting:
                yield (
                    session,
                    NatsError(
                        Reason.SLOW_CONSUMER,
                        f"it took none of the {outbox.pending_bytes} bytes that wait for it in "
                        f"{seconds:g} s{_list_subjects(session)}",
                        closed_reason="Slow Consumer (Write Deadline)",
                    ),
                )

    def _find_over_memory(self) -> Iterator[tuple[NatsSession, NatsError]]:
        """Who is to go because all together keep too much waiting."""
        weights = {
            session: session.kept_bytes
            for session in self._tracked_sessions
            if not session.is_disconnecting
        }
        if sum(weights.values()) <= self._total_pending_bytes:
            return
        # What waits for several is kept once.
        kept = {name: size for session in weights for name, size in session.outbox.iter_buffers()}
        excess = sum(kept.values()) - self._total_pending_bytes
        excess += sum(session.parser.tail_bytes for session in weights)
        for session, weight in sorted(weights.items(), key=lambda item: -item[1]):
            if excess <= 0:
                return
            excess -= weight
            yield (
                session,
                NatsError(
                    Reason.PENDING_LIMIT,
                    f"{weight} bytes are kept for it; for all together {self._total_pending_bytes} may, and it "
                    f"has the most{_list_subjects(session)}",
                    closed_reason="Slow Consumer (Pending Bytes)",
                ),
            )


def _list_subjects(session: NatsSession) -> str:
    """Some of the subjects that a client has subscribed to, for a log."""
    shown = [
        subscription.subject.decode("utf-8", "backslashreplace")
        for subscription in islice(session.subscriptions.values(), _SUBJECTS_LISTED_MAX)
    ]
    more = ", …" if len(session.subscriptions) > _SUBJECTS_LISTED_MAX else ""
    return f"; it has subscribed to {', '.join(shown)}{more}" if shown else ""
