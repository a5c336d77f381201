"""Consumers that read an inbox as a driver does: settle, then request more."""

from __future__ import annotations

from typing import Any

from simplebus.client.core.inbox import Inbox
from simplebus.client.core.messages import Batch, Message


def consume(inbox: Inbox, max_count: int = 1 << 30) -> list[Message[Any]]:
    """Read up to `max_count` messages. The last one stays unsettled."""
    messages: list[Message[Any]] = []
    while len(messages) < max_count:
        message = next(inbox.prepared_messages, None)
        if message is not None:
            messages.append(message)
        else:
            inbox.settle(include_last=True)
            if not inbox.prepare_messages(64):
                break
        inbox.check_invariants()
    return messages


def consume_batches(inbox: Inbox, max_count: int | None = None) -> list[Batch]:
    """Read and settle all messages in batches of up to `max_count`."""
    batches = []
    inbox.settle(include_last=True)
    while (batch := inbox.pop_batch(max_count)) is not None:
        batches.append(batch)
        inbox.settle(include_last=True)
        inbox.check_invariants()
    return batches


def payloads(inbox: Inbox, max_count: int = 1 << 30) -> list[bytes]:
    return [message.payload for message in consume(inbox, max_count)]
