"""Clients that reconnect at once, for scenarios that kill servers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from simplebus.client import reconnect


@contextmanager
def quick_reconnects() -> Iterator[None]:
    """Reconnect without backoff and without logging, for the duration of a block."""
    log, before = logging.getLogger("simplebus"), reconnect.STABLE_CONNECTION_SECONDS
    level = log.level
    log.setLevel(logging.CRITICAL)
    reconnect.STABLE_CONNECTION_SECONDS = 0.0
    try:
        yield
    finally:
        log.setLevel(level)
        reconnect.STABLE_CONNECTION_SECONDS = before
