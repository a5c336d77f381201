"""Queue of unauthenticated connections, processed one at a time.

However many connections send, close or time out at once, authenticated clients wait for at most one
step of one connection. The queue uses the idle time of the event loop, or a fixed share if the loop
is busy.

Origins take turns. An origin is a network at one listener, so a crowd from one network does not
delay others, and health checks are independent of the message ports.

While many connections are ready, listeners accept only after several steps. New clients then wait
in the system's backlog, without descriptors or memory. Listeners are never stopped completely.

    sockets ─► epoll ─► ready, by origin ─► one step of one connection ─► the loop is idle, or
                                  ▲         has had its share ─┐
                                  └────────────────────────────┘
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

LOOP_SHARE = 0.25
"""Share of a busy event loop's time that unauthenticated connections get."""
CROWD_SIZE = 256
"""Ready connections from which listeners accept more slowly."""
STEPS_BETWEEN_ACCEPTS = 16
"""Steps between two accepts of a listener while CROWD_SIZE connections are ready.

A short connection takes about three steps, and a listener accepts a few connections at once.
"""
_EVENTS_PER_STEP = 64
"""Events and deadlines processed per step. Each costs about a microsecond."""
_LOOP_TURNS_PER_STEP = 2
"""Event loop turns within which a resumed task has certainly run."""


