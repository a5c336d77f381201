"""Changed positions of one broker, for its store."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simplebus.core.subscription.position import Position


class PositionChanges:
    """Positions with changes that the store has not handled yet.

    A position may change while frames are taken from an outbox, where nobody waits for a result.
    `Store.apply_position_changes` handles the changes afterwards.
    """

    def __init__(self, *, has_journal: bool = False) -> None:
        """With `has_journal`, `progressed` is filled; a checkpoint must clear it."""
        self._has_journal = has_journal
        self.class_ids: dict[int, None] = {}
        """Classes with changes, for example a floor that moved without an ack."""
        self.given_up: dict[Position, None] = {}
        """Positions that gave up messages, which are to be dead-lettered."""
        self.progressed: dict[Position, None] = {}
        """Positions whose progress is not in the commit log yet."""

    def record_progress(self, position: Position) -> None:
        """Record that messages of a position were sent or acknowledged."""
        if self._has_journal:
            self.progressed[position] = None

    def record_moved(self, position: Position) -> None:
        """Record that the floor of a position may have moved without an ack."""
        self.class_ids[position.class_id] = None

    def record_given_up(self, position: Position) -> None:
        """Record that a position has new pending dead letters."""
        self.class_ids[position.class_id] = self.given_up[position] = None
