"""What each subscriber is sent, when, and when again.

Rule 1: a subscription never holds a message; it holds positions in its class's ring.
Rule 2: bytes are pulled by whoever can send them. A cursor moves when bytes were taken, not before,
so a slow peer costs the ring's memory and nothing else.
Rule 3: a tick touches only what is due; what is due is queued once, with a longer pause each time.

    ring    floor ─ in flight ─ cursor ─ not sent yet ─ head
    wheel   tick 17: (4, 9)  tick 18: (9, 30) …      spans to look at again, by tick
    again   (4, 6) (8, 9)                            what was due and not acknowledged
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from simplebus.core.acks import AckWindow
from simplebus.core.limits import (
    REDELIVERY_BYTES,
    REDELIVERY_MESSAGES,
    REDELIVERY_PAUSE_TICKS_MAX,
    SEND_BYTES,
)
from simplebus.core.ring import Ring


@dataclass(slots=True)
class Span:
    """Messages first..last-1 of a class, sent together."""

    first: int
    last: int
    attempts: int
    """How often this subscription was sent them; 0 when a former one left them."""


@dataclass(frozen=True, slots=True)
class SubscriptionStatistics:
    """A snapshot of one subscription."""

    class_id: int
    session_id: int
    floor: int
    """Every sequence below it is acknowledged."""
    cursor: int
    """Next sequence to be sent."""
    in_flight: int
    """Messages sent, or left by a former subscription, and not acknowledged."""
    waiting: int
    """Messages stored and not sent yet."""
    delivered: int
    """Messages sent for the first time."""
    redelivered: int
    """Messages sent again."""
    acknowledged: int
    """Messages acknowledged."""
    dropped: int
    """Messages that the class's policy took away before they were acknowledged."""


class Subscription:
    """One session's position in one class."""

    def __init__(
        self, *, class_id: int, ring: Ring, window: AckWindow, outbox: Outbox, ack_timeout: int
    ) -> None:
        self.class_id = class_id
        self.ring = ring
        self.window = window
        self.outbox = outbox
        self.ack_timeout = ack_timeout
        """Ticks until what was sent counts as lost, the first time."""
        self.delivered = 0
        self.redelivered = 0
        self.dropped = 0
        self.queued = False
        """Whether the outbox has it in its queue."""
        self._peeked = window.cursor
        self._entered = window.in_flight
        self._dropped_in_flight = 0
        self._wheel: dict[int, list[Span]] = {}
        self._again: deque[Span] = deque()
        if window.floor < window.cursor:
            self._again.append(Span(window.floor, window.cursor, 0))

    @property
    def acknowledged(self) -> int:
        """Messages acknowledged."""
        return self._entered - self._dropped_in_flight - self.window.in_flight

    @property
    def has_again(self) -> bool:
        """Whether something may have to be sent again."""
        return bool(self._again)

    @property
    def has_work(self) -> bool:
        """Whether something may be there to be sent."""
        return bool(self._again) or self.window.cursor < self.ring.head

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(
            class_id=self.class_id,
            session_id=self.outbox.session_id,
            floor=self.window.floor,
            cursor=self.window.cursor,
            in_flight=self.window.in_flight,
            waiting=self.ring.head - self.window.cursor,
            delivered=self.delivered,
            redelivered=self.redelivered,
            acknowledged=self.acknowledged,
            dropped=self.dropped,
        )

    # Sending -------------------------------------------------------------------------------------

    def take_again(self, tick: int) -> bytes:
        """Copies of frames that are to be sent again, empty if there are none. They count as sent.

        Copies, because they are often many small pieces: one write then sends them all.
        """
        pieces: list[memoryview] = []
        space = REDELIVERY_BYTES
        while self._again and not pieces:
            span = self._again[0]
            first = max(span.first, self.window.floor)
            last = min(span.last, first + REDELIVERY_MESSAGES)
            unacked = self.window.unacked(first, last)
            if unacked:
                self.ring.stamp(unacked[0][0], unacked[-1][1], tick % self.ack_timeout)
            count = 0
            for begin, end in unacked:
                while begin < end and space > 0:
                    piece, after = self.ring.piece(begin, end, space)
                    pieces.append(piece)
                    space -= len(piece)
                    count += after - begin
                    begin = after
                if begin < end:
                    last = begin
                    break
            if count:
                # One span for all of them: what is acknowledged within it is left out when due.
                self._expect(first, last, span.attempts + 1, tick)
            if span.attempts:
                self.redelivered += count
            else:
                self.delivered += count
            span.first = last
            if span.first >= span.last:
                self._again.popleft()
        return b"".join(pieces)

    def peek(self, tick: int) -> memoryview:
        """The next new frames in one piece, empty if there are none. `sent` says what was taken."""
        first, last = self.window.cursor, self.ring.head
        if first == last:
            return memoryview(b"")
        piece, last = self.ring.piece(first, last, SEND_BYTES)
        self.ring.stamp(first, last, tick % self.ack_timeout)
        self._peeked = last
        return piece

    def sent(self, piece: memoryview, count: int, tick: int) -> bytes:
        """The first `count` bytes of the peeked piece were taken. Returns the rest of a cut frame.

        That rest is a copy: the frame counts as sent, and its ring may let go of it.
        """
        first, last = self.window.cursor, self._peeked
        rest = b""
        if count < len(piece):
            last, missing = self.ring.cut(first, last, count)
            if missing:
                rest = bytes(piece[count : count + missing])
                last += 1
        if first < last:
            self.window.cursor = last
            self._entered += last - first
            self.delivered += last - first
            self._expect(first, last, 1, tick)
        return rest

    def _expect(self, first: int, last: int, attempts: int, tick: int) -> None:
        """Look at first..last-1 again when their acknowledgement is overdue."""
        pause = min(self.ack_timeout << (attempts - 1), REDELIVERY_PAUSE_TICKS_MAX)
        spans = self._wheel.setdefault(tick + max(pause, self.ack_timeout), [])
        if spans and spans[-1].last == first and spans[-1].attempts == attempts:
            spans[-1].last = last
        else:
            spans.append(Span(first, last, attempts))

    # What comes back -----------------------------------------------------------------------------

    def tick(self, tick: int) -> None:
        """Queue what is due at this tick and not acknowledged."""
        for span in self._wheel.pop(tick, ()):
            if span.last > self.window.floor:
                self._again.append(span)
        if self._again:
            self.outbox.wake(self)
        self.window.release_memory()

    def skip_to(self, floor: int) -> None:
        """The class's policy took away everything below floor."""
        unsent = max(0, floor - self.window.cursor)
        lost = self.window.skip_to(floor)
        self.dropped += lost
        self._dropped_in_flight += lost - unsent

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        self.window.check()
        assert self.ring.floor <= self.window.floor <= self.window.cursor <= self.ring.head
        assert self.acknowledged >= 0
        if self.has_work:
            assert self.queued, "work that nobody was told about"


