"""Who a client is to the bus.

Rule 1: a name says whose messages these are, an instance which run of the program this is: two
programs of one name are told apart, and one that lost its connection is known again.
"""

from __future__ import annotations

import secrets

from simplebus.core.client import ClientCore


def client_core(*, name: str | None, heartbeat: float, frame_bytes: int) -> ClientCore:
    """The core of a client, with a name of its own making if it has none."""
    if not heartbeat >= 0:
        raise ValueError(f"heartbeat must be seconds from 0 on, got {heartbeat!r}")
    return ClientCore(
        name=name or f"anonymous-{secrets.token_hex(8)}",
        instance=secrets.token_hex(8),
        heartbeat=heartbeat,
        client="simplebus for Python",
        frame_bytes_max=frame_bytes,
    )
