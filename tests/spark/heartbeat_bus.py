"""Bus whose timer is advanced by the test instead of the clock.

The bus disconnects clients that send nothing for a few beats. Because the test triggers each beat,
results do not depend on the speed of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from simplebus.core.settings import Settings
from simplebus.server.run import RunningServer
from simplebus.testing.server import BusServer, bus_server, until

_BEAT_SECONDS = 0.4
"""Heartbeat interval requested of clients. The server's own timer is stopped."""


class HeartbeatServer:
    """Bus server with a manually advanced heartbeat timer."""

    def __init__(self, server: BusServer) -> None:
        self.server = server
        self._tick = server.ask(lambda up: up.server.tick)
        server.ask(lambda up: setattr(up.server, "tick", lambda: None))  # Disables the timer.

    def beats(self, count: int) -> None:
        """Advance the timer by `count` beats, regardless of what clients send."""
        for _ in range(count):
            self.server.ask(lambda up: self._tick())

    def advance_after_data(self, count: int) -> None:
        """Advance the timer by `count` beats, waiting before each for data from every client."""
        before: dict[int, int] = {}

        def beat(up: RunningServer) -> bool:
            nonlocal before
            connections = up.server.connections.items()
            received_bytes = {
                number: each.session.receiver.received_bytes for number, each in connections
            }
            if not received_bytes or any(
                received_bytes[number] <= before.get(number, 0) for number in received_bytes
            ):
                return False
            self._tick()
            before = received_bytes
            return True

        for _ in range(count):
            until(lambda: self.server.ask(beat))

    def count_closed(self) -> int:
        """Return the number of connections that the server has closed."""
        return self.server.ask(lambda up: up.server.disconnect_counts.total())


@contextmanager
def heartbeat_bus() -> Iterator[HeartbeatServer]:
    with bus_server(
        Settings(heartbeat_seconds=_BEAT_SECONDS, tick_seconds=_BEAT_SECONDS)
    ) as server:
        yield HeartbeatServer(server)
