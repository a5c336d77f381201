"""Clients of this process, for scenarios that kill their servers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from simplebus.client import reconnect


@contextmanager
def quick_clients() -> Iterator[None]:
    """They come back at once, and say nothing of it."""
    log, before = logging.getLogger("simplebus"), reconnect.STABLE_CONNECTION_SECONDS
    level = log.level
    log.setLevel(logging.CRITICAL)
    reconnect.STABLE_CONNECTION_SECONDS = 0.0
    try:
        yield
    finally:
        log.setLevel(level)
        reconnect.STABLE_CONNECTION_SECONDS = before
