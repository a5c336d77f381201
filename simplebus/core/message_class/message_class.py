"""Message class: a ring, its positions and backlog, and the floor below which messages are freed.

The floor is the lowest one of the positions and the backlog. Retention and last values can keep
older messages. The backlog is taken over by the first subscription with the start position
"waiting"; other subscriptions do not change it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.group.group import AnyGroup, GroupMember
from simplebus.core.limits import (
    COUNTED_POSITIONS_PER_STEP,
    DELIMITER_BYTES,
    HEADER_BYTES,
    SEQUENCE_MAX,
    TIME_INDEX_STEP_SECONDS,
    TIME_INDEX_STEPS_MAX,
)
from simplebus.core.message_class.floor_index import FloorIndex
from simplebus.core.message_class.last_values import LastValues
from simplebus.core.protocol import envelope
from simplebus.core.protocol.requests import Start, SubscribeRequest
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.handover import PositionHandover
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.ring.columns import NEVER, NO_DELAY, MessageRow
from simplebus.core.ring.ring import Ring
from simplebus.core.session.session import Session
from simplebus.core.settings import FullPolicy, Retention
from simplebus.core.statistics import ClassStatistics
from simplebus.core.steps import drain_list, run_to_end
from simplebus.core.subscription.channel_filter import ChannelFilter, ChannelTable
from simplebus.core.subscription.position import ClassDeliveries, Position
from simplebus.core.subscription.subscription import BrokerSubscription

if TYPE_CHECKING:
    from simplebus.core.message_class.remote_storage import RemoteStorage
    from simplebus.core.message_class.spill import ClassSpill


NO_PROBE = SEQUENCE_MAX
"""Value of `MessageClass.probe_sequence` while no message is measured."""


class ProbeObserver(Protocol):
    """Observer of the ack latencies of single messages, one of a class at a time.

    Times are in seconds since 1970.
    """

    def observe_probe(self, cls: MessageClass, now: float) -> None:
        """Record that all positions have acknowledged `cls.probe_sequence`.

        The message is still in the ring, unless it was purged.
        """


class MessageClass:
    """State of one class. The store, the broker and the spill manager change it."""

    is_remote = False
    """True if another system stores the messages; the ring holds the unpublished ones."""

    remote_storage: RemoteStorage | None = None
    """Storage of a remote class."""

    def __init__(
        self, ring: Ring, retention: Retention, full_policy: FullPolicy = FullPolicy.BLOCK
    ) -> None:
        self.class_id = ring.class_id
        self.name = ""
        """Name, or empty; see `label`."""
        self.creator = ""
        """Name of the user who created the class; empty if unknown."""
        self.created_by = ""
        """Description of the client that created the class; empty for other classes, and for all
        classes from before the start of the server.
        """
        self.creator_address = ""
        """Address of the client that created the class; empty if unknown."""
        self.session_count = 0
        """Open sessions that have declared the class."""
        self.idle_since: tuple[float, int] | None = None
        """Time and head when the class was first found unused; None since it was used."""
        self.full_policy = full_policy
        self.ring = ring
        self.set_retention(retention)
        self.has_last_values = False
        """True if the last value of each channel is kept."""
        self.are_last_values_requested = False
        """True if an authorized client has requested last values."""
        self.last_values = LastValues(ring)
        self.compacted_count = 0
        """Last values that compaction has copied to the head."""
        self.pending_floors: deque[tuple[int, int]] = deque()
        """Unfinished compactions as (log position, floor).

        The journal must keep messages from the floor on until the log position is durable.
        """
        self.channels = ChannelTable(ring)
        self.time_index = TimeIndex()
        self.positions: dict[Position, None] = {}
        """All positions, including durables and groups."""
        self._floor_index = FloorIndex()
        self.subscriptions: dict[Position, BrokerSubscription] = {}
        """Subscriptions by position, without groups."""
        self.groups: dict[Position, AnyGroup] = {}
        """Groups by position."""
        self.limited_positions: dict[Position, None] = {}
        """Positions that limit their own backlog."""
        self.named_positions: dict[tuple[str, str], Position] = {}
        """Durables and groups by `position_key`."""
        self.backlog_window = AckWindow(floor=ring.head)
        """Ack window of the backlog."""
        self.backlog_state: Position | PositionHandover = PositionHandover()
        """Attempts and delays of the backlog's messages: the last position, or ranges."""
        self.spill: ClassSpill | None = None
        """Spill state; None if the class fits in memory."""
        self.blocked_sessions: deque[Session] = deque()
        """Sessions whose first parked message is of this class, longest wait first."""
        self.dropped_counts: Counter[Reason] = Counter()
        self.purged_sequences = SequenceSet()
        """Purged sequences that are still stored, and possibly some older sequences."""
        self.deliveries = ClassDeliveries()
        """First deliveries to all positions, the removed ones included."""
        self.redelivered_count = self.acknowledged_count = 0
        """Totals of removed positions."""
        self.probe_sequence = NO_PROBE
        """Message whose ack latency is being measured, until all positions have acknowledged it."""
        self.probe_accepted_at = 0.0
        """Time when the probe was accepted."""
        self.probe_observer: ProbeObserver | None = None
        """Receives the measured latencies; None to measure nothing."""

    def set_creator(self, user: str, address: str, description: str = "") -> None:
        """Record who created the class."""
        self.creator, self.creator_address, self.created_by = user, address, description

    def add_session(self) -> None:
        """Record that a session has declared the class."""
        self.session_count += 1
        self.idle_since = None

    def remove_session(self) -> None:
        """Record that a session that declared the class has ended."""
        self.session_count -= 1

    @property
    def is_unused(self) -> bool:
        """True if the class stores nothing, and nothing of it refers to a client."""
        return not (
            self.session_count
            or self.positions
            or self.blocked_sessions
            or self.first_sequence != self.ring.head
            or self.pending_floors
            or self.is_remote
        )

    @property
    def has_memory(self) -> bool:
        """True if the class holds memory, which an idle class returns after some ticks."""
        return self.ring.statistics().memory_bytes > 0 or self.channels.memory_bytes > 0

    def measure_idle_seconds(self, now: float) -> float:
        """Return for how many seconds the class has been unused, as far as this was called
        before.
        """
        if not self.is_unused:
            self.idle_since = None
            return 0.0
        since, head = self.idle_since or (now, self.ring.head)
        if head != self.ring.head or now < since:  # Or the clock was set back.
            since = now
        self.idle_since = since, self.ring.head
        return now - since

    def set_retention(self, retention: Retention) -> None:
        self.retention = retention
        self._has_retention = bool(retention)

    @property
    def first_sequence(self) -> int:
        """Lowest stored sequence, in memory or on disk."""
        return self.ring.floor if self.spill is None else self.spill.first_sequence

    @property
    def unavailable_reason(self) -> str:
        """Reason why a remote class accepts no messages; empty if it accepts them."""
        return ""

    @property
    def can_evict(self) -> bool:
        """True if `evict` can free space."""
        return self._has_retention or self.has_last_values or self.spill is not None

    @property
    def has_backlog(self) -> bool:
        """True if messages wait for a future subscription."""
        return not self.positions or self.backlog_window.floor < self.backlog_window.cursor

    @property
    def has_lagging_consumer(self) -> bool:
        """True if a connected position has unacknowledged messages."""
        head = self.ring.head
        groups = (group.position for group in self.groups.values() if group.members)
        return any(position.window.floor < head for position in (*self.subscriptions, *groups))

    @property
    def backlog_handover(self) -> PositionHandover:
        """Attempts and delays of the backlog's messages as ranges."""
        state = self.backlog_state
        return state if isinstance(state, PositionHandover) else state.build_handover()

    @property
    def is_floor_exact(self) -> bool:
        """False if the last result of `floor` may be too low."""
        return self._floor_index.is_exact

    def floor(self) -> int:
        """Return the lowest sequence that a position or the backlog needs.

        With very many positions, a result may be too low at first: see `is_floor_exact`.
        """
        if not self.positions:
            return self.backlog_window.floor
        floor = self._floor_index.lowest_floor()
        if self.backlog_window.floor < self.backlog_window.cursor:
            return min(floor, self.backlog_window.floor)
        return floor

    def record_accepted(self, now: float, first_sequence: int) -> None:
        """Record that messages from `first_sequence` on were accepted at `now`."""
        self.time_index.record(now, first_sequence)
        if self.probe_sequence == NO_PROBE:
            self.probe_sequence, self.probe_accepted_at = first_sequence, now

    def accepted_at(self, position: Position, sequence: int) -> float:
        """Return the Unix time at which a message of `position` was accepted; 0.0 if unknown."""
        return self.time_index.time_of(sequence)

    def trim(self, now: float) -> None:
        """Free all messages that are no longer needed."""
        floor = self.compute_retained_floor(now)
        if self.has_last_values:
            floor = self.last_values.lowest_value(floor, now)
        self.release_below(floor)

    def compute_retained_floor(self, now: float) -> int:
        """Return the lowest sequence that is needed or retained, last values not considered."""
        floor = self.floor()
        if floor > self.probe_sequence:
            if self.probe_observer is not None:
                self.probe_observer.observe_probe(self, now)
            self.probe_sequence = NO_PROBE
        if self._has_retention and floor > self.first_sequence:
            floor = min(floor, self._compute_retention_floor(now))
        return floor

    def compute_durable_floor(self, durable_position: int) -> int:
        """Return the lowest sequence that the journal must keep.

        `durable_position` is the log position that the journal has reached.
        """
        while self.pending_floors and self.pending_floors[0][0] <= durable_position:
            self.pending_floors.popleft()
        return self.pending_floors[0][1] if self.pending_floors else self.first_sequence

    def on_dead_lettered(
        self, position: Position, ranges: list[tuple[int, int]], dead_letter_class_id: int
    ) -> None:
        """Handle that messages of `position` were dead-lettered. For remote classes."""

    def release_below(self, floor: int) -> None:
        """Free all messages below `floor`, in memory and on disk."""
        self.ring.release(floor)
        if self.spill is not None:
            self.spill.release_below(floor)

    def evict(self, size_bytes: int) -> bool:
        """Free at least `size_bytes` of retained or spilled messages from the ring.

        Returns:
            False if nothing could be freed.
        """
        if self.spill is not None and self.full_policy is FullPolicy.SPILL:
            return self.spill.evict_spilled(size_bytes)
        ring, floor = self.ring, self.floor()
        if floor <= ring.floor:
            return False
        if not self._has_retention:
            return False
        ring.release(min(floor, max(ring.sequence_after_bytes(size_bytes), ring.floor + 1)))
        return True

    def _compute_retention_floor(self, now: float) -> int:
        ring, retention, spill = self.ring, self.retention, self.spill
        floor = self.first_sequence
        if retention.messages:
            floor = max(floor, ring.head - retention.messages)
        if retention.bytes and ring.frame_bytes > retention.bytes:
            floor = max(floor, ring.sequence_after_bytes(ring.frame_bytes - retention.bytes))
        elif retention.bytes and spill is not None:
            excess_bytes = spill.frame_bytes + ring.frame_bytes - retention.bytes
            if excess_bytes > 0:
                floor = max(floor, spill.sequence_after(excess_bytes))
        if retention.seconds:
            oldest = self.time_index.find_sequence(now - retention.seconds, ring.head)
            floor = max(floor, min(oldest, ring.head))
        return floor

    @property
    def label(self) -> str:
        """Name of the class, or its id if it has none."""
        return self.name or str(self.class_id)

    def count_undelivered(self) -> Counter[Reason]:
        """Return the messages that were dropped or not delivered to some position, by reason."""
        return run_to_end(self.count_undelivered_in_steps())

    def count_undelivered_in_steps(self) -> Generator[None, None, Counter[Reason]]:
        """Return the same in steps. A position that ends meanwhile is counted once."""
        counts = Counter(self.dropped_counts) if self.dropped_counts else Counter[Reason]()
        for number, position in enumerate(drain_list(list(self.positions)), 1):
            if number % COUNTED_POSITIONS_PER_STEP == 0:
                yield
            if position.undelivered_counts:
                counts.update(position.undelivered_counts)
        return counts

    def ring_for_new_position(self) -> Ring:
        """Return the ring from which a new position reads. Remote classes create one for each."""
        return self.ring

    # Positions -----------------------------------------------------------------------------------

    def check_subscribe_request(self, request: SubscribeRequest) -> None:
        """Raise RemoteProtocolError if this kind of class does not support the request."""

    def forget_position(self, position: Position) -> None:
        """Forget a position that is about to be removed for good. For remote classes."""

    def has_remote_position(self, position: Position) -> bool | None:
        """Return True if the remote storage knew this position before; None while unknown."""
        return False

    @staticmethod
    def position_key(durable: str, group: str) -> tuple[str, str]:
        """Return the key in `named_positions`: a durable's own name, else the group's."""
        return (durable, "") if durable else ("", group)

    def add_position(self, position: Position, group: AnyGroup | None = None) -> None:
        """Add a position, and the group that shares it.

        A position with the same name must be removed afterwards.
        """
        self.idle_since = None
        self.positions[position] = None
        self._floor_index.add(position)
        if self.spill is not None:
            self.spill.add_position(position)
        if group is not None:
            self.groups[position] = group
        if position.durable or position.group:
            self.named_positions[self.position_key(position.durable, position.group)] = position

    def enqueue_position(self, position: Position) -> None:
        """Queue the messages of a position for sending."""
        if (group := self.groups.get(position)) is not None:
            group.distribute_messages()
        elif (subscription := self.subscriptions.get(position)) is not None:
            subscription.outbox.enqueue(subscription)

    def find_subscriptions(self, position: Position) -> list[BrokerSubscription | GroupMember]:
        """Return the subscription of a position, or the members of a group."""
        if (group := self.groups.get(position)) is not None:
            return list(group.members)
        subscription = self.subscriptions.get(position)
        return [] if subscription is None else [subscription]

    def group_or_position(self, position: Position) -> AnyGroup | Position:
        """Return the group that shares a position, or the position itself if no group shares it."""
        return self.groups.get(position, position)

    def remove_position(self, position: Position) -> None:
        """Remove a position for good. Its totals are kept.

        If it was the last position, its unacknowledged messages join the backlog.
        """
        del self.positions[position]
        self._floor_index.remove(position)
        if self.spill is not None:
            self.spill.remove_position(position)
        self.limited_positions.pop(position, None)
        if (group := self.groups.pop(position, None)) is not None:
            group.cancel_wakeups()
        key = self.position_key(position.durable, position.group)
        if self.named_positions.get(key) is position:
            del self.named_positions[key]
        if position.channel_filter is not None:
            self.channels.remove_filter(position.channel_filter)
        self.redelivered_count += position.redelivered_count
        self.acknowledged_count += position.acknowledged_count
        self.dropped_counts.update(position.undelivered_counts)
        if not self.positions:
            self._add_to_backlog(position)

    def create_window(
        self, start: str | Start, channel_filter: ChannelFilter | None = None, now: float = 0.0
    ) -> tuple[AckWindow, Position | PositionHandover]:
        """Create the ack window of a new position.

        Args:
            start: Start position of the subscribe request.
            channel_filter: Wanted channels, for the start "last_values"; None for all.

        Returns:
            The window, and the delivery state of its unacknowledged messages as in `backlog_state`.

        Raises:
            ValueError: The start position is not valid for this class.
        """
        ring = self.ring
        match start:
            case "waiting" if self.has_backlog:
                return self._take_over_backlog()
            case "waiting":
                return AckWindow(floor=ring.head), PositionHandover()
            case "new":
                floor = ring.head
            case "earliest":
                floor = self.first_sequence
            case "last":
                floor = ring.head - 1
            case "last_values":
                if self.spill is not None:
                    raise ValueError(
                        f"class {self.label} spills to disk and therefore keeps no last values"
                    )
                return self._create_last_values_window(channel_filter, now), PositionHandover()
            case Start(sequence=int(sequence), time=None):
                floor = sequence
            case Start(sequence=None, time=float(time)):
                floor = self.time_index.find_sequence(time, ring.head)
            case _:
                raise ValueError(
                    'start is "waiting", "new", "earliest", "last", "last_values", '
                    f'{{"sequence": n}} or {{"time": seconds}}, got {start!r}'
                )
        self._extend_backlog_to_head()
        return AckWindow(floor=min(max(floor, self.first_sequence), ring.head)), PositionHandover()

    def _extend_backlog_to_head(self) -> None:
        """Keep all stored messages in the backlog. The new position does not take it over."""
        if not self.positions:
            self.backlog_window.cursor = max(self.backlog_window.cursor, self.ring.head)

    def _create_last_values_window(
        self, channel_filter: ChannelFilter | None, now: float
    ) -> AckWindow:
        """Return a window with everything but the last values of the channels acknowledged."""
        ring = self.ring
        sequences = self.last_values.find_sequences(ring.floor, ring.head, now)
        if channel_filter is not None:
            is_wanted = channel_filter.match_numbers(ring.read_rows_at(sequences).channels)
            sequences = sequences[np.broadcast_to(is_wanted, sequences.shape)]
        self._extend_backlog_to_head()
        window = AckWindow(floor=int(sequences[0]) if sequences.size else ring.head)
        window.cursor = ring.head
        acked = np.ones(window.cursor - window.floor, np.bool_)
        acked[sequences - window.floor] = False
        window.restore_acked(acked)
        return window

    def _take_over_backlog(self) -> tuple[AckWindow, Position | PositionHandover]:
        state, self.backlog_state = self.backlog_state, PositionHandover()
        window, head = self.backlog_window, self.ring.head
        if self.positions and window.cursor < head:
            # Later messages were for the existing positions.
            backlog_end, window.cursor = window.cursor, head
            window.ack_range(backlog_end, head)
        self.backlog_window = AckWindow(floor=head)
        return window, state

    def _add_to_backlog(self, position: Position) -> None:
        """Add the unacknowledged messages of the last position to the backlog.

        The position itself is kept, unless another position was kept before: converting its state
        into ranges takes long if there are many ranges.
        """
        window = position.window
        old_state: Position | PositionHandover = PositionHandover()
        if self.backlog_window.floor < self.backlog_window.cursor:
            window, old_state = window.merge_unacked(self.backlog_window), self.backlog_state
        if old_state != PositionHandover():
            handover = position.build_handover().merge(self.backlog_handover)
            self.backlog_state = handover.restrict_to(window.floor, window.cursor)
        elif position.window.floor < position.window.cursor:
            position.end()
            self.backlog_state = position
        else:
            self.backlog_state = PositionHandover()
        self.backlog_window = window

    def check_invariants(self) -> None:
        """Raise AssertionError if the floor index returns a wrong floor, or too few messages are
        counted as delivered.
        """
        delivered = sum(position.delivered_count for position in self.positions)
        assert self.deliveries.count >= delivered, (self.deliveries.count, delivered)
        if self.positions:
            lowest = min(position.window.floor for position in self.positions)
            while (floor := self._floor_index.lowest_floor()) != lowest:
                assert not self._floor_index.is_exact, (floor, lowest)

    def statistics(self, now: float = 0.0) -> ClassStatistics:
        subscriptions = tuple(
            self.group_or_position(position).statistics() for position in self.positions
        )
        return ClassStatistics(
            class_id=self.class_id,
            name=self.name,
            ring=self.ring.statistics(),
            spilled=self.spill.message_count if self.spill is not None else 0,
            spilled_bytes=self.spill.frame_bytes if self.spill is not None else 0,
            published=self.ring.head - self.compacted_count,
            delivered=self.deliveries.count,
            redelivered=self.redelivered_count + sum(s.redelivered for s in subscriptions),
            acknowledged=self.acknowledged_count + sum(s.acknowledged for s in subscriptions),
            in_flight=sum(s.in_flight for s in subscriptions),
            dropped=dict(self.count_undelivered()),
            blocked_sessions=len(self.blocked_sessions),
            parked=sum(
                batch.count
                for session in self.blocked_sessions
                for class_id, batch in session.parked_messages
                if class_id == self.class_id
            ),
            channels=len(self.channels),
            subscriptions=subscriptions,
            last_values=self.last_values.count_values(now) if self.has_last_values else 0,
            carried=self.compacted_count,
        )


