"""What the page shows of a bus beside figures: who is slow, and why.

Rule 1: sentences are those of `explaining`: nothing is judged here, only chosen and cut.
Rule 2: so many of each, those that are furthest behind; what was left out is counted.
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
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.monitor.class_metrics import BusMetrics, class_label
from simplebus.monitor.snapshot import Column, Note, Table

POSITIONS_MAX = 50
SESSIONS_MAX = 50
_POSITIONS_PER_STEP = 512
_DESCRIPTIONS_PER_STEP = 8
_SLOW_ACK_SECONDS = 5.0
"""A message that is in flight for longer is worth a sentence."""
_BAD_WAIT_REASONS = (WaitReason.BYTES, WaitReason.ROOM)

LaggingPositions = list[tuple[MessageClass, BrokerSubscription]]


def build_classes_table(metrics: BusMetrics) -> Table:
    """Of all classes that are told one by one, those that store most first."""
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
            Column("Again", "count", "Messages sent again.", is_flow=True),
            Column("Stored", "count", "Messages stored."),
            Column("Size", "bytes", "Bytes of the frames of stored messages."),
            Column("In flight", "count", "Messages sent and not acknowledged."),
            Column("Lag", "count", "Of the subscription that is furthest behind."),
            Column("Dropped", "count", "Messages not kept, or not delivered to somebody."),
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
    """Of the classes in which dead letters lie."""
    listed = [each for each in metrics.classes if each.is_dead and each.stored]
    return Table(
        "dead",
        "Dead letters",
        [
            Column("Class"),
            Column("Dead letters", "count", "Messages that were given up and lie there."),
            Column("Size", "bytes"),
            Column("Ever", "count", "Messages that were ever given up there.", is_flow=True),
        ],
        [
            [truncate_text(each.name), each.stored, each.stored_bytes, each.published]
            for each in listed
        ],
    )


def find_lagging_positions(
    classes: Iterable[MessageClass],
) -> Generator[None, None, LaggingPositions]:
    """The positions with the most unacknowledged messages, in pieces."""
    found: list[tuple[int, int, MessageClass, BrokerSubscription]] = []
    position_count = 0
    for cls in list(classes):
        for position in list(cls.subscriptions):
            position_count += 1
            lag = position.class_ring.head - position.window.floor
            found.append((lag, -position_count, cls, position))
            if position_count % _POSITIONS_PER_STEP == 0:
                found = nlargest(POSITIONS_MAX, found, key=_lag_key)
                yield
    return [(cls, position) for _, _, cls, position in nlargest(POSITIONS_MAX, found, key=_lag_key)]


def _lag_key(each: tuple[int, int, MessageClass, BrokerSubscription]) -> tuple[int, int]:
    return each[:2]


def build_subscriptions_table(
    broker: Broker, reporter: PositionReporter
) -> Generator[None, None, tuple[Table, list[Note]]]:
    """The subscriptions that are furthest behind, and what there is to say of them, in pieces."""
    chosen = yield from find_lagging_positions(broker.classes.values())
    rows: list[list[str | float | None]] = []
    notes: list[Note] = []
    for count, (cls, position) in enumerate(chosen):
        if position not in cls.subscriptions:  # It has gone meanwhile.
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
    total = sum(len(cls.subscriptions) for cls in broker.classes.values())
    table = Table(
        "subscriptions",
        "Subscriptions",
        [
            Column("Class"),
            Column("Subscription"),
            Column("Lag", "count", "Stored messages from its oldest unacknowledged one on."),
            Column("Unsent", "count", "Stored messages that it was not sent yet."),
            Column("In flight", "count", "Messages sent to it and not acknowledged."),
            Column("To repeat", "count", "Messages that are to be sent to it again."),
            Column("Repeated", "count", "Messages that were sent to it again.", is_flow=True),
            Column("Oldest", "seconds", "Since when its oldest message is in flight."),
            Column("What it waits for"),
        ],
        rows,
        left_out=max(0, total - len(rows)),
    )
    return table, notes


def describe_subscriber(info: PositionInfo) -> str:
    """What a subscription is called."""
    if info.durable:
        return f"durable {info.durable!r}"
    if info.group:
        return f"group {info.group!r}, {len(info.members) + info.members_left_out} members"
    named = f" {info.name!r}" if info.name else ""
    return f"session {info.session}{named}"


def _build_note(cls: MessageClass, info: PositionInfo, name: str) -> Note | None:
    """What should be read of a subscription, if anything."""
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
    """Which classes are full."""
    return [
        Note(
            f"class {truncate_text(each.name)!r}",
            f"{each.blocked} publisher{'s wait' if each.blocked > 1 else ' waits'} for room: "
            f"{each.stored:,} messages are stored",
            is_bad=True,
        )
        for each in metrics.classes
        if each.blocked
    ]


def build_unavailable_notes(broker: Broker, metrics: BusMetrics) -> list[Note]:
    """Of which classes nothing is taken where they are kept."""
    return [
        Note(
            f"class {truncate_text(each.name)!r}",
            f"its stream takes nothing, and who publishes to it waits: {truncate_text(why)}",
            is_bad=True,
        )
        for each in metrics.classes
        if (cls := broker.classes.get(each.class_id)) is not None
        and (why := cls.unavailable_reason)
    ]


def build_sessions_table(
    broker: Broker, reporter: PositionReporter
) -> Generator[None, None, tuple[Table, list[Note]]]:
    """The sessions for which most is kept, and what there is to say of them, in pieces."""
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
                "it has taken no bytes since "
                f"{format_duration(reporter.ticks_to_seconds(session.send_blocked_ticks))}"
            )
        elif session.parked_messages:
            is_fast = session in broker.store.publish_queue.rate_queue.waiting_sessions
            what = "wait because they come too fast" if is_fast else "wait for room"
            why = (
                f"its messages {what} since "
                f"{format_duration(reporter.ticks_to_seconds(session.parked_ticks))}"
            )
        elif session.has_write_backlog:
            why = "the journal is behind: it is not read from until then"
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
            Column("Speaks"),
            Column("Subscriptions", "count"),
            Column("Published", "count", "Messages that it has published.", is_flow=True),
            Column("Sent", "bytes", "Bytes that were sent to it.", is_flow=True),
            Column("Kept", "bytes", "Bytes kept for it beside what classes store."),
            Column("What it waits for"),
        ],
        rows,
        left_out=max(0, len(broker.sessions) - len(rows)),
    )
    return table, notes


_VERSIONS = {-1: "NATS", 0: "nothing yet", 1: "version 1", 2: "version 2"}
