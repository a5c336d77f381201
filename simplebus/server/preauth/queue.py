"""Where those wait who have not said who they are, or have not come in yet: one of them moves at a
time.

Rule 1: however many of them have something to say at once, or go at once, or have had their time,
whoever is inside waits for one step of one of them.
Rule 2: they take what time the event loop has left. Where it has none left, they take a part of it.
Rule 3: each place has its turn: many that come from one keep nobody waiting who comes from another.
A place is an address at one door: whatever stands before the bus, health is told beside it.
Rule 4: while a crowd is to move that is in already, few are let in for each step that it takes: who
comes faster than it is dealt with waits in the system's queue, and takes neither descriptors nor
memory. Never nobody: a crowd that always has something to say shuts no door.

    sockets ─► epoll ─► ready, by place ─► one step of one guest ─► the loop has nothing else to do,
                                  ▲        or has had its time ─┐
                                  └─────────────────────────────┘
"""

from __future__ import annotations

import heapq
import itertools
import math
import select
import socket
from collections import deque
from collections.abc import Hashable
from typing import Self

import trio
from trio.testing import wait_all_tasks_blocked

PART_OF_LOOP = 0.25
"""How much of the loop's time strangers have though others could use it all."""
CROWD = 256
"""So many are to move, and a listener has its turn only"""
STEPS_BETWEEN = 16
"""after so many steps: who comes and goes takes some three, and a turn lets in a few."""
_NEWS_MAX = 64
"""Of so many sockets is heard at once. Each costs a microsecond."""
_TURNS_MAX = 2
"""So many turns of the loop later at most whoever was told to move has moved."""


