"""A bus that beats when it is told, and takes for dead who says nothing for a few beats.

Rule 1: how long a machine takes for anything is of no account.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from simplebus.core.settings import Settings
from simplebus.server.run import RunningServer
from simplebus.testing.server import BusServer, bus_server, until

_BEAT_SECONDS = 0.4
"""That a heartbeat is asked for so often is what is left of it."""


class Beaten:
    """Such a bus."""

    def __init__(self, server: BusServer) -> None:
        self.server = server
        self._tick = server.ask(lambda up: up.server.tick)
        server.ask(lambda up: setattr(up.server, "tick", lambda: None))  # The clock's.

    def beats(self, count: int) -> None:
        """So many, whatever anybody says."""
        for _ in range(count):
            self.server.ask(lambda up: self._tick())

    def beats_when_heard(self, count: int) -> None:
        """So many, each when all who are connected have said something since the one before."""
        before: dict[int, int] = {}

        def beat(up: RunningServer) -> bool:
            nonlocal before
            connections = up.server.connections.items()
            said = {number: each.session.receiver.received_bytes for number, each in connections}
            if not said or any(said[number] <= before.get(number, 0) for number in said):
                return False
            self._tick()
            before = said
            return True

        for _ in range(count):
            until(lambda: self.server.ask(beat))

    def taken_for_dead(self) -> int:
        """How many were."""
        return self.server.ask(lambda up: up.server.disconnect_counts.total())


@contextmanager
def beaten_bus() -> Iterator[Beaten]:
    with bus_server(Settings(heartbeat_seconds=_BEAT_SECONDS, tick_seconds=_BEAT_SECONDS)) as it:
        yield Beaten(it)
