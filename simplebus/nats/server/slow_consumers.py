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
from simplebus.core.errors import Reason
from simplebus.core.redelivery.delivery_policy import Clock
from simplebus.core.session.pending_limits import UncountedPendingBytes
from simplebus.core.session.rate_limits import SessionRateLimits
from simplebus.core.users import rate_limit
from simplebus.nats.errors import NatsError
from simplebus.nats.limits import (
    BACKLOG_BYTES,
    CHANCE_SECONDS,
    FED_SECONDS,
    STALL_SECONDS_ALONE,
    STALL_SECONDS_MAX,
    STUCK_SECONDS,
    NatsLimits,
)
from simplebus.nats.server.session import NatsSession
from simplebus.nats.server.users import NatsUser

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class Limited:
    """Of one front."""

    def __init__(self, broker: Broker | None) -> None:
        self._clock = broker.clock if broker is not None else BrokerClock()
        self._metering = (
            broker.rate_limits if broker is not None else SessionRateLimits(self._clock)
        )

    def open(self, session: NatsSession) -> None:
        """A client has come, of whom nothing is known but the address."""
        session.adopt(self._metering.token_buckets_for(None, session.address))

    def enter(self, session: NatsSession, user: NatsUser | None) -> None:
        """It is known who it is."""
        shared = user.shared if user is not None else None
        session.adopt(self._metering.token_buckets_for(shared, session.address))

    def charge(self, session: NatsSession) -> None:
        """Have what it has published since the last time count, and see how long it is to wait."""
        if session.meters:
            rate_limit.charge(session.meters, *session.take_published())
            session.paused_until = rate_limit.due(session.meters, self._clock.now)

    def is_paused(self, session: NatsSession) -> bool:
        """Whether it is not read from because it has published too fast."""
        return session.paused_until > self._clock.now

    def pause_seconds(self, session: NatsSession) -> float:
        """How long it is to wait; 0 for not at all. Others may have published for the same user
        meanwhile: asked again when that is over."""
        if not session.meters:
            return 0.0
        session.paused_until = rate_limit.due(session.meters, self._clock.now)
        return session.paused_until - self._clock.now


_SUBJECTS_SHOWN = 3


class Publisher(Protocol):
    """Whose messages fill others, at whichever door."""

    def reduce_read_size(self) -> None:
        """Less of it is to be read at a time."""


class Hold:
    """For whom a publisher waits."""

    __slots__ = ("others", "seconds", "sent_before", "sessions")

    def __init__(self, sessions: list[NatsSession], others: bool, seconds: float) -> None:
        self.sessions = sessions
        self.others = others
        """Whether others, who are not behind, would wait with it."""
        self.seconds = seconds
        """How long it waits at most, before it says something more."""
        self.sent_before = [session.outbox.sent_bytes for session in sessions]
        """What each had taken when it began."""

    def shorten(self) -> None:
        """It waits a moment, and for nobody but those who are about to be given up."""
        self.others, self.seconds = True, STALL_SECONDS_MAX


