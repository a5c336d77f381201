"""Everything that waits to be sent to one session, in order.

Bytes are pulled by the driver when the socket can send. A feed's cursor moves when bytes were sent,
so a slow peer costs only ring memory. A version 2 peer gets a Deliver frame whenever the feed
changes. One call does a bounded amount of work: an outbox that returns no bytes but is not idle
must be called again after other sessions had their turn.

    rest               bytes that were begun or copied, sent first
    replies            encoded replies
    deferred replies   long replies, each made after the previous one was sent
    queue              feeds with messages to send, in turn
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from simplebus.core.limits import LOOKED_MESSAGES_MAX, OWED_BYTES
from simplebus.core.protocol import frames


class Feed(Protocol):
    """Source of messages for an outbox."""

    class_id: int
    subscription_number: int
    """Number of the subscription, chosen by the peer."""
    is_queued: bool
    """True if the feed is in the outbox's queue."""
    attempt: int
    """Delivery attempt of the frames returned last."""
    scanned_count: int
    """Messages scanned by the last `copy_frames`. At LOOKED_MESSAGES_MAX it stops, even if more
    match.
    """

    @property
    def has_frames_to_copy(self) -> bool:
        """True if `copy_frames` must be called before `peek_frames`."""

    @property
    def has_work(self) -> bool:
        """True if there may be something to send."""

    def copy_frames(self, tick: int) -> bytes:
        """Return copies of the next frames, which count as sent. Empty if there are none."""

    def peek_frames(self, tick: int) -> memoryview:
        """Return the next frames in one piece, without a copy. `mark_sent` reports how much was
        sent.
        """

    def mark_sent(self, piece: memoryview, sent_bytes: int, tick: int) -> bytes:
        """Record that `sent_bytes` of the peeked piece were sent.

        Returns:
            The rest of a frame that was cut, which counts as sent.
        """


