"""Admission of a session by its first frame: authentication and connection limits.

Nothing that a peer sends has an effect before it is admitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.events import ConnectRequested, Event
from simplebus.core.session.rate_limits import SessionRateLimits
from simplebus.core.session.session import Session
from simplebus.core.users.users import User, Users


class ConnectionLimits:
    """Limits on the connections of each user, and on their publish rates."""

    def __init__(self, sessions: Mapping[int, Session], rate_limits: SessionRateLimits) -> None:
        self.rate_limits = rate_limits
        self._sessions = sessions
        self.external_counters: list[Callable[[str], int]] = []
        """Functions that return a user's connections at listeners with sessions of their own."""

    def check_user(self, user: User) -> None:
        """Raise RemoteProtocolError (too_many_connections) if the user has no connection left."""
        if not user.connections:
            return
        count = sum(
            1
            for session in self._sessions.values()
            if session.user == user.name and not session.is_local  # Counted by their own listeners.
        )
        count += sum(count_at_listener(user.name) for count_at_listener in self.external_counters)
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
    *,
    frame_bytes_max: int,
) -> None:
    """Authenticate a session by its first event. Without `users` everyone is admitted.

    An admitted session may send frames of up to `frame_bytes_max` bytes.

    Raises:
        RemoteProtocolError: unauthorized, too_many_connections or too_many_attempts. Each refusal
            is counted in `refusal_counts`.
    """
    user_name, grants, token_buckets = session.user, session.grants, session.token_buckets
    if users is not None:
        version, auth = 1, None
        if isinstance(first_event, ConnectRequested):
            version, auth = 2, first_event.body.auth
        try:
            if session.admission_error is not None:
                raise session.admission_error
            user = users.authenticate(
                auth, certified=session.certificate_names, address=session.address, version=version
            )
            connection_limits.check_user(user)
        except RemoteProtocolError as error:
            refusal_counts[error.reason] += 1
            raise
        user_name, grants = user.name, users.get_grants(user)
        token_buckets = connection_limits.rate_limits.token_buckets_for(user, session.address)
    session.authenticate(user_name, grants, token_buckets, frame_bytes_max=frame_bytes_max)
