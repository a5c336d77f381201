"""Notification of subscriptions about new messages, and the limits of slow subscriptions."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from simplebus.core.limits import REDELIVERY_MESSAGES, SCAN_MESSAGES_MAX

if TYPE_CHECKING:
    from simplebus.core.message_class.message_class import MessageClass
    from simplebus.core.subscription.position import Position, PositionChanges


@dataclass(slots=True)
class _WaitingPositions:
    """Positions of a class that wait for their notification."""

    remaining: Iterator[Position]
    """Positions that have not been notified since the class had new messages. Some may have ended.
    """
    has_new_messages: bool = False
    """True if messages were stored meanwhile, so that all positions are notified again."""


class Notifier:
    """Queues the messages of positions for sending: of all at once, or of some in each turn."""

    def __init__(self, position_changes: PositionChanges) -> None:
        self.per_turn = sys.maxsize
        """Positions of a class that are notified at once. The others wait: a driver that sets this
        number calls `notify_waiting` while `has_waiting` is True.
        """
        self.slow_positions: dict[Position, None] = {}
        """Positions whose consumer must be disconnected because their backlog is too long."""
        self._position_changes = position_changes
        self._waiting: dict[MessageClass, _WaitingPositions] = {}

    @property
    def has_waiting(self) -> bool:
        """True if `notify_waiting` has work to do."""
        return bool(self._waiting)

    def is_waiting(self, cls: MessageClass) -> bool:
        """Return True if positions of a class wait for their notification."""
        return cls in self._waiting

    def notify(self, cls: MessageClass) -> None:
        """Notify all positions of a class, of which very many wait for `notify_waiting`."""
        if len(cls.positions) > self.per_turn:
            if (waiting := self._waiting.get(cls)) is not None:
                waiting.has_new_messages = True
                return
            self._waiting[cls] = _WaitingPositions(iter(list(cls.positions)))
            if len(self._waiting) == 1:
                self.notify_waiting()
            return
        for subscription in cls.subscriptions.values():
            subscription.outbox.enqueue(subscription)
        for group in cls.groups.values():
            group.distribute_messages()
        if cls.limited_positions:
            self.enforce_pending_limits(cls, list(cls.limited_positions))

    def notify_waiting(self) -> None:
        """Notify the next `per_turn` of the waiting positions of one class."""
        cls, waiting = next(iter(self._waiting.items()))
        del self._waiting[cls]
        positions = list(islice(waiting.remaining, self.per_turn))
        if len(positions) == self.per_turn:
            self._waiting[cls] = waiting  # The other classes continue first.
        elif waiting.has_new_messages:
            self._waiting[cls] = _WaitingPositions(iter(list(cls.positions)))
        for position in positions:
            if position in cls.positions:  # It may have ended meanwhile.
                cls.enqueue_position(position)
        limited = [position for position in positions if position in cls.limited_positions]
        if limited:
            self.enforce_pending_limits(cls, limited)

    def enforce_pending_limits(self, cls: MessageClass, positions: Sequence[Position]) -> None:
        """Apply the slow-consumer policies of positions with a pending limit."""
        scan_budget = SCAN_MESSAGES_MAX
        for position in positions:
            position.count_backlog(min(scan_budget, REDELIVERY_MESSAGES))
            if position.delivery_policy.slow_policy == "disconnect":
                if position not in self.slow_positions and position.is_over_pending_limit():
                    self.slow_positions[position] = None
                    # The position is ended later, by `Store.apply_position_changes`.
                    self._position_changes.record_moved(position)
            elif cls.group_or_position(position).enforce_pending_limit():
                self._position_changes.record_moved(position)
            if position.scanned_count:
                scan_budget = max(0, scan_budget - position.scanned_count)
                del cls.limited_positions[position]  # Examined last the next time.
                cls.limited_positions[position] = None

    def pop_slow_positions(self, cls: MessageClass) -> list[Position]:
        """Return the positions of a class that exceed their limit, each once."""
        slow = [position for position in self.slow_positions if position.class_id == cls.class_id]
        for position in slow:
            del self.slow_positions[position]
        return [position for position in slow if position in cls.limited_positions]
