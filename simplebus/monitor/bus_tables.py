"""Tables and notes about slow subscriptions and sessions of a bus.

Sentences come from the broker's reports. Each table lists a limited number of rows, the worst ones,
and counts the others.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from heapq import nlargest
from itertools import islice

from simplebus.core.broker.broker import Broker
from simplebus.core.broker.inquire import protocol_version
from simplebus.core.broker.inquire_positions import PositionReporter, producer_name, truncate_text
from simplebus.core.broker.wait_reasons import WaitReason, complete_sentence, format_duration
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.inquiry import PositionInfo
from simplebus.core.subscription.position import Position
from simplebus.monitor.class_metrics import BusMetrics, class_label
from simplebus.monitor.snapshot import Column, Note, Table

POSITIONS_MAX = 50
SESSIONS_MAX = 50
_POSITIONS_PER_STEP = 512
_DESCRIPTIONS_PER_STEP = 8
_SLOW_ACK_SECONDS = 5.0
"""Messages in flight for longer get a note."""
_BAD_WAIT_REASONS = (WaitReason.BYTES, WaitReason.ROOM)

LaggingPositions = list[tuple[MessageClass, Position]]


def build_classes_table(metrics: BusMetrics) -> Table:
    """Return the table of the listed classes, those with blocked publishers and most messages
    first.
    """
    listed = [each for each in metrics.classes if not each.is_dead]
    listed.sort(key=lambda each: (-each.blocked, -each.stored, each.class_id))
    if metrics.others is not None:
        listed.append(metrics.others)
    return Table(
        "classes",
        "Classes",
        [
            Column("Class"),
            Column("Published", "count", "Messages accepted.", is_flow=True),
            Column("Delivered", "count", "Messages sent for the first time.", is_flow=True),
            Column("Acknowledged", "count", "Messages acknowledged.", is_flow=True),
            Column("Redelivered", "count", "Messages sent again.", is_flow=True),
            Column("Stored", "count", "Messages stored."),
            Column("Size", "bytes", "Bytes of the frames of stored messages."),
            Column("In flight", "count", "Messages sent and not acknowledged."),
            Column("Lag", "count", "Lag of the slowest subscription, in messages."),
            Column("Dropped", "count", "Messages dropped, or not delivered to some subscription."),
            Column("Subscriptions", "count"),
        ],
        [
            [
                truncate_text(each.name),
                each.published,
                each.delivered,
                each.acknowledged,
                each.redelivered,
                each.stored,
                each.stored_bytes,
                each.in_flight,
                each.lag,
                sum(each.dropped.values()),
                each.positions,
            ]
            for each in listed
        ],
    )


def build_dead_letters_table(metrics: BusMetrics) -> Table:
    """Return the table of the dead-letter classes."""
    listed = [each for each in metrics.classes if each.is_dead and each.stored]
    return Table(
        "dead",
        "Dead letters",
        [
            Column("Class"),
            Column("Dead letters", "count", "Dead letters stored in the class."),
            Column("Size", "bytes"),
            Column("Total", "count", "Dead letters since the class exists.", is_flow=True),
        ],
        [
            [truncate_text(each.name), each.stored, each.stored_bytes, each.published]
            for each in listed
        ],
    )


def find_lagging_positions(
    classes: Iterable[MessageClass],
) -> Generator[None, None, LaggingPositions]:
    """Return the positions with the largest lag, in steps."""
    found: list[tuple[int, int, MessageClass, Position]] = []
    position_count = 0
    for cls in list(classes):
        for position in list(cls.positions):
            position_count += 1
            lag = position.class_ring.head - position.window.floor
            found.append((lag, -position_count, cls, position))
            if position_count % _POSITIONS_PER_STEP == 0:
                found = nlargest(POSITIONS_MAX, found, key=_lag_key)
                yield
    return [(cls, position) for _, _, cls, position in nlargest(POSITIONS_MAX, found, key=_lag_key)]


def _lag_key(each: tuple[int, int, MessageClass, Position]) -> tuple[int, int]:
    return each[:2]


def build_subscriptions_table(
    broker: Broker, reporter: PositionReporter
) -> Generator[None, None, tuple[Table, list[Note]]]:
    """Return the table of the subscriptions with the largest lag and its notes, in steps."""
    chosen = yield from find_lagging_positions(broker.classes.values())
    rows: list[list[str | float | None]] = []
    notes: list[Note] = []
    for count, (cls, position) in enumerate(chosen):
        if position not in cls.positions:  # It has ended meanwhile.
            continue
        info = reporter.describe_position(cls, position)
        name, oldest = describe_subscriber(info), info.oldest
        rows.append(
            [
                truncate_text(class_label(cls)),
                name,
                info.lag,
                info.unsent,
                info.in_flight,
                info.again + info.put_off,
                info.redelivered,
                oldest.first_seconds if oldest is not None else None,
                complete_sentence(info.waits, info.waits_for),
            ]
        )
        if note := _build_note(cls, info, name):
            notes.append(note)
        if count % _DESCRIPTIONS_PER_STEP == _DESCRIPTIONS_PER_STEP - 1:
            yield
    total = sum(len(cls.positions) for cls in broker.classes.values())
    table = Table(
        "subscriptions",
        "Subscriptions",
        [
            Column("Class"),
            Column("Subscription"),
            Column("Lag", "count", "Stored messages from the oldest unacknowledged one on."),
            Column("Unsent", "count", "Stored messages not yet sent to it."),
            Column("In flight", "count", "Messages sent to it but not acknowledged."),
            Column("Redelivery due", "count", "Messages that will be sent to it again."),
            Column("Redelivered", "count", "Messages sent to it again.", is_flow=True),
            Column("Oldest", "seconds", "Time for which its oldest message is in flight."),
            Column("Waiting for"),
        ],
        rows,
        left_out=max(0, total - len(rows)),
    )
    return table, notes


def describe_subscriber(info: PositionInfo) -> str:
    """Return a label for a subscription."""
    if info.durable:
        return f"durable {info.durable!r}"
    if info.group:
        return f"group {info.group!r}, {len(info.members) + info.members_left_out} members"
    named = f" {info.name!r}" if info.name else ""
    return f"session {info.session}{named}"


def _build_note(cls: MessageClass, info: PositionInfo, name: str) -> Note | None:
    """Return a note if the subscription is slow or blocks publishers."""
    oldest = info.oldest
    is_late = oldest is not None and oldest.first_seconds > _SLOW_ACK_SECONDS
    is_bad = info.waits in _BAD_WAIT_REASONS or bool(
        cls.blocked_sessions and info.floor == cls.first_sequence
    )
    is_alone = info.waits == WaitReason.NOBODY and info.lag > 0
    if not (is_bad or is_late or is_alone):
        return None
    about = f"class {truncate_text(class_label(cls))!r}, {name}"
    return Note(about, complete_sentence(info.waits, info.waits_for), is_bad=is_bad)


def build_blocked_notes(broker: Broker, metrics: BusMetrics) -> list[Note]:
    """Return notes about full classes."""
    return [
        Note(
            f"class {truncate_text(each.name)!r}",
            f"{each.blocked} publisher{'s wait' if each.blocked > 1 else ' waits'} for space: "
            f"{each.stored:,} messages are stored",
            is_bad=True,
        )
        for each in metrics.classes
        if each.blocked
    ]


def build_unavailable_notes(broker: Broker, metrics: BusMetrics) -> list[Note]:
    """Return notes about classes whose storage accepts no messages."""
    return [
        Note(
            f"class {truncate_text(each.name)!r}",
            f"its stream accepts no messages, so publishers wait: {truncate_text(why)}",
            is_bad=True,
        )
        for each in metrics.classes
        if (cls := broker.classes.get(each.class_id)) is not None
        and (why := cls.unavailable_reason)
    ]


def build_sessions_table(
    broker: Broker, reporter: PositionReporter
) -> Generator[None, None, tuple[Table, list[Note]]]:
    """Return the table of the sessions with the most pending bytes and its notes, in steps."""
    chosen = nlargest(
        SESSIONS_MAX, islice(broker.sessions.values(), 10_000), key=lambda each: each.pending_bytes
    )
    yield
    rows: list[list[str | float | None]] = []
    notes: list[Note] = []
    for session in chosen:
        name, why = truncate_text(producer_name(session)), ""
        if session.send_blocked_ticks:
            why = (
                "it has read nothing for "
                f"{format_duration(reporter.ticks_to_seconds(session.send_blocked_ticks))}"
            )
        elif session.parked_messages:
            is_fast = session in broker.store.publish_queue.rate_queue.waiting_sessions
            what = "exceed its rate limit and wait" if is_fast else "wait for space"
            why = (
                f"its messages {what}, for "
                f"{format_duration(reporter.ticks_to_seconds(session.parked_ticks))}"
            )
        elif session.has_write_backlog:
            why = "it is not read from until the journal has caught up"
        rows.append(
            [
                f"{session.session_id}",
                name,
                truncate_text(session.peer),
                _VERSIONS[protocol_version(session)],
                len(session.subscriptions),
                session.handled_count,
                session.outbox.sent_bytes,
                session.pending_bytes,
                why,
            ]
        )
        if why:
            called = f" {name!r}" if name else ""
            notes.append(Note(f"session {session.session_id}{called}", why, is_bad=True))
    yield
    table = Table(
        "sessions",
        "Sessions",
        [
            Column("Session"),
            Column("Name"),
            Column("Peer"),
            Column("Protocol"),
            Column("Subscriptions", "count"),
            Column("Published", "count", "Messages published by the session.", is_flow=True),
            Column("Sent", "bytes", "Bytes sent to the session.", is_flow=True),
            Column("Pending", "bytes", "Memory held for the session outside the classes."),
            Column("Waiting for"),
        ],
        rows,
        left_out=max(0, len(broker.sessions) - len(rows)),
    )
    return table, notes


_VERSIONS = {-1: "NATS", 0: "unknown", 1: "version 1", 2: "version 2"}
