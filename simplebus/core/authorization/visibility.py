"""Channel filters restricted to the channels that a user may see.

Consumers that share a position are always allowed to see the same channels.
"""

from __future__ import annotations

from collections.abc import Sequence

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.subscription.channel_filter import ChannelFilter
from simplebus.core.subscription.position import Position
from simplebus.core.users.permissions import ClassPermissions


def create_effective_filter(
    cls: MessageClass, channels: Sequence[str], scope: ClassPermissions | None
) -> ChannelFilter | None:
    """Return a filter for the requested channels within `scope`; None for all channels.

    Raises:
        RemoteProtocolError: memory_limit.
    """
    if not channels and scope is None:
        return None
    channel_filter = cls.channels.add_filter(channels, scope)
    if channel_filter is None:
        budget = cls.ring.budget
        raise RemoteProtocolError(
            Reason.MEMORY_LIMIT,
            f"the bus has no memory for {len(channels)} patterns: {budget.available_bytes} bytes "
            f"are left of {budget.limit_bytes}",
        )
    return channel_filter


def scope_key(scope: ClassPermissions | None) -> object:
    """Return a key that is equal for scopes with the same permissions."""
    return None if scope is None else scope.comparison_key


def visible_scope_key(position: Position) -> object:
    """Return the key of the scope that restricts a position's consumers."""
    return None if position.channel_filter is None else scope_key(position.channel_filter.scope)


def apply_scope(cls: MessageClass, position: Position, scope: ClassPermissions | None) -> None:
    """Restrict a named position to the scope of the user who resumes it.

    Raises:
        RemoteProtocolError: unauthorized, it has consumers with another scope.
    """
    former_filter = position.channel_filter
    if visible_scope_key(position) == scope_key(scope):
        return
    if position.has_consumer:
        raise RemoteProtocolError(
            Reason.UNAUTHORIZED,
            f"the group {position.group!r} is shared by users who may see other channels of "
            f"class {cls.label}",
        )
    patterns = former_filter.patterns if former_filter is not None else ()
    position.set_channel_filter(create_effective_filter(cls, patterns, scope))
    if former_filter is not None:
        cls.channels.remove_filter(former_filter)
