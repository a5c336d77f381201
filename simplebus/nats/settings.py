"""Settings of the NATS listener. Pure bounds are fields of `NatsLimits`."""

from __future__ import annotations

from dataclasses import dataclass, field

from simplebus.core.users.users import Users
from simplebus.nats.limits import NatsLimits


@dataclass(frozen=True, slots=True)
class NatsSettings:
    """Settings of one NATS listener."""

    limits: NatsLimits = field(default_factory=NatsLimits)
    server_name: str = "simplebus"
    users: Users | None = None
    """Users of NATS clients; None without authentication."""
    connect_urls: tuple[str, ...] = ()
    """Addresses of servers that clients may use as well, as HOST:PORT."""
    tls_required: bool = False
    """True if INFO requires TLS."""
    tls_available: bool = False
    """True if INFO offers TLS."""
    tls_verify: bool = False
    """True if INFO requests a client certificate."""
