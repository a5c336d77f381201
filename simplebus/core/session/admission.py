"""A peer's first word: who it is, and whether it is let in.

Rule 1: nothing that a peer says has any effect before this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.events import Event, Greeted
from simplebus.core.session.rate_limits import SessionRateLimits
from simplebus.core.session.session import Session
from simplebus.core.users.users import User, Users


class ConnectionLimits:
    """How many connections each user has, and how fast these publish."""

    def __init__(self, sessions: Mapping[int, Session], rate_limits: SessionRateLimits) -> None:
        self.rate_limits = rate_limits
        self._sessions = sessions
        self.external_counters: list[Callable[[str], int]] = []
        """What doors with sessions of their own say of a user's name."""

    def check_user(self, user: User) -> None:
        """Raises RemoteProtocolError (too_many_connections) if there may be no more."""
        if not user.connections:
            return
        count = sum(
            1
            for session in self._sessions.values()
            if session.user == user.name and not session.is_foreign  # Those are of other doors.
        )
        count += sum(at(user.name) for at in self.external_counters)
        if count >= user.connections:
            raise RemoteProtocolError(
                Reason.TOO_MANY_CONNECTIONS,
                f"user {user.name!r} has {count} connections, {user.connections} are allowed",
            )


def admit_session(
    users: Users | None,
    session: Session,
    first_event: Event,
    connection_limits: ConnectionLimits,
    refusal_counts: Counter[Reason],
) -> None:
    """Let a session in that says this first; None for users lets in everybody.

    Raises RemoteProtocolError (unauthorized, too_many_connections, too_many_attempts), which is
    counted.
    """
    if users is not None:
        version, auth = 1, None
        if isinstance(first_event, Greeted):
            version, auth = 2, first_event.asked.auth
        try:
            if session.admission_error is not None:
                raise session.admission_error
            user = users.admit(
                auth, certified=session.certificate_names, address=session.address, version=version
            )
            connection_limits.check_user(user)
        except RemoteProtocolError as error:
            refusal_counts[error.reason] += 1
            raise
        session.user, session.grants = user.name, users.grants(user)
        session.token_buckets = connection_limits.rate_limits.token_buckets_for(
            user, session.address
        )
    session.is_authenticated = True
