"""Full-class policy `drop_oldest`: the oldest messages make space for new ones.

A class drops its oldest messages for each of its positions. With very many positions, it does so in
several turns, and new messages are parked meanwhile. A drop in several turns is logged as a purge
when it begins: new positions do not receive the dropped messages, and if the server ends before the
last turn, recovery completes the drop. A class with last values always drops at once: the values
are copied, and no message may be stored between a value and its copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from simplebus.core.errors import Reason
from simplebus.core.limits import (
    DROP_OLDEST_DIVISOR,
    DROPPED_SINGLY_POSITIONS_MAX,
    POSITIONS_PER_TURN,
)
from simplebus.core.message_class.purge import mark_purged
from simplebus.core.protocol.envelope_batch import EnvelopeColumns
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.store import compaction
from simplebus.core.store.compaction import CompactingStore, DropOldestCompactor
from simplebus.core.store.publish_queue import PublishQueue
from simplebus.core.subscription.position import Position

if TYPE_CHECKING:
    from simplebus.core.message_class.message_class import MessageClass
    from simplebus.core.session.session import Session


class DroppingStore(CompactingStore, Protocol):
    """Parts of a `Store` that the dropper uses."""

    classes: dict[int, MessageClass]
    publish_queue: PublishQueue
    is_refusing_paused: bool

    def append_batch(
        self,
        cls: MessageClass,
        batch: FrameBatch,
        session: Session | None,
        columns: EnvelopeColumns | None = None,
    ) -> int: ...

    def drop_newest(self, session: Session | None, cls: MessageClass, batch: FrameBatch) -> int:
        """Drop new messages, and refuse them if the session expects confirms.

        Returns the number of dropped messages; the rest must wait.
        """


@dataclass(slots=True)
class _PartialDrop:
    """Drop of the oldest messages of a class that continues in later turns."""

    floor: int
    """Messages below this sequence are dropped."""
    steps: Iterator[int]
    """Drops them for the positions that may still need them; see `_drop_in_steps`."""


class OldestMessageDropper:
    """Stores messages in full classes in place of the oldest ones."""

    def __init__(self, store: DroppingStore) -> None:
        self.cost_per_turn = sys.maxsize
        """Cost of dropping in one turn; see `_drop_in_steps`. A driver that sets it calls
        `continue_drops` while `has_waiting` is True.
        """
        self._store = store
        self._partial_drops: dict[MessageClass, _PartialDrop] = {}

    @property
    def has_waiting(self) -> bool:
        """True if `continue_drops` has work to do."""
        return bool(self._partial_drops)

    def drop_floor(self, cls: MessageClass) -> int:
        """Return the sequence below which messages of a class are being dropped; 0 if none are."""
        drop = self._partial_drops.get(cls)
        return 0 if drop is None else drop.floor

    def append(
        self,
        cls: MessageClass,
        batch: FrameBatch,
        session: Session | None,
        columns: EnvelopeColumns | None,
        *,
        can_wait: bool = True,
    ) -> int:
        """Append messages in place of the oldest ones. Parameters as `Store.append_batch`.

        With `can_wait`, the rest of the messages may have to be parked until `continue_drops` has
        made space.

        Returns:
            The number of messages that were handled: stored, refused or dropped.
        """
        ring, compactor, handled = cls.ring, DropOldestCompactor(self._store, cls), 0
        while cls not in self._partial_drops:
            remaining_frames = batch.slice(handled, batch.count)
            if not len(ring):  # The ring is empty and still too full: others use all memory.
                return handled + self._store.drop_newest(session, cls, remaining_frames)
            floor = self._find_new_floor(cls, remaining_frames, compactor)
            lagging = _list_lagging(cls, floor)
            needed = _lowest_needed(cls, lagging, floor)
            cls.dropped_counts[Reason.DROP_OLDEST] += floor - needed
            cost = len(lagging) + _measure_groups(cls)
            if can_wait and cost > self.cost_per_turn and not cls.has_last_values:
                mark_purged(cls, cls.first_sequence, floor)
                if self._store.commit_log is not None:
                    # From 0: earlier drops and acks may not be written yet.
                    self._store.commit_log.append_purge(cls.class_id, 0, floor)
                self._partial_drops[cls] = _PartialDrop(floor, _drop_in_steps(cls, lagging, floor))
                break
            copied = compactor.copy_before_drop(floor)
            for position in lagging:
                position.skip_to(floor)
            _release_dropped(cls, floor)
            if copied is not None:
                cls.dropped_counts[Reason.DROP_OLDEST] -= copied.count_from(needed)
                compaction.append_copy(self._store, cls, copied)
            handled += self._store.append_batch(cls, remaining_frames, session, columns)
            if handled == batch.count or self._store.is_refusing_paused:
                break
        return handled

    @staticmethod
    def _find_new_floor(
        cls: MessageClass, batch: FrameBatch, compactor: DropOldestCompactor
    ) -> int:
        """Return the sequence below which messages are dropped to make space for a batch."""
        ring = cls.ring
        excess = len(ring) + batch.count - ring.messages_max
        if excess > 0:
            floor = min(ring.floor + excess, ring.head)
        else:
            floor = ring.sequence_after_bytes(batch.data.size)
        if len(cls.positions) + _measure_groups(cls) > DROPPED_SINGLY_POSITIONS_MAX:
            floor = min(floor + len(ring) // DROP_OLDEST_DIVISOR, ring.head)
        return max(floor, compactor.leading_values_end())

    def continue_drops(self) -> None:
        """Continue to drop the oldest messages of one class, at a cost of `cost_per_turn`.

        After the last step, parked messages of the class are stored.
        """
        self._continue_drop(next(iter(self._partial_drops)), self.cost_per_turn)

    def complete_drop(self, cls: MessageClass) -> None:
        """Drop the oldest messages of a class for all positions, and store parked messages."""
        while cls in self._partial_drops:
            self._continue_drop(cls, sys.maxsize)

    def _continue_drop(self, cls: MessageClass, cost_max: int) -> None:
        drop = self._partial_drops.pop(cls)
        for cost in drop.steps:
            cost_max -= cost
            if cost_max <= 0:
                self._partial_drops[cls] = drop  # The other classes continue first.
                return
        _release_dropped(cls, drop.floor)
        self._store.publish_queue.retry(cls)


def _drop_in_steps(cls: MessageClass, positions: list[Position], floor: int) -> Iterator[int]:
    """Drop the messages below `floor` for these positions.

    Yields the cost of each step: 1 for a position. After some members of a group, no other step
    belongs to the turn.
    """
    for position in positions:
        for _ in position.unacked.discard_held_in_parts(0, floor):
            yield POSITIONS_PER_TURN
        if position in cls.positions:
            if position.window.floor < floor:
                position.skip_to(floor)
            cls.enqueue_position(position)  # It may have fewer messages in flight now.
        yield 1
    yield POSITIONS_PER_TURN  # The parked messages are stored in the next turn.


def _measure_groups(cls: MessageClass) -> int:
    """Return the cost of dropping messages from all groups of a class, as `drop_cost`."""
    return sum(group.drop_cost for group in cls.groups.values())


def _list_lagging(cls: MessageClass, floor: int) -> list[Position]:
    """Return the positions that may need messages below `floor`."""
    return [position for position in cls.positions if position.window.floor < floor]


def _lowest_needed(cls: MessageClass, lagging: list[Position], floor: int) -> int:
    """Return the lowest sequence below `floor` that a position or the backlog needs, or `floor`."""
    floors = [position.window.floor for position in lagging]
    if cls.has_backlog:
        floors.append(cls.backlog_window.floor)
    return min(max(cls.first_sequence, min(floors, default=floor)), floor)


def _release_dropped(cls: MessageClass, floor: int) -> None:
    """Free the messages below `floor`, which no position needs any more."""
    if cls.has_backlog:
        cls.backlog_window.skip_to(floor)
    cls.release_below(floor if cls.has_last_values else max(floor, cls.floor()))
