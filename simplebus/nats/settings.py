"""How the NATS door behaves.

Rule 1: what is only a bound is a field of `NatsLimits`; what changes what happens stands here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simplebus.nats.limits import NatsLimits
from simplebus.nats.server.users import NatsAuth


@dataclass(frozen=True, slots=True)
class NatsSettings:
    """Of one door."""

    limits: NatsLimits = field(default_factory=NatsLimits)
    server_name: str = "simplebus"
    auth: NatsAuth = field(default_factory=NatsAuth)
    """Who may come in, and what they may do."""
    tls_required: bool = False
    """Whether INFO asks for TLS."""
    tls_available: bool = False
    """Whether INFO offers it."""
    tls_verify: bool = False
    """Whether INFO asks for a client's certificate."""
