"""What waits for one connection, and for all together, and who is to go when that is too much.

Rule 1: what is kept for all is looked at with each beat, and between two of them whenever a part of
what may be kept has come since the last look: however fast many begin what they never end, the
bound is passed by that part at most.
"""

from __future__ import annotations

from collections.abc import Collection

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import BEGUN_PART, Limits
from simplebus.core.session.session import Session
from simplebus.core.session.version2 import Version2Decoder


def check_session_pending(session: Session, limits: Limits) -> None:
    """Raise RemoteProtocolError (over_credit, pending_limit) when too much waits for one."""
    if isinstance(session.decoder, Version2Decoder):
        most = max(limits.credit_granted, limits.frame_bytes)
        if session.parked_bytes > most:
            raise RemoteProtocolError(
                Reason.OVER_CREDIT,
                f"{session.parked_bytes} bytes are unconfirmed, the credit is "
                f"{limits.credit_granted}",
            )
    if session.pending_bytes > limits.pending_bytes:
        raise RemoteProtocolError(
            Reason.PENDING_LIMIT,
            f"{session.pending_bytes} bytes wait for this connection, "
            f"{limits.pending_bytes} are allowed",
        )


class UncountedPendingBytes:
    """What has come since all was looked at, and is kept because it is not whole yet, or waits."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, size_bytes: int, total_bytes_max: int) -> bool:
        """So many bytes more. Returns whether it is time to look, where `most` may be kept."""
        self._bytes += size_bytes
        if self._bytes * BEGUN_PART <= total_bytes_max:
            return False
        self._bytes = 0
        return True


def select_sessions_to_close(
    sessions: Collection[Session], total_bytes_max: int
) -> list[tuple[Session, RemoteProtocolError]]:
    """The sessions to be cut off because more than `most` bytes are kept for all together."""
    excess = sum(session.pending_bytes for session in sessions) - total_bytes_max
    heavy = []
    if excess > 0:
        for session in sorted(sessions, key=lambda s: -s.pending_bytes):
            sentence = (
                f"{session.pending_bytes} bytes wait for this connection; for all together "
                f"{total_bytes_max} are allowed, and it has the most"
            )
            heavy.append((session, RemoteProtocolError(Reason.PENDING_LIMIT, sentence)))
            excess -= session.pending_bytes
            if excess <= 0:
                break
    return heavy