class Anteroom:
    """Of all doors of one loop. Enter `run` in a nursery: without it nobody moves."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._ready: dict[Hashable, deque[Guest]] = {}
        """By place: who is to move. Whose turn it was last is last."""
        self._crowd = 0
        """How many those are, but for listeners."""
        self._watched: dict[int, Guest] = {}
        """By descriptor: who waits for something to read."""
        self._deadlines: list[tuple[float, int, Guest]] = []
        """A heap. Guests that wait no more are in it, too: no more than those who wait."""
        self._numbers = itertools.count()
        self._sleep = trio.CancelScope()
        self.steps = 0
        """How many were taken."""

    @property
    def waiting(self) -> int:
        """How many wait, for something to read or for their turn."""
        return len(self._watched) + sum(map(len, self._ready.values()))

    def enter(self, sock: socket.socket, place: Hashable, *, is_listener: bool = False) -> Guest:
        """One more has come, from this place. To be used in a `with` block."""
        return Guest(self, sock, place, is_listener)

    async def run(self) -> None:
        """Have them move, until cancelled."""
        try:
            while True:
                self._look()
                if (guest := self._next()) is None:
                    await self._sleep_on()
                    continue
                self.steps += 1
                guest.moved_at = self.steps
                guest.move()
                for _ in range(_TURNS_MAX):
                    if guest.is_to_begin:
                        await trio.lowlevel.checkpoint()
                await give_way(guest.took())
        finally:
            self._poll.close()

    def _look(self) -> None:
        """Who has something to read, or has had its time, is to move."""
        for fd, _ in self._poll.poll(0, _NEWS_MAX):
            if (guest := self._watched.pop(fd, None)) is not None:
                self._queue(guest)
        now = trio.current_time()
        for _ in range(_NEWS_MAX):
            if not self._deadlines or self._deadlines[0][0] > now:
                break
            deadline, _, guest = heapq.heappop(self._deadlines)
            if guest.listed_at != deadline:
                continue
            guest.listed_at = math.inf
            if guest.is_queued:  # It waits for us.
                continue
            if guest.deadline <= now:
                guest.is_late = True
                self.hurry(guest)
            else:
                self._list(guest)

    def _next(self) -> Guest | None:
        is_crowded = self._crowd >= CROWD
        place = next(
            (at for at, all_ in self._ready.items() if not (is_crowded and self._rests(all_[0]))),
            None,
        )
        if place is None:
            return None
        waiting = self._ready.pop(place)
        guest = waiting.popleft()
        if waiting:
            self._ready[place] = waiting  # Behind the others.
        self._unqueued(guest)
        return guest

    def _rests(self, guest: Guest) -> bool:
        """Whether it has let others in a moment ago."""
        return guest.is_listener and self.steps - guest.moved_at < STEPS_BETWEEN

    async def _sleep_on(self) -> None:
        """Until somebody is to move."""
        with trio.CancelScope() as self._sleep:
            if self._deadlines:
                self._sleep.deadline = self._deadlines[0][0]
            await trio.lowlevel.wait_readable(self._poll.fileno())

    def _queue(self, guest: Guest) -> None:
        self._ready.setdefault(guest.place, deque()).append(guest)
        guest.is_queued = True
        self._crowd += not guest.is_listener

    def _unqueued(self, guest: Guest) -> None:
        guest.is_queued = False
        self._crowd -= not guest.is_listener

    # What guests ask for --------------------------------------------------------------------------

    def watch(self, guest: Guest) -> None:
        """It is to move when there is something to read, or at its deadline."""
        fd = guest.socket.fileno()
        events = select.EPOLLIN | select.EPOLLONESHOT
        if guest.is_known:
            self._poll.modify(fd, events)
        else:
            self._poll.register(fd, events)
            guest.is_known = True
        self._watched[fd] = guest
        self._list(guest)
        if guest.deadline < self._sleep.deadline:
            self._sleep.deadline = guest.deadline

    def _list(self, guest: Guest) -> None:
        """It is to be looked at when its deadline has passed, if not before that anyway."""
        if guest.deadline >= guest.listed_at:
            return
        guest.listed_at = guest.deadline
        heapq.heappush(self._deadlines, (guest.deadline, next(self._numbers), guest))
        if len(self._deadlines) > 2 * (len(self._watched) + self._crowd) + _NEWS_MAX:
            all_ = self._deadlines
            self._deadlines = [each for each in all_ if each[2].is_due_at(each[0])]
            heapq.heapify(self._deadlines)

    def hurry(self, guest: Guest) -> None:
        """It is to move, whatever it waits for."""
        if guest.is_queued:
            return
        self._watched.pop(guest.socket.fileno(), None)
        self._queue(guest)
        self._sleep.cancel()

    def forget(self, guest: Guest) -> None:
        """It waits no more."""
        if guest.is_queued:
            self._unqueued(guest)
            waiting = self._ready[guest.place]
            waiting.remove(guest)
            if not waiting:
                del self._ready[guest.place]
        elif self._watched.get(fd := guest.socket.fileno()) is guest:
            del self._watched[fd]

    def leave(self, guest: Guest) -> None:
        """It does not come back."""
        self.forget(guest)
        if guest.is_known and not self._poll.closed and guest.socket.fileno() >= 0:
            guest.is_known = False
            self._poll.unregister(guest.socket.fileno())


class Guest:
    """One who waits there; a context manager. Only its own task waits for it."""

    def __init__(
        self, room: Anteroom, sock: socket.socket, place: Hashable, is_listener: bool = False
    ) -> None:
        self.socket = sock
        self.place = place
        self.is_listener = is_listener
        """Whether it lets others in."""
        self.deadline = math.inf
        """Of what it waits for."""
        self.listed_at = math.inf
        """When the room will look at it: no later than at its deadline."""
        self.is_known = False
        """Whether the room's epoll has its socket."""
        self.is_queued = False
        """Whether it is to move when its turn comes."""
        self.is_late = False
        """Whether its deadline has passed."""
        self.is_to_begin = False
        """Whether it was told to move, and has not had the loop since."""
        self.moved_at = -STEPS_BETWEEN
        """How many steps the room had taken then."""
        self._room = room
        self._task: trio.lowlevel.Task | None = None
        self._end: trio.CancelScope | None = None
        """What is cancelled when its turn comes."""
        self._began = self._ended = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """It is inside, or gone."""
        self._room.leave(self)

    async def readable(self, deadline: float = math.inf) -> None:
        """Wait for something to read, or the end of it, and for its turn. Raises
        trio.TooSlowError when there is nothing in time."""
        self.is_late, self.deadline = False, deadline
        self._room.watch(self)
        await self._wait()
        if self.is_late:
            raise trio.TooSlowError

    async def turn(self) -> None:
        """Wait for its turn: what comes next takes long."""
        self._room.hurry(self)
        await self._wait()

    def end(self, scope: trio.CancelScope) -> None:
        """Cancel a scope around what it does: in its turn if it waits here, else at once."""
        if self._task is None:
            scope.cancel()
        else:
            self._end = scope
            self._room.hurry(self)

    async def _wait(self) -> None:
        self._ended = trio.current_time()
        self._task = trio.lowlevel.current_task()
        try:
            await trio.lowlevel.wait_task_rescheduled(self._forget)
        finally:
            self._task, self.is_to_begin, self.deadline = None, False, math.inf
            self._began = trio.current_time()

    def _forget(self, _: object) -> trio.lowlevel.Abort:
        self._room.forget(self)
        self._wait_no_more()
        return trio.lowlevel.Abort.SUCCEEDED

    def is_due_at(self, deadline: float) -> bool:
        """Whether it is for this deadline that it will be looked at; if it waits for none any more,
        it will not be."""
        is_listed = self.listed_at == deadline
        if is_listed and self.deadline == math.inf:
            self.listed_at = math.inf
            return False
        return is_listed

    def _wait_no_more(self) -> trio.lowlevel.Task:
        """Its task goes on, though maybe not at once. Until then nothing else may move it: neither
        its deadline nor who ends it."""
        task, self._task, self.deadline = self._task, None, math.inf
        assert task is not None
        return task

    def move(self) -> None:
        """It is its turn."""
        self.is_to_begin = True
        if self._end is not None:
            self._end.cancel()
        elif self._task is not None:
            trio.lowlevel.reschedule(self._wait_no_more())

    def took(self) -> float:
        """How long its last step did, or, if it does not wait here any more, at most did."""
        ended = self._ended if self._task is not None else trio.current_time()
        return ended - self._began


async def give_way(took: float, *, part: float = PART_OF_LOOP) -> None:
    """Behind something that took so long: wait until nobody else has anything to do, or until they
    have had so much time that it was this part of the loop's."""
    with trio.move_on_after(took * (1 / part - 1)):
        await wait_all_tasks_blocked()
