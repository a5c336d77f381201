"""A peer's first word: who it is, and whether it is let in.

Rule 1: nothing that a peer says has any effect before this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.events import Event, Greeted
from simplebus.core.session import Session
from simplebus.core.users import User, Users


def admit(
    users: Users | None,
    session: Session,
    event: Event,
    sessions: Mapping[int, Session],
    refused: Counter[Reason],
) -> None:
    """Let a session in that says this first; None for users lets in everybody.

    Raises RemoteProtocolError (unauthorized, too_many_connections), which is counted.
    """
    if users is not None:
        version, auth = 1, None
        if isinstance(event, Greeted):
            version, auth = 2, event.asked.auth
        try:
            user = users.admit(
                auth, certified=session.certified, address=session.address, version=version
            )
            if user.connections:
                _check_connections(user, sessions)
        except RemoteProtocolError as error:
            refused[error.reason] += 1
            raise
        session.user, session.grants = user.name, users.grants(user)
    session.is_admitted = True


def _check_connections(user: User, sessions: Mapping[int, Session]) -> None:
    count = sum(1 for session in sessions.values() if session.user == user.name)
    if count >= user.connections:
        raise RemoteProtocolError(
            Reason.TOO_MANY_CONNECTIONS,
            f"user {user.name!r} has {count} connections, {user.connections} are allowed",
        )
