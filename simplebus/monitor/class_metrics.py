"""How each class of a bus is doing: figures, without a look at any message.

Rule 1: a class costs one look at each of its positions, and others have their turn in between.
Rule 2: so many classes are told one by one, those through which most went; the rest together, so
that neither a program that makes up names nor one that has many fills what reads this, or hides
what is at work. One that is told stays, until another one has twice as much.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Generator
from dataclasses import dataclass, field

from simplebus.core import dead_letters
from simplebus.core.errors import Reason
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.store.store import Store
from simplebus.monitor.counted import Counted

CLASSES_MAX = 100
OTHERS = "(others)"
"""What all classes beyond these are called. They have no id: a class may have that name."""
_POSITIONS_AT_ONCE = 256


@dataclass(slots=True)
class ClassFigures:
    """Of one class, or of several."""

    name: str
    class_id: int = -1
    """-1 of several."""
    classes: int = 1
    published: int = 0
    delivered: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    in_flight: int = 0
    stored: int = 0
    stored_bytes: int = 0
    memory_bytes: int = 0
    spilled: int = 0
    positions: int = 0
    lag: int = 0
    """Of the position that is furthest behind; without one, what waits for a first subscription."""
    blocked: int = 0
    """Sessions with messages that wait for room."""
    is_dead: bool = False
    """Whether dead letters lie in it."""
    dropped: Counter[Reason] = field(default_factory=Counter)

    def add(self, other: ClassFigures) -> None:
        """Count another one in."""
        self.classes += other.classes
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lag = max(self.lag, other.lag)
        self.dropped.update(other.dropped)


_SUMMED = (
    *("published", "delivered", "redelivered", "acknowledged", "in_flight"),
    *("stored", "stored_bytes", "memory_bytes", "spilled", "positions", "blocked"),
)


@dataclass(slots=True)
class BusFigures:
    """Of all classes."""

    classes: list[ClassFigures]
    """Those that are told one by one."""
    others: ClassFigures | None
    """The rest; None without any."""
    total: ClassFigures
    dead_letters: int
    """Messages that lie in classes of dead letters."""


def label(cls: MessageClass) -> str:
    """What a class is called: by its name, or by its id where it has none."""
    return cls.name or str(cls.class_id)


def of_class(cls: MessageClass) -> Generator[None, None, ClassFigures]:
    """One class, in pieces."""
    ring, spill = cls.ring, cls.spill
    figures = ClassFigures(
        name=label(cls),
        class_id=cls.class_id,
        published=ring.head - cls.compacted_count,
        delivered=cls.delivered,
        redelivered=cls.redelivered,
        acknowledged=cls.acknowledged,
        stored=ring.head - cls.first_sequence,
        spilled=spill.message_count if spill is not None else 0,
        positions=len(cls.subscriptions),
        blocked=len(cls.blocked_sessions),
        is_dead=dead_letters.are_kept_in(cls.name),
        dropped=cls.dropped.copy(),
    )
    held = ring.statistics()
    figures.stored_bytes = held.frame_bytes + (spill.frame_bytes if spill is not None else 0)
    figures.memory_bytes = held.memory_bytes
    for count, position in enumerate(list(cls.subscriptions)):
        if count % _POSITIONS_AT_ONCE == _POSITIONS_AT_ONCE - 1:
            yield
        window = position.window
        figures.delivered += position.delivered
        figures.redelivered += position.redelivered
        figures.acknowledged += position.acknowledged
        figures.in_flight += window.in_flight
        figures.lag = max(figures.lag, position.class_ring.head - window.floor)
        if position.undelivered_counts:
            figures.dropped.update(position.undelivered)
    if not cls.subscriptions and not cls.is_remote:
        figures.lag = cls.backlog_window.in_flight + ring.head - cls.backlog_window.cursor
    return figures


def of_bus(store: Store, before: Collection[int] = ()) -> Generator[None, None, BusFigures]:
    """All classes, in pieces. `before` are the ids of those that were told one by one last."""
    told: list[ClassFigures] = []
    busiest = _busiest(list(store.classes.values()), before)
    others: ClassFigures | None = None
    total = ClassFigures("", classes=0)
    dead = 0
    for cls in list(store.classes.values()):
        figures = yield from of_class(cls)
        yield
        total.add(figures)
        dead += figures.stored * figures.is_dead
        if cls.class_id in busiest:
            told.append(figures)
        elif others is None:
            figures.name, figures.class_id = OTHERS, -1
            others = figures
        else:
            others.add(figures)
    return BusFigures(told, others, total, dead)


def _busiest(classes: list[MessageClass], before: Collection[int]) -> set[int]:
    """The ids of those to be told one by one. Of equal ones, those that were there first."""

    def went_through(cls: MessageClass) -> int:
        messages = cls.ring.head - min(cls.compacted_count, cls.first_sequence)
        return messages * (2 if cls.class_id in before else 1)

    most = heapq.nlargest(CLASSES_MAX, classes, key=went_through)
    return {cls.class_id for cls in most}


def count(counted: Counted, figures: BusFigures) -> None:
    """The metrics of the bus, and of each class that is told by itself. The others have only what
    comes and goes: which classes they are changes, and a counter must not fall."""
    for metric, help, value in _counters(figures.total):
        counted.counter(f"bus_{metric}", f"{help} Of all classes.", value)
    for reason, lost in figures.total.dropped.items():
        counted.counter(f"bus_{_DROPPED}", f"{_LOST} Of all classes.", lost, reason=reason.value)
    for each in figures.classes:
        labels = {"class": each.name, "class_id": str(each.class_id)}
        for metric, help, value in _counters(each):
            counted.counter(metric, help, value, **labels)
        for reason, lost in each.dropped.items():
            counted.counter(_DROPPED, _LOST, lost, **labels, reason=reason.value)
    for each in (*figures.classes, *([figures.others] if figures.others is not None else [])):
        labels = {"class": each.name, "class_id": str(each.class_id) if each.class_id >= 0 else ""}
        for metric, help, value in (
            ("stored_messages", "Messages stored.", each.stored),
            ("stored_bytes", "Bytes of the frames of stored messages.", each.stored_bytes),
            ("spilled_messages", "Stored messages that are on disk only.", each.spilled),
            ("class_memory_bytes", "Memory held for stored messages.", each.memory_bytes),
            ("in_flight_messages", "Messages sent and not acknowledged.", each.in_flight),
            (
                "lag_messages",
                "Stored messages from the lowest one that a subscription has not acknowledged.",
                each.lag,
            ),
            ("subscriptions", "Subscriptions, durables and groups included.", each.positions),
            ("blocked_publishers", "Sessions with messages that wait for room.", each.blocked),
        ):
            counted.gauge(metric, help, value, **labels)


_DROPPED = "dropped_messages"
_LOST = "Messages that were not kept, or not delivered to some subscription, by reason."


def _counters(of: ClassFigures) -> tuple[tuple[str, str, int], ...]:
    return (
        ("published_messages", "Messages accepted.", of.published),
        ("delivered_messages", "Messages sent for the first time.", of.delivered),
        ("redelivered_messages", "Messages sent again.", of.redelivered),
        ("acknowledged_messages", "Messages acknowledged.", of.acknowledged),
    )
