"""Facts of a bus as immutable values: its classes, positions and sessions.

Collection reads no message, visits each position once and yields regularly. Only the busiest
classes are listed individually, the rest together, so that many class names cannot flood the
readers. A listed class stays listed until another one has twice as many messages.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from heapq import nlargest
from itertools import islice
from typing import TypeVar

import msgspec

from simplebus.core import dead_letters
from simplebus.core.broker.broker import Broker
from simplebus.core.broker.class_warnings import count_backlog, find_class_warning
from simplebus.core.broker.inquire import protocol_version
from simplebus.core.broker.inquire_positions import PositionReporter, producer_name, truncate_text
from simplebus.core.broker.wait_reasons import complete_sentence, format_count, format_duration
from simplebus.core.errors import DEAD_LETTER_REASONS, Reason
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol.inquiry import PositionInfo
from simplebus.core.session.session import Session
from simplebus.core.steps import drain_list
from simplebus.core.store.store import Store
from simplebus.core.subscription.position import Position

CLASSES_LISTED_MAX = 100
OTHER_CLASSES_NAME = "(others)"
"""Name of the classes that are not listed individually. They have no id, because a class may have
the same name.
"""
POSITIONS_MAX = 50
SESSIONS_MAX = 50
CANDIDATES_MAX = 10_000
"""Sessions or clients of which the ones with the most pending bytes are selected."""
_PROTOCOLS = {-1: "NATS", 0: "unknown", 1: "version 1", 2: "version 2"}
_POSITIONS_PER_STEP = 256
_DESCRIPTIONS_PER_STEP = 8
_CANDIDATES_PER_STEP = 256
CLASSES_COMPARED_PER_STEP = 256
T = TypeVar("T")


class ClassFacts(msgspec.Struct, frozen=True):
    """Facts of one class, or of several together."""

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
    dropped: Mapping[Reason, int] = {}
    """Messages dropped or moved to dead letters, by reason."""
    unavailable: str = ""
    """Reason why its storage accepts no messages; empty if it does."""
    warning: str = ""
    """Sentence about a class that has only publishers or only subscribers."""
    is_growing: bool = False
    """True if messages arrive and the class has no subscription."""

    @property
    def label(self) -> str:
        """The name, cut to a limited length."""
        return truncate_text(self.name)

    @property
    def dropped_count(self) -> int:
        """Messages dropped without becoming dead letters."""
        return sum(self.dropped.values()) - self.dead_lettered_count

    @property
    def dead_lettered_count(self) -> int:
        """Messages moved to dead letters."""
        return sum(self.dropped.get(reason, 0) for reason in DEAD_LETTER_REASONS)

    def plus(self, other: ClassFacts) -> ClassFacts:
        """Return the facts of both together."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED_FIELDS}
        dropped = Counter(self.dropped)
        dropped.update(other.dropped)
        lag = max(self.lag, other.lag)
        return msgspec.structs.replace(self, lag=lag, dropped=dropped, **sums)


_SUMMED_FIELDS = (
    *("classes", "published", "delivered", "redelivered", "acknowledged", "in_flight"),
    *("stored", "stored_bytes", "memory_bytes", "spilled", "positions", "blocked"),
)


class PositionFacts(msgspec.Struct, frozen=True):
    """A position, and facts about it from its class."""

    class_label: str
    info: PositionInfo
    blocks_publishers: bool
    """True if publishers wait for the messages that it holds."""

    @property
    def subscriber(self) -> str:
        """Label of the subscription."""
        info = self.info
        if info.durable:
            return f"durable {info.durable!r}"
        if info.group:
            members = format_count(len(info.members) + info.members_left_out, "member")
            return f"group {info.group!r}, {members}"
        return f"session {info.session}" + (f" {info.name!r}" if info.name else "")

    @property
    def due_count(self) -> int:
        """Messages that will be sent again."""
        return self.info.to_redeliver + self.info.delayed

    @property
    def oldest_seconds(self) -> float | None:
        """Seconds for which the oldest message is in flight; None if no message is in flight."""
        return self.info.oldest.first_seconds if self.info.oldest is not None else None

    @property
    def waits_for(self) -> str:
        """Sentence about the event that the position waits for."""
        return complete_sentence(self.info.waits, self.info.waits_for)


