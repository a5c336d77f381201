"""Where the messages of a position are, as far as its cursor has passed them.

Rule 1: this file looks at so much and no more; where that does not tell, it says so by None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from simplebus.core.limits import EXPLAINED_MESSAGES, EXPLAINED_SPANS
from simplebus.core.redelivery.ack_timer import SequenceSet, Span
from simplebus.core.redelivery.ack_window import AckWindow

Sets = Sequence[tuple[int, int, SequenceSet]]
"""When something is due, how often it was sent, and which messages: as of `Wheel.sets`."""

_DOUBLED = 32
"""Of what was sent more often, the pauses before are as long as the last one."""


class Standing(NamedTuple):
    """What a position says of itself."""

    in_flight: int
    sent: Sets
    """What is in flight lies in here; so may what is acknowledged."""
    pauses: Sets
    """What comes again at a tick."""
    later: Sequence[tuple[float, int, Span]]
    """What is put off to a time, the earliest one first."""
    again: Sequence[Span]
    """What is to be sent now."""
    waiting: Sequence[SequenceSet]
    """All that waits, as far as that is known."""
    behind: int = 0
    """Messages that wait for others of their key."""
    unburied: int = 0
    """Messages that are given up and wait for room among the dead letters."""


class Oldest(NamedTuple):
    """What was sent first, of what is in flight."""

    sequence: int
    attempts: int
    sent_tick: int
    """When it was sent last, or its consumer has said that it is at it."""
    first_tick: int
    """About when it was sent for the first time."""
    due_tick: int
    """When it is sent again."""


def oldest(sets: Sets, window: AckWindow, pause: Callable[[int], int]) -> Oldest | None:
    """Of what lies in these sets and is not acknowledged, what was sent first. `pause` says how
    many ticks lie between a sending and the next."""
    spare = EXPLAINED_MESSAGES
    by_time = sorted(
        (due - pause(max(attempts, 1)), due, attempts, held) for due, attempts, held in sets if held
    )
    for sent, due, attempts, held in by_time:
        for first, last in islice(held.within(window.floor, window.cursor), EXPLAINED_SPANS):
            last = min(last, first + spare)
            open_ranges = window.unacked(first, last)
            if open_ranges:
                before = _pauses_before(max(attempts, 1), pause)
                return Oldest(open_ranges[0][0], attempts, sent, sent - before, due)
            spare -= last - first
            if spare <= 0:
                return None
    return None


def _pauses_before(attempts: int, pause: Callable[[int], int]) -> int:
    """Ticks between the first sending and the last one."""
    few = min(attempts, _DOUBLED)
    return sum(pause(n) for n in range(1, few)) + (attempts - few) * pause(few)


def put_off(standing: Standing, window: AckWindow) -> int:
    """About how many messages are put off."""
    spans: list[Span] = [span for _, _, span in islice(standing.later, EXPLAINED_SPANS)]
    for _, attempts, held in standing.pauses[:EXPLAINED_SPANS]:
        spans += [Span(a, b, attempts) for a, b in islice(held, EXPLAINED_SPANS)]
    return count(spans, standing, window)


def to_be_sent(standing: Standing, window: AckWindow) -> int:
    """About how many messages are to be sent again now."""
    return count(islice(standing.again, EXPLAINED_SPANS), standing, window)


def count(spans: Iterable[Span], standing: Standing, window: AckWindow) -> int:
    """How many messages of these spans are not acknowledged."""
    total = 0
    for span in spans:
        first, last = max(span.first, window.floor), min(span.last, window.cursor)
        if first >= last:
            continue
        if standing.waiting:
            parts = (held.within(first, last) for held in standing.waiting)
            total += sum(b - a for part in parts for a, b in part)
        else:
            last = min(last, first + EXPLAINED_MESSAGES)
            total += sum(b - a for a, b in window.unacked(first, last))
    return total
