"""Sending to many connections in several turns of the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import trio

from simplebus.server.send_turns import SEND_SECONDS_MAX, SendTurns


@dataclass
class Clock:
    """Clock that advances only when a connection sends."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class SlowConnection:
    """Connection whose flush takes half of the time of a turn."""

    clock: Clock
    session: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(is_closed=False))
    flush_count: int = 0

    def flush(self) -> None:
        self.flush_count += 1
        self.clock.now += SEND_SECONDS_MAX / 2


def flush_counts(connections: list[SlowConnection]) -> list[int]:
    return [connection.flush_count for connection in connections]


async def test_connections_that_do_not_fit_into_a_turn_are_sent_to_in_the_next_ones() -> None:
    clock, ended_turns = Clock(), list[list[int]]()
    connections = [SlowConnection(clock) for _ in range(5)]
    async with trio.open_nursery() as nursery:
        turns = SendTurns(
            nursery.start_soon, lambda: ended_turns.append(flush_counts(connections)), clock=clock
        )
        turns.begin_turn()
        for connection in connections:
            turns.flush(connection)
        assert flush_counts(connections) == [1, 1, 0, 0, 0]
    assert ended_turns == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


async def test_a_waiting_connection_is_sent_to_once() -> None:
    clock = Clock()
    connection = SlowConnection(clock)
    async with trio.open_nursery() as nursery:
        turns = SendTurns(nursery.start_soon, lambda: None, clock=clock)
        turns.flush(connection)  # No turn has begun.
        turns.flush(connection)
        assert connection.flush_count == 0
    assert connection.flush_count == 1


async def test_a_new_turn_sends_at_once_although_others_wait() -> None:
    clock = Clock()
    waiting, other = SlowConnection(clock), SlowConnection(clock)
    async with trio.open_nursery() as nursery:
        turns = SendTurns(nursery.start_soon, lambda: None, clock=clock)
        turns.flush(waiting)
        turns.begin_turn()
        turns.flush(other)
        assert flush_counts([waiting, other]) == [0, 1]
    assert waiting.flush_count == 1


async def test_a_connection_that_closed_while_it_waited_is_not_sent_to() -> None:
    clock = Clock()
    connection = SlowConnection(clock)
    async with trio.open_nursery() as nursery:
        turns = SendTurns(nursery.start_soon, lambda: None, clock=clock)
        turns.flush(connection)
        connection.session.is_closed = True
    assert connection.flush_count == 0


async def test_a_connection_that_gets_messages_at_the_end_of_a_full_turn_has_another_turn() -> None:
    clock = Clock()
    first, second = SlowConnection(clock), SlowConnection(clock)
    started = list[Callable[[], Awaitable[object]]]()

    def end_turn() -> None:
        if second.flush_count == 0:
            clock.now += SEND_SECONDS_MAX
            turns.flush(second)

    turns = SendTurns(started.append, end_turn, clock=clock)
    turns.flush(first)
    await started.pop()()
    assert flush_counts([first, second]) == [1, 1]
    assert not started, "the task ran already"
