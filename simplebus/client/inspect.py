"""A look at what the bus holds, asked for in pieces: what both clients know of it.

Rule 1: an answer may be shorter than what was asked for. It is asked on until there is enough, or
nothing behind.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from simplebus.client.core import arguments
from simplebus.client.core.client import ClientCore
from simplebus.client.core.messages import Message
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.message_types import Registry
from simplebus.client.subscribe_options import seconds_of
from simplebus.client.subscription_target import Target
from simplebus.core.channel.pattern import check_name
from simplebus.core.limits import FETCH_MESSAGES_MAX, SEQUENCE_MAX
from simplebus.core.protocol.inquiry import (
    BusQuestion,
    BusSaid,
    ChannelQuestion,
    ChannelSaid,
    ClassQuestion,
    ClassSaid,
    Explained,
    Question,
    SessionQuestion,
    SessionSaid,
)
from simplebus.core.protocol.requests import FetchReply, PurgeReply


def check_range(first: int, last: int | None) -> tuple[int, int | None]:
    """Messages first..last-1, as they are. Raises ValueError for what are none."""
    arguments.check_integer("first", first, minimum=0, maximum=SEQUENCE_MAX)
    if last is not None:
        arguments.check_integer("last", last, minimum=0, maximum=SEQUENCE_MAX)
    return first, last


def get_purged_count(request: OpenRequest) -> int:
    """How many messages were."""
    assert isinstance(request.reply, PurgeReply)
    return request.reply.purged


def build_inquire_request(
    what: object, channel: str | None, session: int | None, registry: Registry
) -> Question:
    """Raises ValueError for what makes no sense, UnboundTypeError for a type without a class."""
    named = None if what is None else _class(what, registry)
    if session is not None:
        if named is not None or channel is not None:
            raise ValueError("a session is asked about alone, without a class and a channel")
        return SessionQuestion(session)
    if channel is not None:
        return ChannelQuestion(check_name(channel), named)
    return BusQuestion() if named is None else ClassQuestion(named)


def _class(what: object, registry: Registry) -> int | str:
    """A class by its id or its name: it is not made, should it not be there."""
    of = Target.of(what, registry).what
    if isinstance(of, int | str):
        return of
    if of.name is not None:
        return of.name
    assert of.class_id is not None
    return of.class_id


def answer(request: OpenRequest) -> Explained:
    """What the bus has said."""
    assert isinstance(request.reply, BusSaid | ClassSaid | ChannelSaid | SessionSaid)
    return request.reply


class FetchOperation:
    """Messages of a class from a sequence or a time on, as far as they have come."""

    def __init__(
        self, class_id: int, target: Target, first: int, count: int, time: datetime | None
    ) -> None:
        arguments.check_integer("first", first, minimum=0, maximum=SEQUENCE_MAX)
        arguments.check_integer("count", count, minimum=0, maximum=SEQUENCE_MAX)
        self.messages: list[Message[Any]] = []
        self.is_done = not count
        self._class_id = class_id
        self._target = target
        self._next = first
        self._time = None if time is None else seconds_of("time", time)
        """None when it is known which message is next."""
        self._count = count

    def send_request(self, core: ClientCore) -> OpenRequest:
        """Ask for what is missing."""
        missing = min(self._count - len(self.messages), FETCH_MESSAGES_MAX)
        request = core.fetch(self._class_id, self._next, missing, start_time=self._time)
        request.decode = self._target.decode
        return request

    def accept_reply(self, request: OpenRequest) -> None:
        """An answer has come."""
        reply = request.reply
        assert isinstance(reply, FetchReply)
        for batch in request.batches:
            self.messages += batch
        if reply.purged:
            purged = {n for first, last in reply.purged for n in range(first, last)}
            self.messages = [each for each in self.messages if each.sequence not in purged]
        before = self._next if self._time is None else reply.first
        is_over = reply.next >= reply.head or reply.next <= before
        self.is_done = is_over or len(self.messages) >= self._count
        self._next, self._time = reply.next, None