class TimeIndex:
    """Unix times at which messages were accepted, in steps of TIME_INDEX_STEP_SECONDS.

    With more than TIME_INDEX_STEPS_MAX steps, the steps become longer.

        start times        12.00     12.01     57.30    when the step's first message was accepted
        end times          12.01     12.02     57.31    a message from then on begins a new step
        first sequences    0         40        95       sequence of the step's first message
    """

    def __init__(self) -> None:
        self._start_times: list[float] = []
        self._end_times: list[float] = []
        self._first_sequences: list[int] = []
        self._step_seconds = TIME_INDEX_STEP_SECONDS
        self.next_step_time = float("-inf")
        """`record` need not be called before this time."""

    def __len__(self) -> int:
        return len(self._start_times)

    def record(self, now: float, sequence: int) -> None:
        """Record that the message with this sequence, and later ones, arrive from `now` on."""
        if now < self.next_step_time:
            return
        self.next_step_time = now + self._step_seconds
        self._start_times.append(now)
        self._end_times.append(self.next_step_time)
        self._first_sequences.append(sequence)
        if (
            len(self._start_times) > TIME_INDEX_STEPS_MAX
        ):  # Merge pairs of steps and double the step length.
            last = self._end_times[-1:] * (len(self._end_times) % 2)
            self._end_times = self._end_times[1::2] + last
            self._start_times, self._first_sequences = (
                self._start_times[::2],
                self._first_sequences[::2],
            )
            self._step_seconds *= 2

    def find_sequence(self, time: float, head: int) -> int:
        """Return the first sequence that was possibly accepted at `time` or later, or `head`.

        At most one step of earlier messages is included.
        """
        index = bisect_right(self._start_times, time) - 1
        if index < 0:
            return 0
        if time >= self._end_times[index]:
            index += 1
        return self._first_sequences[index] if index < len(self._first_sequences) else head

    def time_of(self, sequence: int) -> float:
        """Return the approximate Unix time at which a message was accepted; 0.0 if unknown."""
        index = bisect_right(self._first_sequences, sequence) - 1
        return self._start_times[index] if index >= 0 else 0.0

    def list_steps(self, first: int, last: int, *, max_count: int) -> list[tuple[int, float]]:
        """Return (first sequence, start time) of the steps of messages `first` to `last - 1`.

        At most `max_count` steps are returned, the earliest ones. The messages must be stored.
        """
        if first >= last:
            return []
        begin = max(0, bisect_right(self._first_sequences, first) - 1)
        end = min(bisect_left(self._first_sequences, last), begin + max_count)
        return list(
            zip(self._first_sequences[begin:end], self._start_times[begin:end], strict=True)
        )

    def trim(self, floor: int) -> None:
        """Forget the times of messages below `floor`."""
        count = bisect_right(self._first_sequences, floor) - 1
        if count > 0:
            del self._start_times[:count], self._end_times[:count], self._first_sequences[:count]
            while (
                self._step_seconds > TIME_INDEX_STEP_SECONDS
                and len(self._start_times) < TIME_INDEX_STEPS_MAX // 4
            ):
                self._step_seconds /= 2


def build_row(cls: MessageClass, frame: memoryview, now: float) -> MessageRow | None:
    """Return the column values of one envelope frame.

    None if the envelope is not valid, or there is no memory for its channel.
    """
    try:
        channel, _, expires_ms, not_before_ms = envelope.decode_stored_fields(
            bytes(frame[HEADER_BYTES:-DELIMITER_BYTES])
        )
    except RemoteProtocolError:
        return None
    number = cls.channels.intern_name(channel)
    if number is None:
        return None
    return MessageRow(
        number,
        NEVER if expires_ms is None else now + expires_ms / 1000,
        NO_DELAY if not not_before_ms else now + not_before_ms / 1000,
    )


def class_label(classes: Mapping[int, MessageClass], class_id: int) -> str:
    """Return the name of a class, or its id if it has none or does not exist."""
    cls = classes.get(class_id)
    return str(class_id) if cls is None else cls.label