class SessionFacts(msgspec.Struct, frozen=True):
    """A session of the broker."""

    session: str
    """Its id."""
    name: str
    peer: str
    protocol: str
    """Version of its protocol."""
    subscriptions: int
    published: int
    sent_bytes: int
    pending_bytes: int
    """Memory held for the session outside the classes."""
    waits_for: str
    """Sentence about the event that the session waits for; empty if it does not wait."""


class BusFacts(msgspec.Struct, frozen=True):
    """Facts of all classes."""

    classes: Collection[ClassFacts]
    """Classes that are listed individually."""
    other_classes: ClassFacts | None
    """The other classes together; None if all classes are listed."""
    total: ClassFacts
    dead_letters: int
    """Messages stored in dead-letter classes."""

    @property
    def rows(self) -> tuple[ClassFacts, ...]:
        """The listed classes, and the others as one."""
        return (*self.classes, *([self.other_classes] if self.other_classes is not None else []))


class SlowFacts(msgspec.Struct, frozen=True):
    """The positions and sessions that are furthest behind, the worst first."""

    positions: Collection[PositionFacts] = ()
    """Positions with the largest lag."""
    positions_left_out: int = 0
    sessions: Collection[SessionFacts] = ()
    """Sessions with the most pending bytes."""
    sessions_left_out: int = 0


def collect_class(cls: MessageClass, now: float) -> Generator[None, None, ClassFacts]:
    """Collect the facts of one class in steps, at the time `now` of the broker's clock.

    Published and delivered messages are counted in the first step, so that they belong to the same
    time however many positions the class has.
    """
    ring, spill, positions = cls.ring, cls.spill, list(cls.positions)
    statistics, dropped, in_flight, lag = ring.statistics(), cls.dropped_counts.copy(), 0, 0
    redelivered, acknowledged = cls.redelivered_count, cls.acknowledged_count
    warning = find_class_warning(cls, now)
    facts = ClassFacts(
        name=cls.label,
        class_id=cls.class_id,
        published=ring.head - cls.compacted_count,
        delivered=cls.deliveries.count,
        stored=ring.head - cls.first_sequence,
        stored_bytes=statistics.frame_bytes + (spill.frame_bytes if spill is not None else 0),
        memory_bytes=statistics.memory_bytes,
        spilled=spill.message_count if spill is not None else 0,
        positions=len(positions),
        blocked=len(cls.blocked_sessions),
        is_dead=dead_letters.is_dead_letter_class(cls.name),
        unavailable=cls.unavailable_reason,
        warning=warning.sentence if warning is not None else "",
        is_growing=warning is not None and warning.is_growing,
    )
    for count, position in enumerate(drain_list(positions)):
        if count % _POSITIONS_PER_STEP == _POSITIONS_PER_STEP - 1:
            yield
        redelivered += position.redelivered_count
        acknowledged += position.acknowledged_count
        window = position.window
        in_flight += window.in_flight_count
        lag = max(lag, position.class_ring.head - window.floor)
        if position.undelivered_counts:
            dropped.update(position.undelivered_counts)
    if not cls.positions and not cls.is_remote:
        lag = count_backlog(cls)
    return msgspec.structs.replace(
        facts,
        redelivered=redelivered,
        acknowledged=acknowledged,
        in_flight=in_flight,
        lag=lag,
        dropped=dropped,
    )


def collect_bus(
    store: Store, previously_listed: Collection[int] = ()
) -> Generator[None, None, BusFacts]:
    """Collect the facts of all classes in steps.

    `previously_listed` contains the ids of the classes that were listed individually before.
    """
    listed: list[ClassFacts] = []
    busiest = yield from _select_busiest(list(store.classes.values()), previously_listed)
    other_classes: ClassFacts | None = None
    total = ClassFacts("", classes=0)
    dead_letter_count = 0
    for cls in list(store.classes.values()):
        facts = yield from collect_class(cls, store.clock.now)
        yield
        total = total.plus(facts)
        dead_letter_count += facts.stored * facts.is_dead
        if cls.class_id in busiest:
            listed.append(facts)
        else:
            empty_facts = ClassFacts(OTHER_CLASSES_NAME, classes=0)
            other_classes = (empty_facts if other_classes is None else other_classes).plus(facts)
    return BusFacts(listed, other_classes, total, dead_letter_count)


