"""Restore: rebuilds a broker from its recovered state and messages, before the first connection.

The order is: for each class its messages and its backlog; then positions, purges and producers.
Recovery may find messages that were released just before a crash, so the messages may exceed the
limits until `finish`. If they do not fit into memory at all, nothing is dropped, and RestoreError
describes which setting to change.

The records of messages are authoritative. The state is used only where an error in it cannot lose
messages:

    previous end      durability    files on disk                    publisher numbers used
    any               disk          as confirmed                     all
    process killed    os            as written; the state never      all
                      memory        refers to later messages         up to the first gap
    power failure     below disk    any part may be missing          only if publishers agree

Sequences in the state (positions, backlog, floors, purges) are limited to messages whose records
are older than the state, because later sequences were assigned again. If too few acks are known,
messages are redelivered. Names and refusals are always used.

A publisher may reuse a number above the first gap for another message, because its Connect reply
contained a lower number. A number below the gap may be missing after a power failure; its publisher
sends the message again. So such a producer state stays uncertain, across further restarts, until
the publisher confirms it.

Ids of messages are used only if all numbers are: an id without its message would lose the message
when its publisher sends it again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from simplebus.core.broker.broker import Broker
from simplebus.core.dead_letters import is_dead_letter_class
from simplebus.core.errors import BusError, Reason
from simplebus.core.limits import (
    MESSAGE_ID_BITS,
    MESSAGE_ID_MASK,
    MESSAGES_MAX,
    PRODUCER_BITMAPS_BYTES_MAX,
    RESTORE_HEADROOM_BYTES,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.purge import purge_messages
from simplebus.core.message_class.spill import empty_messages
from simplebus.core.message_class.stored_frames import StoredFrameReader
from simplebus.core.producer_state import NumberBitmap, number_distance
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.frames import FrameBatch, Integers
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import DeliveryPolicy
from simplebus.core.redelivery.handover import PositionHandover
from simplebus.core.redelivery.timer_wheel import spans_by_attempts
from simplebus.core.ring.columns import MessageRows, Times
from simplebus.core.ring.ring import Ring
from simplebus.core.session.version2 import message_numbers
from simplebus.core.snapshot import (
    ClassSnapshot,
    MessageIdsSnapshot,
    PositionSnapshot,
    ProducerSnapshot,
    RecoveredState,
    RefusalSnapshot,
    RemovedClass,
)

# Empty messages that are appended together.
_MISSING_AT_ONCE = 65_536
_HALF_NUMBER_RANGE = 1 << (MESSAGE_ID_BITS - 1)


class RestoreError(BusError):
    """The recovered state does not fit into this broker."""


class NumberTrust(enum.Enum):
    """Extent to which recovered message numbers are used; see the table of the module."""

    ALL = enum.auto()
    UNTIL_FIRST_GAP = enum.auto()
    """Numbers up to the first number that is not stored, and no later numbers."""
    UNTIL_CONTRADICTED = enum.auto()
    """All numbers, until their publisher states another number."""


def choose_number_trust(
    recovered: RecoveredState, default_durability: Durability, boot_id: str
) -> NumberTrust:
    """Return how far to trust the message numbers of a recovered state.

    Args:
        recovered: The recovered state.
        default_durability: Durability to assume if the state does not name one.
        boot_id: Id of the current boot of the machine.
    """
    durability = default_durability if recovered.durability is None else recovered.durability
    if durability >= Durability.DISK:
        return NumberTrust.ALL
    if recovered.boot_id != boot_id:
        return NumberTrust.UNTIL_CONTRADICTED
    return NumberTrust.ALL if durability >= Durability.OS else NumberTrust.UNTIL_FIRST_GAP


class BrokerRestorer:
    """Fills one new broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._stored_frames = StoredFrameReader()
        self.split_frames = self._stored_frames.split_frames
        self._budgets = (
            broker.store.class_registry.budget,
            broker.store.class_registry.dead_letter_budget,
        )
        for budget in self._budgets:
            budget.overdraft_bytes = _restore_headroom_bytes(budget.limit_bytes)

    def open_class(self, class_id: int, name: str) -> MessageClass:
        """Create a class. Raises RemoteProtocolError (too_many_classes)."""
        is_internal = is_dead_letter_class(name)
        self._broker.store.class_registry.create_classes(
            [(class_id, name)], are_internal=is_internal
        )
        return self._broker.classes[class_id]

    def finish_removed_class(self, cls: MessageClass, removed: RemovedClass) -> None:
        """Remove a recovered class again that was removed before, unless it has messages."""
        if cls.first_sequence == cls.ring.head:
            cls.ring.set_next_sequence(max(cls.ring.head, removed.head))
            self._broker.store.class_registry.remove_class(cls.class_id)

    def append_messages(
        self, cls: MessageClass, first: int, batch: FrameBatch, accepted_times: Times
    ) -> None:
        """Append messages to a class.

        Args:
            cls: The class.
            first: Sequence of the first message; it must be the head of the class.
            batch: The messages.
            accepted_times: Time of acceptance of each message.

        Raises:
            RestoreError: if the messages do not fit into memory.
        """
        assert cls.ring.head == first, (cls.ring.head, first)
        try:
            for run, rows in self._stored_frames.iter_runs(cls.channels, batch, accepted_times):
                self._append_run(cls, run, rows)
        except ValueError as error:
            raise RestoreError(f"class {cls.label}: {error}") from None
        except MemoryError:
            ring = cls.ring.statistics()
            raise RestoreError(
                f"class {cls.label} holds more than fits into memory: {ring.message_count} "
                f"messages take {ring.memory_bytes} bytes, and there are more; raise the memory "
                "limit of the class or of all classes, or use the policy spill"
            ) from None

    def append_missing(self, cls: MessageClass, sequence: int) -> None:
        """Append empty messages up to `sequence`, in place of messages that cannot be read.

        `skip_missing` removes them. Raises RestoreError if they do not fit into memory.
        """
        while cls.ring.head < sequence:
            count = min(sequence - cls.ring.head, _MISSING_AT_ONCE)
            times = np.full(count, self._broker.clock.now)
            first = cls.ring.head
            self.append_messages(cls, first, empty_messages(cls.class_id, count), times)
            if cls.has_last_values:
                cls.last_values.skip_missing(first, cls.ring.head)

    def skip_missing(self, class_id: int, first: int, last: int, *, is_new: bool) -> None:
        """Skip needed messages first..last-1, which cannot be read.

        Each position that needs them counts them as undelivered. Without positions, the class
        counts them if they are not known to be missing: `is_new`.
        """
        cls = self._broker.classes[class_id]
        if is_new and not cls.positions:
            cls.dropped_counts[Reason.DAMAGED] += last - first
        first = max(first, cls.first_sequence)
        for position in cls.positions if first < last else ():
            position.skip_unavailable(first, last, Reason.DAMAGED)
        self.restore_purge(class_id, first, last, None)

    def _append_run(self, cls: MessageClass, run: FrameBatch, rows: MessageRows | None) -> None:
        """Append messages of one frame type. Raises MemoryError if they do not fit."""
        ring, spill = cls.ring, cls.spill
        stored = ring.append(run, 0, rows)
        while stored < run.count and spill is not None:
            remaining_frames = run.slice(stored, run.count)
            if not spill.evict_spilled(remaining_frames.data.size):
                break
            stored += ring.append(remaining_frames, 0, _remaining_rows(rows, stored))
        if stored < run.count:
            with _raised_ring_limits(ring):
                stored += ring.append(
                    run.slice(stored, run.count), 0, _remaining_rows(rows, stored)
                )
        if stored < run.count:
            raise MemoryError

    def restore_backlog(
        self, cls: MessageClass, snapshot: ClassSnapshot | None, known_head: int | None
    ) -> None:
        """Restore the backlog of a class whose messages are appended.

        `known_head` limits the snapshot to messages below it, if it is given.
        """
        ring = cls.ring
        cls.backlog_window = AckWindow(floor=cls.first_sequence)
        if snapshot is not None:
            cls.set_creator(snapshot.creator, snapshot.creator_address)
            self._broker.store.class_registry.count_creator(cls)
            head = ring.head if known_head is None else known_head
            window = cls.backlog_window = snapshot.backlog_window.to_window(
                floor=cls.first_sequence, head=head
            )
            sent = [(window.floor, head, 1)] if snapshot.attempts is None else snapshot.attempts
            # The clock may have been set back; delays must not grow because of that.
            taken_at = min(snapshot.taken_at, self._broker.clock.now)
            delays = [(first, last, taken_at + delay) for first, last, delay in snapshot.delays]
            cls.backlog_state = PositionHandover(sent, not_before_times=delays).restrict_to(
                window.floor, head
            )

    def restore_position(self, snapshot: PositionSnapshot, known_head: int | None) -> None:
        """Restore a durable without a connected subscription. Messages in flight will be
        redelivered.

        `known_head` limits the snapshot to messages below it, if it is given.
        """
        broker = self._broker
        cls = broker.classes[snapshot.class_id]
        head = cls.ring.head if known_head is None else known_head
        window = snapshot.window.to_window(floor=cls.first_sequence, head=head)
        policy = DeliveryPolicy(
            ack_timeout_ticks=snapshot.ack_timeout_ticks,
            in_flight_max=snapshot.in_flight_max,
            deliveries_max=snapshot.deliveries_max,
            pending_max=snapshot.pending_max,
            slow_policy=snapshot.slow_policy,
            accepts_envelopes=True,
            backoff_ticks=snapshot.backoff_ticks,
            backoff_seconds=snapshot.backoff_seconds,
        )
        spans = spans_by_attempts(window.floor, window.cursor, snapshot.attempts, default=1)
        position = broker.subscription_manager.restore_position(
            cls, snapshot, policy, window, spans
        )
        if position is None:
            raise RestoreError(
                f"the durable {snapshot.durable!r} of class {snapshot.class_id} has "
                f"{len(snapshot.patterns)} patterns, which do not fit into memory; raise the "
                "memory limit of all classes"
            )

    def restore_purge(self, class_id: int, first: int, last: int, known_head: int | None) -> None:
        """Purge messages again, limited to those below `known_head` if it is given."""
        cls = self._broker.classes.get(class_id)
        if cls is not None:
            purge_messages(cls, first, last if known_head is None else min(last, known_head), None)
            cls.dropped_counts.pop(Reason.PURGED, None)  # That was counted when it happened.

    def restore_message_ids(
        self, snapshots: list[MessageIdsSnapshot], stored: Iterable[tuple[int, bytes, int, float]]
    ) -> None:
        """Restore the ids of the latest messages, after all messages.

        Args:
            snapshots: Snapshots of the windows.
            stored: Ids found in messages that are newer than the snapshot, ascending by sequence:
                (class id, id, sequence, time of acceptance).
        """
        message_ids, now = self._broker.store.message_ids, self._broker.clock.now
        for window in snapshots:
            if (cls := self._broker.classes.get(window.class_id)) is not None:
                message_ids.restore(window, head=cls.ring.head, now=now)
        for class_id, message_id, sequence, time in stored:
            message_ids.add(class_id, message_id, sequence, time)

    def finish(self) -> None:
        """Release messages that no position needs, and enforce the limits again."""
        for cls in self._broker.classes.values():
            cls.trim(self._broker.clock.now)
        for budget in self._budgets:
            budget.overdraft_bytes = 0
        for cls in self._broker.classes.values():
            cls.ring.trim_to_limits()

    def mark_producers_incomplete(self) -> None:
        """Record that the states of some publishers may be lost."""
        self._broker.subscription_manager.producer_states.is_incomplete = True

    def restore_producer(
        self,
        snapshot: ProducerSnapshot,
        stored: StoredNumbers,
        refusals: list[RefusalSnapshot],
        trust: NumberTrust = NumberTrust.ALL,
    ) -> None:
        """Restore the state of a publisher.

        Args:
            snapshot: Snapshot of the state.
            stored: Numbers found in the messages' records.
            refusals: Refusals that the publisher may not have received.
            trust: How far numbers are used.
        """
        next_number, ahead = find_next_number(snapshot.next_number, stored)
        if trust is not NumberTrust.ALL:
            # A Connect reply may have contained a higher number than was recovered. The publisher
            # then reuses the numbers from `next_number` on: storing one message twice is better
            # than losing another message.
            ahead = None
            refusals = [
                refusal
                for refusal in refusals
                if number_distance(refusal.first_number + refusal.count, next_number) >= 0
            ]
        reasons = set(Reason)
        self._broker.subscription_manager.producer_states.restore(
            snapshot.name,
            next_number,
            ahead,
            self._broker.clock.now,
            instance=snapshot.instance,
            refusals=[refusal.to_refusal() for refusal in refusals if refusal.reason in reasons],
            is_uncertain=snapshot.is_uncertain or trust is NumberTrust.UNTIL_CONTRADICTED,
        )


