"""Access to durables and groups of the cluster, and their delivery policy.

Access is decided as for a local durable. The creator sets the delivery policy; it applies at all
servers while any server uses the durable. When no server does, a user with the right to change it
sets it again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from simplebus.core.authorization.session_permissions import visible_scope
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import BACKOFF_STEPS_MAX, DELIVERIES_MAX
from simplebus.core.protocol.requests import Seconds
from simplebus.core.session.session import Session
from simplebus.core.subscription.position import Position
from simplebus.jetstream import api
from simplebus.jetstream.remote_class import RemoteClass

if TYPE_CHECKING:
    from simplebus.core.broker.broker import Broker


class _PolicyMetadata(msgspec.Struct, frozen=True):
    ack: Seconds
    deliveries: Annotated[int, Meta(ge=0, le=DELIVERIES_MAX)] = 0
    backoff: Annotated[list[Seconds], Meta(max_length=BACKOFF_STEPS_MAX)] = []


class DurableCheck:
    """Checks for the durables of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def check_access(
        self, cls: RemoteClass, position: Position, owner: str, *, is_seek: bool
    ) -> bool:
        """Check that the subscribing sessions may use a durable or group of `owner`.

        Args:
            owner: User in the consumer's metadata; empty for none.
            is_seek: The durable is to be moved.

        Returns:
            True if the sessions may change the durable.

        Raises:
            RemoteProtocolError: (unauthorized) a session may not use or move it.
        """
        subscriptions = self._broker.subscription_manager
        subscriptions.quotas.change_owner(position, owner)
        patterns = tuple(position.channel_filter.patterns) if position.channel_filter else ()
        sessions = subscribed_sessions(self._broker, position)
        for session in sessions:
            if is_seek:
                subscriptions.durable_owners.check_can_change(session, cls, position)
            else:
                subscriptions.durable_owners.check_can_resume(
                    session, cls, position, visible_scope(session, cls, patterns)
                )
        return all(
            subscriptions.durable_owners.can_change(session, cls, position) for session in sessions
        )

    def encode_policy(self, position: Position) -> str:
        """Encode the position's delivery policy for the consumer's metadata."""
        seconds, policy = self._broker.settings.tick_seconds, position.delivery_policy
        metadata = _PolicyMetadata(
            ack=round(policy.ack_timeout_ticks * seconds, 6),
            deliveries=policy.deliveries_max,
            backoff=list(policy.backoff_seconds)
            or [round(ticks * seconds, 6) for ticks in policy.backoff_ticks],
        )
        return msgspec.json.encode(metadata).decode()

    def apply_policy(self, position: Position, encoded: str) -> None:
        """Set the position's delivery policy from metadata; ignore invalid metadata."""
        try:
            metadata = msgspec.json.decode(encoded, type=_PolicyMetadata)
        except (msgspec.DecodeError, RecursionError):
            return
        policy = replace(
            position.delivery_policy,
            ack_timeout_ticks=self._ticks(metadata.ack),
            deliveries_max=metadata.deliveries,
            backoff_ticks=tuple(map(self._ticks, metadata.backoff)),
            backoff_seconds=tuple(metadata.backoff),
        )
        position.set_delivery_policy(policy)

    def _ticks(self, seconds: float) -> int:
        return max(1, round(seconds / self._broker.settings.tick_seconds))


def subscribed_sessions(broker: Broker, position: Position) -> list[Session]:
    """Return the sessions that subscribe to a position, alone or as group members."""
    return [
        session
        for session in broker.sessions.values()
        if any(subscription.position is position for subscription in session.subscriptions.values())
    ]


def resume_replies(broker: Broker, sessions: list[Session]) -> None:
    """Send replies that waited for the state of a position."""
    for session in sessions:
        session.outbox.resume_replies()
        session.outbox.mark_ready()


def check_same_channels(
    position: Position, patterns: tuple[str, ...], info: dict[str, Any]
) -> None:
    """Raise RemoteProtocolError (subscription_mismatch) if the consumer has other channels."""
    channels = api.channels_of(info)
    if channels != set(patterns):
        raise RemoteProtocolError(
            Reason.SUBSCRIPTION_MISMATCH,
            f"{position.durable or position.group!r} exists for the channels {sorted(channels)}, "
            f"and was requested with {list(patterns)}",
        )