class PreAuthQueue:
    """Schedules the unauthenticated connections of all listeners. Start `run` in a nursery."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._ready_by_origin: dict[Hashable, deque[PreAuthConnection]] = {}
        """Connections that are ready to run. The origin that was served last is at the end."""
        self._ready_connection_count = 0
        """Ready connections, without listeners."""
        self._polled_by_fd: dict[int, PreAuthConnection] = {}
        """Connections that wait for input, by file descriptor."""
        self._deadlines: list[tuple[float, int, PreAuthConnection]] = []
        """Heap of deadlines. Outdated entries stay in it and are skipped; their number is bounded.
        """
        self._tie_breakers = itertools.count()
        self._sleep_scope = trio.CancelScope()
        self.step_count = 0
        """Steps so far."""

    @property
    def waiting_count(self) -> int:
        """Connections that wait for input or for their turn."""
        return len(self._polled_by_fd) + sum(map(len, self._ready_by_origin.values()))

    def add(
        self, sock: socket.socket, origin: Hashable, *, is_listener: bool = False
    ) -> PreAuthConnection:
        """Return the queue entry of a socket, to be used as a context manager."""
        return PreAuthConnection(self, sock, origin, is_listener)

    async def run(self) -> None:
        """Run one connection after the other until cancelled."""
        try:
            while True:
                self._collect_ready()
                if (connection := self._pop_next()) is None:
                    await self._wait_for_events()
                    continue
                self.step_count += 1
                connection.last_step_number = self.step_count
                connection.start_step()
                for _ in range(_LOOP_TURNS_PER_STEP):
                    if connection.is_starting:
                        await trio.lowlevel.checkpoint()
                await yield_to_others(connection.step_seconds())
        finally:
            self._poll.close()

    def _collect_ready(self) -> None:
        """Mark connections as ready that have input or whose deadline has passed."""
        for fd, _ in self._poll.poll(0, _EVENTS_PER_STEP):
            if (connection := self._polled_by_fd.pop(fd, None)) is not None:
                self._enqueue(connection)
        now = trio.current_time()
        for _ in range(_EVENTS_PER_STEP):
            if not self._deadlines or self._deadlines[0][0] > now:
                break
            deadline, _, connection = heapq.heappop(self._deadlines)
            if connection.scheduled_at != deadline:
                continue
            connection.scheduled_at = math.inf
            if connection.is_queued:  # It waits for its turn, not for the client.
                continue
            if connection.deadline <= now:
                connection.has_timed_out = True
                self.make_ready(connection)
            else:
                self._schedule_deadline(connection)

    def _pop_next(self) -> PreAuthConnection | None:
        is_crowded = self._ready_connection_count >= CROWD_SIZE
        origin = next(
            (
                candidate
                for candidate, connections in self._ready_by_origin.items()
                if not (is_crowded and self._has_just_accepted(connections[0]))
            ),
            None,
        )
        if origin is None:
            return None
        waiting = self._ready_by_origin.pop(origin)
        connection = waiting.popleft()
        if waiting:
            self._ready_by_origin[origin] = waiting  # At the end.
        self._mark_dequeued(connection)
        return connection

    def _has_just_accepted(self, connection: PreAuthConnection) -> bool:
        """Return True for a listener that has accepted a few steps ago."""
        return (
            connection.is_listener
            and self.step_count - connection.last_step_number < STEPS_BETWEEN_ACCEPTS
        )

    async def _wait_for_events(self) -> None:
        """Wait until a connection may be ready."""
        with trio.CancelScope() as self._sleep_scope:
            if self._deadlines:
                self._sleep_scope.deadline = self._deadlines[0][0]
            await trio.lowlevel.wait_readable(self._poll.fileno())

    def _enqueue(self, connection: PreAuthConnection) -> None:
        self._ready_by_origin.setdefault(connection.origin, deque()).append(connection)
        connection.is_queued = True
        self._ready_connection_count += not connection.is_listener

    def _mark_dequeued(self, connection: PreAuthConnection) -> None:
        connection.is_queued = False
        self._ready_connection_count -= not connection.is_listener

    # Called by PreAuthConnection ------------------------------------------------------------------

    def watch_readable(self, connection: PreAuthConnection) -> None:
        """Mark the connection as ready when it has input, or at its deadline."""
        fd = connection.socket.fileno()
        events = select.EPOLLIN | select.EPOLLONESHOT
        if connection.is_registered:
            self._poll.modify(fd, events)
        else:
            self._poll.register(fd, events)
            connection.is_registered = True
        self._polled_by_fd[fd] = connection
        self._schedule_deadline(connection)
        if connection.deadline < self._sleep_scope.deadline:
            self._sleep_scope.deadline = connection.deadline

    def _schedule_deadline(self, connection: PreAuthConnection) -> None:
        """Schedule a check at the connection's deadline, unless an earlier one is scheduled."""
        if connection.deadline >= connection.scheduled_at:
            return
        connection.scheduled_at = connection.deadline
        heapq.heappush(self._deadlines, (connection.deadline, next(self._tie_breakers), connection))
        if (
            len(self._deadlines)
            > 2 * (len(self._polled_by_fd) + self._ready_connection_count) + _EVENTS_PER_STEP
        ):
            entries = self._deadlines
            self._deadlines = [entry for entry in entries if entry[2].is_scheduled_for(entry[0])]
            heapq.heapify(self._deadlines)

    def make_ready(self, connection: PreAuthConnection) -> None:
        """Mark the connection as ready, even if it waits for data or time."""
        if connection.is_queued:
            return
        self._polled_by_fd.pop(connection.socket.fileno(), None)
        self._enqueue(connection)
        self._sleep_scope.cancel()

    def stop_waiting(self, connection: PreAuthConnection) -> None:
        """Remove the connection from the queue and from the poll."""
        if connection.is_queued:
            self._mark_dequeued(connection)
            waiting = self._ready_by_origin[connection.origin]
            waiting.remove(connection)
            if not waiting:
                del self._ready_by_origin[connection.origin]
        elif self._polled_by_fd.get(fd := connection.socket.fileno()) is connection:
            del self._polled_by_fd[fd]

    def leave(self, connection: PreAuthConnection) -> None:
        """Remove the connection for good."""
        self.stop_waiting(connection)
        if connection.is_registered and not self._poll.closed and connection.socket.fileno() >= 0:
            connection.is_registered = False
            self._poll.unregister(connection.socket.fileno())


