"""Ownership of durables and groups: which users may resume, move or remove them.

- The owner is the user who created the durable or group. The owner and users without restrictions
  may do everything, whatever the current permissions of the owner are.
- A durable with an owner may be resumed by users who may configure the class. A group, or a durable
  without an owner, may be resumed by any user.
- A user who is not the owner must be allowed to see all channels, or the same as the owner.
  Otherwise the position would skip messages that the owner may see.
- Only the owner and users who may configure the class may move or remove a durable or group, or
  change its delivery policy or expiry.
"""

from __future__ import annotations

from collections.abc import Mapping

from simplebus.core.authorization.session_permissions import can_use_wildcards
from simplebus.core.authorization.visibility import (
    create_effective_filter,
    scope_key,
    visible_scope_key,
)
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.session.session import Session
from simplebus.core.subscription.position import Position
from simplebus.core.users.permissions import AdminRight, ClassAccess, ClassPermissions
from simplebus.core.users.user_directory import UserDirectory

_EMPTY_SCOPE = ClassPermissions(allow_all=False, allow=(), deny_all=True, deny=())


class DurableOwners:
    """Ownership checks of one broker."""

    def __init__(
        self,
        user_directory: UserDirectory,
        sessions: Mapping[int, Session],
        closing_sessions: list[tuple[Session, RemoteProtocolError]],
    ) -> None:
        """Create the checks.

        Args:
            user_directory: The users, who own durables and groups.
            sessions: Open sessions by id.
            closing_sessions: Receives the sessions that must be closed, each with the reason.
        """
        self._user_directory = user_directory
        self._sessions = sessions
        self._closing_sessions = closing_sessions

    def check_can_resume(
        self,
        session: Session,
        cls: MessageClass,
        position: Position,
        scope: ClassPermissions | None,
    ) -> None:
        """Check that a session may resume a durable or join a group.

        Args:
            session: Session that subscribes.
            cls: Class of the position.
            position: Durable or group.
            scope: Part of the class that the session may see; None for everything.

        Raises:
            RemoteProtocolError: unauthorized.
        """
        if self._is_owner_or_unrestricted(session, position):
            return
        if position.owner and not (position.group or self._can_configure(session, cls)):
            raise _unauthorized_error(session, position, "it belongs to another user")
        owner_scope = self._owner_scope(cls, position)
        if scope is not None and scope_key(owner_scope) != scope.comparison_key:
            raise _unauthorized_error(
                session, position, "it receives messages that this user may not see"
            )

    def check_can_change(self, session: Session, cls: MessageClass, position: Position) -> None:
        """Raise RemoteProtocolError (unauthorized) unless a session may change a position."""
        if not self.can_change(session, cls, position):
            raise _unauthorized_error(
                session, position, "it belongs to another user", action="move or remove"
            )

    def can_change(self, session: Session, cls: MessageClass, position: Position) -> bool:
        """Return True if a session may move or remove a position, or change its delivery policy."""
        is_named = bool(position.durable or position.group)
        return (
            not is_named
            or self._is_owner_or_unrestricted(session, position)
            or self._can_configure(session, cls)
        )

    def reapply_permissions(self, cls: MessageClass, reason: str) -> None:
        """Apply permissions again after a class, or the source of its dead letters, was renamed.

        A session whose permissions in the class have changed is closed, and its positions are
        restricted to messages that it may still receive.
        """
        if not cls.positions:
            return
        for session in list(self._sessions.values()):
            grants = session.grants
            if grants is None:
                continue
            scope: ClassPermissions | None = grants.subscribe_permissions(cls.class_id, cls.name)
            scope = None if scope is not None and scope.access is ClassAccess.ALL else scope
            for subscription in list(session.subscriptions.values()):
                position = subscription.position
                former_filter = position.channel_filter
                patterns = former_filter.patterns if former_filter is not None else ()
                allowed = scope if can_use_wildcards(session, cls, patterns) else _EMPTY_SCOPE
                if position.class_id != cls.class_id or visible_scope_key(position) == scope_key(
                    allowed
                ):
                    continue
                position.set_channel_filter(create_effective_filter(cls, patterns, allowed))
                if former_filter is not None:
                    cls.channels.remove_filter(former_filter)
                self._closing_sessions.append(
                    (session, RemoteProtocolError(Reason.UNAUTHORIZED, reason))
                )

    @staticmethod
    def _is_owner_or_unrestricted(session: Session, position: Position) -> bool:
        return session.grants is None or bool(session.user and session.user == position.owner)

    @staticmethod
    def _can_configure(session: Session, cls: MessageClass) -> bool:
        grants = session.grants
        return grants is None or grants.has_right(AdminRight.CONFIGURE, cls.class_id, cls.name)

    def _owner_scope(self, cls: MessageClass, position: Position) -> ClassPermissions | None:
        """Return the part of the class that the owner may see now; None for everything."""
        grants = self._user_directory.get_grants(position.owner)
        if grants is None:
            return None
        scope = grants.subscribe_permissions(cls.class_id, cls.name)
        return None if scope.access is ClassAccess.ALL else scope


def _unauthorized_error(
    session: Session, position: Position, detail: str, *, action: str = "use"
) -> RemoteProtocolError:
    kind = "durable" if position.durable else "group"
    name = position.durable or position.group
    return RemoteProtocolError(
        Reason.UNAUTHORIZED,
        f"user {session.user!r} may not {action} the {kind} {name!r}: {detail}",
    )
