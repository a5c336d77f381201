"""Limits on the bytes held for one session, and for all sessions together.

The total is checked at each tick, and in between whenever a fraction of the limit has arrived since
the last check. The total can exceed the limit only by that fraction, and by the reads that arrive
during a check.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    CLOSED_SESSIONS_PER_TURN,
    COUNTED_SESSIONS_PER_TURN,
    PENDING_CHECK_DIVISOR,
    Limits,
)
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
) -> Iterator[list[tuple[Session, RemoteProtocolError]]]:
    """Select the sessions to close if more than `total_bytes_max` bytes are held for all.

    The sessions with the most bytes are closed first. Other calls of the broker are allowed between
    the parts.

    Yields:
        Sessions that must be closed, each with the reason.
    """
    sessions = list(sessions)
    pending_bytes: list[int] = []
    for first in range(0, len(sessions), COUNTED_SESSIONS_PER_TURN):
        if first:
            yield []
        part = sessions[first : first + COUNTED_SESSIONS_PER_TURN]
        pending_bytes += [session.pending_bytes for session in part]
    sizes = np.array(pending_bytes, np.int64)
    excess_bytes = int(sizes.sum()) - total_bytes_max
    if excess_bytes <= 0:
        return
    order = np.argsort(-sizes, kind="stable")
    count = int(np.cumsum(sizes[order]).searchsorted(excess_bytes)) + 1
    for first in range(0, count, CLOSED_SESSIONS_PER_TURN):
        indexes = order[first : min(first + CLOSED_SESSIONS_PER_TURN, count)].tolist()
        yield [
            (sessions[index], _total_limit_error(pending_bytes[index], total_bytes_max))
            for index in indexes
            if not sessions[index].is_closed
        ]


def _total_limit_error(pending_bytes: int, total_bytes_max: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        Reason.PENDING_LIMIT,
        f"{pending_bytes} bytes wait for this connection; for all together {total_bytes_max} are "
        "allowed, and it has the most",
    )