def _select_busiest(
    classes: list[MessageClass], previously_listed: Collection[int]
) -> Generator[None, None, set[int]]:
    """Return the ids of the classes to list individually, in steps; of equal ones, the older
    ones.
    """

    def weighted_message_count(cls: MessageClass) -> int:
        messages = cls.ring.head - min(cls.compacted_count, cls.first_sequence)
        return messages * (2 if cls.class_id in previously_listed else 1)

    selected: list[tuple[int, int, int]] = []
    for first in range(0, len(classes), CLASSES_COMPARED_PER_STEP):
        part = classes[first : first + CLASSES_COMPARED_PER_STEP]
        counted = [
            (weighted_message_count(cls), -age, cls.class_id) for age, cls in enumerate(part, first)
        ]
        selected = heapq.nlargest(CLASSES_LISTED_MAX, selected + counted)
        yield
    return {class_id for _, _, class_id in selected}


def collect_slow(broker: Broker, reporter: PositionReporter) -> Generator[None, None, SlowFacts]:
    """Collect the positions and sessions that are furthest behind, in steps."""
    positions: list[PositionFacts] = []
    lagging = yield from _find_lagging_positions(broker.classes.values())
    for count, (cls, position) in enumerate(lagging):
        if position not in cls.positions:  # It has ended meanwhile.
            continue
        info = yield from reporter.describe_position(cls, position)
        is_blocking = bool(cls.blocked_sessions and info.floor == cls.first_sequence)
        positions.append(PositionFacts(truncate_text(cls.label), info, is_blocking))
        if count % _DESCRIPTIONS_PER_STEP == _DESCRIPTIONS_PER_STEP - 1:
            yield
    candidates = list(islice(broker.sessions.values(), CANDIDATES_MAX))
    sessions = yield from select_largest(
        SESSIONS_MAX, candidates, key=lambda each: each.pending_bytes
    )
    described = [_describe_session(broker, reporter, session) for session in sessions]
    yield
    total = sum(len(cls.positions) for cls in broker.classes.values())
    yield
    return SlowFacts(
        positions,
        max(0, total - len(positions)),
        described,
        max(0, len(broker.sessions) - len(sessions)),
    )


def select_largest(
    count: int, candidates: list[T], key: Callable[[T], float]
) -> Generator[None, None, list[T]]:
    """Remove all candidates and return those with the largest keys, in steps; of equal ones, the
    first ones. The largest one comes first.
    """
    remaining, selected = drain_list(candidates), list[T]()
    while part := list(islice(remaining, _CANDIDATES_PER_STEP)):
        selected = nlargest(count, [*selected, *part], key=key)
        yield
    return selected


def _find_lagging_positions(
    classes: Iterable[MessageClass],
) -> Generator[None, None, list[tuple[MessageClass, Position]]]:
    """Return the positions with the largest lag, in steps."""
    found: list[tuple[int, int, MessageClass, Position]] = []
    position_count = 0
    for number, cls in enumerate(list(classes), 1):
        if number % CLASSES_COMPARED_PER_STEP == 0:
            yield
        for position in list(cls.positions):
            position_count += 1
            lag = position.class_ring.head - position.window.floor
            found.append((lag, -position_count, cls, position))
            if position_count % _POSITIONS_PER_STEP == 0:
                found = nlargest(POSITIONS_MAX, found, key=lambda each: each[:2])
                yield
    largest = nlargest(POSITIONS_MAX, found, key=lambda each: each[:2])
    return [(cls, position) for _, _, cls, position in largest]


def _describe_session(broker: Broker, reporter: PositionReporter, session: Session) -> SessionFacts:
    waits_for = ""
    if session.send_blocked_ticks:
        waited = format_duration(reporter.ticks_to_seconds(session.send_blocked_ticks))
        waits_for = f"it has read nothing for {waited}"
    elif session.parked_messages:
        is_fast = session in broker.store.publish_queue.rate_queue.waiting_sessions
        cause = "exceed its rate limit and wait" if is_fast else "wait for space"
        waited = format_duration(reporter.ticks_to_seconds(session.parked_ticks))
        waits_for = f"its messages {cause}, for {waited}"
    elif session.has_write_backlog:
        waits_for = "it is not read from until the journal has caught up"
    return SessionFacts(
        str(session.session_id),
        truncate_text(producer_name(session)),
        truncate_text(session.peer),
        _PROTOCOLS[protocol_version(session)],
        len(session.subscriptions),
        session.handled_count,
        session.outbox.sent_bytes,
        session.pending_bytes,
        waits_for,
    )
