"""Warnings about classes that have publishers or subscribers only, such as misspelled ones."""

from __future__ import annotations

from typing import NamedTuple

from simplebus.core import dead_letters
from simplebus.core.broker.wait_reasons import format_waiting_count
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.users.permissions import has_private_channels

GROWTH_SECONDS = 60.0
"""A class grows if a message was accepted within this time."""


class ClassWarning(NamedTuple):
    """Warning about one class."""

    sentence: str
    is_growing: bool
    """True if messages arrive that no subscription receives."""


def count_backlog(cls: MessageClass) -> int:
    """Count the messages that wait for a first subscription."""
    window = cls.backlog_window
    later = 0 if cls.positions else cls.ring.head - window.cursor
    return window.in_flight_count + later


def find_class_warning(cls: MessageClass, now: float) -> ClassWarning | None:
    """Return the warning about a class at the time `now`, or None."""
    if not cls.positions and cls.first_sequence == cls.ring.head:
        return None  # Nearly all of very many classes.
    if cls.is_remote or dead_letters.is_dead_letter_class(cls.name):
        return None
    if has_private_channels(cls.name):
        return None
    origin = f"; {cls.created_by} has created it" if cls.created_by else ""
    if cls.positions:
        if cls.ring.head or not origin:
            return None
        return ClassWarning(f"nobody has published to it{origin}", is_growing=False)
    backlog = count_backlog(cls)
    if backlog and now < cls.time_index.next_step_time + GROWTH_SECONDS:
        waiting = format_waiting_count(backlog)
        growth = f"nobody subscribes to it, and it grows: {waiting} for a first subscription"
        return ClassWarning(growth + origin, is_growing=True)
    if backlog and origin and not cls.deliveries.count:
        return ClassWarning(f"nobody has subscribed to it{origin}", is_growing=False)
    return None
