"""A look at what the bus holds, asked for in pieces: what both clients know of it.

Rule 1: an answer may be shorter than what was asked for. It is asked on until there is enough, or
nothing behind.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from simplebus.client.options import seconds_of
from simplebus.client.target import Target
from simplebus.core import arguments
from simplebus.core.client.asking import Request
from simplebus.core.client.core import ClientCore
from simplebus.core.client.messages import Message
from simplebus.core.limits import FETCH_MESSAGES_MAX, SEQUENCE_MAX
from simplebus.core.requests import FetchReply


class Fetching:
    """Messages of a class from a sequence or a time on, as far as they have come."""

    def __init__(
        self, class_id: int, target: Target, first: int, count: int, time: datetime | None
    ) -> None:
        arguments.whole("first", first, least=0, most=SEQUENCE_MAX)
        arguments.whole("count", count, least=0, most=SEQUENCE_MAX)
        self.messages: list[Message[Any]] = []
        self.is_done = not count
        self._class_id = class_id
        self._target = target
        self._next = first
        self._time = None if time is None else seconds_of("time", time)
        """None when it is known which message is next."""
        self._count = count

    def ask(self, core: ClientCore) -> Request:
        """Ask for what is missing."""
        missing = min(self._count - len(self.messages), FETCH_MESSAGES_MAX)
        request = core.fetch(self._class_id, self._next, missing, time=self._time)
        request.decode = self._target.decode
        return request

    def take(self, request: Request) -> None:
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
