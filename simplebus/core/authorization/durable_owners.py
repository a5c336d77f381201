"""Whose a durable or a group is, and who else may take it up.

Rule 1: who made a durable has it, whatever its rights are now. Others have it who may do
everything, or may configure its class; and, if it is nobody's, who may see all that it is for.
Rule 2: a group is for several: whoever may see the same as its maker is let in.
Rule 3: to move or to forget either is for its maker, and for those who may configure its class; so
is to say how long it waits for whom, what it gives up, and when it is forgotten.
Rule 4: nobody takes up what is for more than it may see: what it passed over would be lost for the
others. Only its maker does, whose own it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from simplebus.core.authorization.session_permissions import can_use_wildcards
from simplebus.core.authorization.visibility import (
    create_effective_filter,
    scope_key,
    visible_scope_key,
)
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.group.group import GroupMember
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.session.session import Session
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.core.users.permissions import Right, Scope, Verdict
from simplebus.core.users.users import Users

_EMPTY_SCOPE = Scope(everything=False, allow=(), nothing=True, deny=())


class DurableOwners:
    """Of one broker."""

    def __init__(
        self,
        get_users: Callable[[], Users | None],
        sessions: Mapping[int, Session],
        close_session: Callable[[Session, RemoteProtocolError], None],
    ) -> None:
        """`users` says who they are now; `cut` has a session closed."""
        self.get_users = get_users
        self._sessions = sessions
        self._close_session = close_session

    def check_can_resume(
        self, session: Session, cls: MessageClass, position: BrokerSubscription, scope: Scope | None
    ) -> None:
        """Raise RemoteProtocolError (unauthorized) when a session that may see this much of a class
        may not take this up."""
        if self._is_owner_or_unrestricted(session, position):
            return
        if position.owner and not (position.group or self._can_configure(session, cls)):
            raise _unauthorized_error(session, position, "is not its own")
        of_maker = self._owner_scope(cls, position)
        if scope is not None and scope_key(of_maker) != scope.key:
            raise _unauthorized_error(session, position, "is for more than it may see")

    def check_can_change(
        self, session: Session, cls: MessageClass, position: BrokerSubscription
    ) -> None:
        """The same where it is to be moved, or forgotten."""
        if not self.can_change(session, cls, position):
            raise _unauthorized_error(session, position, "is not its own to move or to forget")

    def can_change(self, session: Session, cls: MessageClass, position: BrokerSubscription) -> bool:
        """Whether a session says how this goes on, and until when."""
        is_named = bool(position.durable or position.group)
        return (
            not is_named
            or self._is_owner_or_unrestricted(session, position)
            or self._can_configure(session, cls)
        )

    def reapply_permissions(self, cls: MessageClass, reason: str) -> None:
        """A class has a name now, or one whose dead letters it keeps: whose rights in it are others
        by that is sent no more than these allow, and has to come again."""
        if not cls.subscriptions:
            return
        for session in list(self._sessions.values()):
            grants = session.grants
            if grants is None:
                continue
            scope: Scope | None = grants.subscribing(cls.class_id, cls.name)
            scope = None if scope is not None and scope.verdict is Verdict.ALL else scope
            for held in list(session.subscriptions.values()):
                position = held.group if isinstance(held, GroupMember) else held
                former = position.channel_filter
                patterns = former.patterns if former is not None else ()
                allowed = scope if can_use_wildcards(session, cls, patterns) else _EMPTY_SCOPE
                if position.class_id != cls.class_id or visible_scope_key(position) == scope_key(
                    allowed
                ):
                    continue
                position.set_channel_filter(create_effective_filter(cls, patterns, allowed))
                if former is not None:
                    cls.channels.remove_filter(former)
                self._close_session(session, RemoteProtocolError(Reason.UNAUTHORIZED, reason))

    @staticmethod
    def _is_owner_or_unrestricted(session: Session, position: BrokerSubscription) -> bool:
        return session.grants is None or bool(session.user and session.user == position.owner)

    @staticmethod
    def _can_configure(session: Session, cls: MessageClass) -> bool:
        grants = session.grants
        return grants is None or grants.has(Right.CONFIGURE, cls.class_id, cls.name)

    def _owner_scope(self, cls: MessageClass, position: BrokerSubscription) -> Scope | None:
        """What its maker may see of the class by now; None for everything."""
        users = self.get_users()
        user = users.named(position.owner) if users is not None else None
        grants = users.grants(user) if users is not None and user is not None else None
        if grants is None:
            return None
        scope = grants.subscribing(cls.class_id, cls.name)
        return None if scope.verdict is Verdict.ALL else scope


def _unauthorized_error(
    session: Session, position: BrokerSubscription, detail: str
) -> RemoteProtocolError:
    kind = "durable" if position.durable else "group"
    name = position.durable or position.group
    return RemoteProtocolError(
        Reason.UNAUTHORIZED, f"user {session.user!r}: the {kind} {name!r} {detail}"
    )
