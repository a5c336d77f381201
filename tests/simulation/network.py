"""Simulated connections that are slow, split bytes, stall and break.

Bytes arrive in order and unchanged, as with TCP. Their timing, the size of pieces, and how many of
the last bytes arrive are random. The two ends may learn at different times that a connection broke.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tests.simulation.world import World

CAPACITY = 3000
"""Bytes under way in one direction; then the sender waits."""
_SPLIT_PROBABILITY = 0.15
"""Share of the arrivals that are only a part of the bytes under way."""


class Endpoint(Protocol):
    """One end of a connection."""

    def on_bytes(self, line: SimulatedConnection, data: bytes) -> None:
        """Called with received bytes."""

    def on_writable(self, line: SimulatedConnection) -> None:
        """Called when more bytes can be sent."""

    def on_closed(self, line: SimulatedConnection) -> None:
        """Called when the other end has closed the connection."""


class _Pipe:
    """One direction of a connection."""

    def __init__(self, world: World, line: SimulatedConnection) -> None:
        self.world = world
        self.line = line
        self.end: Endpoint
        self.data = bytearray()
        self.moves = False
        """True if an arrival is scheduled."""
        self.ends = False
        """True if the sender has closed its end."""
        self.is_closed = False

    @property
    def room(self) -> int:
        return 0 if self.ends or self.is_closed else max(0, CAPACITY - len(self.data))

    def put(self, data: bytes) -> None:
        assert not self.ends
        self.data += data
        self.move()

    def move(self) -> None:
        if not self.moves and not self.is_closed:
            self.moves = True
            world = self.world
            delay = world.random.choice([0.0002, 0.001, 0.02])
            if world.is_fault_due(0.02):
                delay = world.random.uniform(0.5, 8.0)  # The connection stalls.
            world.call_later(delay, self._arrive)

    def _arrive(self) -> None:
        self.moves = False
        if self.is_closed:
            return
        if self.data:
            world = self.world
            max_bytes = len(self.data)
            count = max_bytes
            if world.random.random() < _SPLIT_PROBABILITY:
                count = world.random.randint(1, max_bytes)
            chunk = bytes(self.data[:count])
            del self.data[:count]
            self.end.on_bytes(self.line, chunk)
            if not self.line.is_gone and not self.ends:
                self.line.other_end(self.end).on_writable(self.line)
        if self.data:
            self.move()
        elif self.ends and not self.is_closed:
            self.is_closed = True
            self.end.on_closed(self.line)


class SimulatedConnection:
    """Connection between a client and a server."""

    made = 0

    def __init__(self, world: World, client: Endpoint, server: Endpoint, name: str) -> None:
        self.world = world
        self.client, self.server, self.name = client, server, name
        self.up, self.down = _Pipe(world, self), _Pipe(world, self)
        self.up.end, self.down.end = server, client
        self.is_gone = False
        """True if no more bytes move, even if no end has detected it yet."""

    def other_end(self, end: Endpoint) -> Endpoint:
        return self.client if end is self.server else self.server

    def close_from(self, by: Endpoint) -> None:
        """Close one end; the other end receives the bytes that are under way."""
        own_pipe, other_pipe = (self.up, self.down) if by is self.client else (self.down, self.up)
        other_pipe.is_closed = True
        own_pipe.ends = True
        own_pipe.move()

    def break_off(self, *, client_after: float, server_after: float) -> None:
        """Break the connection: some bytes under way arrive, and each end learns of it later."""
        if self.is_gone:
            return
        for pipe in (self.up, self.down):
            if pipe.data and not pipe.is_closed and self.world.random.random() < 0.5:
                count = self.world.random.randint(0, len(pipe.data))
                if count:
                    pipe.end.on_bytes(self, bytes(pipe.data[:count]))
        self.is_gone = True
        self.up.is_closed = self.down.is_closed = True
        self.world.call_later(client_after, self.client.on_closed, self)
        self.world.call_later(server_after, self.server.on_closed, self)


Dial = Callable[[Endpoint, str], "SimulatedConnection | None"]
"""Connects a client; returns None if the bus is down."""