def _restore_headroom_bytes(limit: int) -> int:
    return limit // 2 + RESTORE_HEADROOM_BYTES


def _remaining_rows(rows: MessageRows | None, stored_count: int) -> MessageRows | None:
    return None if rows is None else rows.slice(stored_count, rows.count)


@contextmanager
def _raised_ring_limits(ring: Ring) -> Iterator[None]:
    """Let a ring exceed its limits within the `with` block."""
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
    """Stored numbers of one publisher, as ranges that may overlap and are in any order."""

    firsts: list[Integers] = field(default_factory=list)
    counts: list[Integers] = field(default_factory=list)

    def add_range(self, first: int, count: int) -> None:
        self.firsts.append(np.array([first]))
        self.counts.append(np.array([count]))

    def add_array(self, numbers: Integers) -> None:
        """Add numbers in the order of their messages, shape (n,) with n >= 1."""
        bounds = np.r_[0, np.flatnonzero(np.diff(numbers) != 1) + 1, numbers.size]
        self.firsts.append(numbers[bounds[:-1]])
        self.counts.append(np.diff(bounds))


def collect_producer_numbers(
    numbers_by_producer: dict[str, StoredNumbers],
    batches: Iterable[FrameBatch],
    producer_runs: list[tuple[int, str]],
) -> None:
    """Add the message numbers of `batches` to the numbers of their publishers.

    `producer_runs` are (message count, producer key) for consecutive messages; the key is empty for
    messages without a number.
    """
    numbers = np.concatenate([message_numbers(batch) for batch in batches])
    at = 0
    for count, name in producer_runs:
        if name:
            numbers_by_producer.setdefault(name, StoredNumbers()).add_array(
                numbers[at : at + count]
            )
        at += count


def find_next_number(next_number: int, stored: StoredNumbers) -> tuple[int, NumberBitmap | None]:
    """Return the number at which a publisher continues, and the stored numbers above it.

    Args:
        next_number: Every number before it is stored.
        stored: Further stored numbers.
    """
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
    if end - begin > 8 * PRODUCER_BITMAPS_BYTES_MAX:
        return number, None
    steps = np.zeros(end - begin + 1, np.int32)
    np.add.at(steps, begins[gap:] - begin, 1)
    np.subtract.at(steps, ends[gap:] - begin, 1)
    return number, NumberBitmap.from_flags(number, np.cumsum(steps[:-1]) > 0)
