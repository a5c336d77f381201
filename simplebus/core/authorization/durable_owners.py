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

from simplebus.core.authorization.session_permissions import may_see_whole
from simplebus.core.authorization.visibility import key_of, seen, wanted
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.group.group import Member
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.session.session import Session
from simplebus.core.subscription.subscription import Subscription
from simplebus.core.users.permissions import Right, Scope, Verdict
from simplebus.core.users.users import Users

_NOTHING = Scope(everything=False, allow=(), nothing=True, deny=())


class Owners:
    """Of one broker."""

    def __init__(
        self,
        users: Callable[[], Users | None],
        sessions: Mapping[int, Session],
        cut: Callable[[Session, RemoteProtocolError], None],
    ) -> None:
        """`users` says who they are now; `cut` has a session closed."""
        self.users = users
        self._sessions = sessions
        self._cut = cut

    def check(
        self, session: Session, cls: MessageClass, position: Subscription, scope: Scope | None
    ) -> None:
        """Raise RemoteProtocolError (unauthorized) when a session that may see this much of a class
        may not take this up."""
        if self._is_free(session, position):
            return
        if position.owner and not (position.group or self._configures(session, cls)):
            raise _unauthorized(session, position, "is not its own")
        of_maker = self._seen_by_maker(cls, position)
        if scope is not None and key_of(of_maker) != scope.key:
            raise _unauthorized(session, position, "is for more than it may see")

    def check_change(self, session: Session, cls: MessageClass, position: Subscription) -> None:
        """The same where it is to be moved, or forgotten."""
        if not self.may_change(session, cls, position):
            raise _unauthorized(session, position, "is not its own to move or to forget")

    def may_change(self, session: Session, cls: MessageClass, position: Subscription) -> bool:
        """Whether a session says how this goes on, and until when."""
        is_named = bool(position.durable or position.group)
        return not is_named or self._is_free(session, position) or self._configures(session, cls)

    def judge_again(self, cls: MessageClass, why: str) -> None:
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
                position = held.group if isinstance(held, Member) else held
                former = position.wanted
                patterns = former.patterns if former is not None else ()
                allowed = scope if may_see_whole(session, cls, patterns) else _NOTHING
                if position.class_id != cls.class_id or seen(position) == key_of(allowed):
                    continue
                position.wants(wanted(cls, patterns, allowed))
                if former is not None:
                    cls.channels.remove(former)
                self._cut(session, RemoteProtocolError(Reason.UNAUTHORIZED, why))

    @staticmethod
    def _is_free(session: Session, position: Subscription) -> bool:
        return session.grants is None or bool(session.user and session.user == position.owner)

    @staticmethod
    def _configures(session: Session, cls: MessageClass) -> bool:
        grants = session.grants
        return grants is None or grants.has(Right.CONFIGURE, cls.class_id, cls.name)

    def _seen_by_maker(self, cls: MessageClass, position: Subscription) -> Scope | None:
        """What its maker may see of the class by now; None for everything."""
        users = self.users()
        user = users.named(position.owner) if users is not None else None
        grants = users.grants(user) if users is not None and user is not None else None
        if grants is None:
            return None
        scope = grants.subscribing(cls.class_id, cls.name)
        return None if scope.verdict is Verdict.ALL else scope


def _unauthorized(session: Session, position: Subscription, why: str) -> RemoteProtocolError:
    kind = "durable" if position.durable else "group"
    name = position.durable or position.group
    return RemoteProtocolError(
        Reason.UNAUTHORIZED, f"user {session.user!r}: the {kind} {name!r} {why}"
    )
