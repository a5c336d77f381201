"""Clients that fall behind: whom they hold up, for how long, and when they are given up.

Rule 1: a publisher waits a little for a client that it has filled and that goes on taking, and is
read in smaller pieces if that was too little: so a fast one does not drown a slower one. It never
waits long for one that takes nothing, until that one is about to be given up.
Rule 2: a client is given up when more waits for it than may, or when it takes nothing for too long.
It is told nothing: it would not read it.
Rule 3: what nobody waits for costs nothing: only who is above the mark is looked at.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Protocol

from simplebus.core.errors import Reason
from simplebus.nats.errors import NatsError
from simplebus.nats.limits import BACKLOG_BYTES, STUCK_SECONDS, NatsLimits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from simplebus.nats.session import NatsSession

_SUBJECTS_SHOWN = 3


class Publisher(Protocol):
    """Whose messages fill others, at whichever door."""

    def slow_down(self) -> None:
        """Less of it is to be read at a time."""


class Pace:
    """Of one front."""

    def __init__(self, limits: NatsLimits) -> None:
        self._limits = limits
        self.mark = min(BACKLOG_BYTES, limits.max_pending // 4)
        """With more than this waiting for it a client is behind."""
        self._brink = limits.max_pending * 3 // 4
        """With more than this it is about to be given up."""
        self.now = 0.0
        """The front sets it before it asks anything."""
        self._behind: dict[NatsSession, None] = {}

    def note(self, session: NatsSession) -> NatsError | None:
        """More than the mark waits for a client. Returns why it is to be given up, if it is."""
        waiting, most = session.pending_bytes, self._limits.max_pending
        if waiting <= most:
            self._behind[session] = None
            return None
        return NatsError(
            Reason.SLOW_CONSUMER,
            f"{waiting} bytes wait for it, {most} may{_shown(session)}",
            closed="Slow Consumer (Pending Bytes)",
        )

    def take_behind(self) -> list[NatsSession]:
        """Who was noted since this was asked last, and is worth waiting for."""
        if not self._behind:
            return []
        behind = [session for session in self._behind if self.is_worth_waiting_for(session)]
        self._behind.clear()
        return behind

    def is_worth_waiting_for(self, session: NatsSession) -> bool:
        """Whether a client is behind, and takes what waits for it or is about to be given up."""
        waiting = session.outbox.pending_bytes
        return (
            waiting > self.mark
            and not session.is_cut
            and not session.closed
            and (waiting > self._brink or not self._is_stuck(session))
        )

    def _is_stuck(self, session: NatsSession) -> bool:
        return (
            session.outbox.sent_bytes == session.vain_at
            and self.now - session.vain_since > STUCK_SECONDS
        )

    @property
    def has_behind(self) -> bool:
        """Whether anybody was noted since it was asked who."""
        return bool(self._behind)

    def waited_in_vain(self, publisher: Publisher, session: NatsSession, before: int) -> None:
        """A publisher has waited as long as one may for a client that had taken so much before."""
        if session.outbox.sent_bytes == before != session.vain_at:
            session.vain_at, session.vain_since = before, self.now
        if not self._is_stuck(session):
            publisher.slow_down()  # Otherwise the sooner it is given up, the better for all.

    def overdue(
        self, sessions: Iterable[NatsSession], now: float
    ) -> list[tuple[NatsSession, NatsError]]:
        """One beat: who has taken nothing of what waits for it for too long."""
        seconds = self._limits.write_seconds
        found = []
        for session in sessions:
            outbox = session.outbox
            if not outbox.pending_bytes:
                session.taking_since = now
            elif outbox.sent_bytes != session.taken_bytes:
                session.taken_bytes, session.taking_since = outbox.sent_bytes, now
            elif now - session.taking_since > seconds and not session.is_cut:
                error = NatsError(
                    Reason.SLOW_CONSUMER,
                    f"it took none of the {outbox.pending_bytes} bytes that wait for it in "
                    f"{seconds:g} s{_shown(session)}",
                    closed="Slow Consumer (Write Deadline)",
                )
                found.append((session, error))
        return found


def _shown(session: NatsSession) -> str:
    """Some of the subjects that a client has subscribed to, for a log."""
    shown = [
        subscription.subject.decode("utf-8", "backslashreplace")
        for subscription in islice(session.subscriptions.values(), _SUBJECTS_SHOWN)
    ]
    more = ", …" if len(session.subscriptions) > _SUBJECTS_SHOWN else ""
    return f"; it has subscribed to {', '.join(shown)}{more}" if shown else ""
