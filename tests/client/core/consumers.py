"""What consumers do with their inboxes, as a driver's loops do it: settle, then ask for more."""

from __future__ import annotations

from typing import Any

from simplebus.client.core.inbox import Inbox
from simplebus.client.core.messages import Batch, Message


def take(inbox: Inbox, most: int = 1 << 30) -> list[Message[Any]]:
    """Consume up to so many messages as a loop does. The last one is not settled."""
    taken: list[Message[Any]] = []
    while len(taken) < most:
        message = next(inbox.prepared_messages, None)
        if message is not None:
            taken.append(message)
        else:
            inbox.settle(include_last=True)
            if not inbox.prepare_messages(64):
                break
        inbox.check_invariants()
    return taken


def take_batches(inbox: Inbox, most: int | None = None) -> list[Batch]:
    """Consume everything in batches of at most so many. All of it is settled."""
    batches = []
    inbox.settle(include_last=True)
    while (batch := inbox.pop_batch(most)) is not None:
        batches.append(batch)
        inbox.settle(include_last=True)
        inbox.check_invariants()
    return batches


def payloads(inbox: Inbox, most: int = 1 << 30) -> list[bytes]:
    return [message.payload for message in take(inbox, most)]
