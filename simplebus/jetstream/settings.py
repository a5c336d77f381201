"""How a door uses a JetStream cluster.

Rule 1: all doors of one engine have the same settings; where they differ, a stream is for the most
that any has asked for (`growing`).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from simplebus.core.limits import MESSAGE_ID_MASK
from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import FullPolicy, Retention, Settings
from simplebus.jetstream.names import JetStreamNames
from simplebus.nats.client.credentials import Credentials
from simplebus.net.nats_connection import NatsAddress

REPLICAS_MAX = 5
DUPLICATE_SECONDS_MAX = 900.0
"""Numbers of messages come round: within four times as long nobody may publish 2**31 of them, which
are 600,000 in a second then."""


@dataclass(frozen=True, slots=True)
class JetStreamOptions:
    """Raises ValueError for what makes no sense."""

    servers: tuple[NatsAddress, ...]
    names: JetStreamNames = field(default_factory=JetStreamNames)
    replicas: int = 1
    """How many servers keep each message."""
    storage: str = "file"
    """"file", or "memory"."""
    ack_wait_seconds: float = 30.0
    """After which the cluster gives what a door holds to another one, should the door be gone."""
    duplicate_seconds: float = 120.0
    """How long a message is known by its id: within it, one that is published again is stored
    once."""
    max_bytes: int = 0
    """Of a class's stream; 0 for any number. At it publishers wait."""
    credentials: Credentials | None = None
    """None for what the first server's address says."""
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError("no NATS server was named, expected one at least")
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise ValueError(f"replicas must be from 1 to {REPLICAS_MAX}, got {self.replicas}")
        if self.storage not in ("file", "memory"):
            raise ValueError(f"storage is file or memory, got {self.storage!r}")
        for name in ("ack_wait_seconds", "duplicate_seconds"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.duplicate_seconds > DUPLICATE_SECONDS_MAX:
            raise ValueError(
                f"duplicate_seconds must be at most {DUPLICATE_SECONDS_MAX:g}, got "
                f"{self.duplicate_seconds}"
            )
        if self.max_bytes < 0:
            raise ValueError(f"max_bytes must be 0 or more, got {self.max_bytes}")

    @property
    def durability(self) -> Durability:
        """What a PubAck means: a server that keeps messages in files has given them to its
        system."""
        return Durability.OS if self.storage == "file" else Durability.MEMORY

    def first_message_number(self, now: float) -> int:
        """Which number a program begins with that connects at this time, at whichever door. What
        one of its name has used within the time of duplicates, elsewhere perhaps, lies before it:
        numbers go on with the clock, faster than anybody publishes, and come round after four
        times as long."""
        part = now / (4 * self.duplicate_seconds) % 1.0
        return int(part * (MESSAGE_ID_MASK + 1)) & MESSAGE_ID_MASK


def unsupported_settings(settings: Settings) -> list[tuple[int | str | None, str, str]]:
    """What a bus can be told and a door before a cluster cannot do: of which class, None for all of
    them; what, by the name of its key; and why not."""
    found: list[tuple[int | str | None, str, str]] = []
    every = None, settings.full_policy, settings.keep, False
    own = [(key, c.full_policy, c.keep, c.last_values) for key, c in settings.classes.items()]
    for key, policy, keep, keeps_values in (every, *own):
        if policy not in (None, FullPolicy.BLOCK):
            why = f"before a JetStream cluster there is only block, got {policy}"
            found.append((key, "full", why))
        keep = keep or Retention()
        kept = ("messages", keep.messages), ("memory", keep.bytes), ("seconds", keep.seconds)
        for name, most in kept:
            if most:
                why = "a JetStream cluster keeps nothing that everybody has"
                found.append((key, f"keep-{name}", why))
        if keeps_values:
            found.append((key, "last-values", "a JetStream cluster keeps none"))
    return found


def check_settings(settings: Settings) -> None:
    """Raises ValueError for what is `unfit`."""
    for key, what, why in unsupported_settings(settings):
        raise ValueError(f"{'every class' if key is None else f'class {key}'}: {what}: {why}")
