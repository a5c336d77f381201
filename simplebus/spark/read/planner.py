"""Planning of a batch: from offsets and stored messages to ranges of messages.

Planning is deterministic and does no I/O, because a failed batch is planned again. Each message
that should be read but is not stored any more belongs to a LostRange; the caller raises or logs it.

    lost     │ read              │ later
    start ── floor ───────────── end ── head
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from simplebus.spark.read.offsets import BusExtent, BusExtents, ClassExtent, Offsets, ServerOffsets


class DataLossError(Exception):
    """Messages that the query should read are lost."""


@dataclass(frozen=True, slots=True)
class MessageRange:
    """Messages first..last-1 of a class, to be read by one task."""

    server: str
    memory_id: str
    """Memory id of the sequences."""
    class_: str
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first

    def __str__(self) -> str:
        return f"messages {self.first} to {self.last - 1} of class {self.class_} at {self.server}"


@dataclass(frozen=True, slots=True)
class LostRange:
    """Messages first..last-1 of a class that should be read but cannot be."""

    server: str
    class_: str
    first: int
    last: int | None
    """None if the number of lost messages is unknown."""
    reason: str

    @property
    def count(self) -> int:
        """Number of messages known to be lost."""
        return 0 if self.last is None else self.last - self.first

    def __str__(self) -> str:
        until = "and on" if self.last is None else f"to {self.last - 1}"
        return (
            f"messages {self.first} {until} of class {self.class_} at {self.server} "
            f"are lost: {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Ranges to read and ranges that are lost."""

    ranges: list[MessageRange]
    losses: list[LostRange]


def describe_losses(losses: Iterable[LostRange]) -> str:
    """Return the error text for a query that ends because of lost messages."""
    sentences = "; ".join(map(str, losses))
    return f"{sentences}. With the option failOnDataLoss=false a query continues without them"


def plan_reads(start: Offsets, end: Offsets, extents: BusExtents) -> ReadPlan:
    """Return the ranges from start to end that are stored, and the lost ones.

    A server or class without a start is read from its floor. One without an extent is not
    subscribed to any more, or is unreachable.
    """
    ranges: list[MessageRange] = []
    losses: list[LostRange] = []
    for server, position in end.items():
        extent = extents.get(server, _EMPTY_EXTENT)
        before = start.get(server, ServerOffsets(position.memory_id))
        for name, last in position.classes.items():
            first = before.classes.get(name)
            class_extent = extent.classes.get(name)
            if class_extent is None:
                if first is None or first < last:
                    losses.append(LostRange(server, name, first or 0, last, _NOT_SUBSCRIBED))
                continue
            if first is not None and not _is_same_memory(before.memory_id, position.memory_id):
                reason = f"they had the memory id {before.memory_id}, and the bus was reset since"
                losses.append(LostRange(server, name, first, None, reason))
                first = None
            if not _is_same_memory(position.memory_id, extent.memory_id):
                first_lost = last if first is None else first
                losses.append(
                    LostRange(server, name, first_lost, last, _memory_changed(extent.memory_id))
                )
                continue
            if first is None:
                first = min(class_extent.floor, last)
            losses += _unavailable_ranges(server, name, first, last, class_extent)
            first, last = max(first, class_extent.floor), min(last, class_extent.head)
            if first < last:
                ranges.append(MessageRange(server, extent.memory_id, name, first, last))
    return ReadPlan(ranges, losses)


_EMPTY_EXTENT = BusExtent("", {})
_NOT_SUBSCRIBED = "the query does not read the class any more, or the bus does not answer"


def _is_same_memory(memory_id: str, other_id: str) -> bool:
    """Return True if the memory ids are equal, or one is unknown."""
    return not memory_id or not other_id or memory_id == other_id


def _memory_changed(bus: str) -> str:
    return f"the bus was reset and has the memory id {bus} now"


def _unavailable_ranges(
    server: str, name: str, first: int, last: int, class_extent: ClassExtent
) -> list[LostRange]:
    losses = []
    if first < class_extent.floor and first < last:
        reason = f"the class holds messages from {class_extent.floor} on"
        losses.append(LostRange(server, name, first, min(class_extent.floor, last), reason))
    if last > max(first, class_extent.head):
        reason = f"the next message of the class will be {class_extent.head}"
        losses.append(LostRange(server, name, max(first, class_extent.head), last, reason))
    return losses


