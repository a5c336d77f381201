"""Somebody who is no query and takes messages of a bus."""

from __future__ import annotations

from typing import Any

from simplebus.testing.server import PATIENCE_SECONDS


def take(messages: Any, count: int) -> None:
    """So many messages of a blocking subscription, in however many pieces they come."""
    while count:
        taken = len(messages.take(count, timeout=PATIENCE_SECONDS))
        assert taken, f"{count} messages did not come"
        count -= taken
