"""Limits on the bytes held for one session, and for all sessions together.

The total is checked at each tick, and in between whenever a fraction of the limit has arrived since
the last check. The total can exceed the limit only by that fraction.
"""

from __future__ import annotations

from collections.abc import Collection

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import PENDING_CHECK_DIVISOR, Limits
from simplebus.core.session.session import Session


def check_session_pending(session: Session, limits: Limits) -> None:
    """Raise RemoteProtocolError (over_credit, pending_limit) if too much is held for a session."""
    if session.has_confirms:
        limit_bytes = max(limits.granted_credit_bytes, limits.frame_bytes)
        if session.parked_bytes > limit_bytes:
            raise RemoteProtocolError(
                Reason.OVER_CREDIT,
                f"{session.parked_bytes} bytes are unconfirmed, the credit is "
                f"{limits.granted_credit_bytes}",
            )
    if session.pending_bytes > limits.pending_bytes:
        raise RemoteProtocolError(
            Reason.PENDING_LIMIT,
            f"{session.pending_bytes} bytes wait for this connection, "
            f"{limits.pending_bytes} are allowed",
        )


class UncountedPendingBytes:
    """Bytes of incomplete or waiting frames since the total was last checked."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, size_bytes: int, total_bytes_max: int) -> bool:
        """Add bytes. Returns True if the total must be checked now."""
        self._bytes += size_bytes
        if self._bytes * PENDING_CHECK_DIVISOR <= total_bytes_max:
            return False
        self._bytes = 0
        return True


def select_sessions_to_close(
    sessions: Collection[Session], total_bytes_max: int
) -> list[tuple[Session, RemoteProtocolError]]:
    """Return the sessions to close because more than `total_bytes_max` bytes are held for all.

    The sessions with the most bytes are closed first.
    """
    excess = sum(session.pending_bytes for session in sessions) - total_bytes_max
    closing = []
    if excess > 0:
        for session in sorted(sessions, key=lambda s: -s.pending_bytes):
            detail = (
                f"{session.pending_bytes} bytes wait for this connection; for all together "
                f"{total_bytes_max} are allowed, and it has the most"
            )
            closing.append((session, RemoteProtocolError(Reason.PENDING_LIMIT, detail)))
            excess -= session.pending_bytes
            if excess <= 0:
                break
    return closing
