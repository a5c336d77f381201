"""What is read next, and by whom: from offsets and what the buses hold to ranges of messages.

Rule 1: nothing of Spark and no I/O here, and the same question gets the same answer: a batch that
failed is planned again.
Rule 2: whatever should be read and is not there any more is a Loss that names class and range;
nothing is left out without one. Whether a loss ends the query is the caller's business.

    lost     │ read              │ to come
    start ── floor ───────────── end ── head
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from simplebus.spark.read.offsets import ClassExtent, BusExtents, BusExtent, Offsets, Position


class DataLossError(Exception):
    """Messages that should have been read are gone."""


@dataclass(frozen=True, slots=True)
class Range:
    """Messages first..last-1 of a class: one task's work."""

    server: str
    bus: str
    """The identity of the memory that they are in."""
    class_: str
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first

    def __str__(self) -> str:
        return f"messages {self.first} to {self.last - 1} of class {self.class_} at {self.server}"


@dataclass(frozen=True, slots=True)
class Loss:
    """Messages first..last-1 of a class that should be read, and cannot."""

    server: str
    class_: str
    first: int
    last: int | None
    """None when nobody knows how many they were."""
    why: str

    @property
    def count(self) -> int:
        """How many are known to be lost."""
        return 0 if self.last is None else self.last - self.first

    def __str__(self) -> str:
        until = "and on" if self.last is None else f"to {self.last - 1}"
        return (
            f"messages {self.first} {until} of class {self.class_} at {self.server} "
            f"are lost: {self.why}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What to read, and what cannot be read."""

    ranges: list[Range]
    losses: list[Loss]


def told(losses: Iterable[Loss]) -> str:
    """What to tell a user whose query ends."""
    sentences = "; ".join(map(str, losses))
    return f"{sentences}. With the option failOnDataLoss=false a query goes on without them"


def plan(start: Offsets, end: Offsets, memories: BusExtents) -> Plan:
    """The ranges from start to end, as far as the buses hold them.

    A bus or class that start does not know is read from its floor. One that memories do not know is
    not read any more, or does not answer.
    """
    ranges: list[Range] = []
    losses: list[Loss] = []
    for server, position in end.items():
        memory = memories.get(server, _NOTHING)
        before = start.get(server, Position(position.bus))
        for name, last in position.classes.items():
            first = before.classes.get(name)
            held = memory.classes.get(name)
            if held is None:
                if first is None or first < last:
                    losses.append(Loss(server, name, first or 0, last, _UNREAD))
                continue
            if first is not None and not _same(before.bus, position.bus):
                why = f"they were in the memory {before.bus}, and the bus has begun anew"
                losses.append(Loss(server, name, first, None, why))
                first = None
            if not _same(position.bus, memory.memory_id):
                low = last if first is None else first
                losses.append(Loss(server, name, low, last, _forgotten(memory.memory_id)))
                continue
            if first is None:
                first = min(held.floor, last)
            losses += _missing(server, name, first, last, held)
            first, last = max(first, held.floor), min(last, held.head)
            if first < last:
                ranges.append(Range(server, memory.memory_id, name, first, last))
    return Plan(ranges, losses)


_NOTHING = BusExtent("", {})
_UNREAD = "the query does not read it any more, or the bus does not answer"


def _same(bus: str, other: str) -> bool:
    """Whether sequences are of one memory; who did not say is believed."""
    return not bus or not other or bus == other


def _forgotten(bus: str) -> str:
    return f"the bus has begun anew, with the memory {bus}"


def _missing(server: str, name: str, first: int, last: int, held: ClassExtent) -> list[Loss]:
    losses = []
    if first < held.floor and first < last:
        why = f"the class holds messages from {held.floor} on"
        losses.append(Loss(server, name, first, min(held.floor, last), why))
    if last > max(first, held.head):
        why = f"the next message of the class will be {held.head}"
        losses.append(Loss(server, name, max(first, held.head), last, why))
    return losses


def overtaken(start: Offsets, memories: BusExtents) -> list[Loss]:
    """What was read, and a bus has lost since: it gives these sequences out again. Only a bus that
    promised less than that its messages are on disk loses any, and remains the one it was."""
    return [
        Loss(
            server,
            name,
            held.head,
            start[server].classes[name],
            "they were read, and the bus has lost them since: the next message of the class will "
            f"be {held.head}",
        )
        for server, memory in memories.items()
        if server in start and _same(start[server].bus, memory.memory_id)
        for name, held in memory.classes.items()
        if start[server].classes.get(name, 0) > held.head
    ]


def ends(start: Offsets, memories: BusExtents, most: int | None = None) -> dict[str, Position]:
    """How far the next batch goes: to the heads, or to `most` messages from start, shared among
    the classes by what waits in each.

    A position of another memory than the bus has now is followed by one of that memory, and one
    behind a head by the head.
    """
    starts = firsts(start, memories)
    waiting = {
        (server, name): max(0, memories[server].classes[name].head - first)
        for (server, name), first in starts.items()
    }
    shares = _shares(waiting, most)
    return {
        server: Position(
            memory.memory_id,
            {name: starts[server, name] + shares[server, name] for name in memory.classes},
        )
        for server, memory in memories.items()
    }


def firsts(start: Offsets, memories: BusExtents) -> dict[tuple[str, str], int]:
    """The first message that is there from start on, by server and class."""
    return {
        (server, name): _first(start, server, memory.memory_id, name, held)
        for server, memory in memories.items()
        for name, held in memory.classes.items()
    }


def _first(start: Offsets, server: str, bus: str, name: str, held: ClassExtent) -> int:
    """Where the next batch begins."""
    before = start.get(server)
    if before is None or not _same(before.bus, bus):
        return held.floor
    return min(max(before.classes.get(name, held.floor), held.floor), held.head)


def _shares(waiting: dict[tuple[str, str], int], most: int | None) -> dict[tuple[str, str], int]:
    total = sum(waiting.values())
    if most is None or total <= most:
        return waiting
    shares = {who: count * most // total for who, count in waiting.items()}
    left = most - sum(shares.values())
    for who in sorted(waiting, key=lambda who: shares[who] - waiting[who]):
        if not left:
            break
        more = min(left, waiting[who] - shares[who])
        shares[who] += more
        left -= more
    return shares


def split(ranges: list[Range], *, most: int, at_least: int | None = None) -> list[Range]:
    """Cut ranges into tasks of about the same size: none above `most` messages, and, if there are
    so many messages, `at_least` of them."""
    total = sum(one.count for one in ranges)
    if at_least is not None and total:
        most = min(most, max(1, total // at_least))
    found = []
    for one in ranges:
        pieces = -(-one.count // most)
        bounds = [one.first + one.count * piece // pieces for piece in range(pieces + 1)]
        for first, last in itertools.pairwise(bounds):
            found.append(Range(one.server, one.bus, one.class_, first, last))
    return found


def lag(end: Offsets, memories: BusExtents) -> dict[tuple[str, str], int]:
    """Messages that wait behind `end`, by server and class."""
    return {
        (server, name): max(0, memories[server].classes[name].head - first)
        for (server, name), first in firsts(end, memories).items()
    }


def at_most(end: Offsets, target: Offsets) -> dict[str, Position]:
    """End, but nowhere behind target. A bus that has begun anew since has no target: it is read
    no further."""
    found = {}
    for server, position in end.items():
        goal = target.get(server, Position(position.bus))
        if not _same(position.bus, goal.bus):
            found[server] = goal
            continue
        sequences = {
            name: min(sequence, goal.classes.get(name, sequence))
            for name, sequence in position.classes.items()
        }
        found[server] = Position(position.bus, sequences)
    return found
