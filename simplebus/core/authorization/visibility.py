"""Which messages of a class a position is for: what was asked for, of what its user may see.

Rule 1: those who share a position may see the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.subscription.channel_filter import ChannelFilter
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.core.users.permissions import Scope


def create_effective_filter(
    cls: MessageClass, channels: Sequence[str], scope: Scope | None
) -> ChannelFilter | None:
    """What is wanted by these patterns and within this scope; None for everything.

    Raises RemoteProtocolError (memory_limit).
    """
    if not channels and scope is None:
        return None
    found = cls.channels.add_filter(channels, scope)
    if found is None:
        budget = cls.ring.budget
        raise RemoteProtocolError(
            Reason.MEMORY_LIMIT,
            f"the bus has no memory for {len(channels)} patterns: {budget.left} bytes are left "
            f"of {budget.limit}",
        )
    return found


def scope_key(scope: Scope | None) -> object:
    """What tells scopes apart that allow different things."""
    return None if scope is None else scope.key


def visible_scope_key(position: BrokerSubscription) -> object:
    """The same of what who holds a position may see."""
    return None if position.channel_filter is None else scope_key(position.channel_filter.scope)


def apply_scope(cls: MessageClass, position: BrokerSubscription, scope: Scope | None) -> None:
    """A named position is taken up by who may see this much of the class.

    Raises RemoteProtocolError (unauthorized) when it is shared by who may see something else.
    """
    former = position.channel_filter
    if visible_scope_key(position) == scope_key(scope):
        return
    if position.has_consumer:
        raise RemoteProtocolError(
            Reason.UNAUTHORIZED,
            f"the group {position.group!r} is shared by users who may see other channels of "
            f"class {cls.name or cls.class_id}",
        )
    patterns = former.patterns if former is not None else ()
    position.set_channel_filter(create_effective_filter(cls, patterns, scope))
    if former is not None:
        cls.channels.remove_filter(former)
