"""Notification of subscriptions about new messages, and the limits of slow subscriptions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from simplebus.core.limits import REDELIVERY_MESSAGES, SCAN_MESSAGES_MAX

if TYPE_CHECKING:
    from simplebus.core.message_class.message_class import MessageClass
    from simplebus.core.subscription.position import Position, PositionChanges


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
        self._waiting: dict[Position, MessageClass] = {}
        """Positions that wait for their notification. Some may have ended."""

    def __contains__(self, position: Position) -> bool:
        """Return True if a position waits for its notification."""
        return position in self._waiting

    @property
    def has_waiting(self) -> bool:
        """True if `notify_waiting` has work to do."""
        return bool(self._waiting)

    def notify(self, cls: MessageClass) -> None:
        """Notify all positions of a class, of which very many wait for `notify_waiting`."""
        if len(cls.positions) > self.per_turn:
            is_first = not self._waiting
            self._waiting.update(dict.fromkeys(cls.positions, cls))
            if is_first:
                self.notify_waiting()
            return
        for subscription in cls.subscriptions.values():
            subscription.outbox.enqueue(subscription)
        for group in cls.groups.values():
            group.distribute_messages()
        if cls.limited_positions:
            self.enforce_pending_limits(cls, list(cls.limited_positions))

    def notify_waiting(self) -> None:
        """Notify the next `per_turn` of the waiting positions."""
        limited: dict[MessageClass, list[Position]] = {}
        for position, cls in list(islice(self._waiting.items(), self.per_turn)):
            del self._waiting[position]
            cls.enqueue_position(position)
            if position in cls.limited_positions:
                limited.setdefault(cls, []).append(position)
        for cls, positions in limited.items():
            self.enforce_pending_limits(cls, positions)

    def notify_all_waiting(self) -> None:
        """Notify all waiting positions, and let none wait any more."""
        self.per_turn = sys.maxsize
        self.notify_waiting()

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
