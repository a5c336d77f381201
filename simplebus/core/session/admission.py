"""A peer's first word: who it is, and whether it is let in.

Rule 1: nothing that a peer says has any effect before this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.events import Event, Greeted
from simplebus.core.session.rate_limits import Metering
from simplebus.core.session.session import Session
from simplebus.core.users.users import User, Users


class Visits:
    """How many connections each user has, and how fast these publish."""

    def __init__(self, sessions: Mapping[int, Session], metering: Metering) -> None:
        self.metering = metering
        self._sessions = sessions
        self.others: list[Callable[[str], int]] = []
        """What doors with sessions of their own say of a user's name."""

    def check(self, user: User) -> None:
        """Raises RemoteProtocolError (too_many_connections) if there may be no more."""
        if not user.connections:
            return
        count = sum(
            1
            for session in self._sessions.values()
            if session.user == user.name and not session.is_inside  # Those are of other doors.
        )
        count += sum(at(user.name) for at in self.others)
        if count >= user.connections:
            raise RemoteProtocolError(
                Reason.TOO_MANY_CONNECTIONS,
                f"user {user.name!r} has {count} connections, {user.connections} are allowed",
            )


def admit(
    users: Users | None,
    session: Session,
    event: Event,
    visits: Visits,
    refused: Counter[Reason],
) -> None:
    """Let a session in that says this first; None for users lets in everybody.

    Raises RemoteProtocolError (unauthorized, too_many_connections, too_many_attempts), which is
    counted.
    """
    if users is not None:
        version, auth = 1, None
        if isinstance(event, Greeted):
            version, auth = 2, event.asked.auth
        try:
            if session.refusal is not None:
                raise session.refusal
            user = users.admit(
                auth, certified=session.certified, address=session.address, version=version
            )
            visits.check(user)
        except RemoteProtocolError as error:
            refused[error.reason] += 1
            raise
        session.user, session.grants = user.name, users.grants(user)
        session.meters = visits.metering.meters(user, session.address)
    session.is_admitted = True
