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
from simplebus.core.message_class.floor_index import Floors
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
from simplebus.core.subscription.channel_filter import ChannelTable, Wanted
from simplebus.core.subscription.subscription import Subscription

if TYPE_CHECKING:
    from simplebus.core.message_class.remote_storage import Elsewhere
    from simplebus.core.message_class.spill import Spill


NO_PROBE = SEQUENCE_MAX


class MessageClass:
    """See the module's law."""

    is_remote = False
    """Whether its messages are kept elsewhere: what is stored here is on its way there."""

    elsewhere: Elsewhere | None = None
    """Where these are."""

    def __init__(self, ring: Ring, keep: Keep, policy: FullPolicy = FullPolicy.BLOCK) -> None:
        self.class_id = ring.class_id
        self.name = ""
        self.maker = ""
        """The user that named it first; empty where that is not known."""
        self.policy = policy
        """What happens when it is full."""
        self.ring = ring
        self.is_to_keep(keep)
        self.holds_values = False
        """Whether it keeps the last message of each channel, besides everything else."""
        self.is_asked_for_values = False
        """Whether somebody has asked for that who may ask."""
        self.values = LastValues(ring)
        self.carried = 0
        """Last values that were stored anew."""
        self.floors_owed: deque[tuple[int, int]] = deque()
        """What was stored anew is as safe as was asked for when these lots are; until then, from
        where on it is to be kept past the process."""
        self.channels = ChannelTable(ring)
        self.times = TimeIndex()
        self.subscriptions: dict[Subscription, None] = {}
        """Every position, those of durables and groups included."""
        self._floors = Floors()
        self.listening: dict[Subscription, None] = {}
        """The positions that sessions are connected to, but for groups."""
        self.groups: dict[Group, None] = {}
        self.policed: dict[Subscription, None] = {}
        """The positions with a policy of their own about what waits for them."""
        self.named: dict[tuple[str, str], Subscription] = {}
        """Durables and groups: see `key`."""
        self.waiting = AckWindow(floor=0)
        """The backlog: what the next subscription that asks for what waits takes over."""
        self.left = Left()
        """How often it was sent to those who left it."""
        self.spill: Spill | None = None
        """What of it is on disk only; None in a class that fits into memory."""
        self.blocked: deque[Session] = deque()
        """Whose parked messages wait for room here, longest wait first."""
        self.dropped: Counter[Reason] = Counter()
        self.purged = SequenceSet()
        """Stored messages that nobody is to have any more; perhaps some that were."""
        self.delivered = self.redelivered = self.acknowledged = 0
        """Of subscriptions that are gone."""
        self.probe = NO_PROBE
        """A message of which it is measured how long it takes until everybody has acknowledged it;
        the next one is chosen when that is known."""
        self.probed_at = 0.0
        """When it was accepted."""
        self.acknowledged_after: Histogram | None = None
        """Where that is counted; None where nobody wants to know."""

    def is_to_keep(self, keep: Keep) -> None:
        """So long it keeps what nobody needs any more."""
        self.keep = keep
        self._keeps = bool(keep)

    @property
    def first(self) -> int:
        """The lowest sequence that is stored."""
        return self.ring.floor if self.spill is None else self.spill.first

    @property
    def refused(self) -> str:
        """Why nothing of it is taken where it is kept, if that is elsewhere; empty where it is."""
        return ""

    @property
    def gives_way(self) -> bool:
        """Whether `give_way` may make room."""
        return self._keeps or self.holds_values or self.spill is not None

    @property
    def has_backlog(self) -> bool:
        """Whether something waits that no subscription is there for."""
        return not self.subscriptions or self.waiting.floor < self.waiting.cursor

    @property
    def is_awaited(self) -> bool:
        """Whether somebody is connected who has not acknowledged everything that is stored."""
        head = self.ring.head
        there = (*self.listening, *(group for group in self.groups if group.members))
        return any(position.window.floor < head for position in there)

    def floor(self) -> int:
        """The lowest sequence that somebody may still need."""
        if not self.subscriptions:
            return self.waiting.floor
        floor = self._floors.lowest()
        if self.waiting.floor < self.waiting.cursor:
            return min(floor, self.waiting.floor)
        return floor

    def accepted(self, now: float, first: int) -> None:
        """Messages from this one on were accepted now."""
        self.times.note(now, first)
        if self.probe == NO_PROBE:
            self.probe, self.probed_at = first, now

    def accepted_at(self, position: Subscription, sequence: int) -> float:
        """When a message that a position holds was accepted; 0.0 where nobody knows."""
        return self.times.at(sequence)

    def release(self, now: float) -> None:
        """Let go of what nobody needs and what is not to be kept."""
        floor = self.needed_from(now)
        if self.holds_values:
            floor = self.values.floor(floor, now)
        self.let_go(floor)

    def needed_from(self, now: float) -> int:
        """The lowest sequence that somebody may still need, or that is to be kept longer, but for
        last values."""
        floor = self.floor()
        if floor > self.probe:
            self.probe = NO_PROBE
            if self.acknowledged_after is not None:
                self.acknowledged_after.observe(now - self.probed_at)
        if self._keeps and floor > self.first:
            floor = min(floor, self._kept_from(now))
        return floor

    def safe_floor(self, reached: int) -> int:
        """From where on it is to be kept past the process, when lots up to `reached` are as safe as
        was asked for."""
        while self.floors_owed and self.floors_owed[0][0] <= reached:
            self.floors_owed.popleft()
        return self.floors_owed[0][1] if self.floors_owed else self.first

    def has_buried(self, position: Subscription, ranges: list[tuple[int, int]], dead: int) -> None:
        """These, which a position has given up, are dead letters in the class with this id."""

    def let_go(self, floor: int) -> None:
        """Nothing below floor is stored any longer."""
        self.ring.release(floor)
        if self.spill is not None:
            self.spill.release(floor)

    def give_way(self, size: int) -> bool:
        """Let go of at least `size` bytes of what is merely kept, or is on disk, too. Returns
        whether there was any."""
        if self.spill is not None and self.policy is FullPolicy.SPILL:
            return self.spill.make_room(size)
        ring, floor = self.ring, self.floor()
        if floor <= ring.floor:
            return False
        if not self._keeps:
            return False
        ring.release(min(floor, max(ring.after(size), ring.floor + 1)))
        return True

    def _kept_from(self, now: float) -> int:
        ring, keep, spill = self.ring, self.keep, self.spill
        kept = self.first
        if keep.messages:
            kept = max(kept, ring.head - keep.messages)
        if keep.bytes and ring.frame_bytes > keep.bytes:
            kept = max(kept, ring.after(ring.frame_bytes - keep.bytes))
        elif keep.bytes and spill is not None:
            too_many = spill.frame_bytes + ring.frame_bytes - keep.bytes
            if too_many > 0:
                kept = max(kept, spill.after(too_many))
        if keep.seconds:
            kept = max(kept, min(self.times.find(now - keep.seconds, ring.head), ring.head))
        return kept

    def lost(self) -> Counter[Reason]:
        """Messages that were not kept, or not delivered to some position, by reason."""
        lost = self.dropped.copy()
        for subscription in self.subscriptions:
            if subscription.undelivered:
                lost.update(subscription.undelivered)
        return lost

    def new_ring(self) -> Ring:
        """What a position that is new is sent from."""
        return self.ring

    # Positions -----------------------------------------------------------------------------------

    def check_wish(self, asked: SubscribeRequest) -> None:
        """Raises RemoteProtocolError for what this kind of class cannot do."""

    def forget(self, position: Subscription) -> None:
        """A position that is about to be removed is not to be found again anywhere."""

    def has_begun(self, position: Subscription) -> bool | None:
        """Whether a position was known elsewhere before; None while that is not known yet."""
        return False

    @staticmethod
    def key(durable: str, group: str) -> tuple[str, str]:
        """By what a named position is found: a durable by its own name, whatever its group is."""
        return (durable, "") if durable else ("", group)

    def add(self, position: Subscription) -> None:
        """One more position. Another one of its names, which is to be removed, is not found by
        them any more."""
        self.subscriptions[position] = None
        self._floors.add(position)
        if self.spill is not None:
            self.spill.add(position)
        if isinstance(position, Group):
            self.groups[position] = None
        if position.durable or position.group:
            self.named[self.key(position.durable, position.group)] = position

    def remove(self, position: Subscription) -> None:
        """A position is gone for good. What it did stays counted; what it leaves is the backlog, if
        it was the last one."""
        del self.subscriptions[position]
        self._floors.remove(position)
        if self.spill is not None:
            self.spill.remove(position)
        self.policed.pop(position, None)
        if isinstance(position, Group):
            del self.groups[position]
        names = self.key(position.durable, position.group)
        if self.named.get(names) is position:
            del self.named[names]
        if position.wanted is not None:
            self.channels.remove(position.wanted)
        self.delivered += position.delivered
        self.redelivered += position.redelivered
        self.acknowledged += position.acknowledged
        self.dropped.update(position.undelivered)
        if not self.subscriptions:
            self._leave(position)

    def start(
        self, start: str | Start, wanted: Wanted | None = None, now: float = 0.0
    ) -> tuple[AckWindow, Left]:
        """A fresh position of who wants these channels, and how often what is not acknowledged in
        it was sent. Raises ValueError for a start that is none."""
        ring = self.ring
        match start:
            case "waiting" if self.has_backlog:
                return self._take_backlog()
            case "waiting":
                return AckWindow(floor=ring.head), Left()
            case "new":
                at = ring.head
            case "earliest":
                at = self.first
            case "last":
                at = ring.head - 1
            case "last_values":
                if self.spill is not None:
                    raise ValueError(
                        f"class {self.class_id} has messages that are on disk only: it keeps no "
                        "last values"
                    )
                return self._start_with_values(wanted, now), Left()
            case Start(sequence=int(sequence), time=None):
                at = sequence
            case Start(sequence=None, time=float(time)):
                at = self.times.find(time, ring.head)
            case _:
                raise ValueError(
                    'start is "waiting", "new", "earliest", "last", "last_values", '
                    f'{{"sequence": n}} or {{"time": seconds}}, got {start!r}'
                )
        self._let_wait()
        return AckWindow(floor=min(max(at, self.first), ring.head)), Left()

    def _let_wait(self) -> None:
        """What waits is not for a position that is about to come, and stays."""
        if not self.subscriptions:
            self.waiting.cursor = max(self.waiting.cursor, self.ring.head)

    def _start_with_values(self, wanted: Wanted | None, now: float) -> AckWindow:
        """A position that has acknowledged everything but the last values of these channels."""
        ring = self.ring
        found = self.values.sequences(ring.floor, ring.head, now)
        if wanted is not None:
            is_wanted = wanted.of(ring.rows_at(found).channels)
            found = found[np.broadcast_to(is_wanted, found.shape)]
        self._let_wait()
        window = AckWindow(floor=int(found[0]) if found.size else ring.head)
        window.cursor = ring.head
        acked = np.ones(window.cursor - window.floor, np.bool_)
        acked[found - window.floor] = False
        window.set_marks(np.packbits(acked).tobytes())
        return window

    def _take_backlog(self) -> tuple[AckWindow, Left]:
        left, self.left = self.left, Left()
        window, head = self.waiting, self.ring.head
        if self.subscriptions and window.cursor < head:  # What came since was for the others.
            since, window.cursor = window.cursor, head
            window.ack_range(since, head)
        self.waiting = AckWindow(floor=head)
        return window, left

    def _leave(self, position: Subscription) -> None:
        """The last position is gone: what it has not acknowledged joins the backlog."""
        window = position.window
        left = position.left().joined(self.left)
        if self.waiting.floor < self.waiting.cursor:
            window = window.union(self.waiting)
        self.waiting, self.left = window, left.within(window.floor, window.cursor)

    def check(self) -> None:
        """Raise AssertionError unless the floor is the lowest there is."""
        if self.subscriptions:
            lowest = min(position.window.floor for position in self.subscriptions)
            assert self._floors.lowest() == lowest, (self._floors.lowest(), lowest)

    def statistics(self, now: float = 0.0) -> ClassStatistics:
        """At this time."""
        subscriptions = tuple(s.statistics() for s in self.subscriptions)
        return ClassStatistics(
            class_id=self.class_id,
            name=self.name,
            ring=self.ring.statistics(),
            spilled=self.spill.messages if self.spill is not None else 0,
            spilled_bytes=self.spill.frame_bytes if self.spill is not None else 0,
            published=self.ring.head - self.carried,
            delivered=self.delivered + sum(s.delivered for s in subscriptions),
            redelivered=self.redelivered + sum(s.redelivered for s in subscriptions),
            acknowledged=self.acknowledged + sum(s.acknowledged for s in subscriptions),
            in_flight=sum(s.in_flight for s in subscriptions),
            dropped=dict(self.lost()),
            blocked_sessions=len(self.blocked),
            parked=sum(
                batch.count
                for session in self.blocked
                for class_id, batch in session.parked
                if class_id == self.class_id
            ),
            channels=len(self.channels),
            subscriptions=subscriptions,
            last_values=self.values.count(now) if self.holds_values else 0,
            carried=self.carried,
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
        self._step = TIMES_STEP_SECONDS
        self.next_time = float("-inf")
        """`note` need not be called before."""

    def __len__(self) -> int:
        """How many steps there are."""
        return len(self._times)

    def note(self, now: float, sequence: int) -> None:
        """The message with this sequence, and those behind it, are accepted now or later."""
        if now < self.next_time:
            return
        self.next_time = now + self._step
        self._times.append(now)
        self._ends.append(self.next_time)
        self._firsts.append(sequence)
        if len(self._times) > TIMES_MAX:  # Two steps become one, and later ones are as long.
            last = self._ends[-1:] * (len(self._ends) % 2)
            self._ends = self._ends[1::2] + last
            self._times, self._firsts = self._times[::2], self._firsts[::2]
            self._step *= 2

    def find(self, time: float, head: int) -> int:
        """A sequence such that every message accepted at `time` or later is at or behind it, and
        few others."""
        at = bisect_right(self._times, time) - 1
        if at < 0:
            return 0
        if time >= self._ends[at]:
            at += 1
        return self._firsts[at] if at < len(self._firsts) else head

    def at(self, sequence: int) -> float:
        """About when this message was accepted; 0 when that is not known."""
        found = bisect_right(self._firsts, sequence) - 1
        return self._times[found] if found >= 0 else 0.0

    def steps(self, first: int, last: int, *, most: int) -> list[tuple[int, float]]:
        """The steps that messages first..last-1 are in, which are stored: with which sequence each
        begins, and when. No more than `most`, the earliest ones."""
        if first >= last:
            return []
        at = max(0, bisect_right(self._firsts, first) - 1)
        end = min(bisect_left(self._firsts, last), at + most)
        return list(zip(self._firsts[at:end], self._times[at:end], strict=True))

    def forget(self, floor: int) -> None:
        """Nothing below floor is kept."""
        count = bisect_right(self._firsts, floor) - 1
        if count > 0:
            del self._times[:count], self._ends[:count], self._firsts[:count]
            while self._step > TIMES_STEP_SECONDS and len(self._times) < TIMES_MAX // 4:
                self._step /= 2


def lone_row(cls: MessageClass, frame: memoryview, now: float) -> Row | None:
    """As a row of its class's columns; None of a bad one, or without memory for its channel."""
    try:
        read, _ = envelope_batch.decode(bytes(frame[HEADER_BYTES:-DELIMITER_BYTES]))
    except RemoteProtocolError:
        return None
    numbers = cls.channels.numbers((read.channel,))
    if numbers is None:
        return None
    expires, opens = read.expires_ms, read.not_before_ms
    return Row(
        numbers[0],
        NEVER if expires is None else now + expires / 1000,
        AT_ONCE if not opens else now + opens / 1000,
    )
