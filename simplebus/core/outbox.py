"""Send queue of one session: replies, and the messages of its subscriptions.

The driver calls `peek` when the socket can send, and `mark_sent` afterwards. A subscription's
cursor advances only when bytes were sent, so a slow peer costs only ring memory. One call does a
bounded amount of work: an outbox that returns no bytes but is not idle must be called again after
other sessions had their turn.

    unsent bytes       a cut frame or copied bytes, sent first
    held confirm       a Confirm that is sent in front of the next bytes
    replies            encoded replies, joined with short messages behind them
    deferred replies   long replies, each created after the previous one was sent
    queue              sources with messages to send, in turn
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from simplebus.core.limits import (
    JOINED_BYTES_MAX,
    MESSAGES_MAX,
    PENDING_REPLY_BYTES,
    SCAN_MESSAGES_MAX,
)
from simplebus.core.protocol import frames


class SendSource(Protocol):
    """Source of messages for an outbox: a subscription, or a member of a group."""

    class_id: int
    subscription_number: int
    """Number of the subscription, chosen by the peer."""
    is_queued: bool
    """True if the source is in the outbox's queue or paused."""
    attempt: int
    """Delivery attempt of the frames returned last."""
    scanned_count: int
    """Messages scanned by the last `copy_frames`, which stops at SCAN_MESSAGES_MAX."""

    @property
    def has_frames_to_copy(self) -> bool:
        """True if `copy_frames` must be called before `peek_frames`."""

    @property
    def has_work(self) -> bool:
        """True if there may be something to send."""

    def copy_frames(self, tick: int) -> bytes:
        """Return copies of the next frames, which count as sent. Empty if no frames wait."""

    def peek_frames(self, tick: int) -> memoryview:
        """Return the next frames in one piece, without a copy. `mark_sent` must follow."""

    def mark_sent(self, piece: memoryview, sent_bytes: int, tick: int) -> bytes:
        """Record that `sent_bytes` of the peeked piece were sent.

        Returns:
            The rest of a frame that was cut, which counts as sent.
        """


