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
from simplebus.core.protocol.inquiry import Position
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.monitor.classes import BusFigures, label
from simplebus.monitor.facts import Column, Note, Table

POSITIONS_MAX = 50
SESSIONS_MAX = 50
_POSITIONS_AT_ONCE = 512
_EXPLAINED_AT_ONCE = 8
_SLOW_SECONDS = 5.0
"""A message that is in flight for longer is worth a sentence."""
_BAD = (WaitReason.BYTES, WaitReason.ROOM)

Positions = list[tuple[MessageClass, BrokerSubscription]]


def classes_table(figures: BusFigures) -> Table:
    """Of all classes that are told one by one, those that store most first."""
    told = [each for each in figures.classes if not each.is_dead]
    told.sort(key=lambda each: (-each.blocked, -each.stored, each.class_id))
    if figures.others is not None:
        told.append(figures.others)
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
            for each in told
        ],
    )


def dead_table(figures: BusFigures) -> Table:
    """Of the classes in which dead letters lie."""
    told = [each for each in figures.classes if each.is_dead and each.stored]
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
            for each in told
        ],
    )


def furthest_behind(classes: Iterable[MessageClass]) -> Generator[None, None, Positions]:
    """The positions with the most unacknowledged messages, in pieces."""
    found: list[tuple[int, int, MessageClass, BrokerSubscription]] = []
    looked = 0
    for cls in list(classes):
        for position in list(cls.subscriptions):
            looked += 1
            lag = position.class_ring.head - position.window.floor
            found.append((lag, -looked, cls, position))
            if looked % _POSITIONS_AT_ONCE == 0:
                found = nlargest(POSITIONS_MAX, found, key=_lag)
                yield
    return [(cls, position) for _, _, cls, position in nlargest(POSITIONS_MAX, found, key=_lag)]


def _lag(each: tuple[int, int, MessageClass, BrokerSubscription]) -> tuple[int, int]:
    return each[:2]


def positions(
    broker: Broker, explaining: PositionReporter
) -> Generator[None, None, tuple[Table, list[Note]]]:
    """The subscriptions that are furthest behind, and what there is to say of them, in pieces."""
    chosen = yield from furthest_behind(broker.classes.values())
    rows: list[list[str | float | None]] = []
    notes: list[Note] = []
    for count, (cls, position) in enumerate(chosen):
        if position not in cls.subscriptions:  # It has gone meanwhile.
            continue
        said = explaining.describe_position(cls, position)
        name, oldest = who(said), said.oldest
        rows.append(
            [
                truncate_text(label(cls)),
                name,
                said.lag,
                said.unsent,
                said.in_flight,
                said.again + said.put_off,
                said.redelivered,
                oldest.first_seconds if oldest is not None else None,
                complete_sentence(said.waits, said.waits_for),
            ]
        )
        if note := _note_of(cls, said, name):
            notes.append(note)
        if count % _EXPLAINED_AT_ONCE == _EXPLAINED_AT_ONCE - 1:
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


def who(said: Position) -> str:
    """What a subscription is called."""
    if said.durable:
        return f"durable {said.durable!r}"
    if said.group:
        return f"group {said.group!r}, {len(said.members) + said.members_left_out} members"
    named = f" {said.name!r}" if said.name else ""
    return f"session {said.session}{named}"


def _note_of(cls: MessageClass, said: Position, name: str) -> Note | None:
    """What should be read of a subscription, if anything."""
    oldest = said.oldest
    is_late = oldest is not None and oldest.first_seconds > _SLOW_SECONDS
    is_bad = said.waits in _BAD or bool(cls.blocked_sessions and said.floor == cls.first_sequence)
    is_alone = said.waits == WaitReason.NOBODY and said.lag > 0
    if not (is_bad or is_late or is_alone):
        return None
    about = f"class {truncate_text(label(cls))!r}, {name}"
    return Note(about, complete_sentence(said.waits, said.waits_for), is_bad=is_bad)


def blocked_notes(broker: Broker, figures: BusFigures) -> list[Note]:
    """Which classes are full."""
    return [
        Note(
            f"class {truncate_text(each.name)!r}",
            f"{each.blocked} publisher{'s wait' if each.blocked > 1 else ' waits'} for room: "
            f"{each.stored:,} messages are stored",
            is_bad=True,
        )
        for each in figures.classes
        if each.blocked
    ]


def refused_notes(broker: Broker, figures: BusFigures) -> list[Note]:
    """Of which classes nothing is taken where they are kept."""
    return [
        Note(
            f"class {truncate_text(each.name)!r}",
            f"its stream takes nothing, and who publishes to it waits: {truncate_text(why)}",
            is_bad=True,
        )
        for each in figures.classes
        if (cls := broker.classes.get(each.class_id)) is not None
        and (why := cls.unavailable_reason)
    ]


def sessions(
    broker: Broker, explaining: PositionReporter
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
                f"{format_duration(explaining.ticks_to_seconds(session.send_blocked_ticks))}"
            )
        elif session.parked_messages:
            is_fast = session in broker.store.publish_queue.rate_queue.waiting_sessions
            what = "wait because they come too fast" if is_fast else "wait for room"
            why = (
                f"its messages {what} since "
                f"{format_duration(explaining.ticks_to_seconds(session.parked_ticks))}"
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
