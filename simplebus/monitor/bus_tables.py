"""Tables and notes about the classes, slow subscriptions and sessions of a bus.

Sentences come from the broker's reports.
"""

from __future__ import annotations

from simplebus.core.broker.inquire_positions import truncate_text
from simplebus.core.broker.wait_reasons import WaitReason, format_count, format_waiting_count
from simplebus.monitor.bus_facts import BusFacts, PositionFacts, SessionFacts, SlowFacts
from simplebus.monitor.snapshot import Column, Note, Table

_SLOW_ACK_SECONDS = 5.0
"""Messages in flight for longer get a note."""
_BAD_WAIT_REASONS = (WaitReason.BYTES, WaitReason.SPACE)
_CLASS_COLUMNS = {
    "label": Column("Class", details="class"),
    "published": Column("Published", "count", "Messages accepted.", is_flow=True),
    "delivered": Column("Delivered", "count", "Messages sent for the first time.", is_flow=True),
    "acknowledged": Column("Acknowledged", "count", "Messages acknowledged.", is_flow=True),
    "redelivered": Column("Redelivered", "count", "Messages sent again.", is_flow=True),
    "stored": Column("Stored", "count", "Messages stored.", is_load=True),
    "stored_bytes": Column("Size", "bytes", "Bytes of the frames of stored messages."),
    "in_flight": Column("In flight", "count", "Messages sent and not acknowledged.", is_load=True),
    "lag": Column("Lag", "count", "Lag of the slowest subscription, in messages."),
    "dropped_count": Column(
        "Dropped", "count", "Messages dropped, or not delivered to some subscription."
    ),
    "dead_lettered_count": Column("Dead-lettered", "count", "Messages moved to dead letters."),
    "positions": Column("Subscriptions", "count"),
}
_DEAD_LETTER_COLUMNS = {
    "label": Column("Class", details="class"),
    "stored": Column("Dead letters", "count", "Dead letters stored in the class."),
    "stored_bytes": Column("Size", "bytes"),
    "published": Column("Total", "count", "Dead letters since the class exists.", is_flow=True),
}
_POSITION_COLUMNS = {
    "class_label": Column("Class", details="class"),
    "subscriber": Column("Subscription"),
    "info.lag": Column("Lag", "count", "Stored messages from the oldest unacknowledged one on."),
    "info.unsent": Column("Unsent", "count", "Stored messages not yet sent to it."),
    "info.in_flight": Column("In flight", "count", "Messages sent to it but not acknowledged."),
    "due_count": Column("Redelivery due", "count", "Messages that will be sent to it again."),
    "info.redelivered": Column("Redelivered", "count", "Messages sent to it again.", is_flow=True),
    "oldest_seconds": Column(
        "Oldest", "seconds", "Time for which its oldest message is in flight."
    ),
    "waits_for": Column("Waiting for"),
}
_SESSION_COLUMNS = {
    "session": Column("Session", details="session"),
    "name": Column("Name"),
    "peer": Column("Peer"),
    "protocol": Column("Protocol"),
    "subscriptions": Column("Subscriptions", "count"),
    "published": Column("Published", "count", "Messages published by the session.", is_flow=True),
    "sent_bytes": Column("Sent", "bytes", "Bytes sent to the session.", is_flow=True),
    "pending_bytes": Column("Pending", "bytes", "Memory held for the session outside the classes."),
    "waits_for": Column("Waiting for"),
}


def build_classes_table(bus: BusFacts) -> Table:
    """Return the table of the listed classes, those with blocked publishers and most messages
    first, and the others as the last row.
    """
    other_rows = [bus.other_classes] if bus.other_classes is not None else []
    listed = [cls for cls in bus.classes if not cls.is_dead]
    listed.sort(key=lambda each: (-each.blocked, -each.stored, each.class_id))
    return Table.of("classes", "Classes", [*listed, *other_rows], _CLASS_COLUMNS)


def build_dead_letters_table(bus: BusFacts) -> Table:
    """Return the table of the dead-letter classes."""
    listed = [cls for cls in bus.classes if cls.is_dead and cls.stored]
    return Table.of("dead", "Dead letters", listed, _DEAD_LETTER_COLUMNS)


def build_subscriptions_table(slow: SlowFacts) -> Table:
    """Return the table of the subscriptions with the largest lag."""
    left_out = slow.positions_left_out
    return Table.of(
        "subscriptions", "Subscriptions", slow.positions, _POSITION_COLUMNS, left_out=left_out
    )


def build_sessions_table(slow: SlowFacts) -> Table:
    """Return the table of the sessions with the most pending bytes."""
    left_out = slow.sessions_left_out
    return Table.of("sessions", "Sessions", slow.sessions, _SESSION_COLUMNS, left_out=left_out)


def build_notes(bus: BusFacts, slow: SlowFacts) -> list[Note]:
    """Return the notes about classes, then those about subscriptions and sessions.

    Classes that grow without a subscription come first, other classes that only have publishers or
    only subscribers last.
    """
    warned = [cls for cls in bus.classes if cls.warning]
    warnings = {
        is_growing: [
            Note(f"class {cls.label!r}", cls.warning, is_bad=is_growing)
            for cls in warned
            if cls.is_growing is is_growing
        ]
        for is_growing in (True, False)
    }
    notes = warnings[True]
    for cls in bus.classes:
        about = f"class {cls.label!r}"
        if cls.blocked:
            publishers = format_waiting_count(cls.blocked, "publisher")
            reason = f"{publishers} for space: {format_count(cls.stored, 'stored message')}"
            notes.append(Note(about, reason, is_bad=True))
        if cls.unavailable:
            reason = truncate_text(cls.unavailable)
            sentence = f"its stream accepts no messages, so publishers wait: {reason}"
            notes.append(Note(about, sentence, is_bad=True))
    for position in slow.positions:
        notes += _build_position_notes(position)
    for session in slow.sessions:
        notes += _build_session_notes(session)
    return notes + warnings[False]


def _build_position_notes(position: PositionFacts) -> list[Note]:
    """Return a note if the subscription is slow or blocks publishers."""
    info, oldest_seconds = position.info, position.oldest_seconds
    is_late = oldest_seconds is not None and oldest_seconds > _SLOW_ACK_SECONDS
    is_bad = info.waits in _BAD_WAIT_REASONS or position.blocks_publishers
    is_alone = info.waits == WaitReason.NOBODY and info.lag > 0
    if not (is_bad or is_late or is_alone):
        return []
    about = f"class {position.class_label!r}, {position.subscriber}"
    return [Note(about, position.waits_for, is_bad=is_bad)]


def _build_session_notes(session: SessionFacts) -> list[Note]:
    """Return a note if the session waits."""
    named = f" {session.name!r}" if session.name else ""
    about = f"session {session.session}{named}"
    return [Note(about, session.waits_for, is_bad=True)] if session.waits_for else []
