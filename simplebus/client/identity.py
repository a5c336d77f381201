"""Who a client is to the bus.

Rule 1: a name says whose messages these are, an instance which run of the program this is: two
programs of one name are told apart, and one that lost its connection is known again.
"""

from __future__ import annotations

import secrets

from simplebus.core import arguments
from simplebus.core.client.core import ClientCore
from simplebus.core.limits import HEARTBEAT_SECONDS_MAX, NAME_CHARACTERS_MAX
from simplebus.core.requests import Auth

# What a bus says to a client that connects has room in frames of this length.
_FRAME_BYTES_LEAST = 512
_FRAME_BYTES_MOST = 1 << 40


def client_core(
    *,
    name: str | None,
    heartbeat: float,
    frame_bytes: int,
    instance: str | None = None,
    auth: Auth | None = None,
) -> ClientCore:
    """The core of a client, with a name and an instance of its own making if it has none."""
    if name is None:
        name = f"anonymous-{secrets.token_hex(8)}"
    if not 0 < len(arguments.text("name", name)) <= NAME_CHARACTERS_MAX:
        raise ValueError(f"name must be of 1 to {NAME_CHARACTERS_MAX} characters, got {name!r}")
    arguments.seconds("heartbeat", heartbeat, most=HEARTBEAT_SECONDS_MAX)
    arguments.whole("frame_bytes", frame_bytes, least=_FRAME_BYTES_LEAST, most=_FRAME_BYTES_MOST)
    return ClientCore(
        name=name,
        instance=instance or secrets.token_hex(8),
        heartbeat=heartbeat,
        client="simplebus for Python",
        frame_bytes_max=frame_bytes,
        auth=auth,
    )
