"""Slow consumers: publisher stalls, disconnection and rate limits of NATS clients.

A publisher stalls for the slow clients that it filled while they make progress, and is read in
smaller pieces if that was not enough. It stalls only if no fast client receives the same messages,
so a slow client never delays a fast one. For a client that is about to exceed `max_pending`, every
publisher waits `LAST_CHANCE_SECONDS` once, as with nats-server.

A client is disconnected when its pending bytes exceed `max_pending` or when it reads nothing for
`write_seconds`. If the pending bytes of all clients exceed their total limit, the client with most
of them is disconnected. No error line is sent: the client would not read it. Only slow sessions
cost time here.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Protocol, TypeAlias
from weakref import ref

from simplebus.core.broker.broker import Broker
from simplebus.core.clock import BrokerClock
from simplebus.core.errors import Reason
from simplebus.core.session.pending_limits import UncountedPendingBytes
from simplebus.core.session.rate_limits import SessionRateLimits
from simplebus.core.steps import drain_list
from simplebus.core.users import rate_limit
from simplebus.core.users.users import User
from simplebus.nats.errors import NatsError
from simplebus.nats.limits import (
    CHECKED_CLIENTS_PER_TURN,
    EXAMINED_BUFFERS_PER_TURN,
    LAST_CHANCE_SECONDS,
    RECENT_DELIVERY_SECONDS,
    SLOW_CLIENT_PENDING_BYTES,
    STALL_SECONDS_EXCLUSIVE,
    STALL_SECONDS_MAX,
    STUCK_SECONDS,
    NatsLimits,
)
from simplebus.nats.server.session import NatsSession, PublisherStall

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class NatsRateLimits:
    """Rate limits of the NATS clients, on the buckets of the broker."""

    def __init__(self, broker: Broker | None) -> None:
        self._clock = broker.clock if broker is not None else BrokerClock()
        self._rate_limits = (
            broker.rate_limits if broker is not None else SessionRateLimits(self._clock)
        )

    def start_session(self, session: NatsSession) -> None:
        """Apply the limits of the address to a new session."""
        session.set_token_buckets(self._rate_limits.token_buckets_for(None, session.address))

    def set_user(self, session: NatsSession, user: User | None) -> None:
        """Apply the limits of the authenticated user."""
        session.set_token_buckets(self._rate_limits.token_buckets_for(user, session.address))

    def charge(self, session: NatsSession) -> None:
        """Charge the messages of a session with a rate limit since the last call, and compute its
        pause.
        """
        rate_limit.consume(session.token_buckets, *session.drain_published())
        session.rate_limited_until = rate_limit.next_available(
            session.token_buckets, self._clock.now
        )

    def is_paused(self, session: NatsSession) -> bool:
        """Return True while the session exceeds its rate limit."""
        return session.rate_limited_until > self._clock.now

    def pause_seconds(self, session: NatsSession) -> float:
        """Return the seconds until the session may be read; 0 for now.

        Other sessions of the same user may publish meanwhile, so call again after the pause.
        """
        if not session.token_buckets:
            return 0.0
        session.rate_limited_until = rate_limit.next_available(
            session.token_buckets, self._clock.now
        )
        return session.rate_limited_until - self._clock.now


_SUBJECTS_LISTED_MAX = 3

SlowConsumer: TypeAlias = tuple[NatsSession, NatsError]
"""Session to disconnect, and the reason."""


class StallablePublisher(Protocol):
    """Publisher of any protocol that can be slowed down."""

    @property
    def is_closed(self) -> bool: ...
    def reduce_read_size(self) -> None:
        """Read less from the publisher at a time."""

    def excuse_silence(self) -> None:
        """Restart the time limits for silence: the server is not reading from the publisher."""


class SlowConsumerMonitor:
    """Detects slow sessions and decides how long publishers wait for them."""

    def __init__(self, limits: NatsLimits, *, total_pending_bytes: int) -> None:
        """`total_pending_bytes` is the limit of all sessions together."""
        self._limits = limits
        self._total_pending_bytes = total_pending_bytes
        self.slow_pending_bytes = min(SLOW_CLIENT_PENDING_BYTES, limits.max_pending // 4)
        """A session with more pending bytes is slow."""
        self._critical_pending_bytes = limits.max_pending * 3 // 4
        """A session with more pending bytes is about to be disconnected."""
        self.now = 0.0
        """Current time; set by NatsServer before each call."""
        self._tracked_sessions: dict[NatsSession, None] = {}
        """Sessions with pending bytes at the last tick or since."""
        self.new_slow_sessions: dict[NatsSession, None] = {}
        """Sessions that became slow since the last `create_stall`."""
        self._kept_input_bytes = UncountedPendingBytes()
        self.is_memory_check_due = False
        """True if much input was kept since the last memory check; see `find_over_memory`."""

    def set_limits(self, limits: NatsLimits, *, total_pending_bytes: int) -> None:
        """Apply new limits. Existing sessions keep the threshold at which they report themselves
        as slow.
        """
        self._limits, self._total_pending_bytes = limits, total_pending_bytes
        self.slow_pending_bytes = min(SLOW_CLIENT_PENDING_BYTES, limits.max_pending // 4)
        self._critical_pending_bytes = limits.max_pending * 3 // 4

    def add_slow(self, session: NatsSession) -> NatsError | None:
        """Note a session that became slow. Returns the error if it must be disconnected."""
        pending_bytes, max_pending = session.pending_bytes, self._limits.max_pending
        if pending_bytes <= max_pending:
            self.new_slow_sessions[session] = None
            return None
        return NatsError(
            Reason.SLOW_CONSUMER,
            f"{pending_bytes} bytes are pending for the client, at most {max_pending} are "
            f"allowed{_list_subjects(session)}",
            closed_reason="Slow Consumer (Pending Bytes)",
        )

    def create_stall(
        self, *, has_fast_receivers: bool, is_exclusive: bool = False
    ) -> PublisherStall | None:
        """Create a stall for the sessions that became slow since the last call; None if it is
        useless.

        Args:
            has_fast_receivers: True if other receivers would be delayed by the stall.
            is_exclusive: True if there were no other receivers for some time.
        """
        if not self.new_slow_sessions:
            return None
        seconds = STALL_SECONDS_EXCLUSIVE if is_exclusive else STALL_SECONDS_MAX
        stall = PublisherStall(list(self.new_slow_sessions), has_fast_receivers, seconds)
        self.new_slow_sessions.clear()
        return stall if self.is_stall_needed(stall) else None

    def create_session_stall(
        self, publisher: NatsSession, receivers: Iterable[NatsSession], *, has_other_receivers: bool
    ) -> PublisherStall | None:
        """Create a stall of a NATS publisher that has just published to `receivers`."""
        has_fast_receivers = self._has_fast_receivers(publisher, receivers) or has_other_receivers
        stall = self.create_stall(
            has_fast_receivers=has_fast_receivers, is_exclusive=not has_fast_receivers
        )
        publisher.has_stalled = publisher.has_stalled or stall is not None
        return stall

    def collect_slow_sessions(
        self, publisher: NatsSession, receivers: Iterable[NatsSession]
    ) -> dict[NatsSession, None]:
        """Return the sessions that became slow since the last call, for a publication that has
        reached only `receivers` yet. Add them to `new_slow_sessions` before its stall is created.
        """
        self._has_fast_receivers(publisher, receivers)  # Noted for the stall.
        slow_sessions, self.new_slow_sessions = self.new_slow_sessions, {}
        return slow_sessions

    def _has_fast_receivers(self, publisher: NatsSession, receivers: Iterable[NatsSession]) -> bool:
        """Return True if a receiver is not slow, or one was not slow until
        `RECENT_DELIVERY_SECONDS` ago.
        """
        fast_receivers = (s for s in receivers if s is not publisher and not self.is_slow(s))
        if (fast_receiver := next(fast_receivers, None)) is not None:
            publisher.last_fast_receiver, publisher.last_fast_receiver_at = (
                ref(fast_receiver),
                self.now,
            )
            return True
        last_receiver = (
            publisher.last_fast_receiver()
            if self.now - publisher.last_fast_receiver_at <= RECENT_DELIVERY_SECONDS
            else None
        )
        return last_receiver is not None and not (
            last_receiver.is_disconnecting or self.is_slow(last_receiver)
        )

    def is_slow(self, session: NatsSession) -> bool:
        """Return True if the session has more than `slow_pending_bytes` pending."""
        return session.outbox.pending_bytes > self.slow_pending_bytes

    def is_stall_needed(self, stall: PublisherStall) -> bool:
        """Return True if waiting still helps one of the sessions."""
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

    def stall_timed_out(self, stall: PublisherStall, publisher: StallablePublisher) -> None:
        """Note that a stall lasted its full duration; sessions without progress are not waited for
        again.
        """
        for session, before in zip(stall.sessions, stall.initial_sent_bytes, strict=True):
            if session.outbox.sent_bytes == before != session.stuck_sent_bytes:
                session.stuck_sent_bytes, session.stuck_since = before, self.now
        if not stall.has_fast_receivers and not all(
            self._is_stuck(session) for session in stall.sessions
        ):
            # If all are stuck, full reads make them exceed their limit sooner.
            publisher.reduce_read_size()

    def track(self, sessions: Mapping[NatsSession, None]) -> None:
        """Check these sessions at each tick until nothing is pending for them."""
        self._tracked_sessions.update(sessions)

    def add_kept_input(self, session: NatsSession, size: int) -> None:
        """Count `size` received bytes that are kept, for example of an incomplete command."""
        self._tracked_sessions[session] = None
        self.is_memory_check_due |= self._kept_input_bytes.add(size, self._total_pending_bytes)

    def find_slow_consumers(self) -> Iterator[list[SlowConsumer]]:
        """Yield the sessions to disconnect, with errors, in parts of bounded work.

        Called once per tick. Other calls are allowed between the parts.
        """
        kept_bytes, sessions = 0, drain_list(list(self._tracked_sessions))
        while part := list(islice(sessions, CHECKED_CLIENTS_PER_TURN)):
            yield [
                (session, error)
                for session in part
                if (error := self._check_progress(session)) is not None
            ]
            kept_bytes += sum(
                session.kept_bytes for session in part if not session.is_disconnecting
            )
        if kept_bytes > self._total_pending_bytes:
            yield from self.find_over_memory()

    def _check_progress(self, session: NatsSession) -> NatsError | None:
        """Return the error of a session that read nothing for `write_seconds`, or None."""
        if session.is_closed or not session.kept_bytes:
            session.sent_bytes_at_tick, session.last_chance_until = -1, 0.0
            self._tracked_sessions.pop(session, None)
            return None
        outbox, seconds = session.outbox, self._limits.write_seconds
        if not self.is_slow(session):
            session.last_chance_until = 0.0
        if outbox.sent_bytes != session.sent_bytes_at_tick or not outbox.pending_bytes:
            session.sent_bytes_at_tick, session.progress_at = outbox.sent_bytes, self.now
        elif self.now - session.progress_at > seconds and not session.is_disconnecting:
            return NatsError(
                Reason.SLOW_CONSUMER,
                f"the client read none of {outbox.pending_bytes} pending bytes for "
                f"{seconds:g} s{_list_subjects(session)}",
                closed_reason="Slow Consumer (Write Deadline)",
            )
        return None

    def find_over_memory(self) -> Iterator[list[SlowConsumer]]:
        """Yield the largest sessions until the others fit into the total limit, in parts of bounded
        work.

        Other calls are allowed between the parts. A session counts with the bytes that are kept
        when its part is examined.
        """
        self.is_memory_check_due = False
        total_bytes, limit_bytes = 0, self._total_pending_bytes
        # A buffer that several sessions share is counted once.
        sizes_by_buffer: dict[int, int] = {}
        largest: list[tuple[int, int, NatsSession]] = []
        examined_count = 0
        for number, session in enumerate(drain_list(list(self._tracked_sessions))):
            if session.is_disconnecting:
                continue
            heappush(largest, (-session.kept_bytes, number, session))
            total_bytes += session.kept_input_bytes
            for identity, size in session.outbox.iter_buffers():
                total_bytes += size - sizes_by_buffer.get(identity, 0)
                sizes_by_buffer[identity] = size
                examined_count += 1
            if examined_count >= EXAMINED_BUFFERS_PER_TURN:
                examined_count = 0
                yield []
        while largest and total_bytes > limit_bytes:
            negative_bytes, _, session = heappop(largest)
            total_bytes += negative_bytes
            if session.is_disconnecting:
                continue
            error = NatsError(
                Reason.PENDING_LIMIT,
                f"{-negative_bytes} bytes are kept for the client, the most of all; all clients "
                f"together may have {limit_bytes}{_list_subjects(session)}",
                closed_reason="Slow Consumer (Pending Bytes)",
            )
            yield [(session, error)]


def _list_subjects(session: NatsSession) -> str:
    """Return some of the client's subjects for the log."""
    shown = [
        subscription.subject.decode("utf-8", "backslashreplace")
        for subscription in islice(session.subscriptions.values(), _SUBJECTS_LISTED_MAX)
    ]
    more = ", …" if len(session.subscriptions) > _SUBJECTS_LISTED_MAX else ""
    return f"; its subscriptions: {', '.join(shown)}{more}" if shown else ""
