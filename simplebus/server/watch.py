"""What a server's HTTP door tells: the facts of its engine and of its doors.

Rule 1: it looks and counts, and changes nothing.
"""

from __future__ import annotations

from simplebus.monitor.facts import Health
from simplebus.monitor.requests import Routes, health_answers
from simplebus.server.engine import Engine
from simplebus.server.nats_door import NatsDoor


class Watch:
    """Of one server."""

    def __init__(self, engine: Engine, nats_door: NatsDoor | None) -> None:
        self._engine = engine
        self._nats_door = nats_door
        self.is_ready = self.is_draining = False

    def health(self) -> Health:
        """Whether the server takes work."""
        if self.is_draining:
            return Health(ready=False, draining=True, why="the server is stopping")
        if not self.is_ready:
            return Health(ready=False, why="not every door is open yet")
        ledger = self._engine.broker.ledger
        failure = ledger.failure if ledger is not None else None
        if failure is not None:
            return Health(ready=False, why=f"{failure[0].value}: {failure[1]}")
        return Health()

    def routes(self) -> Routes:
        """Every path, and who answers it."""
        return Routes(health_answers(self.health))
