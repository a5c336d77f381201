"""Metrics of the classes of a bus, without reading any message.

Collection visits each position once and yields regularly. Only the busiest classes are listed
individually, the rest together, so that many class names cannot flood the readers. A listed class
stays listed until another one has twice as many messages.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Generator
from dataclasses import dataclass, field

from simplebus.core import dead_letters
from simplebus.core.errors import DEAD_LETTER_REASONS, DROP_REASONS, Reason
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.store.store import Store
from simplebus.monitor.metrics_builder import MetricsBuilder

CLASSES_LISTED_MAX = 100
OTHER_CLASSES_NAME = "(others)"
"""Name of the classes that are not listed individually. They have no id, because a class may have
the
same name.
"""
_POSITIONS_PER_STEP = 256


@dataclass(slots=True)
class ClassMetrics:
    """Metrics of one class, or of several together."""

    name: str
    class_id: int = -1
    """-1 for several classes."""
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
    """Lag of the slowest position; without a position, messages kept for the first subscription."""
    blocked: int = 0
    """Sessions whose messages wait for space."""
    is_dead: bool = False
    """True for a dead-letter class."""
    dropped: Counter[Reason] = field(default_factory=Counter)

    def add(self, other: ClassMetrics) -> None:
        """Add the values of another class."""
        self.classes += other.classes
        for name in _SUMMED_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.lag = max(self.lag, other.lag)
        self.dropped.update(other.dropped)


_SUMMED_FIELDS = (
    *("published", "delivered", "redelivered", "acknowledged", "in_flight"),
    *("stored", "stored_bytes", "memory_bytes", "spilled", "positions", "blocked"),
)


@dataclass(slots=True)
class BusMetrics:
    """Metrics of all classes."""

    classes: list[ClassMetrics]
    """Classes that are listed individually."""
    others: ClassMetrics | None
    """The other classes together; None if there are none."""
    total: ClassMetrics
    dead_letters: int
    """Messages stored in dead-letter classes."""


def class_label(cls: MessageClass) -> str:
    """Return the name of a class, or its id if it has none."""
    return cls.name or str(cls.class_id)


def collect_class_metrics(cls: MessageClass) -> Generator[None, None, ClassMetrics]:
    """Collect the metrics of one class in steps."""
    ring, spill = cls.ring, cls.spill
    metrics = ClassMetrics(
        name=class_label(cls),
        class_id=cls.class_id,
        published=ring.head - cls.compacted_count,
        delivered=cls.delivered_count,
        redelivered=cls.redelivered_count,
        acknowledged=cls.acknowledged_count,
        stored=ring.head - cls.first_sequence,
        spilled=spill.message_count if spill is not None else 0,
        positions=len(cls.positions),
        blocked=len(cls.blocked_sessions),
        is_dead=dead_letters.is_dead_letter_class(cls.name),
        dropped=cls.dropped_counts.copy(),
    )
    ring_statistics = ring.statistics()
    metrics.stored_bytes = ring_statistics.frame_bytes + (
        spill.frame_bytes if spill is not None else 0
    )
    metrics.memory_bytes = ring_statistics.memory_bytes
    for count, position in enumerate(list(cls.positions)):
        if count % _POSITIONS_PER_STEP == _POSITIONS_PER_STEP - 1:
            yield
        window = position.window
        metrics.delivered += position.delivered_count
        metrics.redelivered += position.redelivered_count
        metrics.acknowledged += position.acknowledged_count
        metrics.in_flight += window.in_flight_count
        metrics.lag = max(metrics.lag, position.class_ring.head - window.floor)
        if position.undelivered_counts:
            metrics.dropped.update(position.undelivered_counts)
    if not cls.positions and not cls.is_remote:
        metrics.lag = cls.backlog_window.in_flight_count + ring.head - cls.backlog_window.cursor
    return metrics


def collect_bus_metrics(
    store: Store, previously_listed: Collection[int] = ()
) -> Generator[None, None, BusMetrics]:
    """Collect the metrics of all classes in steps.

    `previously_listed` contains the ids of the classes that were listed individually before.
    """
    listed: list[ClassMetrics] = []
    busiest = _select_busiest(list(store.classes.values()), previously_listed)
    others: ClassMetrics | None = None
    total = ClassMetrics("", classes=0)
    dead_letter_count = 0
    for cls in list(store.classes.values()):
        metrics = yield from collect_class_metrics(cls)
        yield
        total.add(metrics)
        dead_letter_count += metrics.stored * metrics.is_dead
        if cls.class_id in busiest:
            listed.append(metrics)
        elif others is None:
            metrics.name, metrics.class_id = OTHER_CLASSES_NAME, -1
            others = metrics
        else:
            others.add(metrics)
    return BusMetrics(listed, others, total, dead_letter_count)


def _select_busiest(classes: list[MessageClass], previously_listed: Collection[int]) -> set[int]:
    """Return the ids of the classes to list individually; of equal ones, the older ones."""

    def weighted_message_count(cls: MessageClass) -> int:
        messages = cls.ring.head - min(cls.compacted_count, cls.first_sequence)
        return messages * (2 if cls.class_id in previously_listed else 1)

    selected = heapq.nlargest(CLASSES_LISTED_MAX, classes, key=weighted_message_count)
    return {cls.class_id for cls in selected}


def add_bus_metrics(metrics_builder: MetricsBuilder, metrics: BusMetrics) -> None:
    """Add the metrics of the bus, of each listed class and of the other classes together.

    The other classes have no counters: their membership changes, and a counter must not decrease.
    """
    for metric, help, value in _counter_values(metrics.total):
        metrics_builder.counter(f"bus_{metric}", f"{help} Sum over all classes.", value)
    metrics_builder.counter_by_reason(
        f"bus_{_DROPPED_METRIC}",
        f"{_DROPPED_HELP} Sum over all classes.",
        metrics.total.dropped,
        _DROPPED_REASONS,
    )
    for each in metrics.classes:
        labels = {"class": each.name, "class_id": str(each.class_id)}
        for metric, help, value in _counter_values(each):
            metrics_builder.counter(metric, help, value, **labels)
        metrics_builder.counter_by_reason(
            _DROPPED_METRIC, _DROPPED_HELP, each.dropped, _DROPPED_REASONS, **labels
        )
    for each in (*metrics.classes, *([metrics.others] if metrics.others is not None else [])):
        labels = {"class": each.name, "class_id": str(each.class_id) if each.class_id >= 0 else ""}
        for metric, help, value in (
            ("stored_messages", "Messages stored.", each.stored),
            ("stored_bytes", "Bytes of the frames of stored messages.", each.stored_bytes),
            ("spilled_messages", "Stored messages that exist on disk only.", each.spilled),
            ("class_memory_bytes", "Memory held for stored messages.", each.memory_bytes),
            ("in_flight_messages", "Messages sent but not acknowledged.", each.in_flight),
            (
                "lag_messages",
                "Stored messages from the lowest one that a subscription has not acknowledged.",
                each.lag,
            ),
            ("subscriptions", "Subscriptions, including durables and groups.", each.positions),
            ("blocked_publishers", "Sessions whose messages wait for space.", each.blocked),
        ):
            metrics_builder.gauge(metric, help, value, **labels)


_DROPPED_METRIC = "dropped_messages"
_DROPPED_REASONS = (*DROP_REASONS, *DEAD_LETTER_REASONS)
_DROPPED_HELP = "Messages dropped, or not delivered to some subscription, by reason."


def _counter_values(metrics: ClassMetrics) -> tuple[tuple[str, str, int], ...]:
    return (
        ("published_messages", "Messages accepted.", metrics.published),
        ("delivered_messages", "Messages sent for the first time.", metrics.delivered),
        ("redelivered_messages", "Messages sent again.", metrics.redelivered),
        ("acknowledged_messages", "Messages acknowledged.", metrics.acknowledged),
    )
