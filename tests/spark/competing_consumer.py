"""Consumer that competes with a query for the messages of a bus."""

from __future__ import annotations

from typing import Any

from simplebus.testing.server import PATIENCE_SECONDS


def take(messages: Any, count: int) -> None:
    """Take `count` messages from a blocking subscription, in any number of pieces."""
    while count:
        received_count = len(messages.take(count, timeout=PATIENCE_SECONDS))
        assert received_count, f"{count} messages did not arrive"
        count -= received_count
