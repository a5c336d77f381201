"""A broker as it was: what was kept past a process, put into a fresh one.

Rule 1: this happens before anybody connects, and in this order: classes, messages, positions,
publishers.
Rule 2: a limit that was kept before the crash stops nobody after it. More may be there than fits:
what was let go of just before, and nobody had written that down; it shrinks as it is acknowledged.
Rule 3: what does not fit by far is an error that says what would help: nothing that was kept is
dropped.
Rule 4: messages are as their records say. What is kept beside them is believed as far as it cannot
be wrong to their cost:

    ended by        level    the files                        numbers of publishers
    anything        disk     as they were confirmed           all
    a killed        os       as they were written: nothing    all
    process         memory   is there before what it is of    up to the first that is not stored
    a power cut     below    each without any part that is    none against the word of their
                    disk     not on disk by chance            programs

What is about sequences, which is positions, what waits, floors and purges, means messages that are
there, and none whose record is later than it: their sequences were given out again. Acknowledged
more than that is nobody's loss; acknowledged less, it comes again. Names and refusals are facts.
A number beyond the first that is not stored may be used for another message by who was told less;
one before it, which a power cut took from one file and not from the other, is sent again by who has
it still: what is doubted stays so, in later processes too, until that program has said so.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from simplebus.core.broker.broker import Broker
from simplebus.core.commit_log import Durability
from simplebus.core.dead_letters import are_kept_in
from simplebus.core.errors import BusError, Reason
from simplebus.core.limits import (
    MESSAGE_ID_BITS,
    MESSAGE_ID_MASK,
    MESSAGES_MAX,
    PUBLISHERS_AHEAD_BYTES_MAX,
    RESTORED_BYTES_BEYOND,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.purge import purge_messages
from simplebus.core.message_class.stored_frames import StoredFrameReader
from simplebus.core.producer_state import NumberBitmap, distance
from simplebus.core.protocol.frames import FrameBatch, Integers
from simplebus.core.redelivery.ack_timer import covering
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import DeliveryPolicy
from simplebus.core.redelivery.handover import Left
from simplebus.core.ring.columns import MessageRows, Times
from simplebus.core.ring.ring import Ring
from simplebus.core.session.version2 import message_numbers
from simplebus.core.snapshot import Image, ClassSnapshot, PositionSnapshot, KeptPublisher, KeptRefusal

_HALF_NUMBER_RANGE = 1 << (MESSAGE_ID_BITS - 1)


class RestoreError(BusError):
    """What was kept does not fit into this broker."""


class NumberTrust(enum.Enum):
    """What of publishers' numbers is believed: see the module's law."""

    ALL = enum.auto()
    UNTIL_FIRST_GAP = enum.auto()
    """Up to the first that is not stored; not what lies behind it."""
    UNTIL_CONTRADICTED = enum.auto()
    """Only as long as their programs say nothing else."""


def choose_number_trust(image: RecoveredState, default_durability: Durability, boot_id: str) -> NumberTrust:
    """Of what a snapshot and its changes say, in this run of the machine. `level` is meant where
    the snapshot does not say how safe it was."""
    was = default_durability if image.level is None else image.level
    if was >= Durability.DISK:
        return NumberTrust.ALL
    if image.boot != boot_id:
        return NumberTrust.UNTIL_CONTRADICTED
    return NumberTrust.ALL if was >= Durability.OS else NumberTrust.UNTIL_FIRST_GAP


class BrokerRestorer:
    """Of one fresh broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._stored_frames = StoredFrameReader(broker.store)
        self.split_frames = self._stored_frames.split_frames
        self._budgets = (
            broker.store.class_registry.budget,
            broker.store.class_registry.dead_letter_budget,
        )
        for budget in self._budgets:
            budget.beyond = _restore_headroom_bytes(budget.limit)

    def open_class(self, class_id: int, name: str) -> MessageClass:
        """A class that is to be there. Raises RemoteProtocolError (too_many_classes)."""
        are_own = are_kept_in(name)
        self._broker.store.class_registry.create_classes([(class_id, name)], are_internal=are_own)
        return self._broker.classes[class_id]

    def append_messages(
        self, cls: MessageClass, first: int, batch: FrameBatch, accepted_times: Times
    ) -> None:
        """Messages that follow those that are there, the first one with sequence `first`, and when
        each was accepted. Raises RestoreError."""
        assert cls.ring.head == first, (cls.ring.head, first)
        try:
            for run, rows in self._stored_frames.iter_runs(cls, batch, accepted_times):
                self._append_run(cls, run, rows)
        except ValueError as error:
            raise RestoreError(f"class {cls.class_id}: {error}") from None
        except MemoryError:
            ring = cls.ring.statistics()
            raise RestoreError(
                f"class {cls.class_id} holds more than fits: {ring.messages} messages in "
                f"{ring.memory_bytes} bytes and further ones; more memory for the class or for "
                "all classes is needed, or the policy spill"
            ) from None

    def _append_run(self, cls: MessageClass, run: FrameBatch, rows: MessageRows | None) -> None:
        """Raises MemoryError unless it fits."""
        ring, spill = cls.ring, cls.spill
        taken = ring.append(run, 0, rows)
        while taken < run.count and spill is not None:
            rest = run.slice(taken, run.count)
            if not spill.evict_spilled(rest.data.size):
                break
            taken += ring.append(rest, 0, _remaining_rows(rows, taken))
        if taken < run.count:
            with _raised_ring_limits(ring):
                taken += ring.append(run.slice(taken, run.count), 0, _remaining_rows(rows, taken))
        if taken < run.count:
            raise MemoryError

    def restore_backlog(
        self, cls: MessageClass, kept: ClassSnapshot | None, known_head: int | None
    ) -> None:
        """What waits in a class whose messages are all there. What is kept is about messages below
        `known_head`, if that is given."""
        ring = cls.ring
        cls.backlog_window = AckWindow(floor=cls.first_sequence)
        if kept is not None:
            cls.creator = kept.maker
            head = ring.head if known_head is None else known_head
            window = cls.backlog_window = kept.waiting.window(floor=cls.first_sequence, head=head)
            sent = [(window.floor, head, 1)] if kept.sent is None else kept.sent
            # Should the clock have been set back, nothing waits longer for that.
            told = min(kept.told, self._broker.clock.now)
            pauses = [(first, last, told + pause) for first, last, pause in kept.pauses]
            cls.backlog_handover = Left(sent, times=pauses).within(window.floor, head)

    def restore_position(self, kept: PositionSnapshot, known_head: int | None) -> None:
        """A durable, with nobody connected to it. What was in flight is to be sent again. What is
        kept is about messages below `known_head`, if that is given."""
        broker = self._broker
        cls = broker.classes[kept.class_id]
        head = cls.ring.head if known_head is None else known_head
        window = kept.window.window(floor=cls.first_sequence, head=head)
        terms = DeliveryPolicy(
            ack_timeout_ticks=kept.ack_ticks,
            in_flight_max=kept.in_flight_max,
            deliveries_max=kept.deliveries_max,
            pending_max=kept.pending_max,
            slow_policy=kept.slow,
            accepts_envelopes=True,
            backoff_ticks=kept.backoff_ticks,
        )
        spans = covering(window.floor, window.cursor, kept.attempts, otherwise=1)
        position = broker.connection_requests.restore_position(cls, kept, terms, window, spans)
        if position is None:
            raise RestoreError(
                f"the durable {kept.durable!r} of class {kept.class_id} has "
                f"{len(kept.channels)} patterns, for which there is no memory"
            )

    def restore_purge(self, class_id: int, first: int, last: int, known_head: int | None) -> None:
        """Nobody is to have these, as far as they are below `known_head`, if that is given."""
        cls = self._broker.classes.get(class_id)
        if cls is not None:
            purge_messages(cls, first, last if known_head is None else min(last, known_head), None)
            cls.dropped_counts.clear()  # That was counted when it happened.

    def finish(self) -> None:
        """All is there: let go of what nobody needs, and have limits hold again."""
        for cls in self._broker.classes.values():
            cls.trim(self._broker.clock.now)
        for budget in self._budgets:
            budget.beyond = 0
        for cls in self._broker.classes.values():
            cls.ring.trim()

    def mark_producers_incomplete(self) -> None:
        """Of some publishers nothing may be left that was known of them."""
        self._broker.connection_requests.producer_states.may_have_lost = True

    def restore_producer(
        self,
        kept: ProducerSnapshot,
        stored: StoredNumbers,
        refusals: list[RefusalSnapshot],
        trust: NumberTrust = NumberTrust.ALL,
    ) -> None:
        """Every number of this publisher before its next is stored, and these are, as far as that
        is believed; and what it may not have heard."""
        following, ahead = find_next_number(kept.next, stored)
        if trust is not NumberTrust.ALL:
            # It was perhaps told more than is back. Then it uses the numbers from `following` on
            # again, for other messages: better one is stored twice than another one never.
            ahead = None
            refusals = [
                each for each in refusals if distance(each.first + each.count, following) >= 0
            ]
        reasons = set(Reason)
        self._broker.connection_requests.producer_states.restore(
            kept.name,
            following,
            ahead,
            self._broker.clock.now,
            instance=kept.instance,
            refusals=[each.refused() for each in refusals if each.reason in reasons],
            is_doubted=kept.is_doubted or trust is NumberTrust.UNTIL_CONTRADICTED,
        )