class PreAuthConnection:
    """Queue entry of a connection or listener; a context manager for use by one task."""

    def __init__(
        self, queue: PreAuthQueue, sock: socket.socket, origin: Hashable, is_listener: bool = False
    ) -> None:
        self.socket = sock
        self.origin = origin
        self.is_listener = is_listener
        """True for a listening socket."""
        self.deadline = math.inf
        """Deadline of the current wait."""
        self.scheduled_at = math.inf
        """Time of the scheduled deadline check; never later than `deadline`."""
        self.is_registered = False
        """True if the socket is registered with epoll."""
        self.is_queued = False
        """True if the connection is ready and waits for its turn."""
        self.has_timed_out = False
        """True if the deadline of the latest wait has passed."""
        self.is_starting = False
        """True if the task was resumed but has not run yet."""
        self.last_step_number = -STEPS_BETWEEN_ACCEPTS
        """Value of the queue's `step_count` at the latest step."""
        self._queue = queue
        self._task: trio.lowlevel.Task | None = None
        self._cancel_on_turn: trio.CancelScope | None = None
        """Scope to cancel when the turn comes."""
        self._step_started = self._step_ended = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave the queue: the connection is authenticated or gone."""
        self._queue.leave(self)

    async def wait_readable(self, deadline: float = math.inf) -> None:
        """Wait for input or the end of the stream, and then for the turn.

        Raises:
            trio.TooSlowError: The deadline has passed.
        """
        self.has_timed_out, self.deadline = False, deadline
        self._queue.watch_readable(self)
        await self._wait()
        if self.has_timed_out:
            raise trio.TooSlowError

    async def wait_turn(self) -> None:
        """Wait for the turn before a step that takes long."""
        self._queue.make_ready(self)
        await self._wait()

    def cancel_in_turn(self, scope: trio.CancelScope) -> None:
        """Cancel `scope` when the turn comes if the connection waits here, otherwise at once."""
        if self._task is None:
            scope.cancel()
        else:
            self._cancel_on_turn = scope
            self._queue.make_ready(self)

    async def _wait(self) -> None:
        self._step_ended = trio.current_time()
        self._task = trio.lowlevel.current_task()
        try:
            await trio.lowlevel.wait_task_rescheduled(self._abort_wait)
        finally:
            self._task, self.is_starting, self.deadline = None, False, math.inf
            self._step_started = trio.current_time()

    def _abort_wait(self, _: object) -> trio.lowlevel.Abort:
        self._queue.stop_waiting(self)
        self._finish_wait()
        return trio.lowlevel.Abort.SUCCEEDED

    def is_scheduled_for(self, deadline: float) -> bool:
        """Return True if a deadline check is scheduled for this time and still needed."""
        is_listed = self.scheduled_at == deadline
        if is_listed and self.deadline == math.inf:
            self.scheduled_at = math.inf
            return False
        return is_listed

    def _finish_wait(self) -> trio.lowlevel.Task:
        """Return the waiting task, which resumes soon. From now on nothing else may resume it."""
        task, self._task, self.deadline = self._task, None, math.inf
        assert task is not None
        return task

    def start_step(self) -> None:
        """Resume the waiting task, or cancel its scope."""
        self.is_starting = True
        if self._cancel_on_turn is not None:
            self._cancel_on_turn.cancel()
        elif self._task is not None:
            trio.lowlevel.reschedule(self._finish_wait())

    def step_seconds(self) -> float:
        """Return the duration of the latest step; an upper bound if the task does not wait here."""
        ended = self._step_ended if self._task is not None else trio.current_time()
        return ended - self._step_started


async def yield_to_others(step_seconds: float, *, loop_share: float = LOOP_SHARE) -> None:
    """Wait after a step of `step_seconds` until other tasks are idle, or have had their share.

    `loop_share` is the share of the event loop's time that the steps get.
    """
    with trio.move_on_after(step_seconds * (1 / loop_share - 1)):
        await wait_all_tasks_blocked()