class Outbox:
    """Everything that waits to be sent to one session, in the order in which it is to go.

    `peek` and `sent` alternate: what peek showed stays valid until the next change to the bus.
    """

    def __init__(self, session_id: int) -> None:
        self.session_id = session_id
        self.sent_bytes = 0
        """Bytes taken so far; a peer that takes none while some wait is stalled."""
        self._replies = bytearray()
        self._rest = memoryview(b"")
        """Copied bytes that go first: the rest of a cut frame, redeliveries, replies."""
        self._queue: deque[Subscription] = deque()
        self._peeked: memoryview = memoryview(b"")
        self._source: Subscription | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes kept for this session beside the rings."""
        return len(self._rest) + len(self._replies)

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be sent."""
        return not (self._rest or self._replies or self._queue)

    def reply(self, frame: bytes) -> None:
        """Queue a frame that is no message."""
        self._replies += frame

    def wake(self, subscription: Subscription) -> None:
        """The subscription has something to send."""
        if not subscription.queued:
            subscription.queued = True
            self._queue.append(subscription)

    def forget(self, subscription: Subscription) -> None:
        """The subscription is gone."""
        if subscription.queued:
            subscription.queued = False
            self._queue.remove(subscription)

    def peek(self, tick: int) -> memoryview:
        """The next bytes to send; empty when there are none."""
        self._source = None
        if not self._rest and self._replies:
            self._rest = memoryview(bytes(self._replies))
            self._replies.clear()
        while not self._rest and self._queue:
            subscription = self._queue[0]
            if subscription.has_again:
                self._rest = memoryview(subscription.take_again(tick))
                continue
            piece = subscription.peek(tick)
            if piece:
                self._source = subscription
                self._peeked = piece
                return piece
            self._queue.popleft()
            subscription.queued = False
        return self._rest

    def sent(self, count: int, tick: int) -> None:
        """The first `count` of the bytes that peek showed were taken."""
        self.sent_bytes += count
        if self._source is None:
            self._rest = self._rest[count:]
            return
        rest = self._source.sent(self._peeked, count, tick)
        if rest:
            self._rest = memoryview(rest)
        if self._source.has_work:
            self._queue.rotate(-1)
        else:
            self._queue.popleft()
            self._source.queued = False
        self._source = None
        self._peeked = memoryview(b"")
