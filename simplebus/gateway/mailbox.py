"""What waits for one module, and what its worker does with it.

Rule 1: everything here that changes is changed under the bus's lock, except what only the worker
changes: the counters of deliveries.
Rule 2: a worker takes all that waits at once. So what is bounded is what waits: at most as much
again is in the worker's hands.
Rule 3: a module that was removed in a callback, and added again, is given nothing before that has
ended.

    publish ──► queue ──► take: the whole queue ──► receive, one message after the other
                  full: block, drop_oldest or drop_newest
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from simplebus.gateway.blocking import TaskGate, ThreadGate, Waiter
from simplebus.gateway.messages import ModuleMessage

if TYPE_CHECKING:
    from simplebus.gateway.routing import Switchboard
    from simplebus.gateway.workers import Home

Gate = TypeVar("Gate", ThreadGate, TaskGate)

QUEUE_PLACES = 1024
"""Messages that may wait for a module, unless it is added with another limit; of those that are
longer than PLACE_BYTES, fewer."""


class Full(enum.StrEnum):
    """What happens to a message for a module whose queue is full."""

    BLOCK = "block"
    """Its publisher waits."""
    DROP_OLDEST = "drop_oldest"
    """It takes the place of the message that waits longest."""
    DROP_NEWEST = "drop_newest"
    """The module does not hear it."""


@dataclass(frozen=True, slots=True)
class ModuleStatistics:
    """A snapshot of one module on a bus."""

    waiting: int
    """Messages in its queue."""
    waiting_bytes: int
    delivered: int
    """Messages that it was given, those on which it failed included."""
    failed: int
    """Messages on which its `receive` raised."""
    dropped: int
    """Messages that it did not hear because its queue was full."""


NAME_CHARACTERS_MAX = 200


def named(module: object) -> str:
    """What a module is called in texts: as it calls itself, unless it fails in that. As it is the
    module's code that says so, nobody asks under a lock."""
    try:
        name = repr(module)
    except Exception:
        return object.__repr__(module)
    return name if len(name) <= NAME_CHARACTERS_MAX else name[:NAME_CHARACTERS_MAX] + "…"


class Mailbox(Waiter):
    """A module's place on a bus."""

    __slots__ = (
        "_board",
        "blocks",
        "delivered",
        "dropped",
        "ends",
        "failed",
        "former",
        "full",
        "hears_all",
        "home",
        "is_busy",
        "is_closed",
        "is_ended",
        "is_poked",
        "lost",
        "module",
        "name",
        "places",
        "queue",
        "room",
        "sources",
        "wake",
    )

    def __init__(self, board: Switchboard, module: object, places: int, full: Full) -> None:
        super().__init__()
        self._board = board
        self.module = module
        self.name = named(module)
        """What it is called in texts."""
        self.places = places
        """How long its queue may be."""
        self.full = full
        self.blocks = full is Full.BLOCK
        """Whether publishers wait when there is no room."""
        self.queue: deque[ModuleMessage] = deque()
        self.room = places
        """How many places are free. A message needs one; a long one takes what is not there."""
        self.delivered = 0
        self.failed = 0
        self.dropped = 0
        self.lost = 0
        """Messages that it was not given because it was removed."""
        self.hears_all = True
        """Whether it hears everyone else,"""
        self.sources: dict[int, object] = {}
        """and whom it hears in any case, by identity."""
        self.wake: Callable[[], None] | None = None
        """How to wake its worker, while that waits."""
        self.is_busy = True
        """Whether its worker has something in its hands."""
        self.is_poked = False
        """Whether the worker is to look around though there is no message."""
        self.is_closed = False
        """Whether nothing more is to be delivered."""
        self.is_ended = False
        """Whether nothing is any more in the module's hands."""
        self.ends: list[ThreadGate | TaskGate] = []
        """Who waits for that."""
        self.former: Mailbox | None = None
        """The one that the module had before, as long as it has something in its hands."""
        self.home: Home | None = None
        """The event loop in which its worker is a task; None for one of its own, and for a thread.
        """

    def is_on(self, board: Switchboard) -> bool:
        """Whether it is of that bus."""
        return self._board is board

    def come_behind(self, former: Mailbox) -> None:
        """The module is in a callback still, of a time when it was on the bus before. The lock is
        held."""
        self.former = former
        self.await_always(former)

    def make_room(self) -> bool:
        """What the policy does about a queue that is full, for one message more. Returns whether
        there is room now. The lock is held."""
        if self.is_closed:
            return False
        if self.full is Full.DROP_NEWEST:
            self.dropped += 1
            return False
        while self.room <= 0:
            self.room += self.queue.popleft().places
            self.dropped += 1
        return True

    def rouse(self) -> None:
        """Wake the worker, if it waits. The lock is held."""
        wake, self.wake = self.wake, None
        if wake is not None:
            self.is_busy = True
            wake()

    def rest(self) -> None:
        """The worker does nothing for a while, though it does not wait for messages."""
        with self._board.lock:
            self._board.fell_idle(self)

    def poke(self) -> None:
        """Have the worker look around, also where there is no message for it."""
        with self._board.lock:
            self.is_poked = True
            self.rouse()

    def close(self) -> None:
        """Nothing more is to be delivered. The lock is held."""
        self.is_closed = True
        self.lost += len(self.queue)
        self.queue.clear()
        self.room, self.blocks = 0, False
        self.rouse()

    def end(self, lost: int = 0) -> None:
        """The worker has ended, for whatever reason, with so many messages in its hands."""
        self._board.ended(self, lost)

    def _grab(self) -> deque[ModuleMessage]:
        """All that waits. The lock is held."""
        batch, self.queue, self.room, self.is_poked = self.queue, deque(), self.places, False
        self.is_busy = True  # Also of a worker that comes back from a rest.
        self._board.let_in(self)
        return batch

    def _look(self, gate_type: type[Gate]) -> tuple[Gate | None, deque[ModuleMessage] | None]:
        """What waits; or a gate that opens once there is something."""
        with self._board.lock:
            if self.is_closed:
                return None, None
            if self.former is not None:
                if not self.former.is_ended:
                    gate = gate_type()
                    self.former.ends.append(gate)
                    return gate, None
                self.await_no_more(self.former)
                self.former = None
            if self.queue or self.is_poked:
                return None, self._grab()
            gate = gate_type()
            self.wake = gate.open
            self._board.fell_idle(self)
            return gate, None

    def take(self) -> deque[ModuleMessage] | None:
        """What waits, once there is something, in a thread; empty when the worker was poked, None
        when the module is removed."""
        while True:
            gate, batch = self._look(ThreadGate)
            if gate is None:
                return batch
            gate.wait()

    async def take_async(self) -> deque[ModuleMessage] | None:
        """As `take`, in a task."""
        while True:
            gate, batch = self._look(TaskGate)
            if gate is None:
                return batch
            await gate.wait(partial(self._stop_waiting, gate))

    def _stop_waiting(self, gate: TaskGate) -> bool:
        with self._board.lock:
            if self.former is not None and gate in self.former.ends:
                self.former.ends.remove(gate)
                return True
            waited, self.wake = self.wake is not None, None
        return waited

    def statistics(self) -> ModuleStatistics:
        """A snapshot."""
        waiting_bytes = sum(message.size for message in self.queue)
        return ModuleStatistics(
            len(self.queue), waiting_bytes, self.delivered, self.failed, self.dropped
        )