class Outbox:
    """Send queue of one session. The bytes returned by `peek` are valid until the broker
    changes.
    """

    def __init__(self, session_id: int) -> None:
        self.session_id = session_id
        self.sent_bytes = 0
        """Bytes sent so far."""
        self.names_feeds = False
        """True if Deliver frames are sent (version 2)."""
        self._named: tuple[int, int, int] | None = None
        """Class, number and attempt of the last Deliver frame."""
        self._replies = bytearray()
        self._confirm_at = -1
        """Offset of the last Confirm in the replies if nothing follows it; -1 otherwise."""
        self._rest = memoryview(b"")
        """Copied bytes that are sent first: the rest of a cut frame, redeliveries, replies."""
        self._owed: deque[Callable[[], bool | None]] = deque()
        self._waits = False
        """True if the first deferred reply is not available yet."""
        self._queue: deque[Feed] = deque()
        self._held: dict[Feed, None] = {}
        """Paused feeds; they are queued when they resume."""
        self._peeked: memoryview = memoryview(b"")
        self._source: Feed | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes held for this session outside the rings."""
        return len(self._rest) + len(self._replies) + OWED_BYTES * len(self._owed)

    @property
    def has_bytes(self) -> bool:
        """True if bytes other than messages are ready. A deferred reply counts only once it is
        made.
        """
        return bool(self._rest or self._replies)

    @property
    def idle(self) -> bool:
        """True if nothing waits to be sent."""
        owes = self._owed and not self._waits
        return not (self._rest or self._replies or owes or self._queue)

    def reply(self, frame: bytes) -> None:
        """Queue a reply frame."""
        self._replies += frame

    def confirm(self, number: int, level: int = 0) -> None:
        """Queue a Confirm for all numbers below `number`. Replaces a Confirm that is last in the
        queue.
        """
        frame = frames.encode(frames.CONFIRM, message_id=number, timer_index=level)
        if self._confirm_at + len(frame) == len(self._replies):
            del self._replies[self._confirm_at :]
        self._confirm_at = len(self._replies)
        self._replies += frame

    def answer(self, class_id: int, messages: Sequence[memoryview], reply: bytes) -> None:
        """Send fetched messages, copied once, and the reply that follows them."""
        if messages:
            named = frames.encode(frames.DELIVER, class_id=class_id)
            reply = b"".join([named, *messages, reply])
            self._named = None
        self._rest = memoryview(reply)

    def owe(self, say: Callable[[], bool | None]) -> None:
        """Defer a reply: the callable sends it after everything queued before was sent.

        The callable returns False if the reply is not available; it is called again after the
        outbox is
        told to resume.
        """
        self._owed.append(say)

    def go_on(self) -> None:
        """Try the deferred reply again."""
        self._waits = False

    def wake(self, feed: Feed) -> None:
        """Queue a feed that has something to send."""
        if not feed.is_queued:
            feed.is_queued = True
            self._queue.append(feed)

    def hold(self, feed: Feed) -> None:
        """Pause a feed."""
        if feed.is_queued and feed not in self._held:
            self._queue.remove(feed)
        feed.is_queued = True
        self._held[feed] = None

    def let_go(self, feed: Feed) -> None:
        """Resume a paused feed, if it still exists."""
        if feed in self._held:
            del self._held[feed]
            self._queue.append(feed)

    def forget(self, feed: Feed) -> None:
        """Remove a feed."""
        if feed.is_queued:
            feed.is_queued = False
            if feed in self._held:
                del self._held[feed]
            else:
                self._queue.remove(feed)
        self._named = None  # A later feed may have the same number.

    def peek(self, tick: int) -> memoryview:
        """Return the next bytes to send. Empty if there are none or the scan limit was reached."""
        self._source = None
        if self._owed and not (self._waits or self._rest or self._replies):
            self._waits = True
            if self._owed[0]() is not False:
                self._waits = False
                self._owed.popleft()
        if not self._rest and self._replies:
            self._rest = memoryview(bytes(self._replies))
            self._replies.clear()
            self._confirm_at = -1
        scanned_count = 0
        while not self._rest and self._queue and scanned_count < LOOKED_MESSAGES_MAX:
            feed = self._queue[0]
            if feed.has_frames_to_copy:
                copies = feed.copy_frames(tick)
                scanned_count += feed.scanned_count
                if copies:
                    if self.names_feeds:
                        copies = self._name(feed) + copies
                    self._rest = memoryview(copies)
                    self._queue.rotate(-1)
                    continue
                if feed.scanned_count >= LOOKED_MESSAGES_MAX and feed.has_work:
                    self._queue.rotate(-1)
                    break
            piece = feed.peek_frames(tick)
            if piece:
                if self.names_feeds and (name := self._name(feed)):
                    self._rest = memoryview(name)
                    continue
                self._source = feed
                self._peeked = piece
                return piece
            self._queue.popleft()
            feed.is_queued = False
        return self._rest

    def sent(self, count: int, tick: int) -> None:
        """Record that the first `count` bytes of the peeked piece were sent."""
        self.sent_bytes += count
        if self._source is None:
            self._rest = self._rest[count:]
            return
        rest = self._source.mark_sent(self._peeked, count, tick)
        if rest:
            self._rest = memoryview(rest)
        if self._source.has_work:
            self._queue.rotate(-1)
        else:
            self._queue.popleft()
            self._source.is_queued = False
        self._source = None
        self._peeked = memoryview(b"")

    def _name(self, feed: Feed) -> bytes:
        """Return a Deliver frame if the feed or attempt changed, else b""."""
        name = (feed.class_id, feed.subscription_number, feed.attempt)
        if name == self._named:
            return b""
        self._named = name
        return frames.encode(
            frames.DELIVER, class_id=name[0], timer_index=name[1], message_id=name[2]
        )


class Nowhere(Outbox):
    """Outbox of a position without a session. Nothing is ever sent from it."""

    def __init__(self) -> None:
        super().__init__(-1)

    def wake(self, feed: Feed) -> None:
        pass