class Outbox:
    """Send queue of one session."""

    def __init__(self, session_id: int, ready: dict[int, None] | None = None) -> None:
        """Create an empty queue.

        Args:
            session_id: Id of the session.
            ready: Ids of the sessions that the driver must flush. The outbox enters its session
                there when it gets something to send.
        """
        self.session_id = session_id
        self._ready = {} if ready is None else ready
        self.sent_bytes = 0
        """Bytes sent so far."""
        self.scanned_count = 0
        """Messages that the last call of `peek` scanned."""
        self.has_deliver_frames = False
        """True if Deliver frames are sent (version 2)."""
        self.piece_messages_max = MESSAGES_MAX
        """Messages in one piece, at most."""
        self._last_deliver: tuple[int, int, int] | None = None
        """Class, number and attempt of the last Deliver frame."""
        self._replies = bytearray()
        self._confirm_offset = -1
        """Offset of the last Confirm in the replies if nothing follows it; -1 otherwise."""
        self._held_confirm: tuple[int, int] | None = None
        """Number and durability of a Confirm that waits for other bytes."""
        self._unsent_bytes = memoryview(b"")
        """Copied bytes that are sent first: the rest of a cut frame, redeliveries or replies."""
        self._deferred_replies: deque[Callable[[], bool | None]] = deque()
        self._is_reply_pending = False
        """True if the first deferred reply is not available yet."""
        self._queue: deque[SendSource] = deque()
        self._paused: dict[SendSource, None] = {}
        """Paused sources; they are queued when they resume."""
        self._is_stopped = False
        """True if no messages of sources are sent any more."""
        self._peeked: memoryview = memoryview(b"")
        self._peeked_source: SendSource | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes held for this session outside the rings."""
        return (
            len(self._unsent_bytes)
            + len(self._replies)
            + PENDING_REPLY_BYTES * len(self._deferred_replies)
        )

    @property
    def has_bytes(self) -> bool:
        """True if bytes other than new messages are ready. Deferred replies do not count."""
        return bool(self._unsent_bytes or self._replies)

    @property
    def is_idle(self) -> bool:
        """True if nothing waits to be sent."""
        can_reply = self._deferred_replies and not self._is_reply_pending
        return not (self._unsent_bytes or self._replies or can_reply or self._queue)

    def mark_ready(self) -> None:
        """Let the driver flush the session at the end of its turn."""
        self._ready[self.session_id] = None

    def queue_reply(self, frame: bytes) -> None:
        """Queue a reply frame."""
        self._replies += frame
        self.mark_ready()

    def queue_confirm(self, number: int, level: int = 0) -> None:
        """Queue a Confirm for all numbers below `number`.

        It replaces a Confirm at the end of the queue.
        """
        self._append_confirm(number, level)
        self._ready[self.session_id] = None

    def _append_confirm(self, number: int, level: int) -> None:
        self._held_confirm = None
        # A Confirm carries the durability in place of the timer index, see `frames.HEADER`.
        frame = frames.encode(frames.CONFIRM, message_id=number, timer_index=level)
        if self._confirm_offset + len(frame) == len(self._replies):
            del self._replies[self._confirm_offset :]
        self._confirm_offset = len(self._replies)
        self._replies += frame

    def hold_confirm(self, number: int, level: int) -> bool:
        """Send a Confirm with the next bytes, or when `release_confirm` is called.

        Returns:
            False if it replaces a Confirm that was held already.
        """
        is_first = self._held_confirm is None
        self._held_confirm = number, level
        return is_first

    def release_confirm(self) -> None:
        """Queue the held Confirm, if there is one."""
        if self._held_confirm is not None:
            self.queue_confirm(*self._held_confirm)

    def queue_fetch_reply(
        self, class_id: int, messages: Sequence[memoryview], reply: bytes
    ) -> None:
        """Send fetched messages, copied once, and the reply that follows them.

        No other bytes may be waiting.
        """
        if messages:
            deliver_frame = frames.encode(frames.DELIVER, class_id=class_id)
            reply = b"".join([deliver_frame, *messages, reply])
            self._last_deliver = None
        self._unsent_bytes = memoryview(reply)

    def defer_reply(self, send_reply: Callable[[], bool | None]) -> None:
        """Call `send_reply` when everything queued before has been sent.

        If `send_reply` returns False, the reply is not available yet. It is called again after
        `resume_replies`.
        """
        self._deferred_replies.append(send_reply)
        self.mark_ready()

    def resume_replies(self) -> None:
        """Try the deferred reply again."""
        self._is_reply_pending = False
        self.mark_ready()

    def enqueue(self, source: SendSource) -> None:
        """Queue a source that has something to send."""
        self._ready[self.session_id] = None
        if not (source.is_queued or self._is_stopped):
            source.is_queued = True
            self._queue.append(source)

    def pause(self, source: SendSource) -> None:
        """Pause a source."""
        if self._is_stopped:
            return
        if source.is_queued and source not in self._paused:
            self._queue.remove(source)
        source.is_queued = True
        self._paused[source] = None

    def resume(self, source: SendSource) -> None:
        """Resume a paused source, if it was not removed."""
        if source in self._paused:
            del self._paused[source]
            self._queue.append(source)
            self.mark_ready()

    def remove(self, source: SendSource) -> None:
        """Remove a source."""
        if source.is_queued and not self._is_stopped:
            source.is_queued = False
            if source in self._paused:
                del self._paused[source]
            else:
                self._queue.remove(source)
        self._last_deliver = None  # A later source may have the same number.

    def stop_sources(self) -> None:
        """Send no more messages of sources, because the session has ended.

        Sources keep `is_queued`; they are never queued here again.
        """
        self._is_stopped = True
        self._queue.clear()
        self._paused.clear()

    def peek(self, tick: int) -> memoryview:
        """Return the next bytes to send. They are valid until the broker changes.

        The result is empty if nothing waits to be sent, or if the scan limit was reached.
        """
        self._peeked_source, self.scanned_count = None, 0
        if self._unsent_bytes:
            return self._unsent_bytes
        if self._deferred_replies and not (self._is_reply_pending or self._replies):
            self._is_reply_pending = True
            if self._deferred_replies[0]() is not False:
                self._is_reply_pending = False
                self._deferred_replies.popleft()
            if self._unsent_bytes:  # Fetched messages.
                return self._unsent_bytes
        prefix = b""
        if self._replies or (self._held_confirm is not None and self._queue):
            is_scan_possible = not self._replies  # A reply does not wait for the end of a scan.
            if self._held_confirm is not None:
                self._append_confirm(*self._held_confirm)
            prefix = bytes(self._replies)
            self._replies.clear()
            self._confirm_offset = -1
            is_joined = self.has_deliver_frames and self._queue
            if not is_joined or (self._queue[0].has_frames_to_copy and not is_scan_possible):
                self._unsent_bytes = memoryview(prefix)
                return self._unsent_bytes
        return self._peek_messages(tick, prefix) if self._queue else self._unsent_bytes

    def _peek_messages(self, tick: int, prefix: bytes) -> memoryview:
        """Return the next messages, behind `prefix`.

        The messages are joined to a prefix if they are copied anyway or are short. Otherwise the
        prefix is returned alone.
        """
        while self._queue and self.scanned_count < SCAN_MESSAGES_MAX:
            source = self._queue[0]
            if source.has_frames_to_copy:
                copies = source.copy_frames(tick)
                self.scanned_count += source.scanned_count
                if copies:
                    if self.has_deliver_frames:
                        prefix += self._deliver_frame_for(source)
                    self._unsent_bytes = memoryview(prefix + copies)
                    self._queue.rotate(-1)
                    return self._unsent_bytes
                if source.scanned_count >= SCAN_MESSAGES_MAX and source.has_work:
                    self._queue.rotate(-1)
                    break
            piece = source.peek_frames(tick)
            if piece:
                if self.has_deliver_frames:
                    prefix += self._deliver_frame_for(source)
                if not prefix:
                    self._peeked_source = source
                    self._peeked = piece
                    return piece
                if len(piece) <= JOINED_BYTES_MAX:  # A second write would cost more than a copy.
                    prefix += piece
                    source.mark_sent(piece, len(piece), tick)
                    self._finish_turn(source)
                break
            self._queue.popleft()
            source.is_queued = False
        self._unsent_bytes = memoryview(prefix)
        return self._unsent_bytes

    def mark_sent(self, count: int, tick: int) -> None:
        """Record that the first `count` bytes of the peeked piece were sent."""
        self.sent_bytes += count
        if self._peeked_source is None:
            self._unsent_bytes = self._unsent_bytes[count:]
            return
        frame_remainder = self._peeked_source.mark_sent(self._peeked, count, tick)
        if frame_remainder:
            self._unsent_bytes = memoryview(frame_remainder)
        self._finish_turn(self._peeked_source)
        self._peeked_source = None
        self._peeked = memoryview(b"")

    def _finish_turn(self, source: SendSource) -> None:
        """Move the first source of the queue behind the others, or remove it if it is done."""
        if source.has_work:
            self._queue.rotate(-1)
        else:
            self._queue.popleft()
            source.is_queued = False

    def _deliver_frame_for(self, source: SendSource) -> bytes:
        """Return a Deliver frame if the source or its attempt has changed, else no bytes."""
        delivery = (source.class_id, source.subscription_number, source.attempt)
        if delivery == self._last_deliver:
            return b""
        self._last_deliver = delivery
        class_id, subscription_number, attempt = delivery
        # A Deliver frame has both in place of timer index and message id, see `frames.HEADER`.
        return frames.encode(
            frames.DELIVER, class_id=class_id, timer_index=subscription_number, message_id=attempt
        )
