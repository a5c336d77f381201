"""Checks of requests and messages against a session's permissions.

A session without grants may do everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simplebus.core.channel.pattern import is_literal
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.message_class.class_registry import ClassRegistry
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.events import FrameRefused
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.ring.columns import MessageRow
from simplebus.core.session.session import Session
from simplebus.core.users.permissions import (
    AdminRight,
    ClassAccess,
    ClassPermissions,
    Grants,
    has_private_channels,
    reply_channel_prefix,
)

__all__ = [
    "AdminRight",
    "can_inquire",
    "check_class_references",
    "check_fetch",
    "check_right",
    "is_visible",
    "mask_unknown_class",
    "visible_scope",
]


def check_right(session: Session, right: AdminRight, cls: MessageClass | None = None) -> None:
    """Check that a session has a right in a class, or in all classes if `cls` is None.

    Raises:
        RemoteProtocolError: unauthorized.
    """
    grants = session.grants
    if grants is None:
        return
    class_id, name = (None, "") if cls is None else (cls.class_id, cls.name)
    if not grants.has_right(right, class_id, name):
        scope = "all classes" if cls is None else f"class {_class_label(cls)}"
        raise _unauthorized_error(session, f"lacks the right {right.value!r} in {scope}")


def is_visible(session: Session, cls: MessageClass) -> bool:
    """Return True if the bus may reveal to a session that the class exists."""
    grants = session.grants
    return grants is None or grants.has_any_access(cls.class_id, cls.name)


def can_inquire(grants: Grants | None, cls: MessageClass) -> bool:
    """Return True if reports may contain this class. Without grants, they contain every class."""
    return grants is None or grants.has_right(AdminRight.INQUIRE, cls.class_id, cls.name)


def check_fetch(session: Session, cls: MessageClass) -> None:
    """Check that a session may fetch messages by sequence.

    A session that may subscribe to all messages of the class may also fetch them, unless it must
    name each channel to which it subscribes.

    Raises:
        RemoteProtocolError: unauthorized.
    """
    grants = session.grants
    if grants is None:
        return
    can_see_all = grants.subscribe_permissions(cls.class_id, cls.name).access is ClassAccess.ALL
    if can_see_all and grants.permissions.wildcards and not has_private_channels(cls.name):
        return
    check_right(session, AdminRight.FETCH, cls)


def check_class_references(
    session: Session, references: Sequence[int | str | NamedClass], class_registry: ClassRegistry
) -> None:
    """Check that a session may name classes in a Connect.

    The session needs some permission in each class, and the right to configure the class if the
    reference has subjects or last values. For an existing class, permissions for its current name
    count, not permissions for a new name in the reference.

    Raises:
        RemoteProtocolError: unauthorized.
    """
    grants, classes = session.grants, class_registry.classes
    if grants is None:
        return
    for reference in references:
        named = reference if isinstance(reference, NamedClass) else None
        class_id, name = -1, ""
        if named is not None:
            class_id, name = -1 if named.id is None else named.id, named.name or ""
        elif isinstance(reference, int):
            class_id = reference
        elif isinstance(reference, str):
            name = reference
        if class_id < 0:
            class_id = class_registry.class_id_by_name.get(name, -1)
        if class_id in classes:
            name = classes[class_id].name
        if not grants.has_any_access(class_id, name):
            shown = name or class_id
            raise _unauthorized_error(session, f"has no permissions in class {shown!r}")
        is_new_id = class_id >= 0 and class_id not in classes
        if name and is_new_id and not grants.has_any_access(class_id, ""):
            # Other clients use the class by its id, so a permission for the new name is not enough.
            raise _unauthorized_error(session, f"has no permissions in class {class_id}")
        if named is not None and named.subjects and not grants.has_right(AdminRight.CONFIGURE):
            # A binding reads, and may reject, messages of all NATS clients on the subject.
            raise _unauthorized_error(
                session, "may not bind subjects: it lacks the right 'configure' in all classes"
            )
        if (
            named is not None
            and named.last_values
            and not grants.has_right(AdminRight.CONFIGURE, class_id, name)
        ):
            shown = name or class_id
            raise _unauthorized_error(
                session,
                f"may not request last values: it lacks the right 'configure' in class {shown!r}",
            )


def check_subscribe(session: Session, reference: int | str, class_registry: ClassRegistry) -> None:
    """Check that a session may subscribe to a class, which need not exist.

    Raises:
        RemoteProtocolError: unauthorized.
    """
    grants = session.grants
    if grants is None:
        return
    [(class_id, name)] = class_registry.resolve_ids([reference])
    cls = class_registry.classes.get(class_id)
    if cls is not None:
        name = cls.name
    elif not isinstance(reference, int):
        class_id = -1  # The id of a class that does not exist is provisional.
    if grants.subscribe_permissions(class_id, name).access is ClassAccess.NONE:
        raise _unauthorized_error(session, f"may not subscribe to class {reference!r}")


def visible_scope(
    session: Session, cls: MessageClass, channels: Sequence[str]
) -> ClassPermissions | None:
    """Return the part of a class that a session may see; None for everything.

    Args:
        session: Session that subscribes.
        cls: Class to subscribe to.
        channels: Requested channel patterns; empty for all channels.

    Raises:
        RemoteProtocolError: unauthorized, the session may see none of the channels.
    """
    grants = session.grants
    if grants is None:
        return None
    if not can_use_wildcards(session, cls, channels):
        raise _unauthorized_error(
            session,
            f"may only subscribe to single channels of class {_class_label(cls)}, "
            "without wildcards",
        )
    scope = grants.subscribe_permissions(cls.class_id, cls.name)
    if scope.access is ClassAccess.NONE:
        raise _unauthorized_error(session, f"may not subscribe to class {_class_label(cls)}")
    if channels and not any(map(scope.can_overlap, channels)):
        shown = ", ".join(channels)[:80]
        raise _unauthorized_error(
            session, f"may not subscribe to {shown} of class {_class_label(cls)}"
        )
    return None if scope.access is ClassAccess.ALL else scope


def can_use_wildcards(session: Session, cls: MessageClass, channels: Sequence[str]) -> bool:
    """Return True unless wildcards in these channel patterns are not allowed to a session.

    An empty sequence stands for all channels, and counts as a wildcard.
    """
    grants = session.grants
    if grants is None or (channels and all(map(is_literal, channels))):
        return True
    return grants.permissions.wildcards and not has_private_channels(cls.name)


def check_private_channels(session: Session, cls: MessageClass, channels: Sequence[str]) -> None:
    """Check that these channels belong to the user of the session, if the class has private
    channels.

    Raises:
        RemoteProtocolError: unauthorized.
    """
    if session.grants is None or not has_private_channels(cls.name):
        return
    prefix = reply_channel_prefix(session.user)
    if not all(channel.startswith(prefix) for channel in channels):
        raise _unauthorized_error(
            session,
            f"may only subscribe to channels of class {_class_label(cls)} that begin with "
            f"{prefix!r}",
        )


def mask_unknown_class(session: Session, refusal: FrameRefused) -> FrameRefused:
    """Return a refusal for an unknown class as it may be sent to the session.

    A session without permissions in the class gets `unauthorized`, so it cannot find out which
    classes exist.
    """
    grants = session.grants
    if (
        grants is None
        or refusal.reason is not Reason.UNKNOWN_CLASS
        or grants.has_any_access(refusal.class_id, "")
    ):
        return refusal
    sentence = f"user {session.user!r} has no permissions in class {refusal.class_id}"
    return replace(refusal, reason=Reason.UNAUTHORIZED, message=sentence)


def can_publish(session: Session, cls: MessageClass, row: MessageRow | None) -> bool:
    """Return True if a session may publish a message.

    `row` has the columns of its envelope; None for a message without an envelope.
    """
    assert session.grants is not None
    scope = session.grants.publish_permissions(cls.class_id, cls.name)
    if scope.access is not ClassAccess.SOME:
        return scope.access is ClassAccess.ALL
    return bool(cls.channels.allowed_flags(scope, 0 if row is None else row.channel)[0])


def publish_denied_text(session: Session, cls: MessageClass, channel: str) -> str:
    """Return the error text for messages that a session may not publish on this channel."""
    target = f"class {_class_label(cls)}"
    if channel:
        target = f"channel {channel!r} of {target}"
    return f"user {session.user!r} may not publish to {target}"


def _class_label(cls: MessageClass) -> str:
    return repr(cls.name) if cls.name else str(cls.class_id)


def _unauthorized_error(session: Session, detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(Reason.UNAUTHORIZED, f"user {session.user!r} {detail}")