def _restore_headroom_bytes(limit: int) -> int:
    return limit // 2 + RESTORED_BYTES_BEYOND


def _remaining_rows(rows: MessageRows | None, stored_count: int) -> MessageRows | None:
    return None if rows is None else rows.slice(stored_count, rows.count)


@contextmanager
def _raised_ring_limits(ring: Ring) -> Iterator[None]:
    """A ring may hold more than it may otherwise, meanwhile."""
    limits = ring.messages_max, ring.bytes_max
    ring.messages_max, ring.bytes_max = (
        MESSAGES_MAX,
        ring.bytes_max + _restore_headroom_bytes(ring.bytes_max),
    )
    try:
        yield
    finally:
        ring.messages_max, ring.bytes_max = limits


@dataclass(slots=True)
class StoredNumbers:
    """Of one publisher, those of which it is known that they are stored: in rows, which may overlap
    and come in any order."""

    firsts: list[Integers] = field(default_factory=list)
    counts: list[Integers] = field(default_factory=list)

    def add_range(self, first: int, count: int) -> None:
        self.firsts.append(np.array([first]))
        self.counts.append(np.array([count]))

    def add_array(self, numbers: Integers) -> None:
        """Shape (n,), one at least, in the order in which they came."""
        bounds = np.r_[0, np.flatnonzero(np.diff(numbers) != 1) + 1, numbers.size]
        self.firsts.append(numbers[bounds[:-1]])
        self.counts.append(np.diff(bounds))


