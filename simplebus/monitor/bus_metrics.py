"""Metrics of the classes of a bus."""

from __future__ import annotations

from collections.abc import Iterator

from simplebus.core.errors import DEAD_LETTER_REASONS, DROP_REASONS
from simplebus.monitor.bus_facts import BusFacts
from simplebus.monitor.metrics_builder import MetricsBuilder
from simplebus.monitor.snapshot import MetricKind

_COUNTER_FIELDS = (
    ("published_messages", "published", "Messages accepted."),
    ("delivered_messages", "delivered", "Messages sent for the first time."),
    ("redelivered_messages", "redelivered", "Messages sent again."),
    ("acknowledged_messages", "acknowledged", "Messages acknowledged."),
)
_LAG_HELP = "Stored messages from the lowest one that a subscription has not acknowledged."
_GAUGE_FIELDS = (
    ("stored_messages", "stored", "Messages stored."),
    ("stored_bytes", "stored_bytes", "Bytes of the frames of stored messages."),
    ("spilled_messages", "spilled", "Stored messages that exist on disk only."),
    ("class_memory_bytes", "memory_bytes", "Memory held for stored messages."),
    ("in_flight_messages", "in_flight", "Messages sent but not acknowledged."),
    ("lag_messages", "lag", _LAG_HELP),
    ("subscriptions", "positions", "Subscriptions, including durables and groups."),
    ("blocked_publishers", "blocked", "Sessions whose messages wait for space."),
)
_DROPPED_REASONS = (*DROP_REASONS, *DEAD_LETTER_REASONS)
_DROPPED_HELP = (
    "Messages dropped, moved to dead letters, or not delivered to some subscription, by reason."
)
_SUM = "Sum over all classes."
_ROWS_PER_STEP = 25


def add_bus_metrics(builder: MetricsBuilder, bus: BusFacts) -> Iterator[None]:
    """Add the metrics of the bus, of each listed class and of the other classes together, in steps.

    The other classes have no counters: their membership changes, and a counter must not decrease.
    """
    totals = [(f"bus_{name}", field, f"{help} {_SUM}") for name, field, help in _COUNTER_FIELDS]
    builder.fields(MetricKind.COUNTER, bus.total, totals)
    builder.counter_by_reason(
        "bus_dropped_messages", f"{_DROPPED_HELP} {_SUM}", bus.total.dropped, _DROPPED_REASONS
    )
    for number, each in enumerate(bus.rows, 1):
        if number % _ROWS_PER_STEP == 0:
            yield
        labels = {"class": each.name, "class_id": str(each.class_id) if each.class_id >= 0 else ""}
        if each is not bus.other_classes:
            builder.fields(MetricKind.COUNTER, each, _COUNTER_FIELDS, **labels)
            builder.counter_by_reason(
                "dropped_messages", _DROPPED_HELP, each.dropped, _DROPPED_REASONS, **labels
            )
        builder.fields(MetricKind.GAUGE, each, _GAUGE_FIELDS, **labels)
