"""Options of the JetStream cluster, and the class settings that it does not support.

All stateless servers of a cluster should have the same options. Existing streams are only upgraded,
never downgraded.
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
"""Message numbers wrap after four such periods. No publisher may send 2**31 messages in that time,
which is a rate of 600,000 messages per second.
"""


@dataclass(frozen=True, slots=True)
class JetStreamOptions:
    """Connection and storage options of a stateless server.

    Raises:
        ValueError: An option is out of range.
    """

    servers: tuple[NatsAddress, ...]
    names: JetStreamNames = field(default_factory=JetStreamNames)
    replicas: int = 1
    """Number of servers that store each message."""
    storage: str = "file"
    """"file", or "memory"."""
    ack_wait_seconds: float = 30.0
    """Time after which the cluster redelivers the messages of a server that died."""
    duplicate_seconds: float = 120.0
    """Time for which a stream remembers message ids, so that a repeated message is stored once."""
    max_bytes: int = 0
    """Size limit of a class's stream, 0 for none. Publishers wait when it is reached."""
    credentials: Credentials | None = None
    """None for the credentials in the first server's address."""
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError("no NATS server was given, expected at least one")
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise ValueError(f"replicas must be from 1 to {REPLICAS_MAX}, got {self.replicas}")
        if self.storage not in ("file", "memory"):
            raise ValueError(f"storage must be file or memory, got {self.storage!r}")
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
        """Return the durability that a PubAck implies.

        A NATS server with file storage has written the message, but not synced it.
        """
        return Durability.OS if self.storage == "file" else Durability.MEMORY

    def first_message_number(self, now: float) -> int:
        """Return the first message number for a publisher that connects at time `now`.

        Numbers follow the clock, faster than any publisher, and wrap after four duplicate windows.
        So all numbers that the publisher used within the duplicate window, at any server, are
        lower.
        """
        part = now / (4 * self.duplicate_seconds) % 1.0
        return int(part * (MESSAGE_ID_MASK + 1)) & MESSAGE_ID_MASK


def unsupported_settings(settings: Settings) -> list[tuple[int | str | None, str, str]]:
    """Return the settings that a JetStream cluster cannot implement.

    Returns:
        Per setting: the class (None for the default of all classes), the key, and the reason.
    """
    found: list[tuple[int | str | None, str, str]] = []
    default = None, settings.full_policy, settings.keep, False
    by_class = [(key, c.full_policy, c.keep, c.last_values) for key, c in settings.classes.items()]
    for key, policy, keep, keeps_values in (default, *by_class):
        if policy not in (None, FullPolicy.BLOCK):
            reason = f"a JetStream cluster supports only block, got {policy}"
            found.append((key, "full", reason))
        keep = keep or Retention()
        limits = ("messages", keep.messages), ("memory", keep.bytes), ("seconds", keep.seconds)
        for name, most in limits:
            if most:
                reason = "a JetStream cluster does not keep acknowledged messages"
                found.append((key, f"keep-{name}", reason))
        if keeps_values:
            found.append((key, "last-values", "a JetStream cluster does not keep last values"))
    return found


def check_settings(settings: Settings) -> None:
    """Raise ValueError if `settings` contains unsupported settings."""
    for key, setting, reason in unsupported_settings(settings):
        raise ValueError(f"{'every class' if key is None else f'class {key}'}: {setting}: {reason}")
