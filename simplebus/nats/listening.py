"""Who hears what is published on a channel at this door: for those who ask the bus.

Rule 1: nothing changes; who is sent something is `routes`' business, and asked there.
"""

from __future__ import annotations

from simplebus.core.explained import Listener
from simplebus.core.limits import EXPLAINED_CHARACTERS
from simplebus.nats.queue_group import JoinedGroup, QueueGroup
from simplebus.nats.routes import Routes
from simplebus.nats.subscription import Subscription


class Listening:
    """Of one front. See `core.explaining_channels.Hearers`."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    def listeners(self, channel: str, most: int) -> tuple[list[Listener], int]:
        """Subscriptions and queue groups, up to so many, and how many were left out."""
        subject = channel.encode()
        found: list[Listener] = []
        left_out = 0
        for sink in self._routes.of(subject):
            queue, members = b"", 1
            if isinstance(sink, QueueGroup | JoinedGroup):
                there = sink.current()
                members = len(there)
                if not members:
                    continue
                one, queue = there[0], there[0].queue
            elif isinstance(sink, Subscription) and sink.takes(subject, None):
                one = sink
            else:
                continue  # A class that the subject is bound to, say.
            if len(found) >= most:
                left_out += 1
                continue
            found.append(
                Listener(
                    pattern=_text(one.subject),
                    queue=_text(queue),
                    members=members,
                    peer=one.session.peer[:EXPLAINED_CHARACTERS],
                )
            )
        return found, left_out


def _text(subject: bytes) -> str:
    return subject.decode("utf-8", "backslashreplace")[:EXPLAINED_CHARACTERS]
