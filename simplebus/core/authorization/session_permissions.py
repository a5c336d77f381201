"""What a session may do.

Rule 1: whoever serves a request asks here first, and nowhere else. A session without grants may do
everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simplebus.core.channel.pattern import is_literal
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.message_class.class_registry import ClassRegistry
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.events import Refused
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.ring.columns import MessageRow
from simplebus.core.session.session import Session
from simplebus.core.users.permissions import Right, Scope, Verdict, is_private

__all__ = [
    "Right",
    "check_class_references",
    "check_fetch",
    "check_right",
    "mask_unknown_class",
    "visible_scope",
]


def check_right(session: Session, right: Right, cls: MessageClass | None = None) -> None:
    """Raise RemoteProtocolError (unauthorized) when this session may not, in this class or, for
    None, in all."""
    grants = session.grants
    if grants is None:
        return
    where = (None, "") if cls is None else (cls.class_id, cls.name)
    if not grants.has(right, *where):
        of = "" if cls is None else f" in class {_class_label(cls)}"
        raise _unauthorized_error(session, f"has not the right {right.value!r}{of}")


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


def check_class_references(
    session: Session, references: Sequence[int | str | NamedClass], class_registry: ClassRegistry
) -> None:
    """The same of naming classes: only who has to do with one may, and to say what it keeps is a
    right of its own. A class that is there is judged by the id and the name that it has, not by a
    new one."""
    grants, known = session.grants, class_registry.classes
    if grants is None:
        return
    for entry in references:
        named = entry if isinstance(entry, NamedClass) else None
        class_id, name = -1, ""
        if named is not None:
            class_id, name = -1 if named.id is None else named.id, named.name or ""
        elif isinstance(entry, int):
            class_id = entry
        elif isinstance(entry, str):
            name = entry
        if class_id < 0:
            class_id = class_registry.class_id_by_name.get(name, -1)
        if class_id in known:
            name = known[class_id].name
        if not grants.knows(class_id, name):
            shown = name or class_id
            raise _unauthorized_error(session, f"has nothing to do with class {shown!r}")
        is_new_id = class_id >= 0 and class_id not in known
        if name and is_new_id and not grants.knows(class_id, ""):
            # Others know a class by its id: whose it is, the name that it is given does not say.
            raise _unauthorized_error(session, f"has nothing to do with class {class_id}")
        if named is not None and named.subjects and not grants.has(Right.CONFIGURE):
            # What is bound is heard, and may be refused, whoever publishes it.
            raise _unauthorized_error(
                session, "may not bind subjects: it may not configure all classes"
            )
        if (
            named is not None
            and named.last_values
            and not grants.has(Right.CONFIGURE, class_id, name)
        ):
            shown = name or class_id
            raise _unauthorized_error(session, f"may not say what class {shown!r} keeps")


def check_subscribe(session: Session, reference: int | str, class_registry: ClassRegistry) -> None:
    """The same of a class that is named to be subscribed to: there is none for who may not."""
    grants = session.grants
    if grants is None:
        return
    [(class_id, name)] = class_registry.resolve_ids([reference])
    cls = class_registry.classes.get(class_id)
    about = (
        (class_id if isinstance(reference, int) else -1, name)
        if cls is None
        else (class_id, cls.name)
    )
    if grants.subscribing(*about).verdict is Verdict.NONE:
        raise _unauthorized_error(session, f"may not subscribe to class {reference!r}")


def visible_scope(session: Session, cls: MessageClass, channels: Sequence[str]) -> Scope | None:
    """What of a class a session may see that subscribes to these channels, none being all; None for
    everything. Raises RemoteProtocolError (unauthorized) for nothing."""
    grants = session.grants
    if grants is None:
        return None
    if not can_use_wildcards(session, cls, channels):
        raise _unauthorized_error(
            session, f"may subscribe to class {_class_label(cls)} by whole channels only"
        )
    scope = grants.subscribing(cls.class_id, cls.name)
    if scope.verdict is Verdict.NONE:
        raise _unauthorized_error(session, f"may not subscribe to class {_class_label(cls)}")
    if channels and not any(map(scope.may_allow, channels)):
        shown = ", ".join(channels)[:80]
        raise _unauthorized_error(
            session, f"may not subscribe to {shown} of class {_class_label(cls)}"
        )
    return None if scope.verdict is Verdict.ALL else scope


def can_use_wildcards(session: Session, cls: MessageClass, channels: Sequence[str]) -> bool:
    """Whether a session may subscribe to these channels, none being all, of which not each one
    may be named."""
    grants = session.grants
    if grants is None or (channels and all(map(is_literal, channels))):
        return True
    if is_private(cls.name) and not grants.has(Right.FETCH, cls.class_id, cls.name):
        return False
    return grants.permissions.wildcards


def mask_unknown_class(session: Session, refusal: Refused) -> Refused:
    """What is refused because its class is not known: of a class that the session may not even
    name, that is why."""
    grants = session.grants
    if (
        grants is None
        or refusal.reason is not Reason.UNKNOWN_CLASS
        or grants.knows(refusal.class_id, "")
    ):
        return refusal
    sentence = f"user {session.user!r} has nothing to do with class {refusal.class_id}"
    return replace(refusal, reason=Reason.UNAUTHORIZED, sentence=sentence)


def can_publish(session: Session, cls: MessageClass, row: MessageRow | None) -> bool:
    """Whether a session may publish a message like this one; None for one without an envelope."""
    assert session.grants is not None
    scope = session.grants.publishing(cls.class_id, cls.name)
    if scope.verdict is not Verdict.SOME:
        return scope.verdict is Verdict.ALL
    return bool(cls.channels.allowed_flags(scope, 0 if row is None else row.channel)[0])


def publish_denied_text(session: Session, cls: MessageClass, channel: str) -> str:
    """What is said of messages that a session may not publish on this channel."""
    what = (
        f"channel {channel!r} of class {_class_label(cls)}"
        if channel
        else f"class {_class_label(cls)}"
    )
    return f"user {session.user!r} may not publish to {what}"


def _class_label(cls: MessageClass) -> str:
    return repr(cls.name) if cls.name else str(cls.class_id)


def _unauthorized_error(session: Session, detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(Reason.UNAUTHORIZED, f"user {session.user!r} {detail}")
