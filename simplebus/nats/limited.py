"""How fast clients of the NATS door publish.

Rule 1: what has come is dealt with, and counts; it is reading on that waits. So little is read at
once that what waits behind, acknowledgements too, does not wait long.
"""

from __future__ import annotations

from simplebus.core import meters
from simplebus.core.broker import Broker
from simplebus.core.metering import Metering
from simplebus.core.terms import Clock
from simplebus.nats.auth import User
from simplebus.nats.session import NatsSession


class Limited:
    """Of one front."""

    def __init__(self, broker: Broker | None) -> None:
        self._clock = broker.clock if broker is not None else Clock()
        self._metering = broker.metering if broker is not None else Metering(self._clock)

    def open(self, session: NatsSession) -> None:
        """A client has come, of whom nothing is known but the address."""
        session.adopt(self._metering.meters(None, session.address))

    def enter(self, session: NatsSession, user: User | None) -> None:
        """It is known who it is."""
        shared = user.shared if user is not None else None
        session.adopt(self._metering.meters(shared, session.address))

    def charge(self, session: NatsSession) -> None:
        """Have what it has published since the last time count, and see how long it is to wait."""
        if session.meters:
            meters.charge(session.meters, *session.take_published())
            session.paused_until = meters.due(session.meters, self._clock.now)

    def is_paused(self, session: NatsSession) -> bool:
        """Whether it is not read from because it has published too fast."""
        return session.paused_until > self._clock.now

    def pause_seconds(self, session: NatsSession) -> float:
        """How long it is to wait; 0 for not at all. Others may have published for the same user
        meanwhile: asked again when that is over."""
        if not session.meters:
            return 0.0
        session.paused_until = meters.due(session.meters, self._clock.now)
        return session.paused_until - self._clock.now
