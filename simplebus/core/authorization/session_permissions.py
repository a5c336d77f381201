"""What a session may do.

Rule 1: whoever serves a request asks here first, and nowhere else. A session without grants may do
everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simplebus.core.channel.pattern import is_literal
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.message_class.class_registry import ClassTable
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.events import Refused
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.ring.columns import Row
from simplebus.core.session.session import Session
from simplebus.core.users.permissions import Right, Scope, Verdict, is_private

__all__ = ["Right", "check_fetch", "check_names", "check_right", "explained", "seen_by"]


def check_right(session: Session, right: Right, cls: MessageClass | None = None) -> None:
    """Raise RemoteProtocolError (unauthorized) when this session may not, in this class or, for
    None, in all."""
    grants = session.grants
    if grants is None:
        return
    where = (None, "") if cls is None else (cls.class_id, cls.name)
    if not grants.has(right, *where):
        of = "" if cls is None else f" in class {_called(cls)}"
        raise _unauthorized(session, f"has not the right {right.value!r}{of}")


def check_fetch(session: Session, cls: MessageClass) -> None:
    """The same of messages by their sequences: who may see all of a class may, unless it may
    subscribe to whole channels only."""
    grants = session.grants
    if grants is None:
        return
    sees_all = grants.subscribing(cls.class_id, cls.name).verdict is Verdict.ALL
    if sees_all and grants.permissions.wildcards and not is_private(cls.name):
        return
    check_right(session, Right.FETCH, cls)


def check_names(
    session: Session, asked: Sequence[int | str | NamedClass], table: ClassTable
) -> None:
    """The same of naming classes: only who has to do with one may, and to say what it keeps is a
    right of its own. A class that is there is judged by the id and the name that it has, not by a
    new one."""
    grants, known = session.grants, table.classes
    if grants is None:
        return
    for entry in asked:
        named = entry if isinstance(entry, NamedClass) else None
        class_id, name = -1, ""
        if named is not None:
            class_id, name = -1 if named.id is None else named.id, named.name or ""
        elif isinstance(entry, int):
            class_id = entry
        elif isinstance(entry, str):
            name = entry
        if class_id < 0:
            class_id = table.names.get(name, -1)
        if class_id in known:
            name = known[class_id].name
        if not grants.knows(class_id, name):
            shown = name or class_id
            raise _unauthorized(session, f"has nothing to do with class {shown!r}")
        is_new_id = class_id >= 0 and class_id not in known
        if name and is_new_id and not grants.knows(class_id, ""):
            # Others know a class by its id: whose it is, the name that it is given does not say.
            raise _unauthorized(session, f"has nothing to do with class {class_id}")
        if named is not None and named.subjects and not grants.has(Right.CONFIGURE):
            # What is bound is heard, and may be refused, whoever publishes it.
            raise _unauthorized(session, "may not bind subjects: it may not configure all classes")
        if (
            named is not None
            and named.last_values
            and not grants.has(Right.CONFIGURE, class_id, name)
        ):
            shown = name or class_id
            raise _unauthorized(session, f"may not say what class {shown!r} keeps")


def check_subscribed(session: Session, asked: int | str, table: ClassTable) -> None:
    """The same of a class that is named to be subscribed to: there is none for who may not."""
    grants = session.grants
    if grants is None:
        return
    [(class_id, name)] = table.find_ids([asked])
    cls = table.classes.get(class_id)
    about = (
        (class_id if isinstance(asked, int) else -1, name) if cls is None else (class_id, cls.name)
    )
    if grants.subscribing(*about).verdict is Verdict.NONE:
        raise _unauthorized(session, f"may not subscribe to class {asked!r}")


def seen_by(session: Session, cls: MessageClass, channels: Sequence[str]) -> Scope | None:
    """What of a class a session may see that subscribes to these channels, none being all; None for
    everything. Raises RemoteProtocolError (unauthorized) for nothing."""
    grants = session.grants
    if grants is None:
        return None
    if not may_see_whole(session, cls, channels):
        raise _unauthorized(
            session, f"may subscribe to class {_called(cls)} by whole channels only"
        )
    scope = grants.subscribing(cls.class_id, cls.name)
    if scope.verdict is Verdict.NONE:
        raise _unauthorized(session, f"may not subscribe to class {_called(cls)}")
    if channels and not any(map(scope.may_allow, channels)):
        shown = ", ".join(channels)[:80]
        raise _unauthorized(session, f"may not subscribe to {shown} of class {_called(cls)}")
    return None if scope.verdict is Verdict.ALL else scope


def may_see_whole(session: Session, cls: MessageClass, channels: Sequence[str]) -> bool:
    """Whether a session may subscribe to these channels, none being all, of which not each one
    may be named."""
    grants = session.grants
    if grants is None or (channels and all(map(is_literal, channels))):
        return True
    if is_private(cls.name) and not grants.has(Right.FETCH, cls.class_id, cls.name):
        return False
    return grants.permissions.wildcards


def explained(session: Session, refused: Refused) -> Refused:
    """What is refused because its class is not known: of a class that the session may not even
    name, that is why."""
    grants = session.grants
    if (
        grants is None
        or refused.reason is not Reason.UNKNOWN_CLASS
        or grants.knows(refused.class_id, "")
    ):
        return refused
    sentence = f"user {session.user!r} has nothing to do with class {refused.class_id}"
    return replace(refused, reason=Reason.UNAUTHORIZED, sentence=sentence)


def may_publish(session: Session, cls: MessageClass, row: Row | None) -> bool:
    """Whether a session may publish a message like this one; None for one without an envelope."""
    assert session.grants is not None
    scope = session.grants.publishing(cls.class_id, cls.name)
    if scope.verdict is not Verdict.SOME:
        return scope.verdict is Verdict.ALL
    return bool(cls.channels.allowed(scope, 0 if row is None else row.channel)[0])


def publishes_nothing(session: Session, cls: MessageClass, channel: str) -> str:
    """What is said of messages that a session may not publish on this channel."""
    what = f"channel {channel!r} of class {_called(cls)}" if channel else f"class {_called(cls)}"
    return f"user {session.user!r} may not publish to {what}"


def _called(cls: MessageClass) -> str:
    return repr(cls.name) if cls.name else str(cls.class_id)


def _unauthorized(session: Session, what: str) -> RemoteProtocolError:
    return RemoteProtocolError(Reason.UNAUTHORIZED, f"user {session.user!r} {what}")
