"""Fetch, inquire and purge requests: the part that all drivers share."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from simplebus.client.core import arguments
from simplebus.client.core.client import ClientCore
from simplebus.client.core.messages import Message
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.message_types import Registry
from simplebus.client.subscribe_options import seconds_of
from simplebus.client.subscription_target import SubscriptionTarget
from simplebus.core.channel.pattern import check_name
from simplebus.core.limits import FETCH_MESSAGES_MAX, SEQUENCE_MAX
from simplebus.core.protocol.inquiry import (
    BusInfo,
    BusInquiry,
    ChannelInfo,
    ChannelInquiry,
    ClassInfo,
    ClassInquiry,
    InquireReply,
    Inquiry,
    SessionInfo,
    SessionInquiry,
)
from simplebus.core.protocol.requests import FetchReply, PurgeReply


def check_range(first: int, last: int | None) -> tuple[int, int | None]:
    """Return the checked bounds of the range first..last-1; `last` is None for no end.

    Raises:
        ValueError: If a sequence is out of range.
    """
    arguments.check_integer("first", first, minimum=0, maximum=SEQUENCE_MAX)
    if last is not None:
        arguments.check_integer("last", last, minimum=0, maximum=SEQUENCE_MAX)
    return first, last


def get_purged_count(request: OpenRequest) -> int:
    """Return the number of purged messages from the reply to a Purge request."""
    assert isinstance(request.reply, PurgeReply)
    return request.reply.purged


def build_inquire_request(
    class_reference: object, channel: str | None, session: int | None, registry: Registry
) -> Inquiry:
    """Return the Inquire request for a class, a channel or a session.

    Raises:
        ValueError: If arguments contradict each other.
        UnboundTypeError: If a type is not bound to a class.
    """
    resolved = None if class_reference is None else _resolve_class(class_reference, registry)
    if session is not None:
        if resolved is not None or channel is not None:
            raise ValueError(
                "got session= together with a class or channel, expected session= only"
            )
        return SessionInquiry(session)
    if channel is not None:
        return ChannelInquiry(check_name(channel), resolved)
    return BusInquiry() if resolved is None else ClassInquiry(resolved)


def _resolve_class(class_reference: object, registry: Registry) -> int | str:
    """Return the id or name of a class, without creating it."""
    resolved = SubscriptionTarget.from_argument(class_reference, registry).class_reference
    if isinstance(resolved, int | str):
        return resolved
    if resolved.name is not None:
        return resolved.name
    assert resolved.class_id is not None
    return resolved.class_id


def get_inquire_reply(request: OpenRequest) -> InquireReply:
    """Return the reply to an Inquire request."""
    assert isinstance(request.reply, BusInfo | ClassInfo | ChannelInfo | SessionInfo)
    return request.reply


class FetchOperation:
    """Fetch of messages from a sequence or a time on.

    A reply may contain fewer messages than requested. Requests are sent until enough messages have
    arrived or the head is reached.
    """

    def __init__(
        self,
        class_id: int,
        target: SubscriptionTarget,
        first: int,
        count: int,
        time: datetime | None,
    ) -> None:
        arguments.check_integer("first", first, minimum=0, maximum=SEQUENCE_MAX)
        arguments.check_integer("count", count, minimum=0, maximum=SEQUENCE_MAX)
        self.messages: list[Message[Any]] = []
        self.is_done = not count
        self._class_id = class_id
        self._target = target
        self._next_sequence = first
        self._time = None if time is None else seconds_of("time", time)
        """Seconds since 1970 for the first request; None when the next sequence is known."""
        self._count = count

    def send_request(self, core: ClientCore) -> OpenRequest:
        """Request the missing messages."""
        missing_count = min(self._count - len(self.messages), FETCH_MESSAGES_MAX)
        request = core.fetch(
            self._class_id, self._next_sequence, missing_count, start_time=self._time
        )
        request.decode = self._target.decode
        return request

    def accept_reply(self, request: OpenRequest) -> None:
        """Add the messages of a reply."""
        reply = request.reply
        assert isinstance(reply, FetchReply)
        for batch in request.batches:
            self.messages += batch
        if reply.purged:
            purged = {sequence for first, last in reply.purged for sequence in range(first, last)}
            self.messages = [message for message in self.messages if message.sequence not in purged]
        previous_sequence = self._next_sequence if self._time is None else reply.first
        has_reached_head = reply.next >= reply.head or reply.next <= previous_sequence
        self.is_done = has_reached_head or len(self.messages) >= self._count
        self._next_sequence, self._time = reply.next, None
