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


class SendSource(Protocol):
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
        self.has_deliver_frames = False
        """True if Deliver frames are sent (version 2)."""
        self._last_deliver: tuple[int, int, int] | None = None
        """Class, number and attempt of the last Deliver frame."""
        self._replies = bytearray()
        self._confirm_offset = -1
        """Offset of the last Confirm in the replies if nothing follows it; -1 otherwise."""
        self._unsent_bytes = memoryview(b"")
        """Copied bytes that are sent first: the rest of a cut frame, redeliveries, replies."""
        self._deferred_replies: deque[Callable[[], bool | None]] = deque()
        self._is_reply_pending = False
        """True if the first deferred reply is not available yet."""
        self._queue: deque[SendSource] = deque()
        self._paused: dict[SendSource, None] = {}
        """Paused feeds; they are queued when they resume."""
        self._peeked: memoryview = memoryview(b"")
        self._peeked_source: SendSource | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes held for this session outside the rings."""
        return len(self._unsent_bytes) + len(self._replies) + OWED_BYTES * len(self._deferred_replies)

    @property
    def has_bytes(self) -> bool:
        """True if bytes other than messages are ready. A deferred reply counts only once it is
        made.
        """
        return bool(self._unsent_bytes or self._replies)

    @property
    def is_idle(self) -> bool:
        """True if nothing waits to be sent."""
        owes = self._deferred_replies and not self._is_reply_pending
        return not (self._unsent_bytes or self._replies or owes or self._queue)

    def queue_reply(self, frame: bytes) -> None:
        """Queue a reply frame."""
        self._replies += frame

    def queue_confirm(self, number: int, level: int = 0) -> None:
        """Queue a Confirm for all numbers below `number`. Replaces a Confirm that is last in the
        queue.
        """
        frame = frames.encode(frames.CONFIRM, message_id=number, timer_index=level)
        if self._confirm_offset + len(frame) == len(self._replies):
            del self._replies[self._confirm_offset :]
        self._confirm_offset = len(self._replies)
        self._replies += frame

    def queue_fetch_reply(self, class_id: int, messages: Sequence[memoryview], reply: bytes) -> None:
        """Send fetched messages, copied once, and the reply that follows them."""
        if messages:
            named = frames.encode(frames.DELIVER, class_id=class_id)
            reply = b"".join([named, *messages, reply])
            self._last_deliver = None
        self._unsent_bytes = memoryview(reply)

    def defer_reply(self, send_reply: Callable[[], bool | None]) -> None:
        """Defer a reply: the callable sends it after everything queued before was sent.

        The callable returns False if the reply is not available; it is called again after the
        outbox is
        told to resume.
        """
        self._deferred_replies.append(send_reply)

    def resume_replies(self) -> None:
        """Try the deferred reply again."""
        self._is_reply_pending = False

    def enqueue(self, feed: SendSource) -> None:
        """Queue a feed that has something to send."""
        if not feed.is_queued:
            feed.is_queued = True
            self._queue.append(feed)

    def pause(self, feed: SendSource) -> None:
        """Pause a feed."""
        if feed.is_queued and feed not in self._paused:
            self._queue.remove(feed)
        feed.is_queued = True
        self._paused[feed] = None

    def resume(self, feed: SendSource) -> None:
        """Resume a paused feed, if it still exists."""
        if feed in self._paused:
            del self._paused[feed]
            self._queue.append(feed)

    def remove(self, feed: SendSource) -> None:
        """Remove a feed."""
        if feed.is_queued:
            feed.is_queued = False
            if feed in self._paused:
                del self._paused[feed]
            else:
                self._queue.remove(feed)
        self._last_deliver = None  # A later feed may have the same number.

    def peek(self, tick: int) -> memoryview:
        """Return the next bytes to send. Empty if there are none or the scan limit was reached."""
        self._peeked_source = None
        if self._deferred_replies and not (self._is_reply_pending or self._unsent_bytes or self._replies):
            self._is_reply_pending = True
            if self._deferred_replies[0]() is not False:
                self._is_reply_pending = False
                self._deferred_replies.popleft()
        if not self._unsent_bytes and self._replies:
            self._unsent_bytes = memoryview(bytes(self._replies))
            self._replies.clear()
            self._confirm_offset = -1
        scanned_count = 0
        while not self._unsent_bytes and self._queue and scanned_count < LOOKED_MESSAGES_MAX:
            feed = self._queue[0]
            if feed.has_frames_to_copy:
                copies = feed.copy_frames(tick)
                scanned_count += feed.scanned_count
                if copies:
                    if self.has_deliver_frames:
                        copies = self._deliver_frame_for(feed) + copies
                    self._unsent_bytes = memoryview(copies)
                    self._queue.rotate(-1)
                    continue
                if feed.scanned_count >= LOOKED_MESSAGES_MAX and feed.has_work:
                    self._queue.rotate(-1)
                    break
            piece = feed.peek_frames(tick)
            if piece:
                if self.has_deliver_frames and (name := self._deliver_frame_for(feed)):
                    self._unsent_bytes = memoryview(name)
                    continue
                self._peeked_source = feed
                self._peeked = piece
                return piece
            self._queue.popleft()
            feed.is_queued = False
        return self._unsent_bytes

    def mark_sent(self, count: int, tick: int) -> None:
        """Record that the first `count` bytes of the peeked piece were sent."""
        self.sent_bytes += count
        if self._peeked_source is None:
            self._unsent_bytes = self._unsent_bytes[count:]
            return
        rest = self._peeked_source.mark_sent(self._peeked, count, tick)
        if rest:
            self._unsent_bytes = memoryview(rest)
        if self._peeked_source.has_work:
            self._queue.rotate(-1)
        else:
            self._queue.popleft()
            self._peeked_source.is_queued = False
        self._peeked_source = None
        self._peeked = memoryview(b"")

    def _deliver_frame_for(self, feed: SendSource) -> bytes:
        """Return a Deliver frame if the feed or attempt changed, else b""."""
        name = (feed.class_id, feed.subscription_number, feed.attempt)
        if name == self._last_deliver:
            return b""
        self._last_deliver = name
        return frames.encode(
            frames.DELIVER, class_id=name[0], timer_index=name[1], message_id=name[2]
        )


class NullOutbox(Outbox):
    """Outbox of a position without a session. Nothing is ever sent from it."""

    def __init__(self) -> None:
        super().__init__(-1)

    def wake(self, feed: SendSource) -> None:
        pass