class Pace:
    """Of one front."""

    def __init__(self, limits: NatsLimits, *, total: int) -> None:
        """`total` is what may be kept for all clients together, in bytes."""
        self._limits = limits
        self._total = total
        self.mark = min(BACKLOG_BYTES, limits.max_pending // 4)
        """With more than this waiting for it a client is behind."""
        self._brink = limits.max_pending * 3 // 4
        """With more than this it is about to be given up."""
        self.now = 0.0
        """The front sets it before it asks anything."""
        self._kept: dict[NatsSession, None] = {}
        """For whom something was kept at the last beat, or since."""
        self._behind: dict[NatsSession, None] = {}
        self._begun = UncountedPendingBytes()

    def adopt(self, limits: NatsLimits, *, total: int) -> None:
        """Go by other limits from now on; the mark is for clients to come."""
        self._limits, self._total = limits, total
        self.mark = min(BACKLOG_BYTES, limits.max_pending // 4)
        self._brink = limits.max_pending * 3 // 4

    def note(self, session: NatsSession) -> NatsError | None:
        """More than the mark waits for a client. Returns why it is to be given up, if it is."""
        waiting, most = session.pending_bytes, self._limits.max_pending
        if waiting <= most:
            self._behind[session] = None
            return None
        return NatsError(
            Reason.SLOW_CONSUMER,
            f"{waiting} bytes wait for it, {most} may{_shown(session)}",
            closed_reason="Slow Consumer (Pending Bytes)",
        )

    def hold(self, *, others: bool, is_alone: bool = False) -> Hold | None:
        """For whom a publisher is to wait: of those that were noted since this was asked last.
        `others` says whether anybody else was sent something meanwhile, `is_alone` whether it is
        known that nobody was for some time. None for nobody."""
        if not self._behind:
            return None
        seconds = STALL_SECONDS_ALONE if is_alone else STALL_SECONDS_MAX
        hold = Hold(list(self._behind), others, seconds)
        self._behind.clear()
        return hold if self.is_worth_it(hold) else None

    def hold_of(
        self, publisher: NatsSession, fed: Iterable[NatsSession], *, elsewhere: bool
    ) -> Hold | None:
        """The same for a client, which has just sent something to these, and `elsewhere`."""
        others = self._feeds_others(publisher, fed) or elsewhere
        hold = self.hold(others=others, is_alone=not others)
        publisher.has_held = publisher.has_held or hold is not None
        return hold

    def _feeds_others(self, publisher: NatsSession, sent: Iterable[NatsSession]) -> bool:
        """Whether anybody would wait with it: one of those that were sent something, and is not
        behind, or one that was a short time ago."""
        others = (s for s in sent if s is not publisher and not self.is_behind(s))
        if (other := next(others, None)) is not None:
            publisher.fed, publisher.fed_at = ref(other), self.now
            return True
        fed = publisher.fed() if self.now - publisher.fed_at <= FED_SECONDS else None
        return fed is not None and not (fed.is_cut or self.is_behind(fed))

    def is_behind(self, session: NatsSession) -> bool:
        """Whether more than the mark waits for it."""
        return session.outbox.pending_bytes > self.mark

    def is_worth_it(self, hold: Hold) -> bool:
        """Whether waiting helps anybody still."""
        return any(self._needs(session, hold.others) for session in hold.sessions)

    def _needs(self, session: NatsSession, others: bool) -> bool:
        if session.is_cut:
            return False
        if not self.is_behind(session):
            session.chance_until = 0.0
            return False
        if not (others or self._is_stuck(session)):
            return True
        if session.outbox.pending_bytes <= self._brink:
            return False
        session.chance_until = session.chance_until or self.now + CHANCE_SECONDS
        return self.now <= session.chance_until

    def _is_stuck(self, session: NatsSession) -> bool:
        return (
            session.outbox.sent_bytes == session.vain_at
            and self.now - session.vain_since > STUCK_SECONDS
        )

    @property
    def has_behind(self) -> bool:
        """Whether anybody was noted since it was asked who."""
        return bool(self._behind)

    def waited_in_vain(self, hold: Hold, publisher: Publisher) -> None:
        """A publisher has waited as long as one may."""
        for session, before in zip(hold.sessions, hold.sent_before, strict=True):
            if session.outbox.sent_bytes == before != session.vain_at:
                session.vain_at, session.vain_since = before, self.now
        if not hold.others and not all(self._is_stuck(session) for session in hold.sessions):
            # Otherwise the sooner they are given up, the better for all.
            publisher.reduce_read_size()

    def keep_all(self, sessions: Mapping[NatsSession, None]) -> None:
        """Something is kept for these: they are looked at with each beat until there is nothing."""
        self._kept.update(sessions)

    def begun(self, session: NatsSession, size: int) -> list[tuple[NatsSession, NatsError]]:
        """So many bytes came of something that a client has not said to its end: it is looked at
        with each beat, too. Returns who is to be given up now, and why."""
        self._kept[session] = None
        return list(self._too_heavy()) if self._begun.add(size, self._total) else []

    def overdue(self) -> list[tuple[NatsSession, NatsError]]:
        """One beat: who is to be given up, and why."""
        for session in [
            session for session in self._kept if session.is_closed or not session.weight
        ]:
            session.taken_bytes, session.chance_until = -1, 0.0
            del self._kept[session]
        return [*self._too_slow(), *self._too_heavy()]

    def _too_slow(self) -> Iterator[tuple[NatsSession, NatsError]]:
        """Who has taken nothing of what waits for it for too long."""
        seconds = self._limits.write_seconds
        for session in self._kept:
            outbox = session.outbox
            if not self.is_behind(session):
                session.chance_until = 0.0
            if outbox.sent_bytes != session.taken_bytes or not outbox.pending_bytes:
                session.taken_bytes, session.taking_since = outbox.sent_bytes, self.now
            elif self.now - session.taking_since > seconds and not session.is_cut:
                yield (
                    session,
                    NatsError(
                        Reason.SLOW_CONSUMER,
                        f"it took none of the {outbox.pending_bytes} bytes that wait for it in "
                        f"{seconds:g} s{_shown(session)}",
                        closed_reason="Slow Consumer (Write Deadline)",
                    ),
                )

    def _too_heavy(self) -> Iterator[tuple[NatsSession, NatsError]]:
        """Who is to go because all together keep too much waiting."""
        weights = {session: session.weight for session in self._kept if not session.is_cut}
        if sum(weights.values()) <= self._total:
            return
        # What waits for several is kept once.
        kept = {name: size for session in weights for name, size in session.outbox.buffers()}
        excess = sum(kept.values()) - self._total
        excess += sum(session.parser.tail_bytes for session in weights)
        for session, weight in sorted(weights.items(), key=lambda item: -item[1]):
            if excess <= 0:
                return
            excess -= weight
            yield (
                session,
                NatsError(
                    Reason.PENDING_LIMIT,
                    f"{weight} bytes are kept for it; for all together {self._total} may, and it "
                    f"has the most{_shown(session)}",
                    closed_reason="Slow Consumer (Pending Bytes)",
                ),
            )


def _shown(session: NatsSession) -> str:
    """Some of the subjects that a client has subscribed to, for a log."""
    shown = [
        subscription.subject.decode("utf-8", "backslashreplace")
        for subscription in islice(session.subscriptions.values(), _SUBJECTS_SHOWN)
    ]
    more = ", …" if len(session.subscriptions) > _SUBJECTS_SHOWN else ""
    return f"; it has subscribed to {', '.join(shown)}{more}" if shown else ""