def collect_producer_numbers(
    numbers_by_producer: dict[str, StoredNumbers],
    batches: Iterable[FrameBatch],
    producer_runs: list[tuple[int, str]],
) -> None:
    """Add the numbers that messages carry to those of their publishers. `publishers` says how many
    messages in a row are whose; "" is for nobody's."""
    numbers = np.concatenate([message_numbers(batch) for batch in batches])
    at = 0
    for count, name in producer_runs:
        if name:
            numbers_by_producer.setdefault(name, StoredNumbers()).add_array(
                numbers[at : at + count]
            )
        at += count


def find_next_number(next_number: int, stored: StoredNumbers) -> tuple[int, NumberBitmap | None]:
    """Where a publisher goes on, of whom every number before `following` is stored, and these are;
    and which numbers behind that are stored, too."""
    if not stored.firsts:
        return next_number, None
    firsts = np.concatenate(stored.firsts)
    begins = ((firsts - next_number + _HALF_NUMBER_RANGE) & MESSAGE_ID_MASK) - _HALF_NUMBER_RANGE
    order = np.argsort(begins, kind="stable")
    ends = (begins + np.concatenate(stored.counts))[order]
    begins = begins[order]
    reached = np.maximum.accumulate(np.r_[0, ends])
    gaps = np.flatnonzero(begins > reached[:-1])
    if not gaps.size:
        return (next_number + int(reached[-1])) & MESSAGE_ID_MASK, None
    gap = int(gaps[0])
    begin, end = int(reached[gap]), int(reached[-1])
    number = (next_number + begin) & MESSAGE_ID_MASK
    if end - begin > 8 * PUBLISHERS_AHEAD_BYTES_MAX:
        return number, None
    steps = np.zeros(end - begin + 1, np.int32)
    np.add.at(steps, begins[gap:] - begin, 1)
    np.subtract.at(steps, ends[gap:] - begin, 1)
    return number, NumberBitmap.of(number, np.cumsum(steps[:-1]) > 0)
