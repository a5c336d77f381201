"""One class: its ring, and everybody who has to do with it.

Rule 1: a class's floor is the lowest of its positions and of its backlog; what lies below is let go
of, unless the class is to keep it longer.
Rule 2: a class that keeps last values holds them below that floor, with what lies between them.
Rule 3: the backlog is what nobody was there for. It waits for the first subscription that asks for
what waits, whoever else comes and goes meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from typing import TYPE_CHECKING

import numpy as np

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.group.group import Group
from simplebus.core.histogram import Histogram
from simplebus.core.limits import (
    DELIMITER_BYTES,
    HEADER_BYTES,
    SEQUENCE_MAX,
    TIMES_MAX,
    TIMES_STEP_SECONDS,
)
from simplebus.core.message_class.floor_index import FloorIndex
from simplebus.core.message_class.last_values import LastValues
from simplebus.core.protocol import envelope_batch
from simplebus.core.protocol.requests import Start, SubscribeRequest
from simplebus.core.redelivery.ack_timer import SequenceSet
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.handover import Left
from simplebus.core.ring.columns import AT_ONCE, NEVER, Row
from simplebus.core.ring.ring import Ring
from simplebus.core.session.session import Session
from simplebus.core.settings import FullPolicy, Keep
from simplebus.core.statistics import ClassStatistics
from simplebus.core.subscription.channel_filter import ChannelFilter, ChannelTable
from simplebus.core.subscription.subscription import BrokerSubscription

if TYPE_CHECKING:
    from simplebus.core.message_class.remote_storage import RemoteStorage
    from simplebus.core.message_class.spill import ClassSpill


NO_PROBE = SEQUENCE_MAX


class MessageClass:
    """See the module's law."""

    is_remote = False
    """Whether its messages are kept elsewhere: what is stored here is on its way there."""

    remote_storage: RemoteStorage | None = None
    """Where these are."""

    def __init__(
        self, ring: Ring, retention: Keep, full_policy: FullPolicy = FullPolicy.BLOCK
    ) -> None:
        self.class_id = ring.class_id
        self.name = ""
        self.creator = ""
        """The user that named it first; empty where that is not known."""
        self.full_policy = full_policy
        """What happens when it is full."""
        self.ring = ring
        self.set_retention(retention)
        self.has_last_values = False
        """Whether it keeps the last message of each channel, besides everything else."""
        self.is_last_values_requested = False
        """Whether somebody has asked for that who may ask."""
        self.last_values = LastValues(ring)
        self.compacted_count = 0
        """Last values that were stored anew."""
        self.pending_floors: deque[tuple[int, int]] = deque()
        """What was stored anew is as safe as was asked for when these lots are; until then, from
        where on it is to be kept past the process."""
        self.channels = ChannelTable(ring)
        self.time_index = TimeIndex()
        self.subscriptions: dict[BrokerSubscription, None] = {}
        """Every position, those of durables and groups included."""
        self._floor_index = FloorIndex()
        self.connected_positions: dict[BrokerSubscription, None] = {}
        """The positions that sessions are connected to, but for groups."""
        self.groups: dict[Group, None] = {}
        self.limited_positions: dict[BrokerSubscription, None] = {}
        """The positions with a policy of their own about what waits for them."""
        self.named_positions: dict[tuple[str, str], BrokerSubscription] = {}
        """Durables and groups: see `key`."""
        self.backlog_window = AckWindow(floor=0)
        """The backlog: what the next subscription that asks for what waits takes over."""
        self.backlog_handover = Left()
        """How often it was sent to those who left it."""
        self.spill: ClassSpill | None = None
        """What of it is on disk only; None in a class that fits into memory."""
        self.blocked_sessions: deque[Session] = deque()
        """Whose parked messages wait for room here, longest wait first."""
        self.dropped: Counter[Reason] = Counter()
        self.purged_sequences = SequenceSet()
        """Stored messages that nobody is to have any more; perhaps some that were."""
        self.delivered = self.redelivered = self.acknowledged = 0
        """Of subscriptions that are gone."""
        self.probe_sequence = NO_PROBE
        """A message of which it is measured how long it takes until everybody has acknowledged it;
        the next one is chosen when that is known."""
        self.probe_accepted_at = 0.0
        """When it was accepted."""
        self.ack_latency: Histogram | None = None
        """Where that is counted; None where nobody wants to know."""

    def set_retention(self, retention: Keep) -> None:
        """So long it keeps what nobody needs any more."""
        self.retention = retention
        self._has_retention = bool(retention)

    @property
    def first_sequence(self) -> int:
        """The lowest sequence that is stored."""
        return self.ring.floor if self.spill is None else self.spill.first_sequence

    @property
    def unavailable_reason(self) -> str:
        """Why nothing of it is taken where it is kept, if that is elsewhere; empty where it is."""
        return ""

    @property
    def can_evict(self) -> bool:
        """Whether `give_way` may make room."""
        return self._has_retention or self.has_last_values or self.spill is not None

    @property
    def has_backlog(self) -> bool:
        """Whether something waits that no subscription is there for."""
        return not self.subscriptions or self.backlog_window.floor < self.backlog_window.cursor

    @property
    def has_lagging_consumer(self) -> bool:
        """Whether somebody is connected who has not acknowledged everything that is stored."""
        head = self.ring.head
        there = (*self.connected_positions, *(group for group in self.groups if group.members))
        return any(position.window.floor < head for position in there)

    def floor(self) -> int:
        """The lowest sequence that somebody may still need."""
        if not self.subscriptions:
            return self.backlog_window.floor
        floor = self._floor_index.lowest_floor()
        if self.backlog_window.floor < self.backlog_window.cursor:
            return min(floor, self.backlog_window.floor)
        return floor

    def record_accepted(self, now: float, first_sequence: int) -> None:
        """Messages from this one on were accepted now."""
        self.time_index.record(now, first_sequence)
        if self.probe_sequence == NO_PROBE:
            self.probe_sequence, self.probe_accepted_at = first_sequence, now

    def accepted_at(self, position: BrokerSubscription, sequence: int) -> float:
        """When a message that a position holds was accepted; 0.0 where nobody knows."""
        return self.time_index.time_of(sequence)

    def trim(self, now: float) -> None:
        """Let go of what nobody needs and what is not to be kept."""
        floor = self.compute_retained_floor(now)
        if self.has_last_values:
            floor = self.last_values.lowest_value(floor, now)
        self.release_below(floor)

    def compute_retained_floor(self, now: float) -> int:
        """The lowest sequence that somebody may still need, or that is to be kept longer, but for
        last values."""
        floor = self.floor()
        if floor > self.probe_sequence:
            self.probe_sequence = NO_PROBE
            if self.ack_latency is not None:
                self.ack_latency.observe(now - self.probe_accepted_at)
        if self._has_retention and floor > self.first_sequence:
            floor = min(floor, self._compute_retention_floor(now))
        return floor

    def compute_durable_floor(self, durable_position: int) -> int:
        """From where on it is to be kept past the process, when lots up to `reached` are as safe as
        was asked for."""
        while self.pending_floors and self.pending_floors[0][0] <= durable_position:
            self.pending_floors.popleft()
        return self.pending_floors[0][1] if self.pending_floors else self.first_sequence

    def on_dead_lettered(
        self, position: BrokerSubscription, ranges: list[tuple[int, int]], dead_letter_class_id: int
    ) -> None:
        """These, which a position has given up, are dead letters in the class with this id."""

    def release_below(self, floor: int) -> None:
        """Nothing below floor is stored any longer."""
        self.ring.release(floor)
        if self.spill is not None:
            self.spill.release_below(floor)

    def evict(self, size_bytes: int) -> bool:
        """Let go of at least `size` bytes of what is merely kept, or is on disk, too. Returns
        whether there was any."""
        if self.spill is not None and self.full_policy is FullPolicy.SPILL:
            return self.spill.evict_spilled(size_bytes)
        ring, floor = self.ring, self.floor()
        if floor <= ring.floor:
            return False
        if not self._has_retention:
            return False
        ring.release(min(floor, max(ring.after(size_bytes), ring.floor + 1)))
        return True

    def _compute_retention_floor(self, now: float) -> int:
        ring, keep, spill = self.ring, self.retention, self.spill
        kept = self.first_sequence
        if keep.messages:
            kept = max(kept, ring.head - keep.messages)
        if keep.bytes and ring.frame_bytes > keep.bytes:
            kept = max(kept, ring.after(ring.frame_bytes - keep.bytes))
        elif keep.bytes and spill is not None:
            too_many = spill.frame_bytes + ring.frame_bytes - keep.bytes
            if too_many > 0:
                kept = max(kept, spill.sequence_after(too_many))
        if keep.seconds:
            kept = max(
                kept, min(self.time_index.find_sequence(now - keep.seconds, ring.head), ring.head)
            )
        return kept

    def count_lost(self) -> Counter[Reason]:
        """Messages that were not kept, or not delivered to some position, by reason."""
        lost = self.dropped.copy()
        for subscription in self.subscriptions:
            if subscription.undelivered:
                lost.update(subscription.undelivered)
        return lost

    def ring_for_new_position(self) -> Ring:
        """What a position that is new is sent from."""
        return self.ring

    # Positions -----------------------------------------------------------------------------------

    def check_subscribe_request(self, request: SubscribeRequest) -> None:
        """Raises RemoteProtocolError for what this kind of class cannot do."""

    def forget_position(self, position: BrokerSubscription) -> None:
        """A position that is about to be removed is not to be found again anywhere."""

    def has_remote_position(self, position: BrokerSubscription) -> bool | None:
        """Whether a position was known elsewhere before; None while that is not known yet."""
        return False

    @staticmethod
    def position_key(durable: str, group: str) -> tuple[str, str]:
        """By what a named position is found: a durable by its own name, whatever its group is."""
        return (durable, "") if durable else ("", group)

    def add_position(self, position: BrokerSubscription) -> None:
        """One more position. Another one of its names, which is to be removed, is not found by
        them any more."""
        self.subscriptions[position] = None
        self._floor_index.add(position)
        if self.spill is not None:
            self.spill.add_position(position)
        if isinstance(position, Group):
            self.groups[position] = None
        if position.durable or position.group:
            self.named_positions[self.position_key(position.durable, position.group)] = position

    def remove_position(self, position: BrokerSubscription) -> None:
        """A position is gone for good. What it did stays counted; what it leaves is the backlog, if
        it was the last one."""
        del self.subscriptions[position]
        self._floor_index.remove(position)
        if self.spill is not None:
            self.spill.remove_position(position)
        self.limited_positions.pop(position, None)
        if isinstance(position, Group):
            del self.groups[position]
        names = self.position_key(position.durable, position.group)
        if self.named_positions.get(names) is position:
            del self.named_positions[names]
        if position.channel_filter is not None:
            self.channels.remove_filter(position.channel_filter)
        self.delivered += position.delivered
        self.redelivered += position.redelivered
        self.acknowledged += position.acknowledged
        self.dropped.update(position.undelivered)
        if not self.subscriptions:
            self._add_to_backlog(position)

    def create_window(
        self, start: str | Start, channel_filter: ChannelFilter | None = None, now: float = 0.0
    ) -> tuple[AckWindow, Left]:
        """A fresh position of who wants these channels, and how often what is not acknowledged in
        it was sent. Raises ValueError for a start that is none."""
        ring = self.ring
        match start:
            case "waiting" if self.has_backlog:
                return self._take_over_backlog()
            case "waiting":
                return AckWindow(floor=ring.head), Left()
            case "new":
                at = ring.head
            case "earliest":
                at = self.first_sequence
            case "last":
                at = ring.head - 1
            case "last_values":
                if self.spill is not None:
                    raise ValueError(
                        f"class {self.class_id} has messages that are on disk only: it keeps no "
                        "last values"
                    )
                return self._create_last_values_window(channel_filter, now), Left()
            case Start(sequence=int(sequence), time=None):
                at = sequence
            case Start(sequence=None, time=float(time)):
                at = self.time_index.find_sequence(time, ring.head)
            case _:
                raise ValueError(
                    'start is "waiting", "new", "earliest", "last", "last_values", '
                    f'{{"sequence": n}} or {{"time": seconds}}, got {start!r}'
                )
        self._extend_backlog_to_head()
        return AckWindow(floor=min(max(at, self.first_sequence), ring.head)), Left()

    def _extend_backlog_to_head(self) -> None:
        """What waits is not for a position that is about to come, and stays."""
        if not self.subscriptions:
            self.backlog_window.cursor = max(self.backlog_window.cursor, self.ring.head)

    def _create_last_values_window(
        self, channel_filter: ChannelFilter | None, now: float
    ) -> AckWindow:
        """A position that has acknowledged everything but the last values of these channels."""
        ring = self.ring
        found = self.last_values.find_sequences(ring.floor, ring.head, now)
        if channel_filter is not None:
            is_wanted = channel_filter.match_numbers(ring.rows_at(found).channels)
            found = found[np.broadcast_to(is_wanted, found.shape)]
        self._extend_backlog_to_head()
        window = AckWindow(floor=int(found[0]) if found.size else ring.head)
        window.cursor = ring.head
        acked = np.ones(window.cursor - window.floor, np.bool_)
        acked[found - window.floor] = False
        window.set_marks(np.packbits(acked).tobytes())
        return window

    def _take_over_backlog(self) -> tuple[AckWindow, Left]:
        left, self.backlog_handover = self.backlog_handover, Left()
        window, head = self.backlog_window, self.ring.head
        if self.subscriptions and window.cursor < head:  # What came since was for the others.
            since, window.cursor = window.cursor, head
            window.ack_range(since, head)
        self.backlog_window = AckWindow(floor=head)
        return window, left

    def _add_to_backlog(self, position: BrokerSubscription) -> None:
        """The last position is gone: what it has not acknowledged joins the backlog."""
        window = position.window
        left = position.build_handover().joined(self.backlog_handover)
        if self.backlog_window.floor < self.backlog_window.cursor:
            window = window.union(self.backlog_window)
        self.backlog_window, self.backlog_handover = (
            window,
            left.within(window.floor, window.cursor),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless the floor is the lowest there is."""
        if self.subscriptions:
            lowest = min(position.window.floor for position in self.subscriptions)
            assert self._floor_index.lowest_floor() == lowest, (
                self._floor_index.lowest_floor(),
                lowest,
            )

    def statistics(self, now: float = 0.0) -> ClassStatistics:
        """At this time."""
        subscriptions = tuple(s.statistics() for s in self.subscriptions)
        return ClassStatistics(
            class_id=self.class_id,
            name=self.name,
            ring=self.ring.statistics(),
            spilled=self.spill.message_count if self.spill is not None else 0,
            spilled_bytes=self.spill.frame_bytes if self.spill is not None else 0,
            published=self.ring.head - self.compacted_count,
            delivered=self.delivered + sum(s.delivered for s in subscriptions),
            redelivered=self.redelivered + sum(s.redelivered for s in subscriptions),
            acknowledged=self.acknowledged + sum(s.acknowledged for s in subscriptions),
            in_flight=sum(s.in_flight for s in subscriptions),
            dropped=dict(self.count_lost()),
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
    """When messages were accepted, to within TIMES_STEP_SECONDS; where more than TIMES_MAX steps
    would be kept, to within longer ones.

    times    12.00     12.01     57.30         a step begins with a message
    ends     12.01     12.02     57.31         when a message begins the next one at the latest
    firsts   0         40        95            sequence of the message that began it
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._ends: list[float] = []
        self._firsts: list[int] = []
        self._step_seconds = TIMES_STEP_SECONDS
        self.next_step_time = float("-inf")
        """`note` need not be called before."""

    def __len__(self) -> int:
        """How many steps there are."""
        return len(self._times)

    def record(self, now: float, sequence: int) -> None:
        """The message with this sequence, and those behind it, are accepted now or later."""
        if now < self.next_step_time:
            return
        self.next_step_time = now + self._step_seconds
        self._times.append(now)
        self._ends.append(self.next_step_time)
        self._firsts.append(sequence)
        if len(self._times) > TIMES_MAX:  # Two steps become one, and later ones are as long.
            last = self._ends[-1:] * (len(self._ends) % 2)
            self._ends = self._ends[1::2] + last
            self._times, self._firsts = self._times[::2], self._firsts[::2]
            self._step_seconds *= 2

    def find_sequence(self, time: float, head: int) -> int:
        """A sequence such that every message accepted at `time` or later is at or behind it, and
        few others."""
        at = bisect_right(self._times, time) - 1
        if at < 0:
            return 0
        if time >= self._ends[at]:
            at += 1
        return self._firsts[at] if at < len(self._firsts) else head

    def time_of(self, sequence: int) -> float:
        """About when this message was accepted; 0 when that is not known."""
        found = bisect_right(self._firsts, sequence) - 1
        return self._times[found] if found >= 0 else 0.0

    def list_steps(self, first: int, last: int, *, max_count: int) -> list[tuple[int, float]]:
        """The steps that messages first..last-1 are in, which are stored: with which sequence each
        begins, and when. No more than `most`, the earliest ones."""
        if first >= last:
            return []
        at = max(0, bisect_right(self._firsts, first) - 1)
        end = min(bisect_left(self._firsts, last), at + max_count)
        return list(zip(self._firsts[at:end], self._times[at:end], strict=True))

    def trim(self, floor: int) -> None:
        """Nothing below floor is kept."""
        count = bisect_right(self._firsts, floor) - 1
        if count > 0:
            del self._times[:count], self._ends[:count], self._firsts[:count]
            while self._step_seconds > TIMES_STEP_SECONDS and len(self._times) < TIMES_MAX // 4:
                self._step_seconds /= 2


def build_row(cls: MessageClass, frame: memoryview, now: float) -> Row | None:
    """As a row of its class's columns; None of a bad one, or without memory for its channel."""
    try:
        read, _ = envelope_batch.decode(bytes(frame[HEADER_BYTES:-DELIMITER_BYTES]))
    except RemoteProtocolError:
        return None
    numbers = cls.channels.intern_names((read.channel,))
    if numbers is None:
        return None
    expires, opens = read.expires_ms, read.not_before_ms
    return Row(
        numbers[0],
        NEVER if expires is None else now + expires / 1000,
        AT_ONCE if not opens else now + opens / 1000,
    )
