"""Connections that are slow, break their bytes into pieces, stall, and end at the worst moment.

Rule 1: bytes arrive in their order and unharmed, as TCP has it; when, in which pieces, and how many
of the last ones is chance.
Rule 2: the two ends learn at different times that a connection is gone; one of them perhaps much
later: until then it believes that the other is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tests.simulation.world import World

CAPACITY = 3000
"""Bytes that are under way in one direction: then who sends waits."""


class End(Protocol):
    """What is at one end of a line."""

    def hear(self, line: Line, data: bytes) -> None:
        """These bytes have come."""

    def go_on(self, line: Line) -> None:
        """There is room for more to be sent."""

    def hang_up(self, line: Line) -> None:
        """The other end is gone."""


class _Pipe:
    """One direction."""

    def __init__(self, world: World, line: Line) -> None:
        self.world = world
        self.line = line
        self.end: End
        self.data = bytearray()
        self.moves = False
        """Whether something is to arrive."""
        self.ends = False
        """Whether nothing comes behind what is under way."""
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
            if world.chance(0.02):
                delay = world.random.uniform(0.5, 8.0)  # It stalls.
            world.after(delay, self._arrive)

    def _arrive(self) -> None:
        self.moves = False
        if self.is_closed:
            return
        if self.data:
            world = self.world
            most = len(self.data)
            count = most if world.random.random() < 0.5 else world.random.randint(1, most)
            piece = bytes(self.data[:count])
            del self.data[:count]
            self.end.hear(self.line, piece)
            if not self.line.is_gone and not self.ends:
                self.line.other(self.end).go_on(self.line)
        if self.data:
            self.move()
        elif self.ends and not self.is_closed:
            self.is_closed = True
            self.end.hang_up(self.line)


class Line:
    """One connection: a client at one end, a server at the other."""

    made = 0

    def __init__(self, world: World, client: End, server: End, name: str) -> None:
        self.world = world
        self.client, self.server, self.name = client, server, name
        self.up, self.down = _Pipe(world, self), _Pipe(world, self)
        self.up.end, self.down.end = server, client
        self.is_gone = False
        """Whether bytes do not move any more, whoever knows."""

    def other(self, end: End) -> End:
        return self.client if end is self.server else self.server

    def shut(self, by: End) -> None:
        """One end says no more and hears no more; the other gets what is under way."""
        mine, theirs = (self.up, self.down) if by is self.client else (self.down, self.up)
        theirs.is_closed = True
        mine.ends = True
        mine.move()

    def cut(self, *, client_after: float, server_after: float) -> None:
        """It breaks: some of the bytes under way arrive, and each end learns of it in its time."""
        if self.is_gone:
            return
        for pipe in (self.up, self.down):
            if pipe.data and not pipe.is_closed and self.world.random.random() < 0.5:
                count = self.world.random.randint(0, len(pipe.data))
                if count:
                    pipe.end.hear(self, bytes(pipe.data[:count]))
        self.is_gone = True
        self.up.is_closed = self.down.is_closed = True
        self.world.after(client_after, self.client.hang_up, self)
        self.world.after(server_after, self.server.hang_up, self)


Dial = Callable[[End, str], "Line | None"]
"""Connects a client; None when nobody answers."""
