"""What consumers do with their inboxes, as a driver's loops do it: settle, then ask for more."""

from __future__ import annotations

from typing import Any

from simplebus.client.core.inbox import Inbox
from simplebus.client.core.messages import Batch, Message


def take(inbox: Inbox, most: int = 1 << 30) -> list[Message[Any]]:
    """Consume up to so many messages as a loop does. The last one is not settled."""
    taken: list[Message[Any]] = []
    while len(taken) < most:
        message = next(inbox.ready, None)
        if message is not None:
            taken.append(message)
        else:
            inbox.settle(current=True)
            if not inbox.prepare(64):
                break
        inbox.check()
    return taken


def take_batches(inbox: Inbox, most: int | None = None) -> list[Batch]:
    """Consume everything in batches of at most so many. All of it is settled."""
    batches = []
    inbox.settle(current=True)
    while (batch := inbox.take_batch(most)) is not None:
        batches.append(batch)
        inbox.settle(current=True)
        inbox.check()
    return batches


def payloads(inbox: Inbox, most: int = 1 << 30) -> list[bytes]:
    return [message.payload for message in take(inbox, most)]