def lost_after_read(start: Offsets, extents: BusExtents) -> list[LostRange]:
    """Return the ranges that were read and that the bus lost since, so it assigns their sequences
    again.

    A bus loses messages and keeps its memory id only if its durability is lower than disk.
    """
    return [
        LostRange(
            server,
            name,
            class_extent.head,
            start[server].classes[name],
            "they were read, and the bus has lost them since: the next message of the class will "
            f"be {class_extent.head}",
        )
        for server, extent in extents.items()
        if server in start and _is_same_memory(start[server].memory_id, extent.memory_id)
        for name, class_extent in extent.classes.items()
        if start[server].classes.get(name, 0) > class_extent.head
    ]


def next_batch_end(
    start: Offsets, extents: BusExtents, max_messages: int | None = None
) -> dict[str, ServerOffsets]:
    """Return the end of the next batch: the heads, or at most `max_messages` after start.

    The messages are shared among classes in proportion to their backlogs. Offsets of another memory
    are replaced by offsets of the current one, and an offset beyond the head by the head.
    """
    starts = first_available(start, extents)
    waiting = {
        (server, name): max(0, extents[server].classes[name].head - first)
        for (server, name), first in starts.items()
    }
    shares = _share_limit(waiting, max_messages)
    return {
        server: ServerOffsets(
            extent.memory_id,
            {name: starts[server, name] + shares[server, name] for name in extent.classes},
        )
        for server, extent in extents.items()
    }


def first_available(start: Offsets, extents: BusExtents) -> dict[tuple[str, str], int]:
    """Return the first stored sequence at or after start, by server and class."""
    return {
        (server, name): _first_in_class(start, server, extent.memory_id, name, class_extent)
        for server, extent in extents.items()
        for name, class_extent in extent.classes.items()
    }


def _first_in_class(
    start: Offsets, server: str, bus: str, name: str, class_extent: ClassExtent
) -> int:
    """Return the first stored sequence at or after start, of one class."""
    before = start.get(server)
    if before is None or not _is_same_memory(before.memory_id, bus):
        return class_extent.floor
    return min(
        max(before.classes.get(name, class_extent.floor), class_extent.floor), class_extent.head
    )


def _share_limit(
    waiting: dict[tuple[str, str], int], max_messages: int | None
) -> dict[tuple[str, str], int]:
    total = sum(waiting.values())
    if max_messages is None or total <= max_messages:
        return waiting
    shares = {key: count * max_messages // total for key, count in waiting.items()}
    remaining = max_messages - sum(shares.values())
    for key in sorted(waiting, key=lambda key: shares[key] - waiting[key]):
        if not remaining:
            break
        more = min(remaining, waiting[key] - shares[key])
        shares[key] += more
        remaining -= more
    return shares


def split_ranges(
    ranges: list[MessageRange], *, max_messages: int, min_ranges: int | None = None
) -> list[MessageRange]:
    """Cut ranges into pieces of about equal size for tasks.

    Args:
        ranges: Ranges to cut.
        max_messages: Maximum size of a piece.
        min_ranges: Minimum number of pieces, if there are enough messages.
    """
    total = sum(part.count for part in ranges)
    if min_ranges is not None and total:
        max_messages = min(max_messages, max(1, total // min_ranges))
    found = []
    for part in ranges:
        pieces = -(-part.count // max_messages)
        bounds = [part.first + part.count * piece // pieces for piece in range(pieces + 1)]
        for first, last in itertools.pairwise(bounds):
            found.append(MessageRange(part.server, part.memory_id, part.class_, first, last))
    return found


def count_backlog(end: Offsets, extents: BusExtents) -> dict[tuple[str, str], int]:
    """Return how many stored messages are after `end`, by server and class."""
    return {
        (server, name): max(0, extents[server].classes[name].head - first)
        for (server, name), first in first_available(end, extents).items()
    }


def limit_to_target(end: Offsets, target: Offsets) -> dict[str, ServerOffsets]:
    """Return `end`, limited to `target`.

    A server whose memory changed since the target was set is not read further.
    """
    found = {}
    for server, position in end.items():
        limit = target.get(server, ServerOffsets(position.memory_id))
        if not _is_same_memory(position.memory_id, limit.memory_id):
            found[server] = limit
            continue
        sequences = {
            name: min(sequence, limit.classes.get(name, sequence))
            for name, sequence in position.classes.items()
        }
        found[server] = ServerOffsets(position.memory_id, sequences)
    return found
