"""What both clients know of purging: which messages, and how many they were."""

from __future__ import annotations

from simplebus.core import arguments
from simplebus.core.client.asking import Request
from simplebus.core.limits import SEQUENCE_MAX
from simplebus.core.requests import PurgeReply


def span(first: int, last: int | None) -> tuple[int, int | None]:
    """Messages first..last-1, as they are. Raises ValueError for what are none."""
    arguments.whole("first", first, least=0, most=SEQUENCE_MAX)
    if last is not None:
        arguments.whole("last", last, least=0, most=SEQUENCE_MAX)
    return first, last


def purged(request: Request) -> int:
    """How many messages were."""
    assert isinstance(request.reply, PurgeReply)
    return request.reply.purged
